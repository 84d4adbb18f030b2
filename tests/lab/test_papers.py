"""The papers' figures and tables: those that cost nothing are run, those that train are trained a little."""

from __future__ import annotations

import csv
import json
import math
import re
import time
import warnings
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from sparsync.feedback import TakenMomentum
from sparsync.planner import Link, Network
from sparsync.simulate.sequential import SequentialPasses
from sparsync.wire import HEADER
from sparsync_lab.cli.app import run as command
from sparsync_lab.cli.papers import unfinished
from sparsync_lab.data import PennTreebank
from sparsync_lab.models import CATALOGUE
from sparsync_lab.papers import (
    ITEMS,
    RunContext,
    adamw,
    beyond,
    chosen,
    evidence_questions,
    outer,
    p1_runs,
    p2,
    store,
    tasks,
    trainings,
)
from sparsync_lab.papers import iteration_times as times
from sparsync_lab.papers import observers as watch
from sparsync_lab.papers import tables as tables
from sparsync_lab.papers.claims.verdicts import verdicts
from sparsync_lab.papers.curves import base_result, by_epoch, difference, scores, shown_difference, spread_caption
from sparsync_lab.papers.differences import NO_PAIR
from sparsync_lab.papers.equal_bytes import budget, counted_traffic
from sparsync_lab.papers.imagenet import image_folder_task
from sparsync_lab.papers.item import Result
from sparsync_lab.papers.lr_search import LearningRateSearch
from sparsync_lab.papers.published import P1_MODELS, P2_ACCURACY
from sparsync_lab.papers.run import SUFFIX, History, Run, file_of, rate_factor, read
from sparsync_lab.papers.run_queue import train_missing
from sparsync_lab.papers.store import load, rounded, runs_of
from sparsync_lab.papers.sweep import (
    ABLATIONS,
    ALSO,
    BALANCED,
    BASE,
    EARLY,
    METHODS,
    SETTINGS,
    TARGETS,
    Stage,
    method_of,
)
from sparsync_lab.papers.tasks import Task
from sparsync_lab.papers.trainings import VirtualSession, traffic_per_step, train_run
from sparsync_lab.virtual import VirtualWorkers
from tests.lab.generated import images

ROOT = Path(__file__).parent.parent.parent
CPU = torch.device("cpu")
PAPER_1 = ("fig1", "table1", "fig2", "fig3", "fig4", "fig5", "fig6", "table2", "table2-model", "fig7", "fig8")
OTHERS = ["p2/table1", "p2/table2", "p3/convergence", "p3/density", "p3/traffic", "beyond/accuracy", "beyond/adamw"]
OTHERS += ["beyond/outer", "beyond/evidence"]
EXPECTED = [*(f"p1/{name}" for name in PAPER_1), *OTHERS]


def task(run: Run) -> Task:
    torch.manual_seed(run.seed)
    model = CATALOGUE["lenet5"].make()
    return tasks.image_task("generated", images(1, 28), model, CPU, run.workers, run.batch, run.seed, None)


TINY = Run(
    "topk", "lenet5", "topk", {**p1_runs.SPARSE, "density": 0.01}, workers=2, batch=4, rate=0.05, steps=8, warmup=0
)


@pytest.fixture
def context(tmp_path: Path) -> RunContext:
    return RunContext(output=tmp_path / "papers", scratch=tmp_path / "scratch")


