"""What goes wrong while the papers are made again: words that fit nothing, folders, damaged files, too little data."""

from __future__ import annotations

import json
import math
import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sparsync_lab.cli.app import run as command
from sparsync_lab.papers import ITEMS, RunContext, beyond, p1_convergence, p1_runs, store, tasks, trainings
from sparsync_lab.papers import run_queue as run_queue
from sparsync_lab.papers import tables as tables
from sparsync_lab.papers.curves import base_result
from sparsync_lab.papers.imagenet import image_folder_task
from sparsync_lab.papers.lr_search import LearningRateSearch
from sparsync_lab.papers.report_page import listed
from sparsync_lab.papers.run import SUFFIX, History, Run, file_of, read, write
from sparsync_lab.papers.run_queue import NoMatchingRun, check_only, train_missing
from sparsync_lab.papers.sweep import Stage
from sparsync_lab.training.loop import batch_indices
from sparsync_lab.virtual import perplexity
from tests.lab.generated import images
from tests.lab.test_papers import TINY, task

CPU = torch.device("cpu")
Batch = tuple[Tensor, ...]


def history_of(run: Run, last: float = 0.5) -> History:
    data = {"name": "generated", "size": "none", "sha256": ""}
    return History(run, "accuracy", [1], [last], [1.0], [0.0, 0.0], [1.0], 1.0, 1.0, 1, [], data)


def test_a_word_that_fits_no_training_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said: list[str] = []
    context = RunContext(output=tmp_path / "o", scratch=tmp_path / "s", only=("vgg61",), log=said.append)
    runs = [p1_runs.training("vgg16", "dense"), p1_runs.training("vgg16", "topk")]
    words = "no training has 'vgg61' in its name; one of them is vgg16-dense-"
    with pytest.raises(NoMatchingRun, match=words):
        train_missing(context, runs)
    assert train_missing(replace(context, deadline=0.0), runs)[0] == {}  # those who only read what is there say nothing
    assert not said
    check_only(replace(context, only=("vgg61", "topk")), runs)
    assert said[0].startswith(words)
    where = ["--output", str(tmp_path / "o"), "--scratch", str(tmp_path / "s")]
    assert command(["papers", "run", "p1/fig6", "--only", "vgg61", *where]) == 2
    assert "has 'vgg61' in its name" in capsys.readouterr().err
    assert not list((tmp_path / "o").iterdir())
    # Of several items, another may have it; none does.
    assert command(["papers", "run", "p3", "--quick", "--only", "vgg61", *where]) == 2
    shown = capsys.readouterr()
    assert shown.out.count("has 'vgg61' in its name") == 2
    assert "no training of any item has a word of --only" in shown.err
    assert [path.name for path in (tmp_path / "o").glob("*.json")] == ["p3-traffic-quick.json"]


def test_a_word_may_fit_a_training_whose_rate_is_not_chosen_yet(tmp_path: Path) -> None:
    context = RunContext(output=tmp_path / "o", scratch=tmp_path / "s")
    for word in ("resnet20-11700", "11700-dense-rate-0-4-seed-2", "1400-ablation-momentum-kept-rate-0-025"):
        assert beyond.accuracy(replace(context, only=(word,), deadline=time.monotonic() + 0.1)).missing, word
    with pytest.raises(NoMatchingRun, match="'resnet20-11701' in its name"):
        beyond.accuracy(replace(context, only=("resnet20-11701",)))


