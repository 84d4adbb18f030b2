"""What P2 claims of choosing entries layer by layer and globally, and how that is judged."""

from __future__ import annotations

from collections.abc import Mapping

from sparsync_lab.papers.claims.claim import (
    LEARNS,
    UNDECIDED,
    Claim,
    Judgement,
    at_most_partly,
    partly_as,
    sentences,
    word_of,
)
from sparsync_lab.papers.claims.p2_accuracies import (
    LIKEWISE,
    MODEL,
    PRINTED,
    TITLES,
    Cells,
    as_far_as_p2,
    both_scopes,
    listed,
    named,
    ours,
)
from sparsync_lab.papers.claims.stored_tables import StoredTables, first_number, raise_missing
from sparsync_lab.papers.differences import POINT, UNDER_A_POINT
from sparsync_lab.papers.p2 import AS_PRINTED, AT_ONE_RATE, EPOCHS, LEARNED, LONG, SCOPES, WITH_MOMENTUM
from sparsync_lab.papers.p2_learned import around_rate, at_same_rate
from sparsync_lab.papers.published import P2_WORKERS

RATES = f"P2's rate is {SCOPES['layer']:g} W layer by layer and {SCOPES['global']:g} W globally"  # W workers
ONE_RATE = "one rate for both"
PAIRS = len(both_scopes(PRINTED))


def _at_one_worker(stored: StoredTables) -> Judgement:
    rows = [row.cells for row in stored.table("p2/table1", AS_PRINTED).rows[1:]]
    pairs = [
        (cells[0], first_number(cells[1]), first_number(cells[2]))
        for cells in rows
        if not any(cell.startswith("–") for cell in cells[1:])
    ] or raise_missing(AS_PRINTED)
    first, *others = (f"{name} {layer:.2f} and {whole:.2f} %" for name, layer, whole in pairs)
    word = word_of((layer > whole for _, layer, whole in pairs), len(rows))
    told = sentences(", ".join(others), f"{RATES}; {ONE_RATE} was not run")
    return partly_as("the rate differs", Judgement(first, word, told))


def _with_momentum(stored: StoredTables) -> Judgement:
    """Compare both scopes where one of them learns, and dense tells scope from rate. It has the rate of layers: where
    it does not learn, or ends below what has a tenth of that rate, the rate decides."""
    cells = ours(stored, "p2/table1", WITH_MOMENTUM)
    every = both_scopes(cells)
    dense = {w: cells["standard", "layer", w] for w in P2_WORKERS if ("standard", "layer", w) in cells}
    learning = {key: pair for key, pair in every.items() if max(pair) > LEARNS and key[1] in dense}
    one = learning or raise_missing(WITH_MOMENTUM)
    counts = {key: pair for key, pair in one.items() if dense[key[1]] > max(LEARNS, pair[1])}
    told = {key: f"{named(key, pair)}, dense {dense[key[1]]:.2f}" for key, pair in {**counts, **one}.items()}
    held = sum(layer > whole for layer, whole in counts.values())
    untested = PAIRS - sum(key[1] in dense for key in every)
    word = word_of([*(layer > whole for layer, whole in counts.values()), *[None] * untested]) if counts else UNDECIDED
    decide = f"in {held} of {len(counts)} pairs that decide, of {len(every)}"
    which = decide if counts else f"none of {len(every)} pairs can decide"
    here = f"{which}: {next(iter(told.values()))}; see {LONG} epochs, beyond/evidence"
    deciding, others = ([text for key, text in told.items() if (key in counts) is own][own or not counts :]
                        for own in (True, False))  # fmt: skip
    why = f"{RATES}; dense has that of layers. A pair decides where dense learns and ends above what is chosen globally"
    why += ": where the lower rate alone ends higher, the scope is not what is compared"
    rest = len(every) - len(one)
    detail = sentences(
        f"likewise {', '.join(deciding)}" if deciding else "",
        why,
        f"not deciding: {', '.join(others)}" if others else "",
        f"in {rest} pairs neither learns" if rest else "",
        _random_with_momentum(cells),
    )
    return as_far_as_p2(Judgement(here, word, detail), _cells(counts or one))


