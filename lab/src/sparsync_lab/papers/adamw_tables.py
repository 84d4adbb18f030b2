"""Tables and charts of AdamW's trainings: scores beside dense's, bytes as a share of dense's."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace

from sparsync_lab.models import CATALOGUE
from sparsync_lab.papers.adamw_sweep import BASELINES, BUDGETS, DEFAULT_BUDGET, MAIN, by_default, preconditioned
from sparsync_lab.papers.claims.claim import UNDECIDED
from sparsync_lab.papers.curves import (
    OVER_SEEDS,
    by_epoch,
    common_seeds,
    difference,
    display_score,
    first_seed,
    mean_and_std,
    seeds_notes,
    shown_difference,
    spread_caption,
    with_their_seeds,
)
from sparsync_lab.papers.differences import PERCENT, POINT, SEVERAL, UNDER_A_POINT
from sparsync_lab.papers.lr_search import LearningRateSearch, goodness
from sparsync_lab.papers.run import History
from sparsync_lab.papers.sweep import Setting
from sparsync_lab.papers.tables import KINDS, NOT_RUN, missing_rate, rate_search_table
from sparsync_lab.report import Curve, Figure, LineChart, Row, Table

STANDING = "Where preconditioned feedback stands"
AT_DENSE_RATE = "at dense's rate"
AGAINST_BUDGET = "Accuracy against budget"
ABLATIONS = "Ablations: "
TOO_SMALL = "sketches take more"
MET, MISSED = "met", "missed"  # of a target
WITHIN = {"perplexity": PERCENT, "accuracy": 0.3}  # share, or points, that may be lost to dense
HEADINGS = ("sent, of dense", "seeds", "rate", "density", "time")


def kind_of(setting: Setting) -> str:
    """Return what a setting's scores are, in words."""
    kind = KINDS.get(CATALOGUE[setting.model].data, "accuracy")
    return "accuracy, %" if kind == "accuracy" else f"{kind}, less is better"


def where(setting: Setting, length: int) -> str:
    """Return a setting in words: model, workers and steps."""
    return f"{setting.title}, {setting.workers} workers of {setting.batch}, {setting.lengths[length]:,} steps"


def share_of(histories: Sequence[History], dense: Sequence[History]) -> float | None:
    """Return the bytes sent as a share of dense's in the same setting, if both are known and something was sent."""
    if not histories or not dense or not histories[0].bytes[-1] or not dense[0].bytes[-1]:
        return None
    return statistics.mean(h.bytes[-1] for h in histories) / dense[0].bytes[-1]


def fraction(share: float | None) -> str:
    """Return a share as one part in so many."""
    if share is None:
        return "–"
    return "1" if round(1 / share, 1) == 1 else f"1/{1 / share:.3g}"


def beside(histories: Sequence[History], dense: Sequence[History]) -> float | None:
    """Return a row's mean score over dense's, or for accuracies the difference in points; over the seeds that both
    have."""
    if dense and dense[0].score == "accuracy":
        return difference(histories, dense)
    pairs = common_seeds(histories, dense)
    if not pairs:
        return None
    own, other = map(statistics.mean, zip(*pairs, strict=True))
    return own / other if math.isfinite(own / other) else None


def shown_beside(histories: Sequence[History], dense: Sequence[History]) -> str:
    """Return ``beside`` in words."""
    apart = beside(histories, dense)
    if apart is None:
        return "–"
    if dense[0].score != "accuracy":
        return f"× {apart:.3f}"
    shown = shown_difference(histories, dense)
    return shown if shown == UNDER_A_POINT else f"{shown} points"


