"""The trainings that test claims: what they change is what is trained."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import inf
from pathlib import Path

import pytest
import torch

from sparsync_lab.models import CATALOGUE
from sparsync_lab.papers import (
    RunContext,
    evidence,
    evidence_questions,
    p2,
    p2_learned,
    random_forms,
    store,
    tuned,
    vgg16_gap,
    vgg16_notes,
)
from sparsync_lab.papers.claims.claim import NOT, PARTLY, REPRODUCED, UNDECIDED
from sparsync_lab.papers.claims.stored_tables import MissingResult
from sparsync_lab.papers.claims.verdicts import verdicts
from sparsync_lab.papers.curves import last_score, mean_and_std, shown_difference
from sparsync_lab.papers.density_stages import DensityStages
from sparsync_lab.papers.differences import MISSING, from_dense, like_dense, near, stated_gap
from sparsync_lab.papers.gaussian_forms import fallback_note
from sparsync_lab.papers.lr_search import LearningRateSearch
from sparsync_lab.papers.p1 import histograms
from sparsync_lab.papers.p1_convergence import figure_1, figure_6
from sparsync_lab.papers.p1_runs import AUTHORS, CARRIED, COUNTED, HELD, HELD_COUNTED, training
from sparsync_lab.papers.run import History, Run, file_of, read, write
from sparsync_lab.papers.trainings import run_options, train_run
from sparsync_lab.papers.vgg16_notes import change_tables, gap_note, precision_note
from sparsync_lab.report import LineChart
from tests.lab.test_papers import history_of, task


def small(run: Run, **changes: object) -> Run:
    own = {"model": "lenet5", "workers": 2, "batch": 4, "steps": 8, "limit": 32, "autocast": False, **changes}
    return replace(run, **own)  # type: ignore[arg-type]


def test_every_run_is_there_once_and_has_its_time() -> None:
    runs = [run for one in evidence_questions.questions() for run in one.runs]
    assert len({run.name for run in runs}) == len(runs)
    assert all(run.seconds > 20 and run.model in CATALOGUE for run in runs)
    for run in runs:
        if run.method != "dense":
            run_options(replace(run, steps=run.steps or 100))  # a setting that cannot be made raises


def test_the_list_says_what_is_missing(tmp_path: Path) -> None:
    context = RunContext(output=tmp_path)
    first = evidence_questions.questions()[0].runs[0]
    file_of(context, first).parent.mkdir()
    file_of(context, first).touch()
    rows = [row.cells for row in evidence.order(context).rows]
    assert [row[-1] for row in rows] == ["done", *["missing"] * (len(rows) - 1)]
    assert rows[0][2] == first.name


def test_what_has_not_run_is_shown_as_that(tmp_path: Path) -> None:
    result = evidence.evidence(RunContext(output=tmp_path, scratch=tmp_path).read_only())
    assert len(result.missing) == sum(len(one.runs) for one in evidence_questions.questions())
    *tables, learned = result.tables
    assert all(row.cells[2] == "not run" for table in tables for row in table.rows)
    assert all(cell.startswith("– (") for row in learned.rows for cell in row.cells[1:])


def test_what_is_compared_with_belongs_to_the_result() -> None:
    """So that it is seen if that was trained with other data."""
    result = evidence.evidence(RunContext(output=Path("results/papers")).read_only())
    beside = LearningRateSearch(lambda run: None).run("lstm-ptb", "dense", 1.0, 0).name
    assert beside in result.runs
    assert len(set(result.runs)) == len(result.runs)


def test_every_method_has_its_rows_of_the_schedules() -> None:
    search = LearningRateSearch(lambda run: None)
    runs = [*tuned.asked(search), *tuned.beside(search)]
    done = {run.name: history_of(run, 0.9) for run in runs}
    rows = [row.cells for row in tuned.comparison(runs, done).rows]
    assert list(dict.fromkeys(cells[0] for cells in rows)) == list(tuned.METHODS)
    for method in tuned.METHODS:
        own = {tuple(cells[1:4]) for cells in rows if cells[0] == method}
        assert len(own) == sum(cells[0] == method for cells in rows)
        assert {tuned.COSINE, tuned.FALLS_ONCE} == {schedule for schedule, *_ in own}
    decays = {cells[0] for cells in rows if cells[3] == "0.0001"}
    assert decays == {"dense", tuned.EARLY, tuned.TOPK}
    authors = [cells for cells in rows if cells[0] == "dense" and cells[2:4] == ["0.1", "0.0001"]]
    assert [cells[5] for cells in authors] == ["3"]  # all seeds, and no longer a row for each


def test_densities_fall_in_stages() -> None:
    density = DensityStages(vgg16_gap.densities(120), 1200, 0.001)
    assert [density(step) for step in (0, 9, 10, 19, 20, 1199)] == [1 / 64, 1 / 64, 0.004, 0.004, 0.001, 0.001]
    with pytest.raises(ValueError, match="densities must be left out with front"):
        Run("a", "lenet5", "topk", {"density": 0.1}, densities=((0.1, 0.2),), front=2.0, steps=5)


def trained(run: Run, folder: Path) -> History:
    """Train it, and read it back."""
    context = RunContext(output=folder, scratch=folder / "scratch")
    history = train_run(run, context, task(run))
    assert history is not None
    assert Run(**store.read_json(file_of(context, run))["run"]).name == run.name
    assert read(file_of(context, run), run).snapshots == list(history.snapshots)
    return history


def test_more_is_sent_at_first(tmp_path: Path) -> None:
    run = small(vgg16_gap.cause("topk", "density warm-up", densities=((0.25, 1 / 4), (0.5, 0.04))))
    history = trained(run, tmp_path)
    sent = history.sent
    assert sent[0] == sent[1] > sent[2] == sent[3] > sent[4] == sent[7]


def test_without_a_residual_nothing_is_kept(tmp_path: Path) -> None:
    """At density 1 there is nothing to keep; below it, what is lost makes another training."""
    losses = []
    kept = training("lenet5", "randk")
    for asked in (kept, random_forms.random_k("lenet5", ", no residual")):
        run = small(asked, options={"density": 0.5, "scope": "global"})
        losses.append(trained(run, tmp_path).losses)
    assert losses[0][:2] == losses[1][:2]
    assert losses[0][2:] != losses[1][2:]


@pytest.mark.parametrize("form", [AUTHORS, CARRIED])
def test_counts_are_stored(form: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    run = small(training("lenet5", form), watch_every=4)
    seen = trained(run, tmp_path).snapshots
    assert [snapshot["step"] for snapshot in seen] == [4, 8]
    assert all(0 <= s["least"] <= s["mean"] <= s["most"] for s in seen)
    assert seen[-1]["fallbacks"] >= seen[0]["fallbacks"] >= 0


SPREAD = 3.0  # points, of VGG-16
CAUSES: Mapping[tuple[str, str], float] = {("topk", "as in figure 6"): 23.4, ("dense", "as in figure 6"): 83.9}


@pytest.mark.parametrize(
    ("changed", "word", "says"),
    [
        ({}, "", ""),
        ({("topk", "clipped at 1"): 77.4}, NOT, "Clipped at 1 leaves the least of the gap"),
        (  # a dense that the change harms is no measure ...
            {("topk", "clipped at 1"): 77.4, ("dense", "clipped at 1"): 78.0},
            NOT,
            "Clipped at 1 leaves the least of the gap; what causes it, these trainings do not say",
        ),
        (  # ... and one that it helps is the measure of all
            {("topk", "clipped at 1"): 85.4, ("dense", "warm-up of 5 epochs"): 90.0},
            NOT,
            "The best dense, 90.00 %, has this change: warm-up of 5 epochs. Clipped at 1 leaves the least of the gap",
        ),
        ({("topk", "clipped at 1"): 80.8}, NOT, "Clipped at 1 leaves the least of the gap"),
        ({("topk", "clipped at 1"): 82.0}, UNDECIDED, "Whether clipped at 1 leaves a gap, one seed does not decide."),
        ({("topk", "clipped at 1"): 85.4}, UNDECIDED, "Whether clipped at 1 leaves a gap, one seed does not decide."),
        ({("topk", "clipped at 1"): 87.4}, REPRODUCED, "Clipped at 1 leaves no gap."),
        (
            {("topk", "rate 0.025"): 61.5, ("topk", "weight decay"): 25.0},
            NOT,
            "Rate 0.025 leaves the least of the gap; what causes it, these trainings do not say",
        ),
        ({("topk", "weight decay"): 25.0}, NOT, "None of the changes takes half of the gap away"),
        (
            {("topk", "weight decay"): 25.0, ("topk", "as in figure 6"): 82.0},
            UNDECIDED,
            "In so few epochs one seed does not decide whether there is a gap to explain.",
        ),
        ({("topk", "weight decay"): 25.0, ("topk", "as in figure 6"): 87.5}, REPRODUCED, "there is no gap to explain"),
        (
            {("topk", "rate 0.025"): 61.5, ("topk", "rate 0.0125"): 70.0},
            NOT,
            "Of the rates, TopK-SGD ends highest with the lowest, 0.0125: a better one may lie below.",
        ),
        (
            {("topk", "weight decay"): 25.0, ("dense", "rate 0.025"): 84.8},
            NOT,
            "Of the rates, dense ends highest with the lowest, 0.025, within the spread of its trainings: a",
        ),
        (
            {("topk", "no warm-up of the rate"): 11.8, ("topk", "warm-up of 5 epochs"): 61.5},
            NOT,
            "have 40 steps of warm-up, figure 6 has 120: TopK-SGD ends with none at 11.8 %, with 120 at 61.5 %.",
        ),
        ({("topk", "rate 0.025"): 61.5}, NOT, "are initial weights, momentum, batch and bfloat16 (fp32 is not run)."),
        ({("topk", "fp32"): 61.5}, NOT, "are initial weights, momentum, batch and products in TF32."),
    ],
)
def test_the_cause_of_the_gap_follows_the_numbers(changed: dict[tuple[str, str], float], word: str, says: str) -> None:
    if not changed:
        with pytest.raises(MissingResult):
            vgg16_gap.judge_gap(CAUSES, 960, SPREAD)
        return
    judged = vgg16_gap.judge_gap({**CAUSES, **changed}, 960, SPREAD)
    assert judged.word == word
    assert says in judged.detail
    assert ("not excluded as" in judged.detail) == (word == NOT)
    assert "; unchanged (40 steps of warm-up): " in judged.here
    best = max(score for (method, _), score in {**CAUSES, **changed}.items() if method == "dense")
    assert ("the best dense" in judged.here) == (best > CAUSES["dense", "as in figure 6"])


def test_where_the_spread_of_vgg16_is_not_known_no_change_decides() -> None:
    judged = vgg16_gap.judge_gap({**CAUSES, ("topk", "clipped at 1"): 60.0}, 960, inf)
    assert (judged.word, "60.50 points below dense" in judged.here) == (UNDECIDED, True)


def test_dense_with_the_same_change_is_told() -> None:
    def here(**own: float) -> str:
        changed = {("topk" if what.startswith("top") else "dense", what.split("_", 1)[1]): own[what] for what in own}
        return vgg16_gap.judge_gap({**CAUSES, **changed}, 960, SPREAD).here

    assert here(top_fp32=88.0).startswith("fp32: 4.10 points above dense, dense with it not run; ")
    both = here(top_fp32=84.5, dense_fp32=87.0)
    assert both.startswith("fp32: within the spread of its trainings from the best dense, dense with it at 87.00 %; ")
    early = vgg16_gap.judge_gap({**CAUSES, ("topk", "density warm-up"): 63.0}, 960, SPREAD)
    assert early.here.startswith("density warm-up: 20.90 points below dense; ")  # dense has no density


def test_every_short_training_of_vgg16_that_is_stored_is_in_the_table(tmp_path: Path) -> None:
    context = RunContext(output=tmp_path, scratch=tmp_path)
    assert change_tables(context) == []
    own = [vgg16_gap.cause(method, "as in figure 6") for method in ("topk", "dense")]
    own += [
        vgg16_gap.cause("topk", "warm-up of 5 epochs", warmup=0.125),
        vgg16_gap.cause("dense", "fp32", autocast=False),
    ]
    own.append(vgg16_gap.cause("topk", "density warm-up", densities=vgg16_gap.densities(40)))
    for run, score in zip(own, (0.234, 0.839, 0.62, 0.84, 0.63), strict=True):
        stored_run(context, run, score, steps=960)
    stored_run(context, replace(vgg16_gap.cause("topk", "clipped at 1", clip=1.0), epochs=10), 0.9)
    (table,) = change_tables(context)
    assert [row.cells for row in table.rows] == [
        ["none: 40 steps of warm-up", "23.40", "83.90", "-60.5", "-60.6", "1.00", "1"],
        ["density warm-up", "63.00", "–", "–", "-21.0", "1.00", "1"],
        ["warm-up of 5 epochs (120 steps of warm-up)", "62.00", "not run", "–", "-22.0", "1.00", "1"],
        [vgg16_notes.TF32, "not run", "84.00", "–", "–", "–", "–"],
    ]
    assert "figure 6 has 120 steps of warm-up, as many as" in table.notes[0]
    assert change_tables(replace(context, epochs=40)) == []
    assert table in figure_6(context.read_only()).tables
    assert table in evidence.evidence(context.read_only()).tables


def test_a_training_with_rand_k_that_falls_back_is_told(tmp_path: Path) -> None:
    context = RunContext(output=tmp_path, scratch=tmp_path)
    run = random_forms.random_k("lenet5", ", with residual, density warm-up")
    stored_run(context, run, 0.62, steps=600, points=[(290, 0.661), (600, 0.62)])
    assert not any("Rand-k" in note for note in evidence.evidence(context.read_only()).notes)
    stored_run(context, run, 0.173, steps=600, points=[(290, 0.661), (600, 0.173)])
    told = "LeNet-5 (randk, with residual, density warm-up) reached 66.1 % at step 290 of 600 and ended at 17.3."
    assert any(told in note for note in evidence.evidence(context.read_only()).notes)


def test_the_gap_is_read_from_stored_trainings(tmp_path: Path) -> None:
    """Its note says "not run" until they are there."""
    context = RunContext(output=tmp_path, scratch=tmp_path)
    assert "not run" in gap_note(context)[0]
    for run in vgg16_gap.causes():
        if run.label.startswith(("cause: topk, as", "cause: dense, as", "cause: topk, clipped")):
            score = {"cause: topk, as in figure 6": 0.2, "cause: topk, clipped at 1": 0.82}.get(run.label, 0.8)
            about = {"name": "cifar10", "size": "1", "sha256": "0"}
            write(
                file_of(context, run), History(run, "accuracy", [1], [score], [1], [1.0], [1], 1.0, 1.0, 1, [], about)
            )
    (note,) = gap_note(context)
    assert "clipped at 1: 2.00 points above dense, dense with it not run" in note
    for method, score in {"dense": 0.9, "topk": 0.77, "gaussiank": 0.78}.items():
        stored_run(context, training("vgg16", method), score)
    known, _ = gap_note(context)
    assert "TopK-SGD ends 13.00 points below dense" in known
    assert "ends 12.00 points below dense." in known
    stored_run(context, training("vgg16", COUNTED), 0.79, [{"step": 60, "mean": 29_456, "fallbacks": 0}])
    assert "and 11.00 points below dense where it is trained again" in gap_note(context)[0]
    assert "in its first 60 steps it sends 2.0 k, later far less." in gap_note(context)[0]
    stored_run(context, vgg16_gap.clipped("topk"), 0.88)
    assert "Clipped" not in gap_note(context)[0]
    stored_run(context, vgg16_gap.clipped("dense"), 0.85)
    clip = "Clipped at a norm of 1, TopK-SGD ends at 88.00 %, clipped dense at 85.00, dense as it is at 90.00 (one seed"
    assert clip in gap_note(context)[0]
    stored_run(context, vgg16_gap.authors_settings("vgg16", "topk"), 0.86)
    assert "of its authors' code" not in gap_note(context)[0]
    stored_run(context, vgg16_gap.authors_settings("vgg16", "dense"), 0.9)
    told = "TopK-SGD ends at 86.00 %, dense with that weight decay at 90.00 (one seed each). Clipped"
    assert f"of its authors' code {told}" in gap_note(context)[0]
    seeded = [tuned.seeded(vgg16_gap.authors_settings("vgg16", method), 1) for method in ("topk", "dense")]
    stored_run(context, seeded[0], 0.87)
    assert f"of its authors' code {told}" in gap_note(context)[0]  # dense has one seed
    stored_run(context, seeded[1], 0.91)
    told = "TopK-SGD ends at 86.50 %, dense with that weight decay at 90.50 (two seeds each). Clipped"
    assert f"of its authors' code {told}" in gap_note(context)[0]
    stored_run(context, vgg16_gap.warmed(), 0.92)
    longer = "In 120 epochs of VGG-16, 30 of them warm-up of the rate, TopK-SGD ends {} dense (one seed)."
    assert longer.format("2.00 points above") in gap_note(context)[0]
    question = "one changed setting"
    assert word_of(context, question)[0] == UNDECIDED  # how far such trainings end apart is not known
    for form, score in {HELD: 0.76, CARRIED: 0.785}.items():
        stored_run(context, training("vgg16", form), score)
    assert word_of(context, question)[0] == UNDECIDED  # nor in short ones
    stored_run(context, vgg16_gap.cause(CARRIED, "as in figure 6"), 0.23)
    word, here = word_of(context, question)
    within = "within the spread of its trainings from"
    assert (word, here.startswith(f"clipped at 1: {within} dense")) == (UNDECIDED, True)
    assert here.endswith(longer.format(within))
    known, note = gap_note(context)
    assert clip in known
    assert longer.format(within) in known
    assert f"clipped at 1: {within} dense" in note
    found = verdicts(
        {"beyond/evidence": evidence.evidence(context.read_only()), "p1/fig1": figure_1(context.read_only())}
    )
    text = next(one for one in found if "TopK-SGD ends like dense" in one.claim.text)
    assert text.detail.endswith(longer.format(within))


def test_what_fp32_changes_is_told_once_it_is_trained(tmp_path: Path) -> None:
    context = RunContext(output=tmp_path, scratch=tmp_path)
    runs = {(method, what): vgg16_gap.cause(method, what, autocast=what != vgg16_gap.FP32)
            for method in ("topk", "dense") for what in (vgg16_gap.PLAIN, vgg16_gap.FP32)}  # fmt: skip
    assert precision_note(context).endswith("; what that changes is not measured.")
    for method, score in {"topk": 0.234, "dense": 0.839}.items():
        stored_run(context, runs[method, vgg16_gap.PLAIN], score)
    assert precision_note(context).endswith("; what that changes is not measured.")
    stored_run(context, runs["topk", vgg16_gap.FP32], 0.85)
    told = "; with fp32 (products in TF32) trainings of 40 epochs end otherwise: TopK-SGD at 85.00 instead of 23.40 %, "
    told += "dense {} (one seed each)."
    assert precision_note(context).endswith(told.format("not run"))
    stored_run(context, runs["dense", vgg16_gap.FP32], 0.842)
    assert precision_note(context).endswith(told.format("at 84.20 instead of 83.90 %"))
    assert precision_note(context) in figure_1(context.read_only()).notes
    assert any(precision_note(context) in note for note in histograms(context.read_only(), "topk").notes)


def stored_run(
    context: RunContext,
    run: Run,
    score: float,
    snapshots: Sequence[Mapping[str, object]] = (),
    steps: int = 1,
    points: Sequence[tuple[int, float]] = (),
) -> None:
    kind = "perplexity" if run.model == "lstm-ptb" else "accuracy"
    about = {"name": "cifar10", "size": "1", "sha256": "0"}
    at, scores = zip(*(points or [(1, score)]), strict=True)
    losses = [1.0] * steps
    history = History(run, kind, at, scores, [1] * len(at), losses, [1] * steps, 0.00133, 1.0, 1, snapshots, about)
    write(file_of(context, run), history)


def alike(context: RunContext, held: float, carried: float) -> None:
    """Store what tells, beside Top-k, how far trainings of VGG-16 end apart; the short ones end alike."""
    for form, score in {HELD: held, CARRIED: carried}.items():
        stored_run(context, training("vgg16", form), score)
    for form in ("topk", CARRIED):
        stored_run(context, vgg16_gap.cause(form, "as in figure 6"), 0.2)


def word_of(context: RunContext, claim: str) -> tuple[str, str]:
    found = verdicts({"beyond/evidence": evidence.evidence(context.read_only())})
    (one,) = (one for one in found if claim in one.claim.text)
    return one.word, f"{one.here}. {one.detail}".rstrip()


def test_gtopk_on_other_models_is_judged_as_far_as_it_was_trained(tmp_path: Path) -> None:
    context = RunContext(output=tmp_path, scratch=tmp_path)
    assert word_of(context, "random-k on the sum, on VGG-16")[0] == MISSING
    (question,) = (one for one in evidence_questions.questions() if one.name == evidence_questions.TREE)
    for run in (*question.runs, *question.beside):
        if run.model == "lstm-ptb":
            seen = [{"step": 50, "ratio": 0.99}, {"step": 100, "ratio": 0.98}] if "gtopk" in run.method else []
            stored_run(context, run, 500.0 if "gtopk" in run.method else 400.0, seen)
    word, here = word_of(context, "random-k on the sum, on VGG-16")
    ours = "The tree is ours: what it drops stays in a residual and is not lost."
    told = "VGG-16 not run; LSTM-PTB 2 snapshots, the largest ratio 0.9900."
    source = "P3's abstract does not say this: its authors' public code draws the ratio."
    ends = "That it holds does not secure convergence: these trainings end at 500.00 (LSTM-PTB, 1 steps)."
    assert (word, here) == (PARTLY, f"{told} {source} {ends} {ours}")
    word, here = word_of(context, "end like dense on VGG-16 and LSTM-PTB")
    assert word == UNDECIDED  # VGG-16 is not run
    assert "LSTM-PTB 500.0, dense 400.0 (perplexity, less is better, 1 steps)" in here
    assert "TopK-SGD ends at 400.0 (LSTM-PTB" in here
    for run in (*question.runs, *question.beside):
        if run.model == "vgg16":
            tree = "gtopk" in run.method
            stored_run(context, run, 0.92 if tree else 0.9, [{"step": 50, "ratio": 1.01}] if tree else [])
    assert word_of(context, "random-k on the sum, on VGG-16")[0] == PARTLY
    assert (
        word_of(context, "end like dense on VGG-16 and LSTM-PTB")[0] == UNDECIDED
    )  # how far its trainings end apart: not run
    alike(context, 0.895, 0.905)
    assert word_of(context, "end like dense on VGG-16 and LSTM-PTB")[0] == PARTLY
    # A difference that one seed does not decide: under a point, and 0.2 % of a perplexity.
    for run in (*question.runs, *question.beside):
        if run.model in ("vgg16", "lstm-ptb") and "gtopk" in run.method:
            stored_run(context, run, 0.895 if run.model == "vgg16" else 400.8)
    assert word_of(context, "end like dense on VGG-16 and LSTM-PTB")[0] == UNDECIDED
    tables = evidence.evidence(context.read_only()).tables
    (own,) = (table for table in tables if table.caption.startswith("P3: its condition"))
    assert {row.cells[3] for row in own.rows} == {"%", "perplexity", ""}


def test_what_gtopk_sends_at_first_is_said_and_fewer_bits_are_picked_up(tmp_path: Path) -> None:
    context, search = RunContext(output=tmp_path, scratch=tmp_path), LearningRateSearch(lambda run: None)
    (question,) = (one for one in evidence_questions.questions() if one.name == evidence_questions.TREE)
    for run in (*question.runs, *question.beside):
        if run.model == "resnet20" and not any(word in run.label for word in ("sign", "levels", "bf16", "0.9")):
            stored_run(context, run, 0.9 + 0.002 * run.seed if run.method == "dense" else 0.88)
    word, here = word_of(context, "with momentum of 0.5 before the residual")
    assert word == NOT
    assert "0.133 % in all and not 0.1 %" in here
    assert ", without it 2.00 points below dense" in here
    claim, momentum = "with values of fewer bits", "with momentum of 0.9"
    assert word_of(context, claim)[0] == word_of(context, momentum)[0] == MISSING
    for run in question.runs:
        if "sign" in run.label or "0.9" in run.label:
            stored_run(context, run, (0.895 - 0.001 * run.seed) if "sign" in run.label else 0.85)
    word, here = word_of(context, claim)
    assert word == PARTLY  # the other two are not run
    same = "Dense has the same seeds and P1's rate."
    assert here == f"sign 0.80 points below dense (three seeds). They end at sign 89.40 %. {same}"
    here = f"85.00 %, 5.00 points below dense (one seed). {same}"
    assert word_of(context, momentum) == (NOT, here)
    tuned_dense = [tuned.in_p1_schedule(search.run("resnet20", "dense", 4.0, 2), seed) for seed in range(3)]
    for run in (*tuned_dense, *(tuned.seeded(training("resnet20", "dense"), seed) for seed in range(3))):
        stored_run(context, run, 0.9 if run.rate == 0.1 else 0.91)
    at_best = " With that rate, 0.1, dense ends at 90.00 ± 0.00 %, with its best, 0.8, at 91.00 ± 0.00; beside that "
    assert word_of(context, momentum)[1].endswith(f"{at_best}gTop-k 6.00 points below dense.")
    assert word_of(context, "with momentum of 0.5")[1].endswith(f"{at_best}gTop-k 3.00 points below dense.")
    for run in question.runs:
        if "levels" in run.label:
            stored_run(context, run, 0.902)
    told = "sign 1.60 points below dense, levels 0.80 points below dense."
    assert word_of(context, claim)[1].endswith(f"{at_best}{told}")


def test_signs_in_gtopk_are_the_library_s() -> None:
    for values in evidence_questions.FEWER_BITS:
        options = run_options(replace(evidence_questions.gtopk_in_fewer_bits(values), steps=10))
        assert (options["collective"], options["values"]) == ("gtopk", values)


def test_what_more_epochs_bring_to_blocks_is_told_once_they_are_trained() -> None:
    block, single = p2.block_and_random()
    scores = {block.label: 57.4, single.label: 83.9}
    assert not p2_learned.block_gap_text(scores)
    scores |= {p2.at_share_of_rate(run, 4).label: 60.0 for run in (block, single)}
    assert p2_learned.block_gap_text(scores).endswith(
        "that it is below P2's, and a better rate may lie below; the rest is not explained, and P2 has ten times as "
        "many epochs"
    )
    best = {**scores, **{p2.at_share_of_rate(run, 16).label: 50.0 for run in (block, single)}}
    assert "may lie below" not in p2_learned.block_gap_text(best)
    scores |= {p2.for_longer(block).label: 85.0, p2.for_longer(single).label: 90.0}
    told = p2_learned.block_gap_text(scores)
    assert "after 90 epochs at 85.0 and 90.0" in told
    assert told.endswith("; 90 epochs instead of 30 bring 27.6")


@pytest.mark.parametrize(
    ("score", "word"),
    [(0.795, UNDECIDED), (0.85, PARTLY), (0.7, UNDECIDED)],  # VGG-16 is not run
    ids=["within a point of what it was", "better", "worse"],
)
def test_rand_k_is_judged_on_every_model_that_was_run(score: float, word: str, tmp_path: Path) -> None:
    context = RunContext(output=tmp_path, scratch=tmp_path)
    (question,) = (one for one in evidence_questions.questions() if one.name == "randk")
    for run in question.beside:
        stored_run(context, run, 0.79)
    claim = "is RandK-SGD better without its residual"
    assert word_of(context, claim)[0] == MISSING
    stored_run(context, next(run for run in question.runs if run.model == "resnet20"), score)
    found, here = word_of(context, claim)
    assert found == word
    assert "VGG-16 not run" in here


def test_clipped_trainings_of_120_epochs_are_picked_up(tmp_path: Path) -> None:
    context = RunContext(output=tmp_path, scratch=tmp_path)
    (question,) = (one for one in evidence_questions.questions() if one.name == "authors' settings")
    for run in question.beside:
        stored_run(context, run, {"topk": 0.78, "dense": 0.9}[run.method])
    claim = "TopK-SGD, clipped at a norm of 1, end like unclipped dense"
    assert word_of(context, claim)[0] == MISSING
    clipped = {run.label: run for run in question.runs if vgg16_gap.CLIPPED in run.label}
    stored_run(context, clipped["topk, clipped at 1"], 0.88)
    ends, before = "88.00 %, dense 90.00, clipped dense", "not clipped 12.00 points below dense"
    told = f"{ends} not run (one seed each): 2.00 points below dense; {before}."
    assert word_of(context, claim) == (UNDECIDED, told)  # how far those end apart that send alike is not known
    stored_run(context, clipped["dense, clipped at 1"], 0.865)
    told = f"{ends} 86.50 (one seed each): 2.00 points below dense; {before}."
    assert word_of(context, claim) == (UNDECIDED, told)
    alike(context, 0.77, 0.80)
    word, here = word_of(context, claim)
    assert word == UNDECIDED  # they end three points apart
    assert here.startswith(f"{ends} 86.50 (one seed each): within the spread of its trainings from dense; {before}. On")
    assert "end between 77.00 and 80.00 % in 120 epochs and between 20.00 and 20.00 % in 40 epochs, one seed" in here


def test_a_difference_under_a_point_is_stated_with_three_seeds_only() -> None:
    assert stated_gap(-0.994, seeds=2) == "under a point"
    assert stated_gap(-0.994, seeds=3) == "-0.99"
    assert stated_gap(-1.0) == "-1.00"
    assert all(map(like_dense, ("-0.99", "+2.00")))
    assert like_dense("under a point") is near(-0.93) is near(0.5, seeds=2) is near(-2.0, spread=3.0) is None
    assert near(-0.93, seeds=3)
    assert near(1.2)
    assert near(-1.2) is near(-1.49, seeds=2) is near(-1.0) is None  # too near to the limit for so few
    assert near(-1.5) is near(-1.2, seeds=3) is False
    assert not any(map(like_dense, ("-1.00", stated_gap(float("nan"), seeds=3))))
    assert like_dense("–") is None  # no seed is common to both
    assert from_dense("–") == "dense not run with its seed"
    run = training("lenet5", "dense")
    one = History(run, "accuracy", [1], [0.9], [1], [1.0], [1], 1.0, 1.0, 1, [], {})
    seeds = [replace(one, run=replace(run, seed=seed), scores=[0.9 + 0.001 * seed]) for seed in range(3)]
    better = [replace(one, scores=[one.last + 0.004]) for one in seeds]
    assert shown_difference(better, seeds) == "+0.40"
    assert shown_difference(better[:2], seeds) == shown_difference(better, seeds[:1]) == "under a point"
    assert shown_difference(better[:1], []) == "–"
    errors = [replace(one, score="word error rate") for one in seeds[:1]]
    assert shown_difference([replace(errors[0], scores=[0.5])], errors) == "-0.400"  # so that columns add up
    assert (mean_and_std(errors), last_score(errors[0]), last_score(one)) == ("0.900", "0.900", "90.00")


def test_random_k_by_both_exchanges_has_the_mean_of_three_seeds_once_they_are_trained(tmp_path: Path) -> None:
    context = RunContext(output=tmp_path, scratch=tmp_path)
    claim = "random-k by all-reduce is as good as by all-gather"
    (question,) = (one for one in evidence_questions.questions() if one.name == "the rest")
    runs = [p2.long_training(f"random+{how}", "layer", 8) for how in ("shared", "allgather")]
    for run, score in zip(runs, (0.84, 0.845), strict=True):
        stored_run(context, run, score)
    told = "all-reduce and all-gather: 84.00 and 84.50 % (layer, W = 8). 1 of 6 settings are trained."
    assert word_of(context, claim) == (PARTLY, told)
    for run in question.runs:
        if "seed 1" in run.label or "seed 2" in run.label:
            stored_run(context, run, (0.84 if "shared" in run.label else 0.845) + 0.01 * run.seed)
    assert "Over three seeds: 85.00 ± 1.00 and 85.50 ± 1.00 % (layer, W = 8)" in word_of(context, claim)[1]


def test_the_authors_settings_are_judged_by_the_seeds_that_both_have(tmp_path: Path) -> None:
    context = RunContext(output=tmp_path, scratch=tmp_path)
    (question,) = (one for one in evidence_questions.questions() if one.name == "authors' settings")
    for run in question.beside:
        stored_run(context, run, {"topk": 0.88, "dense": 0.9}[run.method] + 0.001 * run.seed)
    claim = "TopK-SGD ends like dense (16 workers, 0.1 %), with weight decay"
    theirs = [run for run in question.runs if run.model == "resnet20"]
    stored_run(context, theirs[0], 0.895)
    assert word_of(context, claim)[0] == MISSING
    for run in theirs:
        if run.seed < 1 or run.method == "dense":
            stored_run(context, run, 0.903 if run.method == "dense" else 0.895)
    word, told = word_of(context, claim)
    assert word == UNDECIDED
    assert "ResNet-20 89.50 %, dense 90.30: under a point from dense (one seed)" in told
    assert "without them: ResNet-20 2.00 points below dense" in told
    for run in theirs:
        stored_run(context, run, 0.903 + 0.001 * run.seed if run.method == "dense" else 0.895)
    word, told = word_of(context, claim)
    assert word == PARTLY  # VGG-16 is not run
    assert "ResNet-20 89.50 %, dense 90.40: 0.90 points below dense (three seeds)" in told
    assert "without them: ResNet-20 2.00 points below dense" in told


def test_what_more_epochs_bring_is_said_of_blocks_by_all_reduce(tmp_path: Path) -> None:
    context = RunContext(output=tmp_path, scratch=tmp_path)
    claim = "block-random-k by all-reduce is worse"
    block, _ = p2.block_and_random()
    stored_run(context, block, 0.574)
    stored_run(context, p2.long_training("block+shared", "layer", 8), 0.1)
    told = "By all-reduce it does not learn (layer, W = 8), where the gap cannot grow."
    far = "What is compared ends far below P2, which has 300 epochs: layer up to 81 points."
    assert word_of(context, claim)[1].endswith(f"{told} {far}")
    stored_run(context, p2.for_longer(block), 0.85)
    bring = "90 epochs instead of 30 bring block-random-k by all-gather 27.6 points (layer, W = 8)."
    assert word_of(context, claim)[1].endswith(f"{told} {bring} {far}")


def test_the_cells_of_p2_that_do_not_learn_are_named(tmp_path: Path) -> None:
    context = RunContext(output=tmp_path, scratch=tmp_path)
    for scope, score in {"layer": 0.101, "global": 0.2, "both": 0.9}.items():
        run = p2.long_training("topk" if scope == "both" else "block+shared", scope.replace("both", "layer"), 8)
        stored_run(context, run, score)
    told = "Block-random-k (allReduce) 10.10 (layer, W = 8), Block-random-k (allReduce) 20.00 (global, W = 8)."
    (note,) = (one for one in evidence.evidence(context.read_only()).notes if "did not learn" in one)
    assert note.startswith("2 of the trainings of P2's table")
    assert note.endswith(told)


def test_questions_are_drawn_beside_dense_and_seeds_as_a_band(tmp_path: Path) -> None:
    context = RunContext(output=tmp_path, scratch=tmp_path)
    (question,) = (one for one in evidence_questions.questions() if one.name == evidence_questions.TREE)
    own = [run for run in question.runs if run.model == "resnet20" and "levels" in run.label]
    for run in own[:1]:
        stored_run(context, run, 0.9)
    assert not evidence.evidence(context.read_only()).figures  # one training is no comparison
    beside = [run for run in question.beside if run.model == "resnet20"]
    for run in (*own, *beside):
        stored_run(context, run, 0.9 + 0.01 * run.seed)
    chart = evidence.evidence(context.read_only()).figures[-1].chart
    assert isinstance(chart, LineChart)
    assert chart.title == "ResNet-20 accuracy, forms of gTop-k"
    assert [curve.label for curve in chart.curves] == ["dense", "topk", "gTop-k, 0.001", own[0].label]
    assert [bool(curve.low) for curve in chart.curves] == [True, False, False, True]
    assert list(chart.curves[-1].high) == pytest.approx([92.0])


def test_counts_with_the_authors_settings_are_drawn_beside_their_accuracy(tmp_path: Path) -> None:
    context = RunContext(output=tmp_path, scratch=tmp_path)
    own = [vgg16_gap.authors_settings("lenet5", method) for method in ("dense", "topk", AUTHORS, "gaussiank")]
    for run in own:
        assert (run.watch == "count") == (run.method == "gaussian")
        seen = [{"step": step, "mean": 62 * step / 60, "fallbacks": 0} for step in (60, 120)]
        stored_run(context, run, 0.9, seen if run.watch else ())
    accuracy, counts = evidence.evidence(context.read_only()).figures
    assert accuracy.chart.title == "LeNet-5 accuracy, settings of text and code"
    assert isinstance(counts.chart, LineChart)
    assert {curve.label: [*curve.y] for curve in counts.chart.curves} == {run.label: [1.0, 2.0] for run in own[2:]}
    assert (
        "as a multiple of k, which is 0.1 % throughout, though more is asked for in the first two epochs."
        in counts.caption
    )
    told = word_of(context, "Gaussian-k as printed sends about k entries, with weight decay")[1]
    assert "LeNet-5, which P1 does not draw, 1 times TopK-SGD's on average, 2 k at the end." in told
    assert told.endswith("Without the first 2 epochs on average LeNet-5 2 k.")


def test_a_method_looks_the_same_in_the_charts_of_the_questions(tmp_path: Path) -> None:
    """Whatever else is trained."""
    context = RunContext(output=tmp_path, scratch=tmp_path)
    drawn = {
        "vgg16": ("dense", "topk", "dense, clipped at 1", "topk, authors' settings"),
        "resnet20": ("dense", "topk, authors' settings", "randk", "randk, no residual"),
        "lenet5": ("dense", "randk, no residual"),
    }
    for question in evidence_questions.questions():
        for run in (*question.runs, *question.beside):
            if run.label in drawn.get(run.model, ()):
                stored_run(context, run, 0.9)
    charts = [figure.chart for figure in evidence.evidence(context.read_only()).figures]
    looks: dict[str, set[int | None]] = {}
    for curve in (curve for chart in charts for curve in chart.curves):
        looks.setdefault(curve.label, set()).add(curve.look)
    assert {title.split(" ")[0] for title in (chart.title for chart in charts)} == {"VGG-16", "ResNet-20", "LeNet-5"}
    assert looks["dense"] == {0}
    assert looks["topk"] == {1}
    assert all(len(own) == 1 for own in looks.values())


def test_p2_is_drawn_over_workers_beside_what_it_prints(tmp_path: Path) -> None:
    context = RunContext(output=tmp_path, scratch=tmp_path)
    assert p2.table_1_figures(context) == []
    for scope in p2.SCOPES:
        for workers, score in {1: 0.9, 8: 0.8}.items():
            stored_run(context, p2.long_training("block+shared", scope, workers), score)
    charts = [figure.chart for figure in p2.table_1_figures(context)]
    assert [chart.title for chart in charts] == [
        "Here, 30 epochs, layer by layer: accuracy from 79 %",
        "P2, 300 epochs, layer by layer: accuracy from 89 %",
        "Here, 30 epochs, globally: accuracy from 79 %",
        "P2, 300 epochs, globally: accuracy from 77 %",
    ]
    assert [chart.y_range for chart in charts] == [(79, 91), (89, 95), (79, 91), (77, 95)]
    stored_run(context, p2.long_training("block+shared", "layer", 4), float("nan"))  # is not drawn
    assert [figure.chart for figure in p2.table_1_figures(context)] == charts
    ours, printed, *_ = charts
    assert isinstance(ours, LineChart)
    assert isinstance(printed, LineChart)
    both = {curve.label: (list(curve.x), list(curve.y), curve.look) for curve in ours.curves}
    assert both == {  # with one worker they are one training
        "Block-random-k (allGather)": ([1], [90.0], 4),
        "Block-random-k (allReduce)": ([1, 8], [90.0, 80.0], 5),
    }
    assert list(printed.curves[-1].y) == [93.16, 92.5, 90.8, 90.63]


def test_fallbacks_are_told_from_what_was_counted() -> None:
    run = training("lenet5", CARRIED)
    seen = [{"step": 60, "fallbacks": 16}, {"step": 120, "fallbacks": 17}]
    made = History(run, "accuracy", [1], [0.9], [1], [1.0], [1], 0.001, 1.0, 1, seen, {})
    (note,) = fallback_note(CARRIED, [made])
    assert f"With {CARRIED} the k largest went in 17 of 1,920 selections of LeNet-5, 16 of them in the first 60" in note
    assert fallback_note(CARRIED, [replace(made, snapshots=[])]) == []


def test_figure_6_tells_the_fallbacks_of_every_model(tmp_path: Path) -> None:
    context = RunContext(output=tmp_path, scratch=tmp_path)
    for model in ("lenet5", "resnet20"):
        stored_run(context, training(model, CARRIED), 0.9, [{"step": 60, "mean": 60, "fallbacks": 16}])
        stored_run(context, training(model, HELD_COUNTED), 0.9, [{"step": 60, "mean": 60, "fallbacks": 950}])
    notes = " ".join(figure_6(context.read_only()).notes)
    assert all(f"16 of 960 selections of {title}" in notes for title in ("LeNet-5", "ResNet-20"))
    assert f"With {HELD} the k largest went in 950 of 960 selections of LeNet-5" in notes


def test_a_form_looks_alike_in_both_charts_of_figure_6(tmp_path: Path) -> None:
    context = RunContext(output=tmp_path, scratch=tmp_path)
    stored_run(context, training("lenet5", "dense"), 0.9)
    stored_run(context, training("lenet5", CARRIED), 0.9, [{"step": 60, "mean": 60, "fallbacks": 16}])
    accuracy, counts = (figure.chart for figure in figure_6(context.read_only()).figures)
    assert [curve.label for curve in accuracy.curves] == ["dense", CARRIED]
    (look,) = {curve.look for chart in (accuracy, counts) for curve in chart.curves if curve.label == CARRIED}
    assert look


def test_what_is_trained_again_to_count_looks_as_before(tmp_path: Path) -> None:
    context = RunContext(output=tmp_path, scratch=tmp_path)
    seen = [{"step": 60, "mean": 60, "fallbacks": 16}]
    for method in ("dense", "gaussiank", CARRIED):
        stored_run(context, training("lenet5", method), 0.9)
    stored_run(context, training("lenet5", COUNTED), 0.9, seen)
    figures = figure_6(context.read_only()).figures
    looks = [{curve.label: curve.look for curve in figure.chart.curves} for figure in figures]
    assert looks[0]["gaussiank"] == looks[0][COUNTED] == looks[1][COUNTED]
    assert len(set(looks[0].values())) == 3
    assert f"{COUNTED}: gaussiank trained again, drawn like it." in figures[0].caption
