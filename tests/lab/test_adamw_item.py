"""``beyond/adamw``: what is asked for, which rates are taken, what its tables say, and all of it in a tiny setting."""

from __future__ import annotations

import threading
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from sparsync.config import resolve
from sparsync.engine.budget import within_budget
from sparsync_lab.baselines import BASELINES, DeMo, FactoredAdamW, SparseLoCo
from sparsync_lab.baselines.blocks import groups_of, share_within
from sparsync_lab.data import PennTreebank
from sparsync_lab.docs import adamw as blocks
from sparsync_lab.docs.sources import Sources
from sparsync_lab.models import CATALOGUE
from sparsync_lab.papers import ITEMS, RunContext, adamw, adamw_tables, run_queue, store, tasks, trainings
from sparsync_lab.papers.adamw_sweep import (
    ABLATIONS,
    DEMO,
    FACTORED_HALF,
    GRADIENT,
    GRID,
    LOCO,
    MAIN,
    ROWS,
    SETTINGS,
    STAGES,
    preconditioned,
)
from sparsync_lab.papers.curves import seeds_notes
from sparsync_lab.papers.locks import try_lock
from sparsync_lab.papers.lr_search import LearningRateSearch
from sparsync_lab.papers.run import History, Run
from sparsync_lab.papers.run_queue import train_missing
from sparsync_lab.papers.tables import rate_search_table
from sparsync_lab.papers.trainings import VirtualSession, train_run
from tests.lab.generated import images

COMPARED: Any = {"settings": SETTINGS, "stages": STAGES, "rows": ROWS, "ablations": ABLATIONS, "equal_bytes": False}


