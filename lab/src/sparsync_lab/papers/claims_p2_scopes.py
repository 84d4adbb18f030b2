"""What P2 claims of choosing entries layer by layer and globally, and how that is judged."""

from __future__ import annotations

from collections.abc import Mapping

from sparsync_lab.papers.claim import (
    LEARNS,
    POINT,
    Claim,
    Judgement,
    StoredTables,
    at_most_partly,
    first_number,
    raise_missing,
    sentences,
    word_for,
)
from sparsync_lab.papers.p2 import AS_PRINTED, EPOCHS, LEARNED, SCOPES, WITH_MOMENTUM
from sparsync_lab.papers.p2_accuracies import (
    LIKEWISE,
    PRINTED,
    TITLES,
    Cells,
    as_far_as_p2,
    both_scopes,
    listed,
    named,
    ours,
    trained,
)
from sparsync_lab.papers.p2_learned import at_same_rate
from sparsync_lab.papers.published import P2_WORKERS

RATES = f"P2's rate is {SCOPES['layer']:g} W layer by layer and {SCOPES['global']:g} W globally"  # W workers


def _at_one_worker(stored: StoredTables) -> Judgement:
    rows = [row.cells for row in stored.table("p2/table1", AS_PRINTED).rows[1:]]
    pairs = [
        (cells[0], first_number(cells[1]), first_number(cells[2]))
        for cells in rows
        if not any(cell.startswith("–") for cell in cells[1:])
    ] or raise_missing(AS_PRINTED)
    first, *others = (f"{name} {layer:.2f} and {whole:.2f} %" for name, layer, whole in pairs)
    word = word_for(sum(layer > whole for _, layer, whole in pairs), len(pairs))
    return Judgement(first, at_most_partly(word), sentences(", ".join(others), f"{RATES}; the same was not run"))


def _with_momentum(stored: StoredTables) -> Judgement:
    """Compare both scopes where both learn: not where one is little above chance, and the other at it."""
    cells = ours(stored, "p2/table1", WITH_MOMENTUM)
    every = both_scopes(cells)
    pairs = {key: pair for key, pair in every.items() if min(pair) > LEARNS} or raise_missing(WITH_MOMENTUM)
    first, *others = (named(key, pair) for key, pair in pairs.items())
    held = sum(layer > whole for layer, whole in pairs.values())
    here = f"in {held} of {len(pairs)} pairs of which both learn, of {len(every)}; {first}"
    half = [named(key, pair) for key, pair in every.items() if key not in pairs and max(pair) > LEARNS]
    left_out = f"left out, as one of the two does not learn: {', '.join(half)}" if half else ""
    ends = _dense_ends(cells)
    few = f", and dense itself ends at {ends} % in {EPOCHS} epochs" if ends else ""
    fair = f"not tested fairly: {RATES}, the same was not run{few}"
    return Judgement(here, word_for(held, len(pairs)), sentences(", ".join(others), fair, left_out))


def _dense_ends(cells: Cells) -> str:
    own = {w: cells["standard", "layer", w] for w in P2_WORKERS if ("standard", "layer", w) in cells}
    return ", ".join(f"{score:.2f} (W = {w})" for w, score in own.items())


def _that_learn(stored: StoredTables) -> Judgement:
    """Compare both scopes at P2's rates, and at the same rate where that was trained."""
    cells = ours(stored, "beyond/evidence", LEARNED)
    every = both_scopes(cells)
    pairs = {key: pair for key, pair in every.items() if max(pair) > LEARNS} or raise_missing(LEARNED)
    left_out = ", ".join(named(key, pair) for key, pair in every.items() if key not in pairs)
    most = max(workers for _, workers in pairs)
    held = {key for key, (layer, whole) in pairs.items() if layer > whole}
    first, *others = [key for key in pairs if key[1] == most or key not in held]
    here = f"in {len(held)} of {len(pairs)} pairs that learn; {named(first, pairs[first])}"
    word, far = as_far_as_p2(word_for(len(held), len(pairs)), cells, "topk")
    same, better = _at_the_same_rate({key: own for key, own in at_same_rate(trained(stored)).items() if key in pairs})
    unlearned = f"a pair that does not learn is left out: {left_out}" if left_out else ""
    told = ", ".join(named(key, pairs[key]) for key in others)
    return Judgement(here, at_most_partly(word, better), sentences(told, same, unlearned, far))


def _at_the_same_rate(found: Mapping[tuple[str, int], tuple[float, float, float]]) -> tuple[str, bool]:
    """Return what the scope makes at the rate of layers, and whether layers are ahead there by a point everywhere."""
    own = {key: (layer, whole) for key, (layer, _, whole) in found.items()}
    if not own:
        return f"{RATES}; the same was not run", False
    ahead = [key for key, (layer, whole) in own.items() if layer - whole >= POINT]
    told = f"{RATES}; with that of layers for both: {', '.join(named(key, pair) for key, pair in own.items())}"
    because = "so it is not the rate alone" if ahead else "so the difference is P2's rate"
    if 0 < len(ahead) < len(own):
        because = f"so it is not the rate alone of {', '.join(TITLES[scheme] for scheme, _ in ahead)}"
    return f"{told}, one seed each: {because}", len(ahead) == len(own)


def _printed(workers: int) -> str:
    return listed([PRINTED["topk", scope, workers] for scope in SCOPES])


def _printed_pairs() -> str:
    pairs = both_scopes(PRINTED).values()
    return f"in {sum(layer > whole for layer, whole in pairs)} of {len(pairs)} pairs"


BETTER = "layer by layer is better than globally"
CLAIMS = (
    Claim(
        "p2/table1", f"{BETTER} (momentum 0.9 as P2 states, {EPOCHS} epochs)",
        f"{_printed_pairs()}; Top-k {_printed(1)} (W = 1)", _with_momentum,
    ),
    Claim("p2/table1", f"{BETTER} (no momentum, W = 1, {EPOCHS} epochs)", f"Top-k {_printed(1)}", _at_one_worker),
    Claim("beyond/evidence", f"{LIKEWISE} {BETTER}", f"{_printed_pairs()}; Top-k {_printed(8)} (W = 8)", _that_learn),
)  # fmt: skip