def score_table(
    search: LearningRateSearch, name: str, length: int, labels: Sequence[str], caption: str, against: str = "dense"
) -> Table:
    """Return every method with its chosen rate, and how far it is from one of them."""
    dense, base = (search.repeats(name, label, length) for label in ("dense", against))
    rows = []
    for label in labels:
        histories = search.repeats(name, label, length)
        if not histories:
            rows.append(Row([label, NOT_RUN, "–", "–", "–", missing_rate(search, name, label), "–", "–"]))
            continue
        edge = ", edge" if search.at_edge(*search.searched(name, label)) else ""
        cells = [
            label,
            mean_and_std(histories),
            "–" if label == against else shown_beside(histories, base),
            fraction(share_of(histories, dense)),
            str(len(histories)),
            f"{histories[0].run.rate:g}{edge}",
            f"{100 * histories[0].density:.3g} %",
            f"{statistics.mean(h.seconds for h in histories):,.0f} s",
        ]
        rows.append(Row(cells))
    notes = seeds_notes((search.repeats(name, label, length) for label in labels), base)
    return Table(caption, ["training", kind_of(search.settings[name]), f"to {against}", *HEADINGS], rows, notes)


def all_tables(search: LearningRateSearch) -> list[Table]:
    """Return where things stand, scores against budgets, a table for each setting and length, ablations and rates."""
    found = [standing(search), against_budget(search)]
    for name, setting in search.settings.items():
        for length in range(len(setting.lengths)):
            found.append(score_table(search, name, length, search.methods(name), where(setting, length)))
        ablations = [label for label in search.asked(name) if label in search.ablations]
        for base in dict.fromkeys(search.method(label).like for label in ablations):
            labels = [base, *(label for label in ablations if search.method(label).like == base)]
            found.append(score_table(search, name, 0, labels, f"{ABLATIONS}{where(setting, 0)}, {base}", base))
        if not setting.like:
            found.append(rate_search_table(search, name, search.methods(name)))
    return found


def standing(search: LearningRateSearch) -> Table:
    """Return how preconditioned feedback at the main budget compares with dense and the best of the others."""
    rows = []
    for name, setting in search.settings.items():
        for length in range(len(setting.lengths)):
            if MAIN not in search.methods(name):
                continue
            dense, own = (search.repeats(name, label, length) for label in ("dense", MAIN))
            others = {label: search.repeats(name, label, length) for label in BASELINES if label in search.rows}
            others = {label: histories for label, histories in others.items() if histories}
            best = max(others, key=lambda label: statistics.mean(map(goodness, others[label])), default=None)
            rows.append(
                Row(
                    [
                        where(setting, length),
                        mean_and_std(dense) if dense else NOT_RUN,
                        mean_and_std(own) if own else NOT_RUN,
                        shown_beside(own, dense),
                        at_rate_of_dense(search, name),
                        fraction(share_of(own, dense)),
                        judged(own, dense),
                        "–" if best is None else f"{mean_and_std(others[best])} ({best})",
                    ]
                )
            )
    headings = ["setting", "dense", MAIN, "to dense", AT_DENSE_RATE, "sent, of dense", "target"]
    notes = [
        "Perplexities (less is better), or accuracies in % (CIFAR-10); mean ± deviation over the seeds. At dense's "
        "rate: not tuned, the first seed with the rate that is best for dense. Target: a perplexity within 1 % of "
        "dense, or an accuracy within 0.3 points, with the standard deviation added to what is lost. A setting that "
        "stands here with rates of its own, too, counts with these. Best of the others: of gradient feedback, DeMo and "
        "SparseLoCo, as far as they are trained here; other items have others. " + OVER_SEEDS
    ]
    return Table(STANDING, [*headings, "best of the others"], rows, notes)


def at_rate_of_dense(search: LearningRateSearch, name: str) -> str:
    """Return how the main row compares with dense, first seeds both, if it takes the rate that is dense's best."""
    factor = search.chosen(name, "dense")
    if search.settings[name].like or factor is None:
        return "–"
    own, dense = (search.tried(name, label).get(factor) for label in (MAIN, "dense"))
    return shown_beside([own], [dense]) if own and dense else "–"


