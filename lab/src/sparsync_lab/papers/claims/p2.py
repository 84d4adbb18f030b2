"""What P2 claims of its schemes and of more workers, and how that is judged."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from statistics import mean, stdev

from sparsync_lab.papers.claims.claim import LEARNS, Claim, Judgement, at_most_partly, sentences, word_of
from sparsync_lab.papers.claims.p2_accuracies import (
    LIKEWISE,
    MODEL,
    PRINTED,
    TITLES,
    Cells,
    as_far_as_p2,
    at_most_workers,
    cells_at,
    compared,
    listed,
    ours,
    settings,
)
from sparsync_lab.papers.claims.stored_tables import StoredTables, raise_missing
from sparsync_lab.papers.differences import MISSING, POINT, SEED, UNDER_A_POINT, Held, in_words, stated_gap
from sparsync_lab.papers.p2 import (
    LEARNED,
    LONG,
    LONGER,
    SCOPES,
    block_and_random,
    for_longer,
    long_training,
)
from sparsync_lab.papers.p2_learned import block_gap_text, brought_by_epochs
from sparsync_lab.papers.published import P2_WORKERS
from sparsync_lab.papers.run import SEEDS

THREE = ("topk", "random+allgather", "block+allgather")
BLOCK, DENSE = "block+allgather", "standard"
BLOCKS = (BLOCK, "block+shared")
SETTINGS = len(settings(PRINTED, *THREE))  # of scope and workers ...
SUMS = len(settings(PRINTED, "random+shared"))  # ... that have several workers
PAIRS = SUMS - len(SCOPES)  # of one such number of workers and the next
FEWER_STEPS = "P2's cause is not tested by itself: with 8 workers there are an eighth of the steps, too"


def _comparable(stored: StoredTables) -> Judgement:
    """Judge whether block-random-k ends at most a point farther below dense than P2 prints, layer by layer."""
    cells, every = compared(stored, BLOCK, DENSE)
    own = {at: scores for at, scores in every.items() if at[0] == "layer"} or raise_missing(LEARNED)
    theirs = settings(PRINTED, BLOCK, DENSE)
    held = [block - dense > theirs[at][0] - theirs[at][1] - POINT for at, (block, dense) in own.items()]
    first, others = at_most_workers(own)
    rule = f"it ends at most a point farther below SGD than P2 prints in {sum(held)} of {len(own)} settings"
    alike = cells.get(("block+shared", "layer", 8))
    shared = "" if alike is None else f"block-random-k by all-reduce: {alike:.2f} % (layer, W = 8)"
    told = sentences(rule, _likewise(others), shared, _longer(stored))
    found = Judgement(f"block-random-k and SGD: {first}", word_of(held, len(P2_WORKERS)), told)
    return as_far_as_p2(found, cells_at(cells, own, BLOCK, DENSE))


def _longer(stored: StoredTables) -> str:
    """Return how block-random-k and dense end after more epochs, 8 workers; empty if the first was not trained."""
    scores = stored.last_scores(MODEL)
    runs = block_and_random()[0], long_training(DENSE, "layer", 8)
    block, dense = (scores.get(for_longer(run).label) for run in runs)
    told = MISSING if dense is None else f"at {dense:.2f}"
    ends = f"after {LONGER} epochs block-random-k by all-gather ends"
    return "" if block is None else f"{ends} at {block:.2f} % (layer, W = 8), SGD {told}"


def _one_and_most(cells: Cells, *schemes: str) -> Cells:
    """Return the accuracies of these schemes with 1 and with 8 workers."""
    return {at: score for at, score in cells.items() if at[0] in schemes and at[2] in (P2_WORKERS[0], P2_WORKERS[-1])}


def _fewer_with_workers(cells: Cells) -> dict[str, tuple[float, float]]:
    """Return the accuracies with 1 and with 8 workers of every configuration; dense has no scope."""
    found = {}
    for scheme, title in TITLES.items():
        for scope in SCOPES if scheme != DENSE else ("layer",):
            one = cells.get((scheme.replace("+shared", "+allgather"), scope, P2_WORKERS[0]))
            most = cells.get((scheme, scope, P2_WORKERS[-1]))
            if one is not None and most is not None:
                found[title if scheme == DENSE else f"{title} {scope}"] = one, most
    return found


def _falls(own: Mapping[str, tuple[float, float]]) -> dict[str, Held]:
    """Return whether each falls; by less than a point, of one seed, that is not known."""
    return {name: None if abs(one - most) < POINT else one > most for name, (one, most) in own.items()}


def _falls_with_workers(stored: StoredTables) -> Judgement:
    cells = _one_and_most(ours(stored, "beyond/evidence", LEARNED), *TITLES)
    own, of = _fewer_with_workers(cells) or raise_missing(LEARNED), len(_fewer_with_workers(PRINTED))
    held = _falls(own)
    close = [name for name, falls in held.items() if falls is None]
    few = f" ({len(close)} {UNDER_A_POINT}, {in_words(1)})" if close else ""
    clear = [*held.values()].count(True)
    told = f"W = 8 below W = 1 by a point or more in {clear} of {len(own)} configurations{few}"
    which = f"{UNDER_A_POINT}: {', '.join(close)}" if close else ""
    return as_far_as_p2(Judgement(told, word_of(held.values(), of), sentences(which, FEWER_STEPS)), cells)


def _printed_falls() -> str:
    own = _fewer_with_workers(PRINTED)
    odd = [f"{name} {listed([one, most])}" for name, (one, most) in own.items() if most >= one]
    return f"in {len(own) - len(odd)} of {len(own)} as printed: not {', '.join(odd)} (W = 1, 8)"


def _blocks_fall(stored: StoredTables) -> Judgement:
    cells = _one_and_most(ours(stored, "beyond/evidence", LEARNED), *BLOCKS)
    own = _fewer_with_workers(cells) or raise_missing(LEARNED)
    word = word_of(_falls(own).values(), len(_fewer_with_workers(_one_and_most(PRINTED, *BLOCKS))))
    return as_far_as_p2(Judgement(_from_one_to_most(cells), word, sentences(FEWER_STEPS)), cells)


def _from_one_to_most(cells: Cells) -> str:
    own = {name.removeprefix("Block-random-k "): both for name, both in _fewer_with_workers(cells).items()}
    return f"{', '.join(f'{name} {one:.2f} → {most:.2f}' for name, (one, most) in own.items())} % (W = 1, 8)"


def _top_is_best(stored: StoredTables) -> Judgement:
    """Judge whether neither of the other two is ahead of Top-k by a point."""
    cells, own = compared(stored, *THREE)
    leads = [top - max(others) for top, *others in own.values()]
    held, ahead = [lead > -POINT for lead in leads], sum(lead >= POINT for lead in leads)
    first, others = at_most_workers(own)
    rule = (
        f"the claim holds where Top-k is not a point or more behind, as less than that, of one seed, is no ranking: in "
        f"{ahead} of {len(own)} settings it is ahead by a point or more, in {sum(held) - ahead} within a point"
    )
    told = sentences(rule, _likewise(others), _tested(len(own), SETTINGS))
    found = Judgement(f"Top-k, random-k, block-random-k: {first}", word_of(held, SETTINGS), told)
    return as_far_as_p2(found, cells_at(cells, own, *THREE))


def _printed_best() -> str:
    own = settings(PRINTED, *THREE)
    return f"{at_most_workers(own)[0]}; the best in {sum(top > max(rest) for top, *rest in own.values())} of {len(own)}"


def _blocks_like_random(stored: StoredTables) -> Judgement:
    """Compare block-random-k and random-k, both by all-gather: alike layer by layer, block behind globally."""
    cells, own = compared(stored, BLOCK, "random+allgather")
    first, others = at_most_workers(own)
    alike = [abs(block - single) < POINT for (scope, _), (block, single) in own.items() if scope == "layer"]
    worse = [block < single for (scope, _), (block, single) in own.items() if scope == "global"]
    told = (
        f"layer by layer less than a point apart in {sum(alike)} of {len(alike)} settings, globally block-random-k is "
        f"behind in {sum(worse)} of {len(worse)}"
    )
    unexplained = "why block-random-k is so far below what is published is not explained"
    why = block_gap_text(stored.last_scores(MODEL)) or unexplained
    told = sentences(told, _likewise(others), why)
    found = Judgement(f"block-random-k and random-k: {first}", word_of(alike + worse, SETTINGS), told)
    return as_far_as_p2(found, cells_at(cells, own, BLOCK, "random+allgather"))


def _block_sums(stored: StoredTables) -> Judgement:
    """Compare block-random-k by all-reduce with that by all-gather: every scheme falls with W, as steps are fewer."""
    cells, own = compared(stored, "block+shared", BLOCK, least=2)
    gaps = {at: shared - single for at, (shared, single) in own.items()}
    told = {scope: ", ".join(f"{stated_gap(gap)} (W = {w})" for (at, w), gap in gaps.items() if at == scope)
            for scope in SCOPES}  # fmt: skip
    first, *others = (f"{scope} {points}" for scope, points in told.items() if points)
    learn = {scope: [gaps[at] for at, (shared, _) in own.items() if at[0] == scope and shared > LEARNS]
             for scope in SCOPES}  # fmt: skip
    grows = [later < sooner for seen in learn.values() for sooner, later in pairwise(seen)]
    untested = [None] * (SUMS - len(gaps))
    lost = "; ".join(f"{scope}, W = {w}" for (scope, w), (shared, _) in own.items() if shared <= LEARNS)
    floor = f"by all-reduce it does not learn ({lost}), where the gap cannot grow" if lost else ""
    brings = brought_by_epochs(stored.last_scores(MODEL))
    more = f"{LONGER} epochs instead of {LONG} bring block-random-k by all-gather"
    longer = "" if brings is None else f"{more} {brings:.1f} points (layer, W = 8)"
    word = at_most_partly(word_of([*(gap < 0 for gap in gaps.values()), *grows, *untested]), bool(grows))
    here = f"{first} points; growing in {sum(grows)} of {len(grows)} pairs of W that learn, of {PAIRS}"
    found = Judgement(here, word, sentences(*others, floor, longer))
    return as_far_as_p2(found, cells_at(cells, own, *BLOCKS))


def _printed_sums() -> str:
    gaps = {at: shared - single for at, (shared, single) in settings(PRINTED, "block+shared", BLOCK).items()}
    each = [", ".join(f"{gap:+.2f}" for (at, _), gap in gaps.items() if at == scope) for scope in SCOPES]
    return f"{each[0]} points (layer, W = 2, 4, 8), {each[1]} (global)"


def _random_sums(stored: StoredTables) -> Judgement:
    cells, own = compared(stored, "random+shared", "random+allgather")
    first, others = at_most_workers(own)
    held = [abs(shared - single) < POINT for shared, single in own.values()]
    several = [_mean_of_seeds(stored, f"random+{how}") for how in ("shared", "allgather")]
    means = f"over three seeds: {several[0]} and {several[1]} % (layer, W = 8)" if all(several) else ""
    told = sentences(_likewise(others), means, _tested(len(own), SUMS))
    found = Judgement(f"all-reduce and all-gather: {first}", word_of(held, SUMS), told)
    return as_far_as_p2(found, cells_at(cells, own, "random+shared", "random+allgather"))


def _mean_of_seeds(stored: StoredTables, scheme: str) -> str:
    """Return mean and deviation of a scheme, 8 workers layer by layer; empty unless all seeds were trained."""
    scores, label = stored.last_scores(MODEL), long_training(scheme, "layer", 8).label
    own = [scores[each] for each in (label, *(f"{label}{SEED}{seed}" for seed in SEEDS[1:])) if each in scores]
    return f"{mean(own):.2f} ± {stdev(own):.2f}" if len(own) == len(SEEDS) else ""


def _likewise(others: str) -> str:
    return f"the same with other settings: {others}" if others else ""


def _tested(found: int, of: int) -> str:
    return "" if found == of else f"{found} of {of} settings are trained"


def _printed(*schemes: str) -> str:
    return at_most_workers(settings(PRINTED, *schemes))[0]


CLAIMS = (
    Claim(
        "beyond/evidence", f"{LIKEWISE} Top-k 'outperforms the other two sparsification schemes across the board' "
        "(all-gather)", _printed_best(), _top_is_best,
    ),
    Claim(
        "beyond/evidence",
        f"{LIKEWISE} block-random-k is as good as random-k layer by layer, and worse globally (all-gather)",
        _printed(BLOCK, "random+allgather"), _blocks_like_random,
    ),
    Claim(
        "beyond/evidence", f"{LIKEWISE} block-random-k by all-reduce is worse than by all-gather, the more so with W",
        _printed_sums(), _block_sums,
    ),
    Claim(
        "beyond/evidence", f"{LIKEWISE} random-k by all-reduce is as good as by all-gather",
        _printed("random+shared", "random+allgather"), _random_sums,
    ),
    Claim(
        "beyond/evidence", f"{LIKEWISE} 'the accuracy decreases for all configurations with more workers'",
        _printed_falls(), _falls_with_workers,
    ),
    Claim(
        "beyond/evidence",
        f"{LIKEWISE} 'for the block-random-k algorithm, the test accuracy drops significantly with more workers'",
        _from_one_to_most(_one_and_most(PRINTED, *BLOCKS)), _blocks_fall,
    ),
    Claim(
        "beyond/evidence", f"{LIKEWISE} block-random-k 'has a comparable test accuracy to SGD'",
        f"block-random-k and SGD, all-gather: {listed([PRINTED[how, 'layer', 8] for how in (BLOCK, DENSE)])} "
        "(layer, W = 8)", _comparable,
    ),
)  # fmt: skip
