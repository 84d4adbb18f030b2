"""What P2 claims, and how that is judged."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise
from statistics import mean, stdev

from sparsync_lab.papers.claim import (
    LEARNS,
    MISSING,
    POINT,
    SEED,
    Claim,
    Judgement,
    StoredTables,
    at_most_partly,
    first_number,
    raise_missing,
    sentences,
    stated_gap,
    word_for,
)
from sparsync_lab.papers.p2 import (
    AS_PRINTED,
    AT_LAYERS_RATE,
    LEARNED,
    LONG,
    LONGER,
    SCOPES,
    WITH_MOMENTUM,
    block_gap_text,
    brought_by_epochs,
    long_training,
)
from sparsync_lab.papers.published import P2_ACCURACY, P2_WORKERS
from sparsync_lab.papers.run import SEEDS

TITLES = {scheme: own[0] for scheme, own in P2_ACCURACY.items()}
SPARSE = tuple(scheme for scheme in TITLES if scheme != "standard")
FAR = 10.0  # points: so far below what P2 prints, what is compared is not what it trained
Cells = Mapping[tuple[str, str, int], float]  # accuracy in %, by scheme, scope and workers


def ours(stored: StoredTables, item: str, caption: str) -> Cells:
    """Return what was trained of a table in P2's form. A cell is "ours (published)", and "– (published)" if it was not
    trained. With one worker the two ways to exchange are the same, and there once."""
    table = stored.table(item, caption)
    rows = {row.cells[0]: row.cells for row in table.rows}
    found = {}
    for scheme, title in TITLES.items():
        for scope in SCOPES:
            for workers in P2_WORKERS[1:] if scheme.endswith("shared") else P2_WORKERS:
                cell = rows[title][table.headings.index(f"{scope}, W = {workers}")].split(" (")[0]
                if cell != "–":
                    found[scheme, scope, workers] = float(cell)
    return found or raise_missing(caption)


def _scopes(cells: Cells) -> dict[tuple[str, int], tuple[float, float]]:
    """Return accuracies layer by layer and globally, of what was trained both ways."""
    return {
        (scheme, workers): (cells[scheme, "layer", workers], cells[scheme, "global", workers])
        for scheme in SPARSE
        for workers in P2_WORKERS
        if {(scheme, "layer", workers), (scheme, "global", workers)} <= cells.keys()
    }


Setting = tuple[str, int]  # scope and workers


def _layers_at_one_worker(stored: StoredTables) -> Judgement:
    rows = [row.cells for row in stored.table("p2/table1", AS_PRINTED).rows[1:]]
    pairs = [
        (cells[0], first_number(cells[1]), first_number(cells[2]))
        for cells in rows
        if not any(cell.startswith("–") for cell in cells[1:])
    ] or raise_missing(AS_PRINTED)
    first, *others = (f"{name} {layer:.1f} and {whole:.1f} %" for name, layer, whole in pairs)
    word = word_for(sum(layer > whole for _, layer, whole in pairs), len(pairs))
    rate = "globally with P2's rate, ten times lower, and not with the same one"
    return Judgement(first, at_most_partly(word), sentences(", ".join(others), rate))


def _layers_that_learn(stored: StoredTables) -> Judgement:
    """Compare both scopes at P2's rates, and Top-k at the same rate."""
    cells = ours(stored, "beyond/evidence", LEARNED)
    every = _scopes(cells)
    pairs = {key: pair for key, pair in every.items() if max(pair) > LEARNS} or raise_missing(LEARNED)
    left_out = ", ".join(_named(key, pair) for key, pair in every.items() if key not in pairs)
    most = max(workers for _, workers in pairs)
    held = {key for key, (layer, whole) in pairs.items() if layer > whole}
    first, *others = [key for key in pairs if key[1] == most or key not in held]
    here = f"in {len(held)} of {len(pairs)} pairs that learn; {_named(first, pairs[first])}"
    listed = ", ".join(_named(key, pairs[key]) for key in others)
    word, far = _as_far_as_p2(word_for(len(held), len(pairs)), cells, "topk")
    control, same = _at_layers_rate(stored), "globally P2's rate is ten times lower, and the same rate was not run"
    alike = True
    if control is not None and ("topk", 8) in pairs:
        layer = pairs["topk", 8][0]
        alike = layer - control <= POINT
        because = "so of Top-k the difference is P2's rate, ten times lower" if alike else "so it is not the rate alone"
        same = f"at the rate of layers Top-k globally ends at {control:.1f} % (W = 8, one seed): {because}"
    unlearned = f"a pair that does not learn is left out: {left_out}" if left_out else ""
    return Judgement(here, at_most_partly(word, not alike), sentences(listed, same, unlearned, far))


