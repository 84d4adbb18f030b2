"""What P3 claims, and how that is judged."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from statistics import mean

from sparsync_lab.papers.claim import (
    MISSING,
    POINT,
    SCORE,
    SEVERAL,
    TO_DENSE,
    Claim,
    Judge,
    StoredTables,
    at_most_partly,
    first_number,
    like_dense,
    none,
    seeds_by_label,
    stated_gap,
    word_for,
)
from sparsync_lab.papers.p3 import CONDITION, DENSITIES, ON_OTHERS, OTHERS
from sparsync_lab.papers.run import model_title
from sparsync_lab.papers.tables import NOT_RUN
from sparsync_lab.papers.tuned import CAPTION as RATES
from sparsync_lab.papers.tuned import FALLS_ONCE
from sparsync_lab.report import Table

ITS_CONDITION = "P3: its condition and its accuracy"  # of beyond/evidence
PLAIN_TREE = "gTop-k, 0.001"
CORRECTED = f"{PLAIN_TREE}, momentum corrected, 0.5"
SAME_ORDER = "in the abstract: a rate of the same order"
P1_RATE = "0.1"  # of ResNet-20
NEAR = 0.01  # of a perplexity: so near to dense is "like dense"


def _ratios(table: Table) -> tuple[int, int, float]:
    """Return the looks at P3's condition, how often it did not hold, and the largest ratio."""
    looks, above = (sum(int(first_number(row.cells[at])) for row in table.rows) for at in (1, 4))
    return looks, above, max(first_number(row.cells[2]) for row in table.rows)


def _condition(stored: StoredTables) -> tuple[str, str]:
    looks, above, worst = _ratios(stored.table("p3/density", CONDITION))
    return f"holds at {looks - above} of {looks} looks, the largest ratio {worst:.4f}", word_for(looks - above, looks)


def _condition_elsewhere(stored: StoredTables) -> tuple[str, str]:
    table = stored.table("beyond/evidence", f"{ON_OTHERS}: {CONDITION}")
    looks, above, _ = _ratios(table)
    seen = {row.cells[0]: row.cells for row in table.rows}
    told, every = [], [model_title(model) for model in OTHERS]
    for title in every:
        own = seen.get(title)
        told.append(f"{title} {MISSING}" if own is None else f"{title} {own[1]} looks, the largest ratio {own[2]}")
        with suppress(LookupError):
            how = stored.table("beyond/evidence", f"{ON_OTHERS}: {title}")
            last = {row.cells[0]: row.cells[1] for row in how.rows}[PLAIN_TREE]
            told[-1] += f" (in a training that ends at {last}{' %' if how.headings[1] == SCORE else ''})"
    word = word_for(looks - above, looks)
    return "; ".join(told), at_most_partly(word, set(every) <= set(seen))


def _like_dense(stored: StoredTables) -> tuple[str, str]:
    gaps = {
        f"{density:g}": stored.cell("p3/density", "gTop-k", f"gTop-k, {density:g}", TO_DENSE) for density in DENSITIES
    }
    told = ", ".join(f"{gap} at {density}" for density, gap in gaps.items())
    return f"points to dense: {told}", word_for(sum(map(like_dense, gaps.values())), len(gaps))


def _at_one_permille(stored: StoredTables) -> tuple[str, str]:
    item = "p3/convergence"
    tree, top = (stored.cell(item, "ResNet-20", how, TO_DENSE) for how in (PLAIN_TREE, "topk"))
    return f"points to dense: {tree}, TopK-SGD {top}", word_for(like_dense(tree), True)


def _like_dense_elsewhere(stored: StoredTables) -> tuple[str, str]:
    """Compare gTop-k with dense and TopK-SGD on VGG-16 and LSTM-PTB, each as far as it was trained."""
    told, near = [], []
    for model in OTHERS:
        title = model_title(model)
        try:
            table = stored.table("beyond/evidence", f"{ON_OTHERS}: {title}")
        except LookupError:
            told.append(f"{title} {MISSING}")
            continue
        own = {row.cells[0]: first_number(row.cells[1]) for row in table.rows}
        tree, dense, top = own[PLAIN_TREE], own["dense"], own["topk"]
        less = table.headings[1] != SCORE
        near.append(tree < dense * (1 + NEAR) if less else tree - dense > -POINT)
        kind = "perplexity (less is better)" if less else "accuracy"
        steps = table.rows[0].cells[table.headings.index("steps")]
        told.append(f"{title}, {steps} steps: {kind} {tree:.1f}, TopK-SGD {top:.1f}, dense {dense:.1f}")
    return "; ".join(told), at_most_partly(word_for(sum(near), len(near)), len(near) == len(OTHERS)) if near else none(
        ""
    )


def _on_resnet20(stored: StoredTables) -> dict[str, dict[str, float]]:
    """Return the last accuracies of ResNet-20 in P3's question, by training and seed."""
    scores = stored.scores(ITS_CONDITION)
    return seeds_by_label({label: score for (model, label), score in scores.items() if model == "ResNet-20"})


