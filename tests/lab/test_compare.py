"""Comparisons: what is planned, what is made of outcomes, and the command as a user runs it."""

from __future__ import annotations

import csv
import json
import math
import os
import re
import signal
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import pytest

from sparsync_lab.cli import compare_report
from sparsync_lab.cli.app import run
from sparsync_lab.training.compare import label, options, plan_trainings, summarize
from sparsync_lab.training.local_workers import Worker, WorkerFailed, run_jobs
from sparsync_lab.training.settings import Outcome, Point, Training
from sparsync_lab.training.slow_link import seconds_on_slow_link
from tests.test_cli import ROOT, SPARSYNC
from tests.world import fork_server, processes_of

DENSE = Training("dense")


def outcome(training: Training, accuracy: float, sent: float, step_s: float = 0.01) -> Outcome:
    curve = [Point(step, 1.0, accuracy * step / 4, sent * step) for step in (2, 4)]
    return Outcome(training, 4, 1000, accuracy, sent, 6000.0, sent / 6000, step_s, curve)


def two_methods(gap: float) -> list[Outcome]:
    topk = Training("topk", density=0.01)
    return [outcome(DENSE, a, 6000.0) for a in (0.96, 0.98, 1.0)] + [
        outcome(topk, a - gap, 60.0, s) for a, s in ((0.97, 0.1), (0.98, 0.3), (0.99, 0.2))
    ]


def test_dense_comes_first_and_once() -> None:
    planned = plan_trainings(["paper", "dense", "topk@0.02"], 2, DENSE, density=0.05)
    assert [(t.method, t.density, t.seed) for t in planned] == [
        ("dense", None, 0),
        ("dense", None, 1),
        ("paper", 0.05, 0),
        ("paper", 0.05, 1),
        ("topk", 0.02, 0),
        ("topk", 0.02, 1),
    ]
    assert [label(t) for t in planned[::2]] == ["dense", "paper 5 %", "topk 2 %"]