def test_another_seed_or_length_has_a_result_of_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    where = ["--output", str(tmp_path / "o"), "--scratch", str(tmp_path / "s"), "--minutes", "0.001"]
    for asked in ([], ["--epochs", "20"], ["--seed", "1", "--epochs", "0.5"], ["--quick", "--epochs", "3"]):
        assert command(["papers", "run", "p1/fig1", *asked, *where]) == 0
    assert sorted(path.name for path in (tmp_path / "o").glob("*.json")) == [
        "p1-fig1-epochs-20.json", "p1-fig1-quick.json", "p1-fig1-seed-1-epochs-0.5.json", "p1-fig1.json"
    ]  # fmt: skip
    assert command(["papers", "report", "--output", str(tmp_path / "o")]) == 0
    assert capsys.readouterr().out.splitlines()[-2] == "3 results, 0 quick ones, 19 not run yet"
    page = (tmp_path / "o" / "report.html").read_text(encoding="utf-8")
    for words in ("Dense-SGD<", "fig1. Seed 0", "Dense-SGD (--epochs 20)", "fig1 --seed 1 --epochs 0.5. Seed 1"):
        assert words in page
    assert "Quick:" not in page  # beside a full one
    states = listed([ITEMS["p1/fig1"]], tmp_path / "o")[0][3]
    assert states == "partly; partly, --epochs 20; partly, --seed 1 --epochs 0.5"
    assert command(["papers", "run", "p1/fig2", "--epochs", "20", *where]) == 2
    assert "p1/fig2 has no training whose length is given in them" in capsys.readouterr().err


def test_imagenet_is_asked_for_by_any_word_that_begins_like_it(tmp_path: Path) -> None:
    context = RunContext(output=tmp_path / "o", scratch=tmp_path / "s", deadline=0.0)
    assert not [n for n in p1_convergence.figure_1(context).missing if n.startswith("resnet50")]
    for word in ("resnet50", "resnet50-dense"):
        found = p1_convergence.figure_1(replace(context, only=(word,))).missing
        assert [n for n in found if n.startswith("resnet50-dense")], word


def test_a_folder_that_is_none_is_refused_before_the_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    assert command(["papers", "run", "p1/fig3", "--output", "file"]) == 2
    assert command(["papers", "run", "p3/density", "--quick", "--output", "results", "--scratch", "file/s"]) == 2
    shown = capsys.readouterr()
    assert "output must be a folder that can be written to, got file" in shown.err
    assert "scratch must be a folder that can be written to, got file/s" in shown.err
    assert not shown.out
    assert command(["papers", "report", "--output", "results", "--page", "new/page.html"]) == 0
    assert (tmp_path / "new" / "page.html").is_file()


def test_an_item_that_fails_does_not_stop_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tasks.data, "load", lambda name, folder: (_ for _ in ()).throw(ValueError("no such data")))
    monkeypatch.setattr(tasks.data, "available_cifar10", lambda folder: "cifar10")
    places = ["--output", str(tmp_path / "results"), "--scratch", str(tmp_path / "scratch")]
    assert command(["papers", "run", "p3", "--quick", *places]) == 2
    shown = capsys.readouterr()
    assert shown.out.count("not made: no such data") == 2
    assert "2 of 3 items are not made, or without trainings that failed, see above: p3/conv" in shown.err
    assert (tmp_path / "results" / "p3-traffic-quick.json").is_file()


@pytest.mark.slow
def test_with_several_jobs_an_item_that_fails_does_not_stop_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SPARSYNC_DATA", raising=False)
    places = ["--output", str(tmp_path / "results"), "--scratch", str(tmp_path / "scratch")]
    assert command(["papers", "run", "p3", "--quick", "--jobs", "2", *places]) == 2
    shown = capsys.readouterr()
    own = [line for line in shown.out.splitlines() if line.startswith("  not made: ")]
    theirs = [line for line in shown.out.splitlines() if line.startswith("  [2] not made: ")]
    assert len(own) == len(theirs) == 2, shown.out
    assert "2 of 3 items are not made, or without trainings that failed, see above: p3/conv" in shown.err
    assert (tmp_path / "results" / "p3-traffic-quick.json").is_file()