def _to_dense(scores: Mapping[str, Mapping[str, float]], label: str) -> float:
    """Return how far a training is from dense with the same seeds, in the mean over them."""
    return mean(score - scores["dense"][seed] for seed, score in scores[label].items())


def _with_momentum_corrected(stored: StoredTables) -> tuple[str, str]:
    """Compare gTop-k at 0.1 % on ResNet-20, as published and with momentum before the residual, with dense."""
    scores, early = _on_resnet20(stored), f"{CORRECTED}, density warm-up"
    before, *gaps = (_to_dense(scores, how) for how in (PLAIN_TREE, CORRECTED, early))
    words = [stated_gap(gap, len(scores[how])) for gap, how in ((gaps[0], CORRECTED), (gaps[1], early))]
    told = f"points to dense: {words[0]} instead of {stated_gap(before)}; with more entries at first {words[1]}, but "
    told += f"that is {stored.asked(ITS_CONDITION)['ResNet-20', early][4]} and not 0.1 %"
    return f"{told} (seeds: {len(scores[CORRECTED])} and {len(scores[early])})", word_for(gaps[0] > -POINT, True)


def _dense_at_best(stored: StoredTables) -> str:
    """Return what dense reaches with its best rate in the same schedule, beside what it does with P1's."""
    rows = [row.cells for row in stored.table("beyond/evidence", RATES).rows]
    own = {cells[2]: cells[3] for cells in rows if cells[:2] == ["dense", FALLS_ONCE] and int(cells[4]) >= SEVERAL}
    if P1_RATE not in own or len(own) < 2:
        return ""
    best = next(iter(own))  # the best first
    return f"; that is dense with P1's rate, {own[P1_RATE]}: with {best} it ends at {own[best]}"


def _at_these_bytes(fits: Callable[[str], bool]) -> Judge:
    """Judge what else was tried with gTop-k in the bytes of 0.1 %: the trainings whose label fits."""

    def judge(stored: StoredTables) -> tuple[str, str]:
        scores = _on_resnet20(stored)
        own = {label: seeds for label, seeds in scores.items() if label.startswith("gTop-k") and fits(label)}
        gaps = {label: _to_dense(scores, label) for label in own} or none(NOT_RUN)
        told = ", ".join(
            f"{stated_gap(gap, len(own[label]))} ({label.removeprefix('gTop-k, ')}; seeds: {len(own[label])})"
            for label, gap in gaps.items()
        )
        near = sum(gap > -POINT for gap in gaps.values())
        here = f"points to dense with the same seeds and rate: {told}{_dense_at_best(stored)}"
        return here, word_for(near, len(gaps))

    return judge


def _more_is_better(stored: StoredTables) -> tuple[str, str]:
    scores = [stored.number("p3/density", "gTop-k", f"gTop-k, {density:g}", SCORE) for density in DENSITIES]
    told = ", ".join(f"{score:.2f}" for score in scores) + " % at 0.1, 0.5 and 1 %"
    return told, word_for(scores == sorted(scores), True)


def _growth(stored: StoredTables) -> tuple[str, str]:
    rows = {row.cells[0].split(" (")[0]: row.cells for row in stored.table("p3/traffic", "Bytes a worker").rows}
    top, tree = (first_number(rows["0.001, 128 workers"][at]) for at in (3, 5))
    return f"128 workers: {top:.0f} k and, at the root, {tree:.0f} k entries", word_for(top == 127 and tree == 7, True)


CLAIMS = (
    Claim("p3/convergence", "gTop-k at 0.1 % converges like dense SGD", SAME_ORDER, _at_one_permille),
    Claim("p3/density", "gTop-k is no worse than random-k on the sum", "assumed", _condition),
    Claim("p3/density", "so it converges like dense SGD", SAME_ORDER, _like_dense),
    Claim(
        "beyond/evidence", "P3: gTop-k is no worse than random-k on the sum, on VGG-16 and LSTM-PTB", "assumed",
        _condition_elsewhere,
    ),
    Claim(
        "beyond/evidence", "P3: gTop-k converges like dense SGD on VGG-16 and LSTM-PTB", SAME_ORDER,
        _like_dense_elsewhere,
    ),
    Claim(
        "beyond/evidence", "P3: gTop-k does so on ResNet-20 at 0.1 % with momentum before the residual",
        "not tried by P3",
        _with_momentum_corrected,
    ),
    Claim(
        "beyond/evidence", "P3: gTop-k does so on ResNet-20 in the bytes of 0.1 % with more momentum",
        "not tried by P3",
        _at_these_bytes(lambda label: label.startswith(PLAIN_TREE) and label.endswith("0.9")),
    ),
    Claim(
        "beyond/evidence", "P3: gTop-k does so on ResNet-20 in the bytes of 0.1 % with values of fewer bits",
        "not tried by P3",
        _at_these_bytes(lambda label: not label.startswith(PLAIN_TREE)),
    ),
    Claim(
        "p3/density", "more entries, faster convergence", "its abstract discusses the impact and prints no number",
        _more_is_better,
    ),
    Claim("p3/traffic", "O(k log P) against O(k P) entries", "the orders", _growth),
)  # fmt: skip
