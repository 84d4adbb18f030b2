"""What is known of TopK-SGD's gap to dense on VGG-16, as tables and notes of items tell it."""

from __future__ import annotations

from dataclasses import replace
from math import isfinite
from statistics import mean

from sparsync.layout import entries_for
from sparsync_lab.models import CATALOGUE
from sparsync_lab.papers import store, tuned
from sparsync_lab.papers.claims.claim import sentences
from sparsync_lab.papers.claims.p1_models import LONG, SHORT_ALIKE, spread_of, spread_words
from sparsync_lab.papers.curves import display_score
from sparsync_lab.papers.differences import MISSING, in_words, stated_gap
from sparsync_lab.papers.item import RunContext
from sparsync_lab.papers.p1_runs import COUNTED, LARGEST_GO, training
from sparsync_lab.papers.run import SEEDS, SUFFIX, History, Run
from sparsync_lab.papers.run_queue import stored_history, train_missing
from sparsync_lab.papers.tables import NOT_RUN
from sparsync_lab.papers.vgg16_early import HEADINGS, WHAT_THEY_ARE, early_cells, early_words
from sparsync_lab.papers.vgg16_gap import (
    FP32,
    PLAIN,
    SHORT,
    TITLES,
    authors_settings,
    best_dense,
    cause,
    cause_label,
    clipped,
    judge_gap,
    one_seed_from,
    scores_by_cause,
    warm_up,
    warm_up_of_figure_6,
    warmed,
    warmed_in_words,
)
from sparsync_lab.report import Row, Table

TF32 = "fp32, products in TF32; all workers in one pass"  # instead of bfloat16, and a pass for each
CHANGES = f"VGG-16 with one setting changed at a time, {SHORT} epochs: last accuracy in %, one seed each"


def stored_causes(context: RunContext) -> dict[str, History]:
    """Return all short trainings of VGG-16 that are stored, by label, whatever is changed in them; none of another
    setting."""
    if not _is_full(context):
        return {}
    found: dict[str, History] = {}
    like = cause("topk", PLAIN)
    for path in sorted((context.output / "runs").glob(f"vgg16-cause-*{SUFFIX}")):
        run = Run(**store.read_json(path)["run"])
        if (run.epochs, run.steps, run.seed, run.limit) == (like.epochs, None, 0, None):
            history = stored_history(context.read_only(), run)
            found |= {run.label: history} if history is not None else {}
    return found


def change_tables(context: RunContext) -> list[Table]:
    """Return what every change of a setting brings TopK-SGD and dense; nothing unless both were trained without one."""
    done = stored_causes(context)
    scores = scores_by_cause({label: _score(history) for label, history in done.items()})
    if not {("topk", PLAIN), ("dense", PLAIN)} <= scores.keys():
        return []
    (_, highest), warmed = best_dense(scores), done[cause_label("topk", PLAIN)]
    order = sorted({what for _, what in scores} - {PLAIN}, key=lambda what: -scores.get(("topk", what), 0.0))
    rows = []
    for what in (PLAIN, *order):
        top, dense = (scores.get((method, what)) for method in ("topk", "dense"))
        name = f"none: {_warm_up(warmed)}" if what == PLAIN else TF32 if what == FP32 else what
        history = done.get(cause_label("topk", what))
        if history is not None and history.run.warmup != warmed.run.warmup:
            name += f" ({_warm_up(history)})"
        gaps = [
            "–" if top is None or other is None else stated_gap(top - other, digits=1) for other in (dense, highest)
        ]
        missing = "–" if history is not None and history.run.densities else NOT_RUN  # dense has no density
        ends = [absent if own is None else f"{own:.2f}" for own, absent in ((top, NOT_RUN), (dense, missing))]
        rows.append(Row([name, *ends, *gaps, *early_cells(history)]))
    longer = warm_up_of_figure_6(len(warmed.losses))
    note = (
        f"Trainings without a change are called '{PLAIN}' elsewhere; figure 6 has {longer} steps of warm-up, as many "
        "as the 5 epochs of a change here."
    )
    headings = ["change", "TopK-SGD", "dense with it", "TopK-SGD to dense with it", "to the best dense", *HEADINGS]
    return [Table(CHANGES, headings, rows, [note, WHAT_THEY_ARE])]


def _warm_up(history: History) -> str:
    return f"{warm_up(history.run, len(history.losses))} steps of warm-up"


def gap_note(context: RunContext) -> list[str]:
    """Return what is known of the gap, from the trainings that are stored; nothing of another setting."""
    if not _is_full(context):
        return []
    done = stored_causes(context)
    try:
        scores = scores_by_cause({label: _score(history) for label, history in done.items()})
        judged = judge_gap(scores, len(done[cause_label("topk", PLAIN)].losses), vgg16_spread(context, SHORT))
    except LookupError:
        return [
            *_known(context),
            "What its cause is, the trainings of beyond/evidence are to say, and they are not run.",
        ]
    told = f"With one setting of VGG-16 changed at a time, {SHORT} epochs (a table of figure 6), {judged.here}."
    return [*_known(context), " ".join([f"{told} {judged.detail}", *early_note(context)])]


