"""What P2 claims, and how that is judged."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise
from statistics import mean, stdev

from sparsync_lab.papers.claim import (
    MISSING,
    POINT,
    SEED,
    UNDER_A_POINT,
    Claim,
    StoredTables,
    at_most_partly,
    first_number,
    none,
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
LEARNS = 20.0  # % of accuracy; 10 is chance
FAR = 10.0  # points: so far below, what is compared is not what P2 trained
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
    return found or none(caption)


def _scopes(cells: Cells) -> dict[tuple[str, int], tuple[float, float]]:
    """Return accuracies layer by layer and globally, of what was trained both ways."""
    return {
        (scheme, workers): (cells[scheme, "layer", workers], cells[scheme, "global", workers])
        for scheme in SPARSE
        for workers in P2_WORKERS
        if {(scheme, "layer", workers), (scheme, "global", workers)} <= cells.keys()
    }


def _layers_at_one_worker(stored: StoredTables) -> tuple[str, str]:
    rows = [row.cells for row in stored.table("p2/table1", AS_PRINTED).rows[1:]]
    pairs = [
        (cells[0], first_number(cells[1]), first_number(cells[2]))
        for cells in rows
        if not any(cell.startswith("–") for cell in cells[1:])
    ]
    told = ", ".join(f"{name} {layer:.1f} and {whole:.1f}" for name, layer, whole in pairs) or none(AS_PRINTED)
    word = word_for(sum(layer > whole for _, layer, whole in pairs), len(pairs))
    return f"{told}; globally with P2's rate, ten times lower, and not with the same one", at_most_partly(word)


def _layers_that_learn(stored: StoredTables) -> tuple[str, str]:
    """Compare both scopes at P2's rates, and Top-k at the same rate."""
    every = _scopes(ours(stored, "beyond/evidence", LEARNED))
    pairs = {key: pair for key, pair in every.items() if max(pair) > LEARNS} or none(LEARNED)
    most = max(workers for _, workers in pairs)
    held = {key for key, (layer, whole) in pairs.items() if layer > whole}
    shown = [key for key in pairs if key[1] == most or key not in held]
    listed = ", ".join(
        f"{TITLES[scheme]} {pairs[scheme, w][0]:.1f} and {pairs[scheme, w][1]:.1f}{'' if w == most else f' (W = {w})'}"
        for scheme, w in shown
    )
    told = f"so in {len(held)} of {len(pairs)} pairs that learn (of {len(every)}); W = {most}: {listed}"
    word = word_for(len(held), len(pairs))
    control = _at_layers_rate(stored)
    if control is None or ("topk", 8) not in pairs:
        return f"{told}; globally P2's rate is ten times lower, and the same rate was not run", at_most_partly(word)
    layer = pairs["topk", 8][0]
    told += f". At the rate of layers Top-k globally ends at {control:.1f} instead of {pairs['topk', 8][1]:.1f}"
    if layer - control > POINT:
        return f"{told}, and layer by layer at {layer:.1f} (W = 8, one seed): it is not the rate alone", word
    told += f", layer by layer at {layer:.1f} (W = 8, one seed): of Top-k the difference is P2's rate, ten times lower"
    return told, at_most_partly(word)


def _at_layers_rate(stored: StoredTables) -> float | None:
    """Return the accuracy of Top-k globally at the rate of layers; ``None`` if that was not trained."""
    return _trained(stored).get(f"{long_training('topk', 'global', 8).label}, {AT_LAYERS_RATE}")


def _trained(stored: StoredTables) -> dict[str, float]:
    """Return the last accuracies of ResNet-18 in ``beyond/evidence``, by the labels of the trainings."""
    every = (row.cells for table in stored.results["beyond/evidence"].tables for row in table.rows)
    return {cells[0]: float(cells[2]) for cells in every if cells[1] == "ResNet-18" and cells[2] != MISSING}