def _named(key: tuple[str, int], pair: tuple[float, float]) -> str:
    return f"{TITLES[key[0]]} {pair[0]:.1f} and {pair[1]:.1f} % (W = {key[1]})"


def _at_layers_rate(stored: StoredTables) -> float | None:
    """Return the accuracy of Top-k globally at the rate of layers; ``None`` if that was not trained."""
    return _trained(stored).get(f"{long_training('topk', 'global', 8).label}, {AT_LAYERS_RATE}")


def _trained(stored: StoredTables) -> dict[str, float]:
    """Return the last accuracies of ResNet-18 in ``beyond/evidence``, by the labels of the trainings."""
    every = (row.cells for table in stored.results["beyond/evidence"].tables for row in table.rows)
    return {cells[0]: float(cells[2]) for cells in every if cells[1] == "ResNet-18" and cells[2] != MISSING}


def _layers_with_momentum(stored: StoredTables) -> Judgement:
    """Compare both scopes where at least one of the two learns."""
    cells = ours(stored, "p2/table1", WITH_MOMENTUM)
    every = _scopes(cells)
    pairs = {key: pair for key, pair in every.items() if max(pair) > LEARNS} or raise_missing(WITH_MOMENTUM)
    first, *others = (_named(key, pair) for key, pair in pairs.items())
    held = sum(layer > whole for layer, whole in pairs.values())
    here = f"in {held} of {len(pairs)} pairs that learn, of {len(every)}; {first}"
    dense = ", ".join(f"{cells['standard', 'layer', w]:.1f} (W = {w})" for w in P2_WORKERS
                      if ("standard", "layer", w) in cells)  # fmt: skip
    few = f"dense itself ends at {dense} % in so few epochs" if dense else ""
    return Judgement(here, word_for(held, len(pairs)), sentences(", ".join(others), few))


def _settings(cells: Cells, *schemes: str) -> Iterator[tuple[str, int, list[float]]]:
    """Yield the scopes and numbers of workers with which all these schemes were trained, and their accuracies."""
    for scope in SCOPES:
        for workers in P2_WORKERS:
            if all((scheme, scope, workers) in cells for scheme in schemes):
                yield scope, workers, [cells[scheme, scope, workers] for scheme in schemes]


def _compared(stored: StoredTables, *schemes: str, least: int = 1) -> tuple[Cells, dict[Setting, list[float]]]:
    """Return all cells, and the accuracies of these schemes by the settings in which all of them were trained."""
    cells = ours(stored, "beyond/evidence", LEARNED)
    own = {(scope, w): scores for scope, w, scores in _settings(cells, *schemes) if w >= least}
    return cells, own or raise_missing(LEARNED)


def _shown(own: Mapping[Setting, list[float]]) -> tuple[str, str]:
    """Return the accuracies of the most workers of each scope, and all others."""
    most = {scope: max(w for at, w in own if at == scope) for scope in dict.fromkeys(scope for scope, _ in own)}

    def told(wanted: bool) -> str:
        return ", ".join(
            f"{_joined([f'{score:.1f}' for score in scores])} % ({scope}, W = {w})"
            for (scope, w), scores in own.items()
            if (most[scope] == w) is wanted
        )

    return told(True), told(False)


def _joined(words: list[str]) -> str:
    return f"{', '.join(words[:-1])} and {words[-1]}"


