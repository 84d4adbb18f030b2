"""Why TopK-SGD ends far below dense SGD on VGG-16: one setting changed at a time, and what the trainings say."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from sparsync_lab.papers.claims.claim import Judgement, sentences, word_of
from sparsync_lab.papers.claims.stored_tables import raise_missing
from sparsync_lab.papers.differences import (
    MISSING,
    UNDER_A_POINT,
    WITHIN_SPREAD,
    Held,
    by_spread,
    from_dense,
    near,
    stated_gap,
)
from sparsync_lab.papers.p1_runs import AUTHORS, CARRIED, COUNTED, training
from sparsync_lab.papers.run import Run

SHORT = 40  # epochs in which causes are told apart
AUTHORS_DENSITIES = (1 / 64, 0.004)  # for an epoch each, in the code of P1's authors
ASKED = f"P1, figure 6: why does TopK-SGD lose so much on VGG-16? One change at a time, {SHORT} epochs."
# What labels call the settings of figure 6, whose warm-up of the rate is a share of the training: in a short one it has
# fewer steps.
PLAIN = "as in figure 6"
CLIPPED, FP32, EARLY = "clipped at 1", "fp32", "density warm-up"
TITLES = {"topk": "TopK-SGD", "dense": "dense"}
LONGER = 30  # epochs of warm-up, in a training as long as figure 6's
WARM_UPS = {"no warm-up of the rate": 0.0, "long warm-up of the rate": 0.25}  # shares of the training
Scores = Mapping[tuple[str, str], float]  # last accuracy in %, by method and what is changed


def densities(epochs: float) -> tuple[tuple[float, float], ...]:
    """Return the authors' density warm-up in a training of so many epochs."""
    return tuple((number / epochs, density) for number, density in enumerate(AUTHORS_DENSITIES, 1))


def clipped(method: str) -> Run:
    """Return a training of figure 6 whose gradients are clipped."""
    return training("vgg16", method, label=f"{method}, {CLIPPED}", clip=1.0)


def authors_settings(model: str, method: str) -> Run:
    """Return a training of figure 6 with weight decay and density warm-up of the code of P1's authors; of Gaussian-k
    with its counts."""
    staged = {} if method == "dense" else {"densities": densities(120)}
    form = COUNTED if method == "gaussiank" else method
    return training(model, form, label=f"{method}, authors' settings", weight_decay=1e-4, **staged)


def warmed() -> Run:
    """Return TopK-SGD's training of figure 6 with a longer warm-up of the rate."""
    run = training("vgg16", "topk", label=f"topk, warm-up of {LONGER} epochs")
    return replace(run, warmup=LONGER / run.epochs)


def warmed_in_words(score: float, dense: float, spread: float) -> str:
    """Return where that training ends, from its last accuracy and dense's; the spread as of ``judge_gap``."""
    ends, epochs = one_seed_from(score, dense, spread), warmed().epochs
    return f"in {epochs:g} epochs of VGG-16, {LONGER} of them warm-up of the rate, TopK-SGD ends {ends} (one seed)"


def cause(method: str, what: str, **changes: Any) -> Run:
    """Return a short training of VGG-16 with one thing changed."""
    run = training("vgg16", method, label=cause_label(method, what), epochs=SHORT)
    return replace(run, **changes)


def cause_label(method: str, what: str) -> str:
    return f"cause: {method}, {what}"


def causes() -> tuple[Run, ...]:
    """Return the trainings, the most valuable first."""
    both = ("topk", "dense")
    return (
        *(cause(method, PLAIN) for method in (*both, AUTHORS, CARRIED)),
        *(cause(method, "rate 0.025", rate=0.025) for method in both),
        *(cause(method, "weight decay", weight_decay=1e-4) for method in both),
        cause("topk", EARLY, densities=densities(SHORT)),
        cause("topk", CLIPPED, clip=1.0),
        *(cause("topk", what, warmup=share) for what, share in WARM_UPS.items()),
        cause("topk", "rate 0.0125", rate=0.0125),
        cause("topk", "rate 0.05", rate=0.05),
        cause("dense", CLIPPED, clip=1.0),
        cause("dense", "no warm-up of the rate", warmup=0.0),
        *(cause("topk", f"rate {rate:g}", rate=rate) for rate in (0.00625, 0.003125)),
    )


def judge_gap(scores: Scores, steps: int, spread: float) -> Judgement:
    """Return what the trainings say, and whether TopK-SGD ends like dense with a change. Without the two as in figure 6
    and a change of TopK-SGD there is a ``MissingResult``.

    A change is compared with the best dense of all, as one may harm dense, too.

    Args:
        scores: of the trainings.
        steps: of each.
        spread: by how many points trainings of VGG-16 differ anyway; one seed decides nothing below that.
    """
    if not {("dense", PLAIN), ("topk", PLAIN)} <= scores.keys():
        raise_missing(PLAIN)
    at_best, dense = best_dense(scores)
    gap = scores["topk", PLAIN] - dense
    changed = {what: score - dense for (method, what), score in scores.items() if method == "topk" and what != PLAIN}
    if not changed:
        raise_missing("a change")
    best = max(changed, key=lambda what: changed[what])
    own = warm_up(cause("topk", PLAIN), steps)
    by = "the best dense" if at_best != PLAIN else "dense"
    ends = [one_seed_from(score, dense, spread, by) for score in (scores["topk", best], scores["topk", PLAIN])]
    here = f"{best}: {ends[0]}{_dense_with(scores, best)}; unchanged ({own} steps of warm-up): {ends[1]}"
    highest = f"the best dense, {dense:.2f} %, has this change: {at_best}" if at_best != PLAIN else ""
    said, like_dense = _by_best(best, changed[best], gap, spread)
    lowest = (_lowest_is_best(scores, method, name, spread) for method, name in TITLES.items())
    told = (highest, said, _warm_ups(scores, steps), *lowest, _not_changed(changed) if like_dense is False else "")
    return Judgement(here, word_of([like_dense]), sentences(*told))