def _layers_with_momentum(stored: StoredTables) -> tuple[str, str]:
    """Compare both scopes where at least one of the two learns."""
    every = _scopes(ours(stored, "p2/table1", WITH_MOMENTUM))
    pairs = {key: pair for key, pair in every.items() if max(pair) > LEARNS} or none(WITH_MOMENTUM)
    listed = ", ".join(
        f"{TITLES[scheme]} "
        + ", ".join(
            f"{layer:.1f} and {whole:.1f} (W = {w})" for (own, w), (layer, whole) in pairs.items() if own == scheme
        )
        for scheme in dict.fromkeys(scheme for scheme, _ in pairs)
    )
    held = sum(layer > whole for layer, whole in pairs.values())
    return f"so in {held} of {len(pairs)} pairs that learn (of {len(every)}): {listed}", word_for(held, len(pairs))


def _settings(cells: Cells, *schemes: str) -> Iterator[tuple[str, int, list[float]]]:
    """Yield the scopes and numbers of workers with which all these schemes were trained, and their accuracies."""
    for scope in SCOPES:
        for workers in P2_WORKERS:
            if all((scheme, scope, workers) in cells for scheme in schemes):
                yield scope, workers, [cells[scheme, scope, workers] for scheme in schemes]


def _top_is_best(stored: StoredTables) -> tuple[str, str]:
    cells = ours(stored, "beyond/evidence", LEARNED)
    own = list(_settings(cells, "topk", "random+allgather", "block+allgather")) or none(LEARNED)
    told = ", ".join(
        f"{top:.1f}, {best:.1f} and {block:.1f} ({scope}, W = {w})" for scope, w, (top, best, block) in own
    )
    leads = [top - max(others) for _, _, (top, *others) in own]
    ahead, near = sum(lead >= POINT for lead in leads), sum(abs(lead) < POINT for lead in leads)
    told += f"; Top-k is ahead by a point or more in {ahead} of {len(own)}, {UNDER_A_POINT} from the best in {near}"
    return _not_all(f"Top-k, random-k, block-random-k: {told}", word_for(ahead, len(own)), len(own), 8)


def _blocks_like_random(stored: StoredTables) -> tuple[str, str]:
    """Compare block-random-k and random-k, both by all-gather: alike layer by layer, block behind globally."""
    cells = ours(stored, "beyond/evidence", LEARNED)
    own = list(_settings(cells, "block+allgather", "random+allgather")) or none(LEARNED)
    told = ", ".join(f"{block:.1f} and {single:.1f} ({scope}, W = {w})" for scope, w, (block, single) in own)
    alike = [abs(block - single) < POINT for scope, _, (block, single) in own if scope == "layer"]
    worse = [single - block >= POINT for scope, _, (block, single) in own if scope == "global"]
    told += f"; layer by layer alike in {sum(alike)} of {len(alike)}, globally worse in {sum(worse)} of {len(worse)}"
    why = block_gap_text(_trained(stored)) or "why block-random-k is so far below what is published is not explained"
    return f"{told}; {why}", word_for(sum(alike + worse), len(own))


def _block_sums(stored: StoredTables) -> tuple[str, str]:
    """Compare block-random-k by all-reduce with that by all-gather: every scheme falls with W, as steps are fewer."""
    cells = ours(stored, "beyond/evidence", LEARNED)
    own = list(_settings(cells, "block+shared", "block+allgather")) or none(LEARNED)
    own = [(scope, workers, pair) for scope, workers, pair in own if workers > 1]
    told = ", ".join(
        f"{stated_gap(shared - single, digits=1)} ({scope}, W = {w})" for scope, w, (shared, single) in own
    )
    learn = {scope: [a - b for one, _, (a, b) in own if one == scope and a > LEARNS] for scope in SCOPES}
    grows = [later < sooner for gaps in learn.values() for sooner, later in pairwise(gaps)]
    steps = [single - shared >= POINT for _, _, (shared, single) in own] + grows
    if lost := [f"{scope}, W = {w}" for scope, w, (shared, _) in own if shared <= LEARNS]:
        told += f"; by all-reduce it does not learn ({'; '.join(lost)}), where the gap cannot grow"
    word = word_for(sum(steps), len(steps))
    far = {scope: gap for scope in SCOPES if (gap := _below_p2(cells, scope, "block+allgather")) >= FAR}
    if not far:
        return f"points to all-gather: {told}", at_most_partly(word, bool(grows))
    told += "; but by all-gather, too, it is below P2's: " + ", ".join(f"{s} up to {gap:.0f}" for s, gap in far.items())
    brings = brought_by_epochs(_trained(stored))
    more = f"; {LONGER} epochs instead of {LONG} bring"
    told += ", unexplained" if brings is None else f"{more} {brings:.1f} (layer, W = 8)"
    return f"points to all-gather: {told}", at_most_partly(word)