def _top_is_best(stored: StoredTables) -> Judgement:
    """Judge whether neither of the other two is ahead of Top-k by a point."""
    cells, own = _compared(stored, "topk", "random+allgather", "block+allgather")
    leads = [top - max(others) for top, *others in own.values()]
    held, ahead = sum(lead > -POINT for lead in leads), sum(lead >= POINT for lead in leads)
    first, others = _shown(own)
    order = "Top-k, random-k, block-random-k"
    told = f"in {ahead} of {len(own)} settings Top-k is ahead by a point or more, in {held - ahead} within a point"
    word, far = _as_far_as_p2(word_for(held, len(own)), cells, "topk")
    return Judgement(f"{order}: {first}", _whole(word, own, 8), sentences(told, others, _tested(own, 8), far))


def _blocks_like_random(stored: StoredTables) -> Judgement:
    """Compare block-random-k and random-k, both by all-gather: alike layer by layer, block behind globally."""
    cells, own = _compared(stored, "block+allgather", "random+allgather")
    first, others = _shown(own)
    alike = [abs(block - single) < POINT for (scope, _), (block, single) in own.items() if scope == "layer"]
    worse = [block < single for (scope, _), (block, single) in own.items() if scope == "global"]
    told = f"layer by layer alike in {sum(alike)} of {len(alike)}, globally worse in {sum(worse)} of {len(worse)}"
    why = block_gap_text(_trained(stored)) or "why block-random-k is so far below what is published is not explained"
    word, far = _as_far_as_p2(word_for(sum(alike + worse), len(own)), cells, "block+allgather")
    return Judgement(first, word, sentences(told, others, why, far))


def _block_sums(stored: StoredTables) -> Judgement:
    """Compare block-random-k by all-reduce with that by all-gather: every scheme falls with W, as steps are fewer."""
    cells, own = _compared(stored, "block+shared", "block+allgather", least=2)
    gaps = {at: shared - single for at, (shared, single) in own.items()}
    told = {scope: ", ".join(f"{stated_gap(gap, digits=1)} (W = {w})" for (at, w), gap in gaps.items() if at == scope)
            for scope in SCOPES}  # fmt: skip
    first, *others = (f"{scope} {points}" for scope, points in told.items() if points)
    learn = {scope: [gaps[at] for at, (shared, _) in own.items() if at[0] == scope and shared > LEARNS]
             for scope in SCOPES}  # fmt: skip
    grows = [later < sooner for seen in learn.values() for sooner, later in pairwise(seen)]
    steps = [gap < 0 for gap in gaps.values()] + grows
    lost = "; ".join(f"{scope}, W = {w}" for (scope, w), (shared, _) in own.items() if shared <= LEARNS)
    floor = f"by all-reduce it does not learn ({lost}), where the gap cannot grow" if lost else ""
    brings = brought_by_epochs(_trained(stored))
    longer = "" if brings is None else f"{LONGER} epochs instead of {LONG} bring {brings:.1f} points (layer, W = 8)"
    word, far = _as_far_as_p2(word_for(sum(steps), len(steps)), cells, "block+allgather")
    return Judgement(f"{first} points", at_most_partly(word, bool(grows)), sentences(*others, floor, far, longer))


def _random_sums(stored: StoredTables) -> Judgement:
    cells, own = _compared(stored, "random+shared", "random+allgather")
    first, others = _shown(own)
    held = sum(abs(shared - single) < POINT for shared, single in own.values())
    several = [_mean_of_seeds(stored, f"random+{how}") for how in ("shared", "allgather")]
    means = f"{several[0]} and {several[1]} % (layer, W = 8, three seeds)" if all(several) else ""
    word, far = _as_far_as_p2(word_for(held, len(own)), cells, "random+shared", "random+allgather")
    return Judgement(first, _whole(word, own, 6), sentences(others, means, _tested(own, 6), far))


def _mean_of_seeds(stored: StoredTables, scheme: str) -> str:
    """Return mean and deviation of a scheme, 8 workers layer by layer; empty unless all seeds were trained."""
    scores, label = _trained(stored), long_training(scheme, "layer", 8).label
    own = [scores[each] for each in (label, *(f"{label}{SEED}{seed}" for seed in SEEDS[1:])) if each in scores]
    return f"{mean(own):.2f} ± {stdev(own):.2f}" if len(own) == len(SEEDS) else ""