def test_a_training_that_fails_does_not_stop_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tasks, "load_images", lambda kind, folder: ("generated", images(3, 32)))
    whole = run_queue.train_run

    def train_run(run: Run, context: RunContext) -> History | None:
        if "topk" in run.name:
            raise RuntimeError("out of memory")
        return whole(run, context)

    monkeypatch.setattr(run_queue, "train_run", train_run)
    places = ["--output", str(tmp_path / "results"), "--scratch", str(tmp_path / "scratch")]
    assert command(["papers", "run", "p3/convergence", "--quick", *places]) == 2
    shown = capsys.readouterr()
    assert shown.out.count("out of memory") == 1
    assert "1 trainings failed, see above: resnet20-topk-" in shown.out
    assert "1 of 1 items are not made, or without trainings that failed" in shown.err
    made = json.loads((tmp_path / "results" / "p3-convergence-quick.json").read_text())
    assert len(made["missing"]) == 1
    assert len(list((tmp_path / "results" / "runs").glob("*.json.gz"))) == 2
    context = RunContext(output=tmp_path / "o", scratch=tmp_path / "s")
    with pytest.raises(RuntimeError, match="out of memory"):  # where nothing is done, as it is
        train_missing(context, [p1_runs.training("vgg16", "topk")])


def test_a_damaged_file_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "p1-fig3.json"
    path.write_text('{"run": "topk')
    with pytest.raises(ValueError, match=r"p1-fig3.json is damaged .*: delete it and run it again"):
        read(path, p1_runs.training("vgg16", "dense"))
    assert command(["papers", "list", "--output", str(tmp_path)]) == 2
    assert "p1-fig3.json is damaged" in capsys.readouterr().err


def test_damaged_packs_are_not_taken_for_half_of_cifar10(tmp_path: Path) -> None:
    for name in ("device", "rest-train", "rest-test"):
        (tmp_path / f"cifar10-{name}.npz").write_bytes(b"")
    with pytest.raises(ValueError, match=r"cifar10-device.npz is not the original"):
        tasks.load_images("cifar10", tmp_path)
    (tmp_path / "cifar10-rest-test.npz").unlink()  # only half is whole, and that is damaged
    with pytest.raises(ValueError, match=r"cifar10-device.npz is not the original"):
        tasks.load_images("cifar10", tmp_path)
    (tmp_path / "cifar10-device.npz").unlink()
    with pytest.raises(ValueError, match="CIFAR-10 is missing"):
        tasks.load_images("cifar10", tmp_path)


def test_a_batch_that_nobody_has_is_refused() -> None:
    with pytest.raises(ValueError, match="batch must be from 1 to 3, what a worker has to learn from, got 4"):
        next(batch_indices(3, 4, torch.Generator()))