def test_every_figure_and_table_is_listed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert list(ITEMS) == EXPECTED
    assert command(["papers", "list", "--output", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    for key in EXPECTED:
        assert re.search(rf"^{key} ", shown, re.MULTILINE), key
    assert [item.key for item in chosen("p2")] == ["p2/table1", "p2/table2"]
    assert len(chosen("all")) == len(EXPECTED)


def test_names_of_trainings_are_listed_whole(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """They are copied into ``--only``: each on one line of a file, and never cut in a narrow terminal."""
    asked = ["papers", "list", "beyond/evidence", "--output", str(tmp_path)]
    assert command(asked) == 0
    lines = capsys.readouterr().out.splitlines()
    names = [run.name for one in evidence_questions.questions() for run in one.runs]
    assert [name for name, line in zip(names, lines[2:], strict=True) if f" {name} " not in line] == []


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["papers", "run", "p9/fig1"], "item must be 'all', a paper or one of p1/fig1"),
        (["papers", "run", "p1/fig3", "--minutes", "0"], "minutes must be above 0, got 0"),
        (["papers", "run", "p1/fig3", "--whole"], "whole must be left out without minutes, got True"),
        (["papers", "run", "p1/fig3", "--jobs", "0"], "jobs must be 1 or more, got 0"),
        (["papers", "run", "p1/fig3", "--epochs", "-1"], "epochs must be above 0, got -1"),
        (["papers", "run", "p1/fig3", "--device", "tpu"], "device must be cpu or cuda, got 'tpu'"),
        (["papers", "run", "p3/density", "--quick"], "Give --data-dir or set $SPARSYNC_DATA"),
        (["papers", "run", "p1/fig2", "--quick", "--data-dir", "/nowhere"], "/nowhere does not exist"),
    ],
)
def test_bad_input_is_one_sentence(
    arguments: list[str],
    sentence: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.delenv("SPARSYNC_DATA", raising=False)
    assert command([*arguments, "--output", str(tmp_path / "papers")]) == 2
    assert sentence in capsys.readouterr().err


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The items that cost nothing, run as a user runs them."""
    folder = tmp_path_factory.mktemp("results") / "papers"
    (folder.parent / "bench-select-fig4-gpu.csv").write_bytes(
        (ROOT / "results" / "bench-select-fig4-gpu.csv").read_bytes()
    )
    for key in ("p1/table1", "p1/fig3", "p1/fig4", "p3/traffic"):
        assert command(["papers", "run", key, "--output", str(folder), "--seed", "3"]) == 0
    return folder


def test_a_result_says_where_it_is_from(results: Path) -> None:
    for name in ("p1-table1", "p1-fig3", "p1-fig4", "p3-traffic"):
        plain = json.loads((results / f"{name}-seed-3.json").read_text())
        assert plain["seed"] == 3
        assert plain["command"] == f"sparsync papers run {plain['item']} --seed 3"
        assert {"device", "cpus", "torch", "commit", "date"} <= set(plain["environment"])
        assert plain["rows"]
        assert (results / f"{name}-seed-3.png").is_file() == (name != "p1-table1")
    figure = load(results / "p1-fig3-seed-3.json").result.figures[1]
    assert [curve.label for curve in figure.chart.curves] == ["1 − i/d", "π"]  # type: ignore[union-attr]


def test_the_models_have_the_published_sizes(results: Path) -> None:
    rows = json.loads((results / "p1-table1-seed-3.json").read_text())["rows"]
    assert rows["parameters"] == rows["published"] == [row[2] for row in P1_MODELS]


def test_traffic_grows_as_p3_says(results: Path) -> None:
    rows = json.loads((results / "p3-traffic-seed-3.json").read_text())["rows"]
    lines = [dict(zip(rows, values, strict=True)) for values in zip(*rows.values(), strict=True)]
    for line in lines:
        k = round(25_557_032 * line["density"])
        workers = line["workers"]
        if line["collective"].startswith("Top-k"):
            assert line["mean_bytes"] == pytest.approx((workers - 1) * (8 * k + 4 * HEADER), rel=1e-4)
        if line["collective"].startswith("gTop-k"):
            assert line["max_bytes"] == pytest.approx(math.log2(workers) * (8 * k + 4 * HEADER), rel=1e-4)


def test_messages_of_table_2_hold_what_was_selected() -> None:
    """Those of P1's methods; ours have the room that they may need."""
    network = Network(Link(0.0, 8 / 10e9))
    sent = {"Dense": 10**6, "TopK": 1000, "DGC": 1040, "Gaussian": 20}
    sent |= dict.fromkeys(times.OURS, 1000)
    seconds = {method: times.exchange_seconds(10**6, method, 16, network, many) for method, many in sent.items()}
    assert seconds["Dense"] == pytest.approx(2 * 15 / 16 * 4e6 / 1.25e9, rel=1e-3)
    for method, many in {**sent, "ours: Gaussian, count held": 1100}.items():
        if method != "Dense":
            counts = 4 if method in ("DGC", "Gaussian") else 0  # known to all before
            assert seconds[method] == pytest.approx(15 * (8 * many + 4 * HEADER + counts) / 1.25e9), method
    slow = Network(Link(1.0, 0.0))
    assert times.exchange_seconds(10**6, "TopK", 16, slow, 1000) == 15
    assert times.exchange_seconds(10**6, "Gaussian", 16, slow, 20) == 30


def test_table_2_has_p1s_order_with_p1s_time_of_selection() -> None:
    """By the planner's model, with nothing fitted: the published numbers within a sixth."""
    rows = json.loads((ROOT / "results" / "papers" / "p1-table2.json").read_text())["rows"]
    table = times.tables_of_p1(rows).tables[-1]
    cells = {row.cells[0]: row.cells for row in table.rows}
    assert {name: own[4] for name, own in cells.items()} == {
        "AlexNet": "1.043 s (0.891)",
        "VGG-16": "3.300 s (3.010)",
        "ResNet-50": "0.863 s (0.810)",
        "Inception-V4": "1.363 s (1.268)",
    }
    assert all(own[-1] == "yes" and abs(float(own[-2].rstrip(" %"))) < 18 for own in cells.values())


def test_figure_4_needs_what_was_measured(context: RunContext, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="sparsync bench select --device cuda"):
        ITEMS["p1/fig4"].run(context)


def test_figure_4_has_selection_alone_where_it_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """P1's order is looked for in each table by itself."""
    monkeypatch.chdir(tmp_path)  # this repository's results/ has been measured
    source = (ROOT / "results" / "bench-select-gpu.csv").read_text(encoding="utf-8")  # no authors' code; two commits
    (tmp_path / "bench-select-fig4-gpu.csv").write_text(source, encoding="utf-8")
    context = RunContext(output=tmp_path / "papers")
    before = ITEMS["p1/fig4"].run(context)
    assert len(before.tables) == 1
    assert "trimmed Top_k (PyTorch)" in before.tables[0].headings
    assert any("holds here for 0 with Gaussian_k (PyTorch). For 400 million" in note for note in before.notes)
    assert any(note.startswith("Not measured: selection alone") for note in before.notes)
    assert not any("was timed alone only" in note for note in before.notes)
    columns = "method,size,density,dtype,p50_ms,device,cpus,system,python,torch,sparsync,commit,load,date"
    measured = {"topk": 8, "dgc": 4, "gaussian": 9, "gaussian, authors' code": 2, "trimmed": 5}
    rows = [f'"{name} (PyTorch)",100000000,0.001,fp32,{ms},H200,1,L,3,2,0,abc,0,now' for name, ms in measured.items()]
    (tmp_path / "bench-select-alone-gpu.csv").write_text("\n".join([columns, *rows]), encoding="utf-8")
    result = ITEMS["p1/fig4"].run(context)
    assert [row.cells for row in result.tables[0].rows] == [["100 M", "8 ms", "4 ms", "9 ms", "2 ms", "5 ms"]]
    forms = "Gaussian_k (PyTorch)", "Gaussian_k, authors' code (PyTorch)"
    order = f"{forms[0]} 9 ms, Top_k (torch.topk) 8 ms, DGC_k of Lin et al. (PyTorch) 4 ms, {forms[1]} 2 ms."
    held = f"holds here for 0 with {forms[0]}, 1 with {forms[1]}."
    assert any(held in note and note.endswith(f"the slowest first: {order}") for note in result.notes)
    assert any("with error feedback: of 3 sizes from 20 million" in note for note in result.notes)  # P1 has no smaller
    assert f"{forms[1]} was timed alone only." in result.notes
    theirs = [rows[0].replace("topk", "dgc, authors' code").replace(",8,", f",{ms},") for ms in (7, 20)]
    for row, order in zip(theirs, ("1 with both in their authors' code. For", "0 with both"), strict=True):
        (tmp_path / "bench-select-alone-gpu.csv").write_text("\n".join([columns, *rows, row]), encoding="utf-8")
        assert any(f"1 with {forms[1]}, {order}" in note for note in ITEMS["p1/fig4"].run(context).notes)
    rows.append('"topk (PyTorch)",400000000,0.001,fp32,30,H200,1,L,3,2,0,abc,0,now')  # the forms are not timed there
    rows += [row.replace("100000000", "400000000") for row in rows if row.startswith('"dgc')]
    (tmp_path / "bench-select-alone-gpu.csv").write_text("\n".join([columns, *rows]), encoding="utf-8")
    assert any("alone, as P1 times it: of 2 sizes" in note for note in ITEMS["p1/fig4"].run(context).notes)
    # Whatever measured any of it is named: another commit measured the largest size, another day.
    lines = [line for line in csv.DictReader(source.splitlines()) if line["dtype"] == "fp32"]
    commits, last = dict.fromkeys(line["commit"] for line in lines), max(lines, key=lambda line: int(line["size"]))
    assert len(commits) > 1
    assert result.where["commit"].split(", ") == [*commits, "abc"]
    assert "Time of selection alone, as P1 times it: 100 million entries: H200, now." in result.notes
    of_last = f"; 400 million entries: {last['device']}, {last['date']}."
    assert any(of_last in note for note in result.notes)
    own = {one.claim.text: one for one in verdicts({"p1/fig4": result}) if one.claim.item == "p1/fig4"}
    printed, authors, dgc, *_ = own.values()
    assert (printed.word, authors.word) == ("not", "partly")  # each form by itself
    assert "none of 4 sizes" in printed.here  # that of 1 million does not count
    assert (dgc.word, "100 M alone 4.00 ms, the fastest other 2.00" in dgc.detail) == ("partly", True)


def test_the_report_loads_nothing_and_has_the_published_numbers(
    results: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(["papers", "report", "--output", str(results)]) == 0
    assert "4 results, 0 quick ones, 16 not run yet" in capsys.readouterr().out
    page = (results / "report.html").read_text(encoding="utf-8")
    assert not re.search(r"(src|href)=[\"']?https?:|<script|@import", page)
    assert page.count("<svg") == 3 + 2 + 3
    for number in ("66,034,000", "85.5 %", "78.11 %", "0.4 s for the 25.6 million"):
        assert number in page, number
    assert "Not run yet: sparsync papers run beyond/accuracy" in page
    assert "Command: sparsync papers run p1/fig3 --seed 3" in page


# ---- trainings ------------------------------------------------------------------------------------------------------


def test_a_training_in_slices_equals_one_that_was_not_interrupted(
    context: RunContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = train_run(TINY, context, task(TINY))
    assert whole is not None
    file_of(context, TINY).unlink()
    steps = 0
    history = None
    while history is None:
        # The time is always over: every call makes one step.
        commit = "first" if steps < 3 else "second"
        monkeypatch.setattr(store, "environment", lambda commit=commit: {"commit": commit, "device": "", "date": ""})
        history = train_run(TINY, replace(context, deadline=time.monotonic()), task(TINY))
        steps += 1
    assert steps == 8
    assert history.where["commit"] == "first, second"
    assert history.losses == whole.losses
    assert history.scores == whole.scores
    assert history.bytes == whole.bytes
    assert not list(context.scratch.glob("*.pt"))


def test_a_training_s_file_holds_all_there_is_to_know(context: RunContext) -> None:
    run = replace(TINY, watch="shape", watch_every=4)
    history = train_run(run, context, task(run))
    assert history is not None
    path = file_of(context, run)
    plain = store.read_json(path)
    assert Run(**plain["run"]).name == run.name
    assert len(plain["steps"]["loss"]) == 8
    assert len(plain["data"]["sha256"]) == 64
    assert plain["run"]["seed"] == 0
    assert {"device", "commit", "torch"} <= set(plain["environment"])
    assert [snapshot["step"] for snapshot in plain["snapshots"]] == [4, 8]
    again = read(path, run)
    assert again.losses == pytest.approx(history.losses, rel=1e-4)
    assert again.best == pytest.approx(history.best)
    # It learns: where a bright spot is.
    assert sum(history.losses[-2:]) < sum(history.losses[:2])
    assert plain["steps"]["bytes"] == [[4 * HEADER + 8 * 617, 8]]
    assert sum(again.sent) == plain["points"]["bytes"][-1] == history.bytes[-1]
    # 0.01 of 61,706 entries and 8 bytes each, gathered by two workers.
    assert history.bytes[-1] == 8 * (4 * HEADER + 8 * 617)


def test_a_snapshot_is_gradient_plus_residual(monkeypatch: pytest.MonkeyPatch) -> None:
    """With one worker, what was applied and what is kept add up to it."""
    seen: list[torch.Tensor] = []
    monkeypatch.setattr(watch, "gradient_shape", lambda u: seen.append(u) or {})
    run = replace(TINY, workers=1, watch="shape", watch_every=1)
    made = task(run)
    session = VirtualSession(run, made, 8)
    stream = made.batches(0)
    for _ in range(3):
        session.advance(next(stream))
        names = [name for name, _ in made.model.named_parameters()]
        sent = torch.cat([made.model.get_parameter(name).grad.flatten() for name in names])  # type: ignore[union-attr]
        kept = torch.cat([session.virtual_workers.residual(0, name).flatten() for name in names])  # type: ignore[union-attr]
        assert torch.equal(seen[-1], sent + kept)
        assert int((sent != 0).sum()) == 617


def test_gtopk_meets_p3_s_condition_in_training(context: RunContext) -> None:
    run = replace(TINY, label="gtopk", method="topk+gtopk", workers=4, watch="gtopk", watch_every=2)
    history = train_run(run, context, task(run))
    assert history is not None
    assert [snapshot["step"] for snapshot in history.snapshots] == [2, 4, 6, 8]
    assert all(0 < snapshot["ratio"] < 1 for snapshot in history.snapshots)


def test_what_is_not_done_yet_is_said_in_short() -> None:
    assert unfinished([]) == ""
    assert unfinished(["a", "b", "c"]) == "; not done yet: a, b, c"
    assert unfinished(["a", "b", "c", "d", "e"]) == "; not done yet: a, b, c and 2 more"


def test_passes_may_compute_in_bfloat16(context: RunContext) -> None:
    """Weights, gradients and residuals stay in fp32, and what is learnt is nearly the same."""
    torch.manual_seed(0)
    model = CATALOGUE["resnet20"].make()
    half = replace(TINY, model="resnet20", autocast=True)
    made = [
        tasks.image_task("generated", images(3, 32), model, CPU, 2, 4, 0, None, autocast=half) for half in (False, True)
    ]
    (x, y), *_ = next(made[0].batches(0))
    losses = [one.loss(one.model, (x, y), ())[0] for one in made]
    assert losses[0] != losses[1]
    torch.testing.assert_close(*losses, rtol=0.02, atol=0.02)
    history = train_run(half, context, made[1])
    assert history is not None
    assert all(math.isfinite(loss) for loss in history.losses)
    assert {p.dtype for p in model.parameters()} | {p.grad.dtype for p in model.parameters()} == {torch.float32}
    assert half.name != replace(half, autocast=False).name
    with pytest.raises(ValueError, match="autocast is for models of MNIST and CIFAR-10, got 'gpt'"):
        train_run(replace(half, model="gpt"), context)


def test_what_is_done_is_not_done_again(context: RunContext, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def make(name: str, folder: Any, device: Any, *, workers: int, batch: int, seed: int, **rest: Any) -> Task:
        calls.append(name)
        return task(replace(TINY, workers=workers, batch=batch, seed=seed))

    monkeypatch.setattr(tasks, "make_task", make)
    other = replace(TINY, label="dense", method="dense", options={})
    done, missing = train_missing(replace(context, only=("topk",)), [TINY, other])
    assert (list(done), missing, calls) == (["topk"], [other.name], ["lenet5"])
    done, missing = train_missing(context, [TINY, other])
    assert (list(done), missing, len(calls)) == (["topk", "dense"], [], 2)
    done, missing = train_missing(replace(context, deadline=0.0), [TINY, replace(other, rate=0.1)])
    assert (list(done), len(missing), len(calls)) == (["topk"], 1, 2)
    anew = replace(context, resume=False, begun=time.time())
    train_missing(anew, [TINY])
    train_missing(anew, [TINY])  # of another item of the same command
    assert len(calls) == 3
    assert train_missing(replace(context, seed=1), [TINY])[0]["topk"].run.seed == 1


def test_an_item_that_trains(
    context: RunContext, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """P1's figure 5 on generated images, by the command."""
    made = {"mnist": images(1, 28), "cifar10": images(3, 32)}
    monkeypatch.setattr(tasks, "load_images", lambda kind, folder: ("generated", made[kind]))
    folder = tmp_path / "papers"
    arguments = ["--output", str(folder), "--scratch", str(tmp_path / "scratch")]
    assert command(["papers", "run", "p1/fig5", "--quick", *arguments]) == 0
    assert "p1-fig5-quick.json" in capsys.readouterr().out
    stored = load(folder / "p1-fig5-quick.json")
    assert stored.quick
    assert stored.result.missing == []
    assert len(stored.result.figures) == 3
    assert len(stored.result.runs) == 2
    for name in stored.result.runs:
        assert (folder / "runs" / f"{name}{SUFFIX}").is_file()
    exact, bound = stored.result.rows["exact normal"], stored.result.rows["bound"]
    assert all(a <= b for a, b in zip(exact, bound, strict=True))  # type: ignore[operator]
    assert command(["papers", "report", "--output", str(folder)]) == 0
    assert "Quick: a tiny setting" in (folder / "report.html").read_text(encoding="utf-8")


ON_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("device", [CPU, pytest.param(torch.device("cuda"), marks=ON_GPU)], ids=str)
def test_images_in_folders_are_a_task(tmp_path: Path, context: RunContext, device: torch.device) -> None:
    """What ResNet-50 is trained on, by those who have it."""
    context = replace(context, device=device)
    image = pytest.importorskip("PIL.Image")
    for split, count in (("train", 8), ("val", 2)):
        for label in range(2):
            (tmp_path / split / f"class{label}").mkdir(parents=True)
            for i in range(count):
                image.new("RGB", (40, 48), (200 * label, 10 * i, 50)).save(
                    tmp_path / split / f"class{label}" / f"{i}.png"
                )
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.AdaptiveAvgPool2d(4), torch.nn.Flatten(), torch.nn.Linear(48, 2))
    how = {"workers": 2, "batch": 4, "seed": 0, "side": 32}
    few = image_folder_task(tmp_path, model, device, **how, limit=8)
    assert few.size == "8 images, 4 test images"
    assert {int(label) for batch in next(few.batches(0)) for label in batch[1]} == {0, 1}
    made = image_folder_task(tmp_path, model.to(device), device, **how)
    assert made.epoch == 2
    assert made.size == "16 images, 4 test images"
    run = replace(TINY, steps=12, options={**p1_runs.SPARSE, "density": 0.2})
    history = train_run(run, context, made)
    assert history is not None
    assert history.last == 1.0  # red or not
    with pytest.raises(ValueError, match="ImageNet is at"):
        trainings._task(p1_runs.training("resnet50", "dense"), replace(context, data=tmp_path / "nowhere"))


def test_schedules() -> None:
    run = replace(TINY, warmup=0.1, decay=(0.5, 0.75))
    assert [rate_factor(run, share) for share in (0, 0.05, 0.1, 0.4, 0.5, 0.8)] == pytest.approx(
        [0.02, 0.5, 1, 1, 0.1, 0.01]
    )
    cosine = replace(TINY, warmup=0.0, decay=None)
    assert [rate_factor(cosine, share) for share in (0, 0.5, 1)] == pytest.approx([1, 0.5, 0])


def test_a_run_s_name_follows_what_it_is() -> None:
    assert TINY.name == replace(TINY, seconds=5.0).name
    names = {replace(TINY, **change).name for change in ({}, {"rate": 0.2}, {"seed": 1}, {"settings": {"a": 1}})}
    assert len(names) == 4
    # Figures 1 and 6 share what they have in common.
    assert p1_runs.training("vgg16", "topk").name == replace(p1_runs.training("vgg16", "topk"), seconds=3).name


# ---- beyond the papers ----------------------------------------------------------------------------------------------


def test_methods_beyond_the_papers_send_the_same_bytes() -> None:
    allowed = budget("resnet20", 16)
    assert allowed == 15 * (32 + 8 * 270)
    search = LearningRateSearch(lambda run: None)
    runs = {label: search.run("resnet20", label, 1.0, 0) for label in (*METHODS, *ABLATIONS)}
    for label, run in runs.items():
        if label != "dense":
            assert 0.97 * allowed < counted_traffic(run)(run.options["density"]) <= allowed, label
    assert runs["TopK-SGD"].options["density"] == pytest.approx(0.001, rel=0.005)
    assert (runs[EARLY].front, runs[EARLY].options["beta"]) == (8, 0.5)
    # AdamW has no momentum that could be corrected.
    assert search.run("gpt", "DGC", 1.0, 0).options["momentum"] == "keep"
    assert not {"momentum", "beta"} & set(search.run("gpt", EARLY, 1.0, 0).options)
    with pytest.raises(ValueError, match="most of them dense, of 7,920"):
        search.run("lenet5", "recipe default", 1.0, 0)


def test_every_method_goes_with_the_optimizer_of_its_setting() -> None:
    """Before hours of a GPU are spent: none is refused when its turn comes."""
    search = LearningRateSearch(lambda run: None)
    asked = {(stage.model, label) for stage in search.stages for label in stage.methods}
    assert {model for model, _ in asked} == set(SETTINGS)
    for model, label in sorted(asked):
        run, small = search.run(model, label, 1.0, 0), nn.Linear(8, 8)
        optimizer = trainings.run_optimizer(run, SimpleNamespace(model=small))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            VirtualWorkers(small, lambda *_: None, optimizer, 2, **trainings.run_options(run)).detach()


def test_every_stage_waits_for_its_rate_and_every_target_has_a_length() -> None:
    search = LearningRateSearch(lambda run: None)
    runs = [run for stage in search.stages for part in search.runs(stage) for run in part]
    assert len({run.name for run in runs}) == len(runs)
    for stage in search.stages:
        ready, waiting = search.runs(stage)
        taking = sum(bool(method_of(label).like) for label in stage.methods)
        also = sum(len(ALSO.get((stage.model, label), ())) for label in stage.methods)
        assert (len(ready), len(waiting)) == (
            (3 * (len(stage.methods) - taking) + also, taking)
            if stage.search
            else (0, len(stage.seeds) * len(stage.methods))
        )
        assert all(run.seconds > 6 for run in ready + waiting)
    searched = {(stage.model, label) for stage in search.stages if stage.search for label in stage.methods}
    assert searched >= {(stage.model, label) for stage in search.stages for label in stage.methods}
    assert tuple(TARGETS["resnet20"]) == SETTINGS["resnet20"].lengths


def test_no_table_has_a_row_twice() -> None:
    ours = tables.all_tables(LearningRateSearch(lambda run: None))
    assert sum(table.caption.startswith("Ablations: ResNet-20") for table in ours) == 4
    stored = load(ROOT / "results" / "papers" / "beyond-accuracy.json").result.tables
    assert [table.caption for table in stored if table.caption.startswith("Ablations")] == [
        table.caption for table in ours if table.caption.startswith("Ablations")
    ]
    for table in (*ours, *(table for table in stored if table.headings[0] == "training")):
        names = [row.cells[0] for row in table.rows]
        assert len(set(names)) == len(names), table.caption


def history_of(run: Run, last: float) -> History:
    score = "accuracy" if run.model == "resnet20" else "perplexity"
    return History(run, score, [1], [last], [1.0], [0.0], [1.0], 1.0, 1.0, 1, [], {})


def test_a_rate_is_chosen_alike_for_every_row() -> None:
    scores: dict[float, float] = {}

    def get(run: Run) -> History | None:
        return history_of(run, scores[run.rate]) if run.rate in scores and run.seed == 0 else None

    search = LearningRateSearch(get)
    assert list(search.tried("resnet20", "dense")) == [0.5, 1, 2]
    scores |= {0.1: 0.7, 0.2: 0.8}
    assert search.chosen("resnet20", "dense") is None
    scores[0.4] = math.nan  # it went astray
    assert search.chosen("resnet20", "dense") == 1
    scores[0.4] = 0.8
    assert search.chosen("resnet20", "dense") == 1
    scores[0.4] = 0.9
    assert list(search.tried("resnet20", "dense")) == [0.5, 1, 2, 4]
    assert search.chosen("resnet20", "dense") is None
    assert search.repeats("resnet20", "dense", 0) == []
    scores |= {0.8: 0.91, 1.6: 0.9}
    assert search.chosen("resnet20", "dense") == 4
    assert [h.run.rate for h in search.repeats("resnet20", "dense", 1)] == [0.8]
    scores |= {0.0005: 120.0, 0.001: 100.0, 0.002: 110.0}  # perplexities
    assert search.chosen("gpt", "dense") == 1


def test_a_rate_with_which_a_seed_does_not_learn_is_given_up() -> None:
    scores = {(0.1, 0): 0.7, (0.2, 0): 0.9, (0.4, 0): 0.8, (0.8, 0): 0.5, (0.2, 2): 0.44}

    def get(run: Run) -> History | None:
        found = scores.get((run.rate, run.seed))
        return None if found is None else history_of(run, found)

    search = LearningRateSearch(get)
    assert search.chosen("resnet20", "dense") == 2
    scores[0.2, 2] = 0.46
    assert search.chosen("resnet20", "dense") == 1
    scores |= {(0.2, 2): math.nan, (0.4, 1): 0.1, (0.1, 1): 0.1}  # none is left: the best of the first seed
    assert search.chosen("resnet20", "dense") == 1


def test_the_search_goes_on_around_the_rate_that_all_seeds_learn_with() -> None:
    scores = {(0.1, 0): 0.8, (0.2, 0): 0.9, (0.4, 0): 0.7, (0.2, 1): 0.1}

    def get(run: Run) -> History | None:
        found = scores.get((run.rate, run.seed))
        return None if found is None else history_of(run, found)

    search = LearningRateSearch(get)
    assert list(search.tried("resnet20", "dense")) == [0.25, 0.5, 1, 2]
    assert search.chosen("resnet20", "dense") is None
    scores |= {(0.05, 0): 0.85, (0.025, 0): 0.7}
    assert search.chosen("resnet20", "dense") == 0.25


def test_a_longer_training_is_shown_with_the_best_rate_that_it_was_made_with() -> None:
    short = {0.1: 0.7, 0.2: 0.8, 0.4: 0.9, 0.8: 0.7}
    long: dict[tuple[float, int], float] = {}

    def get(run: Run) -> History | None:
        found = long.get((run.rate, run.seed)) if run.steps == 3500 else short.get(run.rate) if run.seed == 0 else None
        return None if found is None else history_of(run, found)

    search, longer = LearningRateSearch(get), Stage("resnet20", 1, (0, 1), ("dense",))
    assert search.repeats("resnet20", "dense", 1) == []
    long |= {(0.2, 0): 0.93, (0.4, 0): 0.92, (0.4, 1): 0.91, (0.2, 2): 0.94}
    assert [(h.run.rate, h.run.seed) for h in search.repeats("resnet20", "dense", 1)] == [(0.2, 0), (0.2, 2)]
    assert [run.rate for run in search.runs(longer)[0]] == [0.4, 0.4]  # what was chosen is trained all the same
    assert {run.rate for run in search.others(longer)} == {0.1, 0.2, 0.4, 0.8}
    assert [h.run.rate for h in search.repeats("resnet20", "dense", 0)] == [0.4]
    long[0.2, 2] = 0.88  # so that the first seed's best rate is not the best in the mean
    assert [(h.run.rate, h.run.seed) for h in search.repeats("resnet20", "dense", 1)] == [(0.4, 0), (0.4, 1)]


def test_rows_are_compared_over_the_seeds_that_both_have() -> None:
    def row(*found: tuple[int, float]) -> list[History]:
        return [history_of(replace(TINY, model="resnet20", seed=seed), last) for seed, last in found]

    assert difference(row((0, 0.9)), row((0, 0.8), (1, 0.6))) == pytest.approx(10)
    assert difference(row((0, 0.9), (1, 0.7)), row((1, 0.6), (0, 0.8))) == pytest.approx(10)
    assert difference(row((1, 0.9)), row((0, 0.8))) is None


def test_an_ablation_takes_the_rate_of_what_it_changes_unless_that_is_momentum() -> None:
    scores: dict[float, float] = {}

    def get(run: Run) -> History | None:
        known = run.rate in scores and run.seed == 0 and "fp16" not in run.label
        return history_of(run, scores[run.rate]) if known else None

    search = LearningRateSearch(get)
    same, moved = "ablation: values fp16", "ablation: momentum kept"
    assert (search.tried("resnet20", same), search.chosen("resnet20", same)) == ({}, None)
    assert list(search.tried("resnet20", moved)) == [0.5, 1, 2]
    scores |= {0.1: 0.8, 0.2: 0.7, 0.4: 0.6, 0.05: 0.5}
    assert search.tried("resnet20", same) == {0.5: None}
    asked, waiting = search.runs(Stage("resnet20", 0, (0,), (same, moved)))
    assert ([run.rate for run in asked], waiting) == ([0.1, 0.05, 0.1, 0.2, 0.4], [])


def test_an_ablation_that_was_trained_before_another_rate_was_chosen_stays() -> None:
    scores = {0.1: 0.8, 0.2: 0.7, 0.4: 0.6, 0.05: 0.5}

    def get(run: Run) -> History | None:
        known = run.seed == 0 and (run.rate == 0.2 if "fp16" in run.label else run.rate in scores)
        return history_of(run, scores[run.rate]) if known else None

    assert list(LearningRateSearch(get).tried("resnet20", "ablation: values fp16")) == [1]
    assert LearningRateSearch(get).chosen("resnet20", "ablation: values fp16") == 1


def test_an_ablation_that_was_made_with_several_rates_is_shown_with_the_best() -> None:
    """A setting that takes the rates of another shows what they are, whatever else it was trained with."""
    own = {0.2: 0.78, 0.4: 0.74}

    def get(run: Run) -> History | None:
        scores = own if "values fp16" in run.label else {0.1: 0.6, 0.2: 0.7, 0.4: 0.8, 0.8: 0.5}
        return history_of(run, scores[run.rate]) if run.rate in scores and run.seed == 0 else None

    search, label = LearningRateSearch(get), "ablation: balanced, values fp16"
    assert search.chosen("resnet20", BALANCED) == 2
    assert [h.run.rate for h in search.repeats("resnet20", label, 0)] == [0.2]
    assert not search.at_edge("resnet20", label)  # it was not searched for
    (note,) = tables.several_rates(search, "resnet20", [BALANCED, label])
    assert note.endswith(f"shown with the best: {label}: 78.00 with rate 0.2, 74.00 with rate 0.4.")
    own.pop(0.2)
    assert [h.run.rate for h in search.repeats("resnet20", label, 0)] == [0.4]
    assert tables.several_rates(search, "resnet20", [BALANCED, label]) == []
    settings = {"resnet20": SETTINGS["resnet20"], "w4": replace(SETTINGS["resnet20"], workers=4, like="resnet20")}
    assert list(LearningRateSearch(get, settings=settings).tried("w4", BALANCED)) == [2]


def test_every_finished_training_is_among_the_columns() -> None:
    """Longer ones too, with whatever rates they were made."""
    long = {0.2: 0.93, 0.4: 0.92}

    def get(run: Run) -> History | None:
        scores = {1400: {0.1: 0.7, 0.2: 0.8, 0.4: 0.9, 0.8: 0.7}, 3500: long}.get(run.steps or 0, {})
        return history_of(run, scores[run.rate]) if run.rate in scores and run.method == "dense" else None

    columns = tables.columns(LearningRateSearch(get))
    found = {*zip(columns["steps"], columns["rate"], columns["seed"], strict=True)}
    assert {rate for steps, rate, _ in found if steps == 3500} == {*long}
    assert len(found) == len(columns["run"]) == 3 * (4 + len(long))


def test_a_density_that_begins_high_ends_low(context: RunContext) -> None:
    run = replace(TINY, front=4.0, steps=40)
    assert run.name != replace(TINY, steps=40).name
    history = train_run(run, context, task(run))
    assert history is not None
    assert sum(history.sent) == history.bytes[-1] == pytest.approx(40 * traffic_per_step(run)(run.options["density"]))
    assert len(set(history.sent)) == 5
    with pytest.raises(ValueError, match="front must be 1 without steps"):
        replace(TINY, front=2.0, steps=None)


def test_a_transformer_learns_with_adamw(context: RunContext, monkeypatch: pytest.MonkeyPatch) -> None:
    words = torch.arange(400) % 7
    monkeypatch.setattr(tasks.data, "load_ptb", lambda folder: PennTreebank(words, words, words, ("a",)))
    run = Run("gpt", "gpt", "default", {"density": 0.05}, workers=2, batch=2, rate=0.01, steps=12, warmup=0.1,
              decay=None, clip=1.0, limit=64, optimizer="adamw", weight_decay=0.01)  # fmt: skip
    made = trainings._task(run, context)
    session = VirtualSession(run, made, 12)
    assert session.virtual_workers.optimizer.param_groups[0]["betas"] == (0.9, 0.999)
    taken = session.virtual_workers._taken
    assert isinstance(taken, TakenMomentum)
    assert "betas 0.9, 0.999 lowered to 0.5, 0.99" in taken.describe()
    # What is stored as "default" stays what it was, with AdamW behind the residual; with a budget it is today's.
    assert (session.virtual_workers.plan.precondition, session.virtual_workers.plan.momentum) == (False, "move")
    today = VirtualSession(replace(run, options={"budget": 0.1}), made, 12)
    assert today.virtual_workers.plan.precondition
    today.virtual_workers.detach()
    assert (
        type(session.virtual_workers._passes) is SequentialPasses
    )  # on the CPU one worker after another, as real processes compute
    before = made.evaluate()
    history = train_run(run, context)
    assert history is not None
    assert history.score == "perplexity"
    assert history.last < before / 3
    with pytest.raises(ValueError, match="optimizer must be one of sgd, adamw"):
        replace(run, optimizer="lion")


def test_the_item_grows_with_its_trainings(
    context: RunContext, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(tasks, "load_images", lambda kind, folder: ("generated", images(1, 28)))
    tiny = replace(SETTINGS["lenet5"], workers=2, batch=4, lengths=(3, 4), limit=32)
    stages = (Stage("lenet5", 0, (0,), ("dense", BASE)), Stage("lenet5", 1, (0, 1), ("dense", BASE)))
    monkeypatch.setattr(beyond, "QUICK_SETTINGS", {"lenet5": tiny})
    monkeypatch.setattr(beyond, "QUICK_STAGES", stages)
    quick = replace(context, quick=True)
    first = beyond.accuracy(replace(quick, only=("3-dense",)))
    assert len(first.missing) == 2
    assert first.tables[0].rows[0].cells[-1] == "the recipe is not run"
    assert [row.cells[1] for row in first.tables[2].rows] == ["not run", "not run"]
    trained = len(first.runs)
    assert 3 <= trained <= 4
    order = beyond.order(quick)
    assert order.rows[1].cells[3] == "0 of 4"
    assert float(order.rows[1].cells[4]) > 0

    last = beyond.accuracy(quick)
    assert not last.missing
    assert set(first.runs) < set(last.runs)
    longer = last.tables[2]
    assert longer.caption == "LeNet-5 on MNIST, 2 workers of 4, 4 steps"
    assert [row.cells[3] for row in longer.rows] == ["2", "2"]
    assert all("±" in row.cells[1] for row in longer.rows)
    assert sum("*" in cell for row in last.tables[3].rows for cell in row.cells) == 2
    assert set(last.rows["run"]) == set(last.runs)
    assert set(last.rows["seed"]) == {0, 1}
    assert beyond.accuracy(replace(quick, deadline=0.0)).runs == last.runs
    assert command(["papers", "list", "p1/fig1", "--output", str(tmp_path)]) == 2
    assert (
        "item must be one of beyond/accuracy, beyond/adamw, beyond/outer, beyond/evidence or left out, got 'p1/fig1'"
        in capsys.readouterr().err
    )


def test_bytes_of_a_step_are_those_that_are_counted(context: RunContext) -> None:
    whole = {"density": 0.01}
    for method, options in (("default", whole), ("dgc", whole), ("topk", p1_runs.SPARSE), ("dense", {})):
        run = replace(TINY, label=method, method=method, options=options, steps=2)
        history = train_run(run, context, task(run))
        assert history is not None
        assert history.bytes[-1] / 2 == pytest.approx(traffic_per_step(run)(options.get("density", 1.0))), method


def test_the_trainings_of_p2_are_those_of_its_table() -> None:
    every = p2.table_runs(RunContext())
    assert len({run.name for run in every}) == len(every)
    runs = [run for run in every if run.momentum]
    assert len(runs) == 4 + 3 * 2 + 3 * 5 * 2  # with one worker the ways to exchange are the same
    plain = [run for run in every if not run.momentum]
    one = {run.label.removesuffix(", no momentum") for run in plain}
    assert one == {run.label for run in runs if run.workers == 1}
    assert {run.method for run in runs} == {"dense", *P2_ACCURACY} - {"standard"}
    rates = {(run.options["scope"], run.workers): run.rate for run in runs if run.options}
    assert rates["layer", 8] == pytest.approx(0.8)
    assert rates["global", 8] == pytest.approx(0.08)


def test_numbers_are_kept_to_five_digits() -> None:
    assert rounded({"a": [1.23456789, 12345678.0, math.nan, "x", 3, 0.5]}) == {
        "a": [1.2346, 12346000, None, "x", 3, 0.5]
    }
    assert runs_of([1, 1, 0.1]) == [[1, 2], [0.1, 1]]


def test_an_unfinished_item_says_what_is_missing(context: RunContext) -> None:
    result: Result = ITEMS["p3/density"].run(replace(context, deadline=0.0))
    assert len(result.missing) == 3 + 1 + 3 + 3  # dense, and gTop-k at three densities, of which two come near
    assert not result.runs


def test_trainings_that_are_close_have_three_seeds(context: RunContext) -> None:
    runs = p1_runs.repeats(context, "resnet20", "topk")
    assert [run.seed for run in runs] == [0, 1, 2]
    assert len({run.name for run in runs}) == 3
    assert [replace(run, seed=0, label="topk") for run in runs] == [runs[0]] * 3
    assert len(p1_runs.repeats(context, "vgg16", "topk")) == 1
    # Whoever asks for a seed gets that one, and what is there of it.
    (first,) = p1_runs.repeats(replace(context, seed=1), "resnet20", "topk")
    assert first.made(replace(context, seed=1)).name == runs[1].name
    assert len(p1_runs.repeats(replace(context, quick=True), "resnet20", "topk")) == 1


def test_a_row_of_several_seeds_is_their_mean() -> None:
    whole = RunContext()
    dense, topk = (p1_runs.repeats(whole, "resnet20", name) for name in ("dense", "topk"))
    lasts = {0: (0.90, 0.89), 1: (0.91, 0.89), 2: (0.80, 0.91)}
    done = {run.label: history_of(run, lasts[run.seed][0]) for run in dense[:2]}
    done |= {run.label: history_of(run, lasts[run.seed][1]) for run in topk}
    table = scores("", done)
    assert [row.cells[0] for row in table.rows] == ["dense", "topk"]
    assert table.rows[0].cells[1:5] == ["90.50 ± 0.71", "90.50", "–", "2"]
    assert table.rows[1].cells[1:5] == ["89.67 ± 1.15", "89.67", "-1.50", "3"]  # over the seeds that dense has, too
    done["topk, seed 1"] = history_of(topk[1], math.nan)
    assert scores("", done).rows[1].cells[1:5] == ["nan", "nan", "diverged", "3"]
    assert shown_difference([done["topk, seed 2"]], [done["dense"]]) == NO_PAIR


def test_curves_have_the_range_of_the_seeds() -> None:
    dense, topk = (p1_runs.repeats(RunContext(), "resnet20", name) for name in ("dense", "topk"))
    done = {run.label: replace(history_of(run, 0.5), points=[1, 2], scores=[0.1, 0.9]) for run in dense[:1]}
    for run, last in zip(topk, (0.8, 0.6, 0.7), strict=True):
        done[run.label] = replace(history_of(run, 0.5), points=[1, 2], scores=[0.1, last])
    one, three = by_epoch("", done, "").chart.curves  # type: ignore[union-attr]
    assert (one.label, list(one.low)) == ("dense", [])
    assert (three.label, list(three.y)) == ("topk", [pytest.approx(10), pytest.approx(70)])
    assert [three.low[1], three.high[1]] == [pytest.approx(60), pytest.approx(80)]
    assert spread_caption(done) == "the mean of up to 3 seeds, in a band from the lowest to the highest"


def test_data_that_differ_are_said_to(context: RunContext) -> None:
    run = p1_runs.training("resnet20", "dense")
    data = [{"name": name, "size": "none", "sha256": name} for name in ("half", "whole")]
    both = [replace(history_of(run, 0.5), data=own) for own in data]
    said = [note for note in base_result(context, both, []).notes if "same data" in note]
    assert said == ["ResNet-20 was not always trained with the same data, but with half (none) or whole (none)."]
    assert not [note for note in base_result(context, both[:1], []).notes if "same data" in note]


def test_a_look_at_what_is_not_finite_shows_nothing(context: RunContext) -> None:
    run = replace(TINY, watch="gtopk", watch_every=1, rate=1e30)
    history = train_run(run, context, task(run))
    assert history is not None
    assert any("ratio" in snapshot for snapshot in history.snapshots)
    assert any("ratio" not in snapshot for snapshot in history.snapshots)


def test_settings_are_of_compressors() -> None:
    options = trainings.run_options(
        replace(TINY, method="gaussian", settings={"refine": True}, options={"density": 0.01})
    )
    assert options["compressor"].refine
    with pytest.raises(ValueError, match="'default' is a recipe"):
        trainings.run_options(replace(TINY, method="default", settings={"refine": True}))


def names_in(output: Path) -> list[str]:
    """Return the names of the trainings that are stored, sorted."""
    return sorted(path.name.removesuffix(SUFFIX) for path in (output / "runs").iterdir())


def test_what_was_trained_is_still_found(tmp_path: Path) -> None:
    """A change that renames trainings, or moves their densities, would have all of them made anew."""
    stored = names_in(ROOT / "results" / "papers")
    context = RunContext(output=ROOT / "results" / "papers", scratch=tmp_path, deadline=0.0)
    sweeps = beyond.Sweep(context), adamw.sweep_of(context), outer.sweep_of(context)
    settings = [setting for sweep in sweeps for setting in sweep.search.settings.values()]
    lengths = tuple(f"{setting.model}-{length}-" for setting in settings for length in setting.lengths)
    for sweep in sweeps:
        sweep.train_missing()
        assert sweep.done
        assert sorted(history.run.name for history in sweep.histories()) == sorted(sweep.done)
    found = {name for sweep in sweeps for name in sweep.done}
    assert sorted(found) == [name for name in stored if name.startswith(lengths)]
    for name in stored:
        path = ROOT / "results" / "papers" / "runs" / f"{name}{SUFFIX}"
        assert Run(**store.read_json(path)["run"]).name == name


def test_all_that_the_papers_figures_ask_for_is_there(tmp_path: Path) -> None:
    """And nothing is stored that nobody asks for."""
    context = RunContext(output=ROOT / "results" / "papers", scratch=tmp_path).read_only()
    asked: set[str] = set()
    for item in ITEMS.values():
        if item.trains:
            result = item.run(context)
            known = (
                "beyond/accuracy",
                "beyond/adamw",
                "beyond/evidence",
                "beyond/outer",
                "p1/fig6",
            )  # of these it says so
            assert not result.missing or item.key in known, item.key
            asked |= set(result.runs)
            if item.key in known[1:4] and not (context.output / f"{item.file}.json").is_file():
                continue  # not run yet
            shown = load(context.output / f"{item.file}.json").result
            assert not set(shown.runs) - set(result.runs), item.key
    assert asked == set(names_in(context.output))