def early_note(context: RunContext) -> list[str]:
    """Return how the first losses of the short trainings go with where these end, if enough of them are stored."""
    return [told] if (told := early_words(stored_causes(context))) else []


def precision_note(context: RunContext) -> str:
    """Return in what precision VGG-16 is trained, and what fp32 changes, as far as that is stored."""
    scores = scores_by_cause({label: _score(history) for label, history in stored_causes(context).items()})
    pairs = {name: [scores.get((method, what)) for what in (FP32, PLAIN)] for method, name in TITLES.items()}
    known = "what that changes is not measured"
    if any(None not in pair for pair in pairs.values()):
        spread, told = vgg16_spread(context, SHORT), []
        for name, (own, other) in pairs.items():
            missing = own is None or other is None
            told.append(f"{name} {MISSING if missing else f'at {own:.2f} instead of {other:.2f} %'}")
        anyway = f"; such trainings end {spread:.2f} apart anyway" if isfinite(spread) else ""
        ends = f"{', '.join(told)} (one seed each{anyway})"
        known = f"with fp32 (products in TF32) trainings of {SHORT} epochs end otherwise: {ends}"
    return (
        "P1 trains in fp32. VGG-16's passes here compute in bfloat16 where torch's autocast takes that to be safe; "
        f"{known}."
    )


def vgg16_spread(context: RunContext, epochs: int = LONG) -> float:
    """Return by how many points trainings of VGG-16 differ anyway, as judges have it."""
    return spread_of(_alike(context), epochs)


def spread_note(context: RunContext) -> str:
    """Return how far methods that send the largest entries end from one another on VGG-16, if they are stored."""
    told = sentences(spread_words(_alike(context))) if _is_full(context) else ""
    return f" {told}" if told else ""


def _alike(context: RunContext) -> dict[str, float]:
    """Return where the trainings end by which that is known, by label, as far as they are stored."""
    found = {form: stored_history(context.read_only(), training("vgg16", form)) for form in LARGEST_GO}
    short = {label: history for label, history in stored_causes(context).items() if label in SHORT_ALIKE}
    return {label: _score(history) for label, history in {**found, **short}.items() if history is not None}


def _is_full(context: RunContext) -> bool:
    return not context.quick and not context.seed and context.epochs is None


def _known(context: RunContext) -> list[str]:
    """Return how far TopK-SGD and Gaussian-k as printed are from dense in figure 6, and with the authors' settings,
    clipped and with a longer warm-up, if that is stored."""
    cut = [clipped(method) for method in ("topk", "dense")]
    pairs = [[tuned.seeded(authors_settings("vgg16", method), seed) for method in ("topk", "dense")] for seed in SEEDS]
    theirs = [run for pair in pairs for run in pair]
    runs = (*(training("vgg16", method) for method in ("dense", "topk", "gaussiank", COUNTED)), *cut, *theirs, warmed())
    done, _ = train_missing(replace(context.read_only(), only=()), runs)
    if not {"dense", "topk", "gaussiank"} <= done.keys():
        return []
    score, spread = {label: _score(history) for label, history in done.items()}, vgg16_spread(context)
    ends = {label: one_seed_from(own, score["dense"], spread) for label, own in score.items()}
    fewer = done["topk"].density / done["gaussiank"].density
    told = (
        f"TopK-SGD ends {ends['topk']} on VGG-16, for which P1, too, says 0.6 to 0.8 points. As printed "
        f"Gaussian-k sends {fewer:.0f} times fewer entries in all and ends {ends['gaussiank']}"
    )
    if COUNTED in done:
        first = done[COUNTED].snapshots[0]
        k = entries_for(done[COUNTED].run.options["density"], CATALOGUE["vgg16"].parameters)
        told += (
            f", and {ends[COUNTED]} where it is trained again with the same seed; in its first {first['step']} steps "
            f"it sends {first['mean'] / k:.1f} k, later far less"
        )
    told += "."
    both = [pair for pair in pairs if all(run.label in done for run in pair)]
    if both:
        top, dense = (mean(score[run.label] for run in own) for own in zip(*both, strict=True))
        told += (
            f" With weight decay and density warm-up of its authors' code TopK-SGD ends at {top:.2f} %, dense with "
            f"that weight decay at {dense:.2f} ({in_words(len(both))} each)."
        )
    if all(run.label in done for run in cut):
        cut_top, cut_dense = (run.label for run in cut)
        told += (
            f" Clipped at a norm of 1, TopK-SGD ends at {score[cut_top]:.2f} %, clipped dense at "
            f"{score[cut_dense]:.2f}, dense as it is at {score['dense']:.2f} (one seed each)."
        )
    if warmed().label in done:
        told += f" {sentences(warmed_in_words(score[warmed().label], score['dense'], spread))}"
    return [told]


def _score(history: History) -> float:
    return display_score(history.last, history.score)