def test_images_of_other_classes_are_refused(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    for place in ("train/ant", "train/bee", "train/cat", "val/bee", "val/cat"):
        (tmp_path / place).mkdir(parents=True)
        image.new("RGB", (8, 8)).save(tmp_path / place / "a.png")
    with pytest.raises(ValueError, match="train and val must hold the same classes, and only one of them has ant"):
        image_folder_task(tmp_path, nn.Identity(), CPU, workers=1, batch=1, seed=0, side=8)


def test_a_loss_beyond_all_bounds_is_an_infinite_perplexity() -> None:
    def loss(model: nn.Module, batch: Batch, carried: Batch) -> tuple[Tensor, Batch]:
        return batch[0], carried

    for value, expected in ((800.0, math.inf), (math.inf, math.inf), (0.0, 1.0)):
        assert perplexity(nn.Identity(), loss, [(torch.tensor(value),)]) == expected
    assert math.isnan(perplexity(nn.Identity(), loss, [(torch.tensor(math.nan),)]))


def test_only_trainings_that_are_shortened_are_said_to_be() -> None:
    context = RunContext(epochs=3)
    fixed, epochs = p1_runs.watched("fnn3", "topk"), p1_runs.training("vgg16", "dense")
    assert not [note for note in base_result(context, [history_of(fixed)], []).notes if "Trained for" in note]
    notes = base_result(context, [history_of(fixed), history_of(epochs)], []).notes
    assert [note for note in notes if note.startswith("Trained for 3 epochs (2 steps)")]


def test_a_rate_at_the_edge_of_the_search_is_marked() -> None:
    scores = {0.1: 0.7, 0.2: 0.8, 0.4: 0.75}
    search = LearningRateSearch(
        lambda run: history_of(run, scores[run.rate]) if run.rate in scores and not run.seed else None
    )
    assert not search.at_edge("resnet20", "dense")
    scores |= {0.4: 0.85, 0.8: 0.9}
    assert tables.rate_search_table(search, "resnet20", ["dense"]).rows[0].cells[-2:] == ["90.00", "not run"]
    scores[1.6] = 0.92
    assert search.at_edge("resnet20", "dense")
    cells = tables.rate_search_table(search, "resnet20", ["dense", "ablation: values fp32"]).rows
    assert cells[0].cells[-1] == "92.00 * edge"
    assert cells[1].cells[-1] == "92.00 *"  # it takes the rate of another, which is marked there
    verdict = next(row.cells[-1] for row in tables.summary_table(search).rows if row.cells[1] == "1,400")
    assert "its rate stands at the edge of the search" in verdict


def test_a_rate_with_which_another_seed_does_not_learn_is_shown_as_given_up() -> None:
    scores = {0.1: 0.6, 0.2: 0.7, 0.4: 0.9, 0.8: 0.5}

    def get(run: Run) -> History | None:
        if run.model != "resnet20" or run.label.split(",")[0] != "1400 dense" or run.rate not in scores:
            return None
        return history_of(run, 0.1 if (run.rate, run.seed) == (0.4, 1) else scores[run.rate])

    search = LearningRateSearch(get)
    assert search.given_up("resnet20", "dense", 2.0)
    assert not LearningRateSearch(lambda run: get(run) if run.seed else None).given_up("resnet20", "dense", 2.0)
    cells = tables.rate_search_table(search, "resnet20", ["dense"]).rows[0].cells
    assert [cell for cell in cells if cell[0].isdigit()] == ["60.00", "70.00 *", "90.00, given up", "50.00"]
    columns = tables.columns(search)
    given_up = [r for r, rate in zip(columns["run"], columns["rate"], strict=True) if rate == 0.4]
    assert len(given_up) == 3  # all seeds


def test_rows_without_a_seed_in_common_are_not_compared() -> None:
    def get(run: Run) -> History | None:
        if run.model != "resnet20" or run.steps not in (1400, 3500) or run.rate not in (0.1, 0.2, 0.4):
            return None
        if run.steps == 3500 and run.seed != (1 if run.method == "dense" else 0):
            return None
        return history_of(run, 0.9 - abs(run.rate - 0.2))

    row = next(row for row in tables.summary_table(LearningRateSearch(get)).rows if row.cells[1] == "3,500")
    assert row.cells[4] == "–"
    assert "no seed in common" in row.cells[-1]


def test_a_longer_training_whose_best_rate_is_at_an_end_is_made_with_the_next_one() -> None:
    short = {0.1: 0.7, 0.2: 0.8, 0.4: 0.9, 0.8: 0.7}
    long = {(0.4, 0): 0.92}

    def get(run: Run) -> History | None:
        found = long.get((run.rate, run.seed)) if run.steps == 3500 else short.get(run.rate) if run.seed == 0 else None
        return None if found is None else history_of(run, found)

    def asked() -> list[float]:
        return [run.rate for run in LearningRateSearch(get).runs(Stage("resnet20", 1, (0,), ("dense",)))[0]]

    assert asked() == [0.4]  # one rate alone has no end
    long[0.2, 0] = 0.93
    assert asked() == [0.4, 0.1, 0.2]
    long[0.2, 1] = 0.89  # in the mean over the seeds the other is the best
    assert asked() == [0.4, 0.2, 0.8]
    long[0.8, 0] = 0.915
    assert asked() == [0.4, 0.2, 0.8]  # now it lies between two
    long[0.8, 0] = 0.99
    assert asked() == [0.4, 0.2, 0.8]  # further out nothing was searched


def test_where_the_best_rate_stands_at_the_edge_longer_trainings_have_its_neighbour_too() -> None:
    scores = {0.00625: 0.9, 0.0125: 0.8, 0.025: 0.7, 0.05: 0.6, 0.1: 0.5, 0.2: 0.4, 0.4: 0.3}

    def get(run: Run) -> History | None:
        return history_of(run, scores[run.rate]) if run.steps == 1400 and run.rate in scores and not run.seed else None

    search = LearningRateSearch(get)
    for label in ("TopK-SGD", "GaussianK-SGD"):
        ready, waiting = search.runs(Stage("resnet20", 1, (0,), (label,)))
        assert [run.rate for run in ready] == [0.00625, 0.0125]
        assert not waiting
    assert [run.rate for run in search.runs(Stage("resnet20", 1, (1, 2), ("TopK-SGD",)))[0]] == [0.00625, 0.00625]
    scores[0.0125] = 0.95
    assert [run.rate for run in search.runs(Stage("resnet20", 1, (0,), ("TopK-SGD",)))[0]] == [0.0125]


def test_what_does_not_fit_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    where = ["--output", str(tmp_path)]
    assert command(["papers", "run", "p1/fig3", "--only", "topk", *where]) == 2
    assert "only must be left out: p1/fig3 trains nothing, got topk" in capsys.readouterr().err
    assert command(["papers", "run", "p1/fig3", "--seed", "-1", *where]) == 2
    assert "seed must not be below 0, got -1" in capsys.readouterr().err
    assert command(["papers", "report", "--output", str(tmp_path / "typo")]) == 2
    assert "output must be a folder with results" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_checkpoint_of_other_data_is_put_aside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    context = RunContext(output=tmp_path / "o", scratch=tmp_path / "s", log=said.append)
    assert trainings.train_run(TINY, replace(context, deadline=time.monotonic()), task(TINY)) is None
    other = replace(task(TINY), checksum="other")
    monkeypatch.setattr(trainings, "_task", lambda run, context: other)
    history = trainings.train_run(TINY, context)
    assert history is not None
    assert history.data["sha256"] == "other"
    assert any("it was begun with other data; it begins anew" in line for line in said)


def test_a_checkpoint_for_which_there_is_no_memory_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    context = RunContext(output=tmp_path / "o", scratch=tmp_path / "s")
    assert trainings.train_run(TINY, replace(context, deadline=time.monotonic()), task(TINY)) is None

    def full(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch, "load", full)
    with pytest.raises(torch.OutOfMemoryError):
        trainings.train_run(TINY, context, task(TINY))
    assert [path.suffix for path in context.scratch.iterdir()] == [".pt"]


def test_an_item_without_memory_does_not_stop_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(run: Run, context: RunContext) -> History | None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(run_queue, "train_run", full)
    places = ["--output", str(tmp_path / "results"), "--scratch", str(tmp_path / "scratch")]
    assert command(["papers", "run", "p3", "--quick", *places]) == 2
    assert capsys.readouterr().out.count("not made: out of memory") == 2
    assert (tmp_path / "results" / "p3-traffic-quick.json").is_file()


def damaged_states(good: dict[str, Any]) -> dict[str, Any]:
    """Files that are checkpoints and do not fit."""
    short = {**good, "virtual_workers": {**good["virtual_workers"], "ranks": good["virtual_workers"]["ranks"][:1]}}
    strange = {**good, "virtual_workers": {**good["virtual_workers"], "model": {}}}
    return {"nothing": {}, "a list": [1], "a rank is missing": short, "other weights": strange}


@pytest.mark.parametrize(
    "kind", ["empty", "no file of ours", "cut off", *damaged_states({"virtual_workers": {"ranks": []}})]
)
def test_a_training_whose_checkpoint_is_damaged_begins_anew(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainings, "_task", lambda run, context: task(run))
    said: list[str] = []
    context = RunContext(output=tmp_path / "o", scratch=tmp_path / "s", log=said.append)
    whole = trainings.train_run(TINY, context)
    file_of(context, TINY).unlink()
    saved = context.scratch / f"{TINY.name}.pt"
    for _ in range(3):
        assert trainings.train_run(TINY, replace(context, deadline=time.monotonic())) is None
    content = {"empty": b"", "no file of ours": b"no checkpoint", "cut off": saved.read_bytes()[:1000]}
    if kind in content:
        saved.write_bytes(content[kind])
    else:
        torch.save(damaged_states(torch.load(saved, weights_only=True))[kind], saved)
    said.clear()
    history = trainings.train_run(TINY, context)
    assert whole is not None
    assert history is not None
    assert history.losses == whole.losses
    assert re.search(r"\.damaged, as it is called now, cannot be resumed from: .*; it begins anew", said[0])
    assert [path.suffix for path in context.scratch.iterdir()] == [".damaged"]


DAMAGED = ["{}", "[]", '{"points": 1, "steps": {"bytes": [1]}}', "{"]


@pytest.mark.parametrize("content", DAMAGED)
def test_a_file_that_is_damaged_is_named(tmp_path: Path, content: str) -> None:
    path = tmp_path / "a.json"
    path.write_text(content)
    for reads in (lambda path: read(path, TINY), store.load):
        with pytest.raises(ValueError, match=r"a.json is damaged \(.*\): delete it and run it again"):
            reads(path)


def test_a_training_s_file_that_is_cut_off_is_named(tmp_path: Path) -> None:
    path = tmp_path / f"a{SUFFIX}"
    store.write_json(path, {"loss": list(range(1000))})
    whole = path.read_bytes()
    for content in (b"", b"{}", whole[:1], whole[:20], whole[:-1], whole[:40] + b"\xff" * 8 + whole[48:]):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"a.json.gz is damaged \(.*\): delete it and run it again"):
            read(path, TINY)