@pytest.fixture
def context(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunContext:
    words = torch.arange(1200) % 7
    monkeypatch.setattr(tasks.data, "load_ptb", lambda folder: PennTreebank(words, words, words, ("a",)))
    monkeypatch.setattr(tasks, "load_images", lambda kind, folder: ("generated", images(3, 32)))
    return RunContext(quick=True, output=tmp_path / "papers", scratch=tmp_path / "scratch")


def history_of(run: Run, last: float, sent: float) -> History:
    score = "accuracy" if run.model in ("vit", "resnet20") else "perplexity"
    return History(run, score, [1], [last], [sent], [0.0], [sent], 0.01, 1.0, 1, [], {})


def searched(scores: dict[tuple[str, float], float]) -> LearningRateSearch:
    """A search in which methods have these scores by rate, and sent their budget's bytes."""

    def get(run: Run) -> History | None:
        label = run.label.partition(" ")[2].partition(", rate")[0]
        last = scores.get((label, round(run.rate, 9)))
        return (
            None
            if last is None or run.model != "gpt"
            else history_of(run, last + run.seed, 1e6 * run.options.get("budget", 1.0))
        )

    return LearningRateSearch(get, **COMPARED)


def bowl(label: str, best: float, floor: float, rate: float = 0.002) -> dict[tuple[str, float], float]:
    """Scores that are best with one factor of the rate."""
    factors = (0.25, 0.35, *GRID, 2.8, 4.0, 5.6)
    return {(label, round(rate * factor, 9)): floor + abs(factor - best) for factor in factors}


def test_every_stage_is_of_known_settings_and_methods() -> None:
    search = LearningRateSearch(lambda run: None, **COMPARED)
    asked = [(stage.model, stage.length, seed, label) for stage in STAGES for seed in stage.seeds
             for label in stage.methods]  # fmt: skip
    assert len(set(asked)) == len(asked)
    first = {(model, label) for model, length, seed, label in asked if length == 0 and seed == 0}
    rates_of = {(SETTINGS[model].like or model, search.method(label).like or label) for model, _, _, label in asked}
    assert first >= rates_of
    # Four workers that search for their rate share trainings with those that take sixteen's.
    names = [run.name for stage in STAGES if stage.model != "gpt-w4-own" for part in search.runs(stage) for run in part]
    assert len(set(names)) == len(names)
    assert all(method.like in ROWS for method in ABLATIONS.values())
    # The total batch is the same, whatever the workers.
    assert {s.workers * s.batch for s in SETTINGS.values() if s.model == "gpt"} == {64}


@pytest.mark.parametrize(
    ("ends", "word"),
    [
        ((125.0, 126.0, 127.0), "met"),
        ((116.0, 125.0, 134.0), "missed"),  # the mean is dense's, and the seeds are far apart
        ((128.0, 128.0, 128.0), "missed"),
        ((100.0,), "met"),
        ((125.5,), "not decided"),
        ((140.0,), "missed"),
    ],
)
def test_a_target_is_met_by_mean_and_deviation(ends: tuple[float, ...], word: str) -> None:
    dense, own = (
        [history_of(Run("a", "gpt", seed=seed, steps=1), last, 1.0) for seed, last in enumerate(lasts)]
        for lasts in ((125.0, 126.0, 127.0), ends)
    )
    assert adamw_tables.judged(own, dense) == word
    notes = seeds_notes([dense, own], dense)
    assert bool(notes) == (len(ends) < 3)


@pytest.mark.slow
def test_no_budget_is_refused_when_its_turn_comes() -> None:
    """Before hours of a GPU are spent: every method fits its optimizer and every budget its model."""
    search = LearningRateSearch(lambda run: None, **COMPARED)
    asked = [search.run(stage.model, label, 1.0, 0) for stage in STAGES for label in stage.methods]
    alike = [replace(run, label="", variant={}, windows="streams") for run in asked]  # which change nothing of a budget
    for run in {run.name: run for run in alike}.values():
        with torch.device("meta"):
            tensors = dict(CATALOGUE[run.model].make().named_parameters())
        if run.method in BASELINES:
            kind, share = BASELINES[run.method], run.options["budget"] * run.options.get("local_steps", 1)
            allowed = share * 8 / run.workers * sum(tensor.numel() for tensor in tensors.values())
            groups = groups_of([tensor.shape for tensor in tensors.values()], torch.device("cpu"))
            assert share_within(groups, allowed, kind.value_bits, kind.block_bits) > 0
            continue
        optimizer = trainings.run_optimizer(run, SimpleNamespace(model=nn.Linear(4, 4)))
        plan = within_budget(resolve(optimizer=optimizer, **trainings.run_options(run)), tensors, run.workers)
        by_itself = run.optimizer == "adamw" and run.method != "dense"
        assert plan.precondition == run.options.get("precondition", by_itself)
        if "budget" in run.options:
            assert plan.spending is not None
            assert 0.9 < plan.spending.mean / plan.spending.dense / run.options["budget"] <= 1


def test_rates_are_searched_with_16_workers_and_taken_by_all_others() -> None:
    search = searched(bowl("dense", 1.4, 125) | bowl(MAIN, 4.0, 126))
    assert list(search.tried("gpt", "dense")) == list(GRID)
    assert search.chosen("gpt", "dense") == 1.4
    assert list(search.tried("gpt", MAIN)) == [*GRID, 2.8, 4.0, 5.6]  # one after another, as the best stood at the edge
    assert search.chosen("gpt", MAIN) == 4.0
    assert not search.at_edge("gpt", MAIN)
    for name in ("gpt-w4", "gpt-w64"):
        assert list(search.tried(name, MAIN)) == [4.0]
        assert search.chosen(name, MAIN) == 4.0
        stage = next(stage for stage in STAGES if stage.model == name)
        ready, waiting = search.runs(stage)
        assert sorted({run.rate for run in ready}) == pytest.approx([0.0028, 0.008])
        assert not waiting
        assert {(run.workers, run.batch) for run in ready} == {(SETTINGS[name].workers, SETTINGS[name].batch)}
    unknown = searched({})
    assert not unknown.runs(next(stage for stage in STAGES if stage.model == "gpt-w4"))[0]


def test_tables_say_how_far_from_dense_and_for_how_many_bytes() -> None:
    scores = bowl("dense", 1.0, 125) | bowl(MAIN, 1.4, 125.5) | bowl(DEMO, 0.5, 210) | bowl(GRADIENT, 1.0, 190)
    scores |= bowl(preconditioned(15), 1.0, 124) | bowl(preconditioned(100), 1.0, 150)
    search = searched(scores)
    table = adamw_tables.score_table(search, "gpt", 0, search.methods("gpt"), "all")
    rows = {row.cells[0]: row.cells[1:] for row in table.rows}
    assert rows["dense"][:5] == ["126.00 ± 1.00", "–", "1", "3", "0.002"]
    assert rows[MAIN][:5] == ["126.50 ± 1.00", "× 1.004", "1/40", "3", "0.0028"]
    assert rows[DEMO][:2] == ["211.00 ± 1.00", "× 1.675"]
    assert rows[LOCO[15]][0] == "not run"
    standing = {row.cells[0]: row.cells for row in adamw_tables.standing(search).rows}
    of_16 = standing["GPT on PTB, 16 workers of 4, 600 steps"]
    assert of_16[4:] == ["× 1.007", "1/40", "missed", f"191.00 ± 1.00 ({GRADIENT})"]  # 127.5 is more than 1 % above
    assert standing["ViT on CIFAR-10, 16 workers of 32, 1,400 steps"][1] == "not run"
    budgets = {row.cells[0]: row.cells[1] for row in adamw_tables.against_budget(search).rows}
    assert budgets["1/40"] == "126.50 ± 1.00 (× 1.004)"
    assert budgets["1/250"] == "sketches take more"
    drawn = adamw_tables.figures(search)[0].chart
    curves = {curve.label: curve for curve in drawn.curves}  # type: ignore[union-attr]
    assert list(curves["preconditioned"].x) == pytest.approx([1.0, 2.5, 100 / 15])
    assert (curves["dense"].low[0], curves["dense"].high[0]) == (125, 127)
    assert list(curves["DeMo"].y) == [211]
    worse = searched(bowl("dense", 1.0, 125) | bowl(MAIN, 1.0, 127))
    assert adamw_tables.standing(worse).rows[0].cells[6] == "missed"


def test_a_row_whose_search_lacks_a_rate_has_no_score() -> None:
    """As where a training beside the best is not there any more; nor has what takes its rate."""
    limit = "ablation: no limit"
    scores = bowl("dense", 1.0, 125) | bowl(MAIN, 1.0, 124) | bowl(DEMO, 1.0, 210) | {(limit, 0.002): 130.0}
    labels = ["dense", MAIN, DEMO, LOCO[15], limit]

    def shown() -> dict[str, list[str]]:
        table = adamw_tables.score_table(searched(scores), "gpt", 0, labels, "", MAIN)
        assert table.headings[2] == f"to {MAIN}"
        return {row.cells[0]: [row.cells[at] for at in (1, 2, 5)] for row in table.rows}

    assert shown()[MAIN] == ["125.00 ± 1.00", "–", "0.002"]
    assert shown()[limit] == ["131.00 ± 1.00", "× 1.048", "0.002"]
    del scores[MAIN, 0.0028]
    read = {run.rate for run in searched(scores).others(STAGES[0]) if run.method != "dense"}
    assert max(read) == pytest.approx(0.016)  # whatever is stored, beyond the missing one too
    assert shown() == {
        "dense": ["126.00 ± 1.00", "–", "0.002"],
        MAIN: ["not run", "–", "search not done"],
        DEMO: ["211.00 ± 1.00", "–", "0.002"],
        LOCO[15]: ["not run", "–", "–"],
        limit: ["not run", "–", "search not done"],
    }
    (row,) = rate_search_table(searched(scores), "gpt", [MAIN]).rows
    assert "not run" in row.cells
    assert not any("*" in cell for cell in row.cells)


def test_an_edge_is_told() -> None:
    scores = {("dense", round(0.002 * factor, 9)): 100.0 - factor for factor in (*GRID, 2.8, 4.0, 5.6, 8.0)}
    table = adamw_tables.score_table(searched(scores), "gpt", 0, ["dense"], "")
    assert table.rows[0].cells[5] == "0.016, edge"


TINY: dict[str, Any] = {"workers": 2, "batch": 2, "rate": 0.01, "steps": 6, "warmup": 0.1, "decay": None, "limit": 64,
        "optimizer": "adamw"}  # fmt: skip


@pytest.mark.parametrize(("label", "kind"), [(DEMO, DeMo), (LOCO[15], SparseLoCo)])
def test_baselines_are_trainings_like_any_other(context: RunContext, label: str, kind: type) -> None:
    run = Run(label, "gpt", ROWS[label].name, ROWS[label].options, **TINY)
    session = VirtualSession(run, trainings._task(run, context), 6)
    assert isinstance(session.virtual_workers, kind)
    history = train_run(run, context)
    assert history is not None
    assert sum(history.sent) == history.bytes[-1]
    assert store.read_json(context.output / "runs" / f"{run.name}.json.gz")["run"]["method"] == run.method
    with pytest.raises(ValueError, match="carries nothing on from step to step, as lstm-ptb must"):
        train_run(replace(run, model="lstm-ptb"), context)


def test_the_control_s_optimizer_and_betas(context: RunContext) -> None:
    run = Run("control", "gpt", **{**TINY, **ROWS[FACTORED_HALF].changes})
    optimizer = VirtualSession(run, trainings._task(run, context), 6).virtual_workers.optimizer
    assert isinstance(optimizer, FactoredAdamW)
    assert optimizer.param_groups[0]["betas"] == (0.5, 0.999)
    assert run.name != replace(run, beta1=0.9).name != replace(run, beta1=0.9, optimizer="adamw").name


def test_windows_are_random_where_they_are_asked_for(context: RunContext) -> None:
    run = Run("windows", "gpt", windows="random", **TINY)
    assert run.name != replace(run, windows="streams").name
    assert replace(run, windows="streams").name == Run("windows", "gpt", **TINY).name
    tasks_of = [trainings._task(own, context) for own in (run, replace(run, seed=1), replace(run, windows="streams"))]
    first = [torch.stack([here for here, _ in next(task.batches(0))]) for task in tasks_of]
    assert not torch.equal(first[0], first[1])
    again = torch.stack([here for here, _ in next(tasks_of[2].batches(tasks_of[2].epoch))])
    assert torch.equal(first[2], again)  # streams, of which every epoch reads the same windows
    with pytest.raises(ValueError, match="windows must be one of streams, random, got 'all'"):
        replace(run, windows="all")
    with pytest.raises(ValueError, match="windows must be 'streams' but for transformers of text, got 'random' for"):
        train_run(replace(run, model="lstm-ptb"), context)


def test_one_large_training_at_a_time(context: RunContext, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two would not fit in a GPU's memory: a process waits until the other's is done."""
    assert not Run("small", "gpt", workers=16).large
    run = Run("large", "gpt2", **{**TINY, "workers": 16})
    assert run.large
    held, lines = ExitStack(), list[str]()
    monkeypatch.setattr(run_queue, "POLL_SECONDS", 0.05)
    monkeypatch.setattr(run_queue, "train_run", lambda run, context: lines.append("trained"))

    def said(line: str) -> None:
        lines.append(line)
        threading.Timer(0.2, held.close).start()

    assert held.enter_context(try_lock(context.scratch / "large.lock"))
    late = replace(context, deadline=time.monotonic() + 12, log=said)
    train_missing(late, [replace(run, seconds=1)])
    assert lines[:2] == [f"waiting for other processes: {run.name}", "trained"]


@pytest.mark.slow
def test_the_item_in_a_tiny_setting(context: RunContext) -> None:
    result = adamw.adamw(context)
    assert not result.missing
    table = next(t for t in result.tables if t.caption == "GPT on PTB, 2 workers of 2, 30 steps")
    shares = {row.cells[0]: row.cells[3] for row in table.rows}
    assert shares["dense"] == "1"
    for label in (MAIN, GRADIENT, DEMO):
        assert 39.5 <= float(shares[label].removeprefix("1/")) <= 45, (label, shares)
    assert float(shares[LOCO[15]].removeprefix("1/")) >= 40  # all entries, with two bits each, are less
    assert set(result.rows["run"]) == set(result.runs)
    order = ITEMS["beyond/adamw"].order
    assert order is not None
    assert order(context).rows
    path = store.save(replace(context, quick=False), ITEMS["beyond/adamw"], result, 1.0)
    sources = Sources(path.parent.parent, "results")
    for block in (blocks.standing, blocks.against_budget, blocks.language_models, blocks.image_models, blocks.figure):
        assert "Not run yet" not in block(sources)
    assert "DeMo, 1/40" in blocks.language_models(sources)
    standing = next(t for t in result.tables if t.caption == adamw_tables.STANDING)
    judged = {row.cells[0]: row.cells[6] for row in standing.rows}
    for setting, result_of in judged.items():
        assert (setting in blocks.losses(sources)) == (result_of in ("missed", "not decided"))


def test_what_is_not_run_yet_is_said(tmp_path: Path) -> None:
    sources = Sources(tmp_path, "results")
    for block in (blocks.standing, blocks.against_budget, blocks.ablations, blocks.figure):
        assert block(sources) == "Not run yet: `sparsync papers run beyond/adamw`."