def best_dense(scores: Scores) -> tuple[str, float]:
    """Return with what change dense ends highest, and where."""
    ends = {what: score for (method, what), score in scores.items() if method == "dense"}
    best = max(ends, key=lambda what: ends[what])
    return best, ends[best]


def _by_best(best: str, left: float, gap: float, spread: float) -> tuple[str, Held]:
    """Return what the best change says of the gap, and whether TopK-SGD ends like dense with it, or without a gap."""
    plain, closed = (near(each, spread=spread) for each in (gap, left))
    if plain is not False:
        said = "there is no gap to explain" if plain else "one seed does not decide whether there is a gap to explain"
        return f"in so few epochs {said}", plain
    if closed is not False:
        return f"{best} leaves no gap" if closed else f"whether {best} leaves a gap, one seed does not decide", closed
    if left > gap / 2:
        return f"{best} leaves the least of the gap; what causes it, these trainings do not say", False
    return "none of the changes takes half of the gap away", False


def one_seed_from(score: float, other: float, spread: float, name: str = "dense") -> str:
    """Return how far a training of VGG-16 ends from dense, or another, in words; one seed each."""
    return from_dense(by_spread(stated_gap(score - other), spread), name)


def _dense_with(scores: Scores, what: str) -> str:
    """Return where dense ends with a change; empty of a change that dense cannot have."""
    if what == EARLY:
        return ""
    own = scores.get(("dense", what))
    return f", dense with it {MISSING if own is None else f'at {own:.2f} %'}"


def warm_up(run: Run, steps: int) -> int:
    """Return in how many of its steps the rate of a training grows."""
    return round(run.warmup * steps)


def warm_up_of_figure_6(steps: int) -> int:
    """Return in how many steps the rate grows in figure 6, by the steps of a short training."""
    run = training("vgg16", "topk")
    return warm_up(run, round(steps * run.epochs / SHORT))


def _warm_ups(scores: Scores, steps: int) -> str:
    """Return that the short trainings have a shorter warm-up than figure 6's, and what another warm-up brings."""
    known = {what: score for (method, what), score in scores.items() if method == "topk"}
    shares = {what: float(what.split()[2]) / SHORT for what in known if what.startswith("warm-up of ")} | WARM_UPS
    ends = {round(share * steps): known[what] for what, share in shares.items() if what in known}
    own = warm_up(cause("topk", PLAIN), steps)
    told = f"the trainings of {SHORT} epochs have {own} steps of warm-up, figure 6 has {warm_up_of_figure_6(steps)}"
    others = ", ".join(f"with {count or 'none'} at {score:.1f} %" for count, score in sorted(ends.items()))
    return f"{told}: TopK-SGD ends {others}" if others else told


def _lowest_is_best(scores: Scores, method: str, name: str, spread: float) -> str:
    """Return, if so, that a method ends highest with the lowest of several rates, figure 6's included, where nothing
    else is changed."""
    own = {what: score for (of, what), score in scores.items() if of == method}
    ends = {float(what.split()[1]): score for what, score in own.items() if what.startswith("rate ")}
    ends |= {cause(method, PLAIN).rate: own[PLAIN]} if PLAIN in own else {}
    lowest, *others = sorted(ends) or [0.0]
    if not others or max(ends, key=lambda rate: ends[rate]) != lowest:
        return ""
    ahead = by_spread(stated_gap(ends[lowest] - max(ends[rate] for rate in others)), spread)
    slightly = {UNDER_A_POINT: f", by {ahead}", WITHIN_SPREAD: f", {ahead}"}.get(ahead, "")
    return f"of the rates, {name} ends highest with the lowest, {lowest:g}{slightly}: a better one may lie below"


def _not_changed(changed: Collection[str]) -> str:
    """Return what no training has changed, so that it may be the cause."""
    precision = "products in TF32" if FP32 in changed else "bfloat16 (fp32 is not run)"
    return f"not changed, and so not excluded as causes, are initial weights, momentum, batch and {precision}"


def scores_by_cause(scores: Mapping[str, float]) -> dict[tuple[str, str], float]:
    """Return scores of TopK-SGD and dense by what is changed, from scores by the labels of their trainings."""
    found: dict[tuple[str, str], float] = {}
    for method in ("topk", "dense"):
        begins = cause_label(method, "")
        found |= {(method, label.removeprefix(begins)): score for label, score in scores.items()
                  if label.startswith(begins)}  # fmt: skip
    return found