def test_the_same_training_gives_the_same_bytes(tmp_path: Path) -> None:
    for name in ("first", "second"):
        store.write_json(tmp_path / f"{name}{SUFFIX}", {"loss": [0.5, math.nan]}, run={"rate": 0.123456789})
    assert store.read_json(tmp_path / f"first{SUFFIX}") == {"run": {"rate": 0.123456789}, "loss": [0.5, None]}
    assert (tmp_path / f"first{SUFFIX}").read_bytes() == (tmp_path / f"second{SUFFIX}").read_bytes()


def test_a_quick_result_that_is_damaged_does_not_matter_beside_a_full_one(tmp_path: Path) -> None:
    assert command(["papers", "run", "p1/table1", "--output", str(tmp_path)]) == 0
    (tmp_path / "p1-table1-quick.json").write_text("{}")
    assert len(store.results_of(ITEMS["p1/table1"], tmp_path)) == 1


def test_a_training_s_file_that_is_damaged_stops_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tasks, "load_images", lambda kind, folder: ("generated", images(3, 32)))
    arguments = ["papers", "run", "p3/density", "--quick", "--output", str(tmp_path), "--scratch", str(tmp_path / "s")]
    assert command([*arguments, "--only", "0-001"]) == 0
    (damaged,) = (tmp_path / "runs").iterdir()
    damaged.write_text("{}")
    capsys.readouterr()
    assert command(arguments) == 2
    shown = capsys.readouterr()
    assert shown.out.count("is damaged") == 1
    assert f"1 trainings failed, see above: {damaged.name.removesuffix(SUFFIX)}" in shown.out
    found = store.load(tmp_path / "p3-density-quick.json").result
    assert (len(found.runs), found.missing) == (3, [damaged.name.removesuffix(SUFFIX)])
    assert damaged.read_text() == "{}"


def test_an_item_of_several_models_says_where_all_of_them_were_trained(tmp_path: Path) -> None:
    context = RunContext(output=tmp_path / "o", scratch=tmp_path / "s")
    for model, commit in (("resnet20", "one, two"), ("vgg16", "two, three")):
        run = p1_runs.training(model, "dense")
        write(file_of(context, run), replace(history_of(run), where={"commit": commit}))
    result = p1_convergence.figure_1(context.read_only())
    assert len(result.tables) == len(result.figures) == 2
    assert result.where == {"commit": "one, two, three"}
    assert len(result.runs) == 2
    # LeNet-5: three of dense and topk, randk; ResNet-20: two more of dense, three of topk, randk; VGG-16: topk, randk.
    assert len(result.missing) == (3 + 3 + 1) + (2 + 3 + 1) + 2