def _random_with_momentum(cells: Cells) -> str:
    """Return where the schemes that choose at random end with momentum, here and in P2."""
    places = [place for place in cells if place[0].startswith(("random", "block"))]
    if not places:
        return ""
    ends, printed = ([own[place] for place in places] for own in (cells, PRINTED))
    here, there = (f"{min(scores):.2f} to {max(scores):.2f}" for scores in (ends, printed))
    return f"with momentum random-k and block-random-k end at {here} %, in P2 at {there}"


def _cells(pairs: Mapping[tuple[str, int], tuple[float, float]]) -> Cells:
    """Return the accuracies of pairs by scheme, scope and workers."""
    return {(scheme, scope, workers): score for (scheme, workers), pair in pairs.items()
            for scope, score in zip(SCOPES, pair, strict=True)}  # fmt: skip


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
    untested = PAIRS - len(every)
    word = word_of([*(key in held for key in pairs), *[None] * untested])
    scores = stored.last_scores(MODEL)
    controls = at_same_rate(scores)
    alike = {key: (layer, whole) for key, (layer, _, whole) in controls.items() if key in pairs}
    if first in alike:
        layer, whole = alike[first]
        close = f", {UNDER_A_POINT}" if abs(layer - whole) < POINT else ""
        here += f"; at one rate {layer:.2f} and {whole:.2f}{close}"
    same, better = _at_the_same_rate(alike, len(pairs))
    unlearned = f"a pair that does not learn is left out: {left_out}" if left_out else ""
    told = f"likewise {', '.join(named(key, pairs[key]) for key in others)}" if others else ""
    found = Judgement(here, at_most_partly(word, better), sentences(told, same, _around_the_rate(scores), unlearned))
    return as_far_as_p2(found, _cells(pairs))


def _at_the_same_rate(own: Mapping[tuple[str, int], tuple[float, float]], pairs: int) -> tuple[str, bool]:
    """Return what the scope makes at the rate of layers, and whether layers are ahead there by a point wherever that is
    to be trained.

    Args:
        own: accuracies of both scopes at that rate.
        pairs: how many there are at P2's rates.
    """
    if not own:
        return f"{RATES}; {ONE_RATE} was not run", False
    ahead = [key for key, (layer, whole) in own.items() if layer - whole >= POINT]
    told = (
        f"{RATES}. With that of layers for both, one seed: {', '.join(named(key, pair) for key, pair in own.items())}"
    )
    causes = {
        "not explained by the rate alone": ahead,
        "explained by P2's rates": [key for key, (layer, whole) in own.items() if abs(layer - whole) < POINT],
        "reversed at one rate": [key for key, (layer, whole) in own.items() if layer - whole <= -POINT],
    }
    for cause, keys in causes.items():
        if keys:
            told += f"; the difference of {', '.join(f'{TITLES[scheme]} (W = {w})' for scheme, w in keys)} is {cause}"
    rest = f"; {pairs - len(own)} of {pairs} pairs were not run at one rate" if pairs > len(own) else ""
    return f"{told}{rest}", len(ahead) == len(own) and len(own) >= len(AT_ONE_RATE)


def _around_the_rate(scores: Mapping[str, float]) -> str:
    """Return how layers end at rates around that of what is chosen globally, where both were not run at one rate."""
    told = []
    for whole, *near in around_rate(scores):
        gaps = [scores[run.label] - scores[whole.label] for run in near]
        says = "the rate alone may explain the difference"
        if min(gaps) >= POINT or max(gaps) <= -POINT:
            says = f"{'layers stay' if min(gaps) > 0 else 'what is chosen globally stays'} ahead at both"
        each = " and ".join(f"{scores[run.label]:.2f} at {run.rate:g}" for run in near)
        ends = f"{scores[whole.label]:.2f} % globally at rate {whole.rate:g}, layer by layer {each}"
        told.append(f"{TITLES[whole.method]} {ends} (W = {whole.workers}): {says}")
    return f"others were trained layer by layer at rates around the global one: {'; '.join(told)}" if told else ""


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