def judged(own: Sequence[History], dense: Sequence[History]) -> str:
    """Return whether the target is met by the mean, and by the mean and its standard deviation together. What is so
    near to dense that few seeds do not tell is not decided."""
    apart, pairs = beside(own, dense), common_seeds(own, dense)
    if apart is None:
        return "–"
    kind, few = dense[0].score, len(pairs) < SEVERAL
    lost, level = (-apart, 1.0) if kind == "accuracy" else (apart - 1, statistics.mean(other for _, other in pairs))
    if few and abs(lost) < (POINT if kind == "accuracy" else WITHIN[kind]):
        return UNDECIDED
    apart_by = statistics.stdev(score for score, _ in pairs) / level if len(pairs) > 1 else 0.0
    return MET if lost + apart_by <= WITHIN[kind] else MISSED


def against_budget(search: LearningRateSearch) -> Table:
    """Return the score at every budget, for AdamW and for SGD."""
    shown = {"gpt": preconditioned, "resnet20": by_default}
    names = [name for name in shown if name in search.settings]
    found = {name: search.repeats(name, "dense", 0) for name in names}
    rows = [Row(["dense", *(mean_and_std(own) if own else NOT_RUN for own in found.values())])]
    for budget in BUDGETS:
        cells = []
        for name in names:
            label = shown[name](budget)
            own = search.repeats(name, label, 0) if label in search.rows else []
            missing = NOT_RUN if label in search.rows else TOO_SMALL
            cells.append(f"{mean_and_std(own)} ({shown_beside(own, found[name])})" if own else missing)
        rows.append(Row([f"1/{budget}" + (", the default" if budget == DEFAULT_BUDGET else ""), *cells]))
    headings = [f"{where(search.settings[name], 0)}: {kind_of(search.settings[name])}" for name in names]
    return Table(AGAINST_BUDGET, ["budget", *headings], rows)


def figures(search: LearningRateSearch) -> list[Figure]:
    """Draw scores against budgets, and over epochs."""
    made = []
    for name, setting in search.settings.items():
        for length, steps in enumerate(setting.lengths):
            curves = with_their_seeds({label: search.repeats(name, label, length) for label in search.methods(name)})
            title = f"{setting.title}, {setting.workers} workers, {steps:,} steps"
            made += budget_figure(search, name, length, title)
            if len(first_seed(curves)) > 1:
                looks = {label: number for number, label in enumerate(search.rows)}
                made.append(by_epoch(title, curves, f"With its chosen rate each: {spread_caption(curves)}.", looks))
    return made


def budget_figure(search: LearningRateSearch, name: str, length: int, title: str) -> list[Figure]:
    """Draw the score over the bytes sent, dense as a band; nothing unless a method has several budgets."""
    dense = search.repeats(name, "dense", length)
    series: dict[str, list[tuple[float, list[float]]]] = {}
    for label in search.methods(name):
        histories = search.repeats(name, label, length)
        share = share_of(histories, dense)
        if share is None or not search.method(label).options:
            continue
        scores = [display_score(h.last, h.score) for h in histories]
        family = label.rpartition(", 1/")[0]
        series.setdefault(family, []).append((100 * share, scores))
    shares = [share for points in series.values() for share, _ in points]
    if not any(len(points) > 1 for points in series.values()):
        return []
    ends = [display_score(h.last, h.score) for h in dense]
    level = [statistics.mean(ends)] * 2
    span = [min(shares), max(shares)]
    curves = [Curve("dense", span, level, [min(ends)] * 2, [max(ends)] * 2)]
    for family, points in series.items():
        points.sort()
        x, y = [share for share, _ in points], [statistics.mean(scores) for _, scores in points]
        low, high = [min(scores) for _, scores in points], [max(scores) for _, scores in points]
        curves.append(Curve(family, x, y, low, high))
    unit = "%" if dense[0].score == "accuracy" else ""
    chart = LineChart(f"{title}: over bytes", "sent, % of dense", curves, y_unit=unit, log_x=True, log_y=not unit)
    return [Figure(replace(chart), "Bands span the seeds; dense is drawn at all budgets.")]
