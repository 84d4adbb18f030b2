"""What P3 claims, and how that is judged."""

from __future__ import annotations

from contextlib import suppress

from sparsync_lab.papers.claim import (
    MISSING,
    POINT,
    SCORE,
    TO_DENSE,
    Claim,
    Judgement,
    StoredTables,
    at_most_partly,
    first_number,
    from_dense,
    like_dense,
    raise_missing,
    sentences,
    word_for,
    word_of,
)
from sparsync_lab.papers.p3 import CONDITION, DENSITIES, ON_OTHERS, OTHERS
from sparsync_lab.papers.run import model_title
from sparsync_lab.report import Table

PLAIN_TREE = "gTop-k, 0.001"
SAME_ORDER = "a rate of the same order, in the abstract"
NEAR = 0.01  # of a perplexity: so near to dense is "like dense"


def _looks(table: Table) -> tuple[int, int, float]:
    """Return the looks at P3's condition, how often it did not hold, and the largest ratio."""
    looks, above = (sum(int(first_number(row.cells[at])) for row in table.rows) for at in (1, 4))
    return looks, above, max(first_number(row.cells[2]) for row in table.rows)


def _condition(stored: StoredTables) -> Judgement:
    looks, above, worst = _looks(stored.table("p3/density", CONDITION))
    here = f"holds at {looks - above} of {looks} looks, the largest ratio {worst:.4f}"
    return Judgement(here, word_for(looks - above, looks))


def _condition_elsewhere(stored: StoredTables) -> Judgement:
    table = stored.table("beyond/evidence", f"{ON_OTHERS}: {CONDITION}")
    looks, above, _ = _looks(table)
    seen = {row.cells[0]: row.cells for row in table.rows}
    told, ends, every = [], [], [model_title(model) for model in OTHERS]
    for title in every:
        own = seen.get(title)
        told.append(f"{title} {MISSING}" if own is None else f"{title} {own[1]} looks, the largest ratio {own[2]}")
        with suppress(LookupError):
            how = stored.table("beyond/evidence", f"{ON_OTHERS}: {title}")
            last = {row.cells[0]: row.cells[1] for row in how.rows}[PLAIN_TREE]
            ends.append(f"{last}{' %' if how.headings[1] == SCORE else ''} ({title})")
    word = at_most_partly(word_for(looks - above, looks), set(every) <= set(seen))
    return Judgement("; ".join(told), word, sentences(f"these trainings end at {', '.join(ends)}" if ends else ""))


def _at_one_permille(stored: StoredTables) -> Judgement:
    tree, top = (stored.cell("p3/convergence", "ResNet-20", how, TO_DENSE) for how in (PLAIN_TREE, "topk"))
    return Judgement(f"{from_dense(tree)}, TopK-SGD {from_dense(top)}", word_of([like_dense(tree)]))


def _at_higher_densities(stored: StoredTables) -> Judgement:
    gaps = {each: stored.cell("p3/density", "gTop-k", f"gTop-k, {each:g}", TO_DENSE) for each in DENSITIES}
    told = ", ".join(f"{from_dense(gap)} at {100 * density:g} %" for density, gap in gaps.items())
    return Judgement(f"{told}", word_of(map(like_dense, gaps.values())))


def _on_other_models(stored: StoredTables) -> Judgement:
    """Compare gTop-k with dense and TopK-SGD on VGG-16 and LSTM-PTB, each as far as it was trained."""
    told, beside, near = [], [], []
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
        unit = "perplexity, less is better" if less else "%"
        told.append(f"{title} {tree:.1f}, dense {dense:.1f} ({unit})")
        beside.append(f"{top:.1f} ({title}, {table.rows[0].cells[table.headings.index('steps')]} steps)")
    word = word_for(sum(near), len(near)) if near else raise_missing("P3's other models")
    more = sentences(f"TopK-SGD ends at {', '.join(beside)}")
    return Judgement("; ".join(told), at_most_partly(word, len(near) == len(OTHERS)), more)


def _growth(stored: StoredTables) -> Judgement:
    rows = {row.cells[0].split(" (")[0]: row.cells for row in stored.table("p3/traffic", "Bytes a worker").rows}
    top, tree = (first_number(rows["0.001, 128 workers"][at]) for at in (3, 5))
    here = f"128 workers: all-gather sends {top:.0f} k entries, gTop-k's root {tree:.0f} k"
    return Judgement(here, word_for(top == 127 and tree == 7, True))


CLAIMS = (
    Claim("p3/convergence", "gTop-k at 0.1 % ends like dense SGD", SAME_ORDER, _at_one_permille),
    Claim(
        "p3/density", "gTop-k at 0.1, 0.5 and 1 % is no worse than random-k on the sum", "assumed", _condition
    ),
    Claim("p3/density", "gTop-k at 0.1, 0.5 and 1 % ends like dense SGD", SAME_ORDER, _at_higher_densities),
    Claim(
        "beyond/evidence", "P3: gTop-k is no worse than random-k on the sum, on VGG-16 and LSTM-PTB", "assumed",
        _condition_elsewhere,
    ),
    Claim(
        "beyond/evidence", "P3: gTop-k at 0.1 % ends like dense SGD on VGG-16 and LSTM-PTB", SAME_ORDER,
        _on_other_models,
    ),
    Claim(
        "p3/traffic", "a worker sends O(k log P) entries with gTop-k and O(k P) with all-gather", "the orders", _growth
    ),
)  # fmt: skip