def _below_p2(cells: Cells, scope: str, *schemes: str) -> float:
    """Return how far the farthest of these cells is below what P2 prints."""
    gaps = [0.0]
    for scheme in schemes:
        _, *published = P2_ACCURACY[scheme]
        theirs = dict(zip(P2_WORKERS, dict(zip(SCOPES, published, strict=True))[scope], strict=True))
        gaps += [theirs[w] - score for (own, at, w), score in cells.items() if (own, at) == (scheme, scope)]
    return max(gaps)


def _random_sums(stored: StoredTables) -> tuple[str, str]:
    cells = ours(stored, "beyond/evidence", LEARNED)
    own = list(_settings(cells, "random+shared", "random+allgather")) or none(LEARNED)
    told = ", ".join(f"{shared:.1f} and {single:.1f} ({scope}, W = {w})" for scope, w, (shared, single) in own)
    held = sum(abs(shared - single) < POINT for _, _, (shared, single) in own)
    several = [_mean_of_seeds(stored, f"random+{how}") for how in ("shared", "allgather")]
    if all(several):
        told += f"; {several[0]} and {several[1]} (layer, W = 8, three seeds)"
    far = {scope: _below_p2(cells, scope, "random+shared", "random+allgather") for scope in SCOPES}
    told += "".join(f"; {scope} up to {gap:.0f} points below P2's" for scope, gap in far.items() if gap >= FAR)
    told, word = _not_all(told, word_for(held, len(own)), len(own), 6)
    return told, at_most_partly(word, max(far.values()) < FAR)


def _mean_of_seeds(stored: StoredTables, scheme: str) -> str:
    """Return mean and deviation of a scheme, 8 workers layer by layer; empty unless all seeds were trained."""
    scores, label = _trained(stored), long_training(scheme, "layer", 8).label
    own = [scores[each] for each in (label, *(f"{label}{SEED}{seed}" for seed in SEEDS[1:])) if each in scores]
    return f"{mean(own):.2f} ± {stdev(own):.2f}" if len(own) == len(SEEDS) else ""


def _not_all(told: str, word: str, trained: int, of: int) -> tuple[str, str]:
    """Return a verdict that says how much of P2's table it rests on."""
    return f"{told}; {trained} of {of} settings are trained", at_most_partly(word, trained == of)


def _only_blocks_are_faster(stored: StoredTables) -> tuple[str, str]:
    rows = stored.table("p2/table2", "A step").rows
    steps = {row.cells[0]: first_number(row.cells[-1]) for row in rows}
    dense = steps.pop("Standard SGD")
    faster = [name for name, ms in steps.items() if ms < dense]
    told = f"{len(faster)} of {len(steps)} are: the fastest {min(steps.values()):.1f} ms against {dense:.1f} dense"
    return told, word_for(all(name.startswith("Block") for name in faster) and bool(faster), True)


BETTER, LIKEWISE = "layer by layer is better than globally", "P2, table 1, 30 epochs without momentum:"
CLAIMS = (
    Claim(
        "p2/table1", f"{BETTER} (momentum 0.9 as P2 states, 6 epochs)", "18 of 18 pairs; Top-k 93.6 and 91.5 (W = 1)",
        _layers_with_momentum,
    ),
    Claim(
        "p2/table1", f"{BETTER} (no momentum, W = 1, 6 epochs)", "93.6 and 91.5 (Top-k)", _layers_at_one_worker,
    ),
    Claim(
        "beyond/evidence", f"{LIKEWISE} {BETTER}", "18 of 18 pairs; Top-k 93.4 and 91.5 (W = 8)", _layers_that_learn,
    ),
    Claim(
        "beyond/evidence", f"{LIKEWISE} Top-k is better than random-k and block-random-k (all-gather)",
        "so says the text; 6 of 8 in the table; 93.4, 92.5 and 93.1 (layer, W = 8)", _top_is_best,
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
