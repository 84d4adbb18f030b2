"""P2's table 1 in 30 epochs without momentum, in ``beyond/evidence``: its cells; what they say of scope and blocks."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from math import isfinite

from sparsync_lab.papers.claims.claim import LEARNS
from sparsync_lab.papers.claims.p2_accuracies import PRINTED, TITLES
from sparsync_lab.papers.curves import display_score
from sparsync_lab.papers.differences import DIVERGED, POINT, UNDER_A_POINT
from sparsync_lab.papers.p2 import (
    HEADINGS,
    LEARNED,
    LONG,
    LONGER,
    LOWER,
    SCOPES,
    accuracy,
    at_layers_rate,
    at_share_of_rate,
    block_and_random,
    cell,
    for_longer,
    long_training,
    same,
)
from sparsync_lab.papers.published import P2_ACCURACY, P2_WORKERS
from sparsync_lab.papers.run import History, Run
from sparsync_lab.report import Row, Table


def learned(done: Mapping[str, History]) -> Table:
    """Return the accuracies of the trainings without momentum, beside the published ones.

    Args:
        done: by label.
    """
    rows = []
    for scheme, (title, *published) in P2_ACCURACY.items():
        cells = [
            cell(done, long_training(scheme, scope, workers), score)
            for scope, accuracies in zip(SCOPES, published, strict=True)
            for workers, score in zip(P2_WORKERS, accuracies, strict=True)
        ]
        rows.append(Row([title, *cells]))
    return Table(LEARNED, HEADINGS, rows)


def unlearned_note(done: Mapping[str, History]) -> list[str]:
    """Return which cells are of trainings that do not learn.

    Args:
        done: by label.
    """
    cells = {}
    for scheme, scope, workers in product(P2_ACCURACY, SCOPES, P2_WORKERS):
        run = long_training(scheme, scope, workers)
        score = accuracy(done, run)
        if score is not None and score <= LEARNS:
            cells[run.label] = f"{P2_ACCURACY[scheme][0]} {score:.2f} ({scope}, W = {workers})"
    told = f"did not learn, which takes more than {LEARNS:g} % (chance is 10): {', '.join(cells.values())}"
    return [f"{len(cells)} of the trainings of P2's table {told}."] if cells else []


def at_same_rate(scores: Mapping[str, float]) -> dict[tuple[str, int], tuple[float, float, float]]:
    """Return accuracies layer by layer, globally, and globally at the rate of layers, by scheme and workers, where all
    three are trained.

    Args:
        scores: last accuracies in % by label.
    """
    found = {}
    for scheme, workers in product(P2_ACCURACY, P2_WORKERS):
        layer, whole = (long_training(scheme, scope, workers) for scope in SCOPES)
        labels = [run.label for run in (layer, whole, at_layers_rate(whole))]
        if scheme == same(scheme, workers) and scores.keys() >= {*labels}:
            found[scheme, workers] = scores[labels[0]], scores[labels[1]], scores[labels[2]]
    return found


def around_rate(scores: Mapping[str, float]) -> list[tuple[Run, Run, Run]]:
    """Return trainings with entries chosen globally, each with those layer by layer at the nearest lower and higher
    rate: 8 workers, of what was not trained at the rate of layers.

    Args:
        scores: last accuracies in % by label.
    """
    found = []
    for layer in block_and_random():
        whole = long_training(layer.method, "global", layer.workers)
        runs = [run for run in (layer, *(at_share_of_rate(layer, share) for share in LOWER)) if run.label in scores]
        lower, higher = ([run for run in runs if (run.rate < whole.rate) is below] for below in (True, False))
        if whole.label in scores and at_layers_rate(whole).label not in scores and lower and higher:
            found.append((whole, max(lower, key=lambda run: run.rate), min(higher, key=lambda run: run.rate)))
    return found


def same_rate_text(scores: Mapping[str, float]) -> str:
    """Return what the scope makes at the same rate, one seed each; empty if that was not trained."""
    told = []
    for (scheme, workers), (layer, whole, alike) in at_same_rate(scores).items():
        gap, before = layer - alike, layer - whole
        ends = f"at {alike:.2f} globally" if isfinite(gap) else f"globally {DIVERGED}"
        own = (
            f"{TITLES[scheme]} ends at {layer:.2f} % layer by layer, at {whole:.2f} globally with P2's rate, and "
            f"{ends} with the rate of layers (W = {workers}, one seed)"
        )
        if gap <= -POINT:
            own += f". At the same rate globally is {-gap:.2f} points ahead"
        elif isfinite(gap):
            points = f"{gap:.2f} points" if gap >= POINT else UNDER_A_POINT
            lower = f", so most of the {before:.1f} points at P2's rates comes from the lower one"
            most = before >= POINT and gap < before / 2
            own += f". At the same rate the scopes differ by {points}{lower if most else ''}"
        told.append(own)
    return ". ".join(told)


def block_gaps(scores: Mapping[str, float]) -> list[tuple[float, float, float]]:
    """Return rate, and accuracies of block-random-k and random-k, 8 workers layer by layer, the highest rate first.

    Args:
        scores: last accuracies in % by label; of rates of which one of the two is missing nothing is told.
    """
    block, single = block_and_random()
    pairs = [(block, single), *((at_share_of_rate(block, share), at_share_of_rate(single, share)) for share in LOWER)]
    return [(a.rate, scores[a.label], scores[b.label]) for a, b in pairs if {a.label, b.label} <= scores.keys()]


def brought_by_epochs(scores: Mapping[str, float]) -> float | None:
    """Return how much more block-random-k reaches after more epochs, 8 workers layer by layer; ``None`` if that was not
    trained."""
    block, _ = block_and_random()
    longer = for_longer(block).label
    return scores[longer] - scores[block.label] if {longer, block.label} <= scores.keys() else None


def block_gap_text(scores: Mapping[str, float]) -> str:
    """Return how far block-random-k is behind random-k at each rate, and after more epochs, if that is trained; empty
    if lower rates are not."""
    found = block_gaps(scores)
    if len(found) < 2 or found[0][0] != block_and_random()[0].rate:
        return ""
    told = ", ".join(f"{_ending(block)} and {_ending(single)} (rate {rate:g})" for rate, block, single in found)
    before, best = found[0][1], max(block for _, block, _ in found if isfinite(block))
    at_end = ", and a better rate may lie below" if best == found[-1][1] else ""
    of = P2_ACCURACY["block+allgather"][1][P2_WORKERS.index(8)] - before
    gain = f"at most {best - before:.1f}" if best - before >= POINT else "less than a point"
    lower = f"lower rates, down to {found[-1][0]:g}, bring block-random-k {gain}"
    brings = f"{lower} of the {of:.1f} points that it is below P2's{at_end}"
    longer = [scores[run.label] for run in map(for_longer, block_and_random()) if run.label in scores]
    if len(longer) == 2:
        block, single = longer
        told += f", and after {LONGER} epochs at {block:.1f} and {single:.1f}"
        brings += f"; {LONGER} epochs instead of {LONG} bring {block - before:.1f}"
        return f"with 8 workers layer by layer block-random-k and random-k end at {told}: {brings}"
    rest = "the rest is not explained, and P2 has ten times as many epochs"
    return f"with 8 workers layer by layer block-random-k and random-k end at {told}: {brings}; {rest}"


def _ending(score: float) -> str:
    return f"{score:.1f}" if isfinite(score) else DIVERGED


def _blocks_below_p2(done: Mapping[str, History]) -> str:
    """Return between what block-random-k differs from what P2 prints; empty if it was not trained."""
    own = {place: accuracy(done, long_training(*place)) for place in PRINTED if place[0].startswith("block")}
    gaps = {place: score - PRINTED[place] for place, score in own.items() if score is not None and isfinite(score)}
    places = (min(gaps, key=gaps.__getitem__), max(gaps, key=gaps.__getitem__)) if gaps else ()
    ends = (f"{gaps[scheme, scope, w]:+.1f} ({TITLES[scheme]}, {scope}, W = {w})" for scheme, scope, w in places)
    return " to ".join(ends)


def learned_notes(done: Mapping[str, History]) -> list[str]:
    """Return what the trainings without momentum say of the scope and of blocks, where these are there.

    Args:
        done: by label.
    """
    scores = {label: display_score(one.last, one.score) for label, one in done.items()}
    notes = []
    if done:
        notes.append(
            f"P2's table is made here in {LONG} epochs; P2 has 300. In the first 5 the learning rate grows from near 0 "
            "to its value. P2 mentions no such warm-up: it cites Goyal et al. for multiplying the rate by the number "
            "of workers, and for nothing else. What the warm-up changes is not measured."
        )
    if told := same_rate_text(scores):
        notes.append(f"P2's learning rate is ten times lower where entries are chosen globally. {told}.")
    if below := _blocks_below_p2(done):
        notes.append(
            f"Block-random-k beside what P2 prints, in points: {below}. W workers have W times the rate and a W-th of "
            "the steps, with which schemes may fall anyway: so the two ways to exchange are compared at the same "
            "number of workers."
        )
    if gaps := block_gap_text(scores):
        notes.append(f"Is it the rate or the few epochs? {gaps[0].upper()}{gaps[1:]}.")
    return [*notes, *unlearned_note(done)]