def test_momentum_is_moved_except_by_recipes() -> None:
    planned = plan_trainings(["paper", "default", "topk", "random+shared"], 1, DENSE)
    assert [t.momentum_mode for t in planned] == [None, None, None, "move", "move"]
    assert [options(t)["momentum"] for t in planned] == ["keep", "keep", "correct", "move", "move"]
    assert [options(t)["density"] for t in planned[1:3]] == ["0.001", "by a budget of 1/60"]
    assert [options(t)["collective"] for t in planned[-2:]] == ["AllGather", "SharedIndexAllReduce"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--method", "nothing"], "unknown method 'nothing'"),
        (["--method", "topk+nothing"], "'nothing'"),
        (["--method", "topk", "--density", "0"], "density must be above 0 and at most 1, got 0"),
        (["--method", "topk@0"], "density must be above 0 and at most 1, got 0"),
        (["--method", "topk@much"], "method 'topk@much': after @ comes a density in (0, 1], got 'much'"),
        (["--method", "topk@0.01", "--method", "topk@1e-2"], "methods must differ, got topk 1 % more than once"),
        (["--method", "dense@0.1"], "method 'dense@0.1': dense sends every entry, and takes no density"),
        (["--optimizer", "adam"], "optimizer must be one of sgd, adamw, got 'adam'"),
        (["--seeds", "0"], "seeds must be 1 or more, got 0"),
        (["--workers", "0"], "workers must be from 1 to 42"),
        (["--momentum-mode", "lose"], "momentum_mode must be one of keep, move, correct"),
        (["--data", "nothing"], "data must be one of digits, mnist"),
        (["--data", "mnist", "--data-dir", "/nowhere"], "/nowhere"),
        (["--out", __file__], "File exists"),
    ],
)
def test_bad_input_is_one_sentence(arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    default = [] if "--method" in arguments or "--data" in arguments else ["--method", "topk"]
    assert run(["compare", *default, *arguments]) == 2
    said = capsys.readouterr().err
    assert sentence in said
    assert len(said.strip().splitlines()) == 1


def test_outcomes_become_means_with_their_spread() -> None:
    dense, topk = summarize(two_methods(gap=0.0))
    assert (dense.label, topk.label) == ("dense", "topk 1 %")
    assert (dense.seeds, topk.seeds) == (3, 3)
    assert topk.accuracy == pytest.approx(0.98)
    assert dense.deviation == pytest.approx(0.02)  # of a sample: divided by n - 1
    assert topk.deviation == pytest.approx(0.01)
    assert topk.ratio == pytest.approx(100)
    assert topk.step_s == 0.2  # the median, not the mean
    assert summarize(two_methods(gap=0.0)[::3])[1].deviation is None


@pytest.mark.parametrize(("gap", "missed"), [(0.0099, False), (0.0101, True)])
def test_more_than_a_point_under_dense_misses_it(gap: float, missed: bool, tmp_path: Path) -> None:
    lines = summarize(two_methods(gap))
    assert [line.misses for line in lines] == [False, missed]
    assert [row.warning for row in compare_report.table(lines, 4).rows] == [
        "",
        "misses dense by 1.0 points" if missed else "",
    ]
    (finding,) = compare_report.findings(lines)
    assert ("More than 1 point under dense: topk 1 %" in finding) == missed
    assert ("topk 1 % sends least: 100 × less" in finding) == (not missed)


def test_of_two_that_send_about_as_little_the_more_accurate_is_named() -> None:
    def named(least: float, other: float) -> str:
        sparse = [(Training("topk"), 0.975, least), (Training("dgc"), 0.98, other)]
        lines = summarize([outcome(DENSE, 0.98, 6000.0), *(outcome(*each) for each in sparse)])
        return compare_report.findings(lines)[0]

    assert "topk and dgc send about as little, and dgc is the most accurate of them: 57.9 × less" in named(100, 103.6)
    assert "topk sends least: 60.0 × less" in named(100, 120)


def test_what_ended_in_nan_is_said_and_crowned_by_nobody() -> None:
    nan = replace(outcome(Training("topk"), 0.99, 60.0), curve=[Point(4, math.nan, 0.99, 240.0)])
    lines = summarize([outcome(DENSE, 0.98, 6000.0), nan])
    assert compare_report.findings(lines) == ["Ended in NaN: topk."]
    assert [row.warning for row in compare_report.table(lines, 4).rows] == ["", "1 of 1 trainings ended in NaN"]


def test_a_step_on_a_slow_link_waits_for_its_bytes() -> None:
    """Dense sends 2 x 3/4 x 85,002 x 4 bytes in 6 rounds, of which a link of 1 Gb/s carries 1448/1514 as payload; one
    bucket, so that backward hides nothing."""
    alone = 6 * 50e-6 + 510_012 * 8 * 1514 / 1448 / 1e9
    assert seconds_on_slow_link(DENSE, 4, 0.01) == pytest.approx(0.01 + alone, rel=1e-3)
    for sparse in (Training("default"), Training("topk", density=0.01, momentum_mode="move")):
        assert 0.01 < seconds_on_slow_link(sparse, 4, 0.01) < 0.01 + 0.4 * alone
    adamw = Training("default", optimizer="adamw", rate=0.002)
    assert 0.01 < seconds_on_slow_link(adamw, 4, 0.01) < 0.01 + 0.6 * alone
    assert seconds_on_slow_link(DENSE, 1, 0.01) == pytest.approx(0.01)


def test_adamw_has_no_momentum_to_move() -> None:
    planned = plan_trainings(["default", "paper", "topk"], 1, replace(DENSE, optimizer="adamw"))
    assert [t.momentum_mode for t in planned] == [None] * 4
    assert [options(t)["momentum"] for t in planned] == ["keep", "preconditioned", "keep", "keep"]
    with pytest.raises(ValueError, match="momentum_mode 'move' is for sgd's momentum"):
        Training("topk", optimizer="adamw", momentum_mode="move")


def test_curves_are_means_and_bands_over_the_seeds() -> None:
    steps, traffic, bars = compare_report.charts(summarize(two_methods(gap=0.0)))
    assert isinstance(steps, compare_report.LineChart)
    assert isinstance(traffic, compare_report.LineChart)
    dense, topk = steps.curves
    assert list(dense.x) == [2, 4]
    assert dense.y == pytest.approx([49, 98])
    assert (dense.low[-1], dense.high[-1]) == pytest.approx((96, 100))
    assert list(traffic.curves[1].x) == [120, 240]
    assert [bar.note for bar in bars.bars] == ["6.0 kB", "60 B, 100 × less"]  # type: ignore[union-attr]
    assert topk.label == "topk 1 %"


def test_compare_end_to_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trainings on worker processes, supervised by this one."""
    fork_server()
    monkeypatch.setenv("COLUMNS", "200")
    # Without momentum, topk of everything is dense, and 0.1 % learns nothing in ten steps.
    asked = [
        "compare", "--method", "topk@1", "--method", "paper", "--workers", "2", "--steps", "10", "--seeds", "2",
        "--momentum", "0", "--rate", "0.5", "--out", str(tmp_path / "new"),
    ]  # fmt: skip
    assert run(asked) == 0
    shown, errors = capsys.readouterr()
    assert errors == ""
    assert re.search(r"^dense +\d+\.\d ± \d+\.\d % +340,008 +1\.0 × +100 %", shown, re.MULTILINE)
    assert re.search(r"^topk 100 % +.* 678,008 +0\.5 ×", shown, re.MULTILINE)
    assert "sends least" not in shown
    assert re.search(r"^paper +.* 720 +472 × +0\.1 %", shown, re.MULTILINE)
    assert len(re.findall(r"^misses dense by \d+\.\d points", shown, re.MULTILINE)) == 1
    assert shown.splitlines()[-1] == f"report: {tmp_path / 'new' / 'report.html'}"

    content = json.loads((tmp_path / "new" / "outcomes.json").read_text())
    outcomes = [Outcome.from_json(plain) for plain in content["outcomes"]]
    assert [(o.training.method, o.training.seed) for o in outcomes] == [
        (method, seed) for method in ("dense", "topk", "paper") for seed in (0, 1)
    ]
    assert outcomes[0].accuracy == pytest.approx(outcomes[2].accuracy, abs=0.005)  # rounding may tip an image or two
    with (tmp_path / "new" / "table.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [row["method"] for row in rows] == ["dense", "topk 100 %", "paper"]
    assert [row["misses_dense"] for row in rows] == ["no", "no", "yes"]
    assert [row["times_less_than_dense"] for row in rows][::2] == ["1.00", "472.23"]
    for key in (
        "device",
        "cpus",
        "python",
        "torch",
        "sparsync",
        "date",
        "accuracy_mean",
        "accuracy_std",
        "step_p50_ms",
    ):
        assert all(row[key] for row in rows), key
    assert "commit" in rows[0]
    page = (tmp_path / "new" / "report.html").read_text(encoding="utf-8")
    assert page.count('<svg class="chart"') == 3
    assert page.count('class="warned"') == 1
    assert re.search(r'<th scope="row">paper<span class="warning">misses dense by \d+\.\d points</span></th>', page)
    assert rows[0]["torch"] in page
    assert (tmp_path / "new" / "compare.png").read_bytes().startswith(b"\x89PNG")


def test_a_worker_alone_sends_nothing_and_is_compared_all_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    alone = [
        Outcome(t, 1, 1000, 0.9, 0.0, 0.0, 1.0, 0.01, [Point(1, 1.0, 0.9, 0.0)])
        for t in plan_trainings(["topk"], 1, DENSE)
    ]
    lines = summarize(alone)
    compare_report.save(tmp_path, "alone", alone, lines, 1, {})
    assert (tmp_path / "report.html").read_text(encoding="utf-8").count('<svg class="chart"') == 1
    assert compare_report.table(lines, 1).rows[1].cells[2:4] == ["0", "–"]


@pytest.mark.slow
def test_interrupted_compare_leaves_no_worker_behind(tmp_path: Path) -> None:
    command = [*SPARSYNC, "compare", "--workers", "2", "--steps", "100000", "--out", str(tmp_path)]
    # A shell starts what runs in its background with SIGINT ignored, and that is inherited.
    heed = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)  # noqa: E731
    compare = subprocess.Popen(
        command, cwd=ROOT, stderr=subprocess.PIPE, text=True, start_new_session=True, preexec_fn=heed
    )
    try:
        until = time.monotonic() + 120
        while len(processes_of(compare.pid)) < 5 and time.monotonic() < until:  # itself, tracker, fork server, workers
            time.sleep(0.2)
        time.sleep(1)
        compare.send_signal(signal.SIGINT)
        _, errors = compare.communicate(timeout=120)
        assert compare.returncode == 130
        assert errors.strip() == "sparsync: interrupted"
        until = time.monotonic() + 60
        while processes_of(compare.pid) and time.monotonic() < until:
            time.sleep(0.2)
        assert processes_of(compare.pid) == {}
    finally:
        for process in processes_of(compare.pid):
            os.kill(process, signal.SIGKILL)


def one_dies(worker: Worker, rank: int) -> None:
    if worker.rank == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.1)
    raise RuntimeError("connection closed by peer")


def test_a_killed_worker_is_named_whoever_is_heard_first() -> None:
    with pytest.raises(WorkerFailed, match=r"^worker 1 was killed by SIGKILL, the others were stopped$"):
        run_jobs(one_dies, 2, [1], lambda steps: None)


def test_a_failing_worker_is_quoted() -> None:
    with pytest.raises(WorkerFailed, match=r"worker \d failed:\n(.*\n)*RuntimeError: connection closed by peer"):
        run_jobs(one_dies, 2, [-1], lambda steps: None)
