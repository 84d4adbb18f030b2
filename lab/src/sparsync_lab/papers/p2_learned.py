"""P2's table 1 with trainings that learn, in ``beyond/evidence``: its cells, and what follows of scopes and blocks."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product

from sparsync_lab.papers.claim import POINT, UNDER_A_POINT
from sparsync_lab.papers.curves import display_score
from sparsync_lab.papers.p2 import (
    HEADINGS,
    LEARNED,
    LONG,
    LONGER,
    LOWER,
    SCOPES,
    at_layers_rate,
    at_share_of_rate,
    block_and_random,
    cell,
    for_longer,
    long_training,
    same,
)
from sparsync_lab.papers.published import P2_ACCURACY, P2_WORKERS
from sparsync_lab.papers.run import History
from sparsync_lab.report import Row, Table


def learned(done: Mapping[str, History]) -> Table:
    """Return the accuracies of the trainings that learn, beside the published ones.

    Args:
        done: by label.
    """
    rows = []
    for scheme, (title, *published) in P2_ACCURACY.items():
        cells = [
            cell(done, long_training(scheme, scope, workers).label, accuracy)
            for scope, accuracies in zip(SCOPES, published, strict=True)
            for workers, accuracy in zip(P2_WORKERS, accuracies, strict=True)
        ]
        rows.append(Row([title, *cells]))
    return Table(LEARNED, HEADINGS, rows)


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


def same_rate_text(scores: Mapping[str, float]) -> str:
    """Return what the scope makes at the same rate, one seed each; empty if that was not trained."""
    told = []
    for (scheme, workers), (layer, whole, alike) in at_same_rate(scores).items():
        gap, before = layer - alike, layer - whole
        points = f"{abs(gap):.2f} points" if abs(gap) >= POINT else UNDER_A_POINT
        most = before >= POINT and abs(gap) < before / 2
        told.append(
            f"{P2_ACCURACY[scheme][0]} ends at {layer:.2f} % layer by layer, at {whole:.2f} globally with P2's rate, "
            f"and at {alike:.2f} globally with the rate of layers (W = {workers}, one seed). At the same rate the "
            f"scopes differ by {points}"
            f"{f': most of the {before:.1f} points at those of P2 is the ten times lower rate' if most else ''}"
        )
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
    told = ", ".join(f"{block:.1f} and {single:.1f} (rate {rate:g})" for rate, block, single in found)
    before, best = found[0][1], max(block for _, block, _ in found)
    of = P2_ACCURACY["block+allgather"][1][P2_WORKERS.index(8)] - before
    lowest = ", the lowest that was tried," if found[-1][1] == best else ""
    brings = f"another rate{lowest} brings blocks {best - before:.1f} of the {of:.1f} points that they are below P2's"
    if best - before < POINT:
        brings = f"another rate brings blocks nothing of the {of:.1f} points that they are below P2's"
    longer = [scores[run.label] for run in map(for_longer, block_and_random()) if run.label in scores]
    if len(longer) == 2:
        block, single = longer
        told += f", and after {LONGER} epochs at {block:.1f} and {single:.1f}"
        brings += f"; {LONGER} epochs instead of {LONG} bring {block - before:.1f}"
        return f"with 8 workers layer by layer block-random-k and random-k end at {told}: {brings}"
    rest = "the rest is not explained, and P2 has ten times as many epochs"
    return f"with 8 workers layer by layer block-random-k and random-k end at {told}: {brings}; {rest}"


def learned_notes(done: Mapping[str, History]) -> list[str]:
    """Return what the trainings that learn say of the scope and of blocks, where these are there.

    Args:
        done: by label.
    """
    scores = {label: display_score(one.last, one.score) for label, one in done.items()}
    notes = []
    if done:
        notes.append(
            f"P2's table is made here in {LONG} epochs, of which the rate grows over 5. P2 says nothing of such a "
            "warm-up and cites Goyal et al. for scaling the rate alone. The effect of it is not measured."
        )
    if told := same_rate_text(scores):
        notes.append(f"P2's rate is ten times lower where entries are chosen globally. {told}.")
    if any("block" in label for label in done):
        notes.append(
            "Block-random-k is far below what P2 prints, by all-gather, too, and the more so with more workers, with "
            "whom the rate is higher and there are fewer steps. What its two ways to exchange differ by is compared "
            "with the same number of workers."
        )
    if gaps := block_gap_text(scores):
        notes.append(f"At this and other rates, and for longer: {gaps}.")
    return notes