def _as_far_as_p2(word: str, cells: Cells, *schemes: str) -> tuple[str, str]:
    """Return the verdict, and where trainings end far below what P2 prints: such a claim is reproduced in part."""
    below = {scope: max((_below_p2(cells, scope, scheme) for scheme in schemes), default=0.0) for scope in SCOPES}
    far = ", ".join(f"{scope} up to {gap:.0f}" for scope, gap in below.items() if gap >= FAR)
    told = f"what is compared ends far below P2, which has 300 epochs: {far} points" if far else ""
    return at_most_partly(word, not far), told


def _below_p2(cells: Cells, scope: str, scheme: str) -> float:
    """Return how far the farthest of a scheme's cells is below what P2 prints."""
    _, *published = P2_ACCURACY[scheme]
    theirs = dict(zip(P2_WORKERS, dict(zip(SCOPES, published, strict=True))[scope], strict=True))
    return max(
        (theirs[w] - score for (own, at, w), score in cells.items() if (own, at) == (scheme, scope)), default=0.0
    )


def _whole(word: str, own: Mapping[Setting, list[float]], of: int) -> str:
    return at_most_partly(word, len(own) == of)


def _tested(own: Mapping[Setting, list[float]], of: int) -> str:
    return "" if len(own) == of else f"{len(own)} of {of} settings are trained"


def _only_blocks_are_faster(stored: StoredTables) -> Judgement:
    rows = stored.table("p2/table2", "A step").rows
    steps = {row.cells[0]: first_number(row.cells[-1]) for row in rows}
    dense = steps.pop("Standard SGD")
    faster = sorted((ms, name) for name, ms in steps.items() if ms < dense)
    others = [f"{name} {ms:.1f} ms" for ms, name in faster if not name.startswith("Block")]
    here = f"{', '.join(others) or 'none of the others'} against dense's {dense:.1f} ms"
    blocks = ", ".join(f"{name} {ms:.1f} ms" for ms, name in faster if name.startswith("Block"))
    word = word_for(bool(faster) and not others, True)
    return Judgement(here, word, sentences(f"{len(faster)} of {len(steps)} are faster; {blocks}"))


BETTER, LIKEWISE = "layer by layer is better than globally", "P2, table 1, 30 epochs without momentum:"
CLAIMS = (
    Claim(
        "p2/table1", f"{BETTER} (momentum 0.9 as P2 states, 6 epochs)",
        "in 18 of 18 pairs; Top-k 93.6 and 91.5 (W = 1)", _layers_with_momentum,
    ),
    Claim("p2/table1", f"{BETTER} (no momentum, W = 1, 6 epochs)", "Top-k 93.6 and 91.5", _layers_at_one_worker),
    Claim(
        "beyond/evidence", f"{LIKEWISE} {BETTER}", "in 18 of 18 pairs; Top-k 93.4 and 91.5 (W = 8)", _layers_that_learn
    ),
    Claim(
        "beyond/evidence", f"{LIKEWISE} Top-k is better than random-k and block-random-k (all-gather)",
        "93.4, 92.5 and 93.1 (layer, W = 8), 91.5, 91.5 and 90.5 (global); in 6 of 8 settings the best", _top_is_best,
    ),
    Claim(
        "beyond/evidence",
        f"{LIKEWISE} block-random-k is as good as random-k layer by layer, and worse globally (all-gather)",
        "93.1 and 92.5 (layer, W = 8), 90.5 and 91.5 (global)", _blocks_like_random,
    ),
    Claim(
        "beyond/evidence", f"{LIKEWISE} block-random-k by all-reduce is worse than by all-gather, the more so with W",
        "-0.6, -2.3, -2.5 points (layer, W = 2, 4, 8), -2.9, -12.1, -12.3 (global)", _block_sums,
    ),
    Claim(
        "beyond/evidence", f"{LIKEWISE} random-k by all-reduce is as good as by all-gather",
        "92.4 and 92.5 (layer, W = 8), 91.3 and 91.5 (global)", _random_sums,
    ),
    Claim("p2/table2", "only block-random-k is faster than dense", "K80, by eye", _only_blocks_are_faster),
)  # fmt: skip
