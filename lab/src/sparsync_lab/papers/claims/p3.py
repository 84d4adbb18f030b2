"""What P3 claims, and how that is judged."""

from __future__ import annotations

from contextlib import suppress

from sparsync_lab.papers.claims.claim import Claim, Judgement, sentences, word_for, word_of
from sparsync_lab.papers.claims.stored_tables import (
    SCORE,
    TO_DENSE,
    MissingResult,
    StoredTables,
    first_number,
    raise_missing,
)
from sparsync_lab.papers.differences import MISSING, Held, from_dense, like_dense, near_perplexity
from sparsync_lab.papers.p3 import CONDITION, DENSITIES, ON_OTHERS, OTHERS
from sparsync_lab.papers.run import model_title
from sparsync_lab.papers.traffic import COUNTED, NAMES
from sparsync_lab.report import Table

PLAIN_TREE = "gTop-k, 0.001"
SAME_ORDER = "a rate 'at the same order as the vanilla minibatch SGD'"
NOT_THERE = "not in the abstract; its authors' public code draws the ratio"
NOT_SECURED = "that it holds does not secure convergence"
THE_END = "the end is judged, not the rate"
NOT_THE_RATE = "where one training ends does not test the order of a rate"


def _looks(table: Table) -> tuple[int, int, float]:
    """Return the looks at the condition, how often it did not hold, and the largest ratio."""
    looks, above = (sum(int(first_number(row.cells[at])) for row in table.rows) for at in (1, 4))
    return looks, above, max(first_number(row.cells[2]) for row in table.rows)


def _condition(stored: StoredTables) -> Judgement:
    table = stored.table("p3/density", CONDITION)
    looks, above, worst = _looks(table)
    here = f"holds at {looks - above} of {looks} looks, the largest ratio {worst:.4f}"
    ends = [stored.cell("p3/density", "gTop-k", row.cells[0], SCORE) for row in table.rows]
    hair = f"it is {1 - worst:.4f} below 1 at the closest" if worst < 1 else ""
    told = f"{NOT_SECURED}: these trainings end at {', '.join(ends)} %"
    return Judgement(here, _holds(table, len(DENSITIES)), sentences(hair, told))


def _holds(table: Table, trainings: int) -> str:
    """Return the verdict by all looks of so many trainings, of which some may be missing."""
    looks, above, _ = _looks(table)
    untested = [None] * (trainings - len(table.rows))
    return word_of([*[True] * (looks - above), *[False] * above, *untested])


def _condition_elsewhere(stored: StoredTables) -> Judgement:
    table = stored.table("beyond/evidence", f"{ON_OTHERS}: {CONDITION}")
    seen = {row.cells[0]: row.cells for row in table.rows}
    told, ends, every = [], [], [model_title(model) for model in OTHERS]
    for title in every:
        own = seen.get(title)
        told.append(f"{title} {MISSING}" if own is None else f"{title} {own[1]} looks, the largest ratio {own[2]}")
        with suppress(MissingResult):
            how = stored.table("beyond/evidence", f"{ON_OTHERS}: {title}")
            last = stored.row("beyond/evidence", how.caption, PLAIN_TREE)[1]
            ends.append(f"{last}{' %' if how.headings[1] == SCORE else ''} ({title})")
    unsecured = f"{NOT_SECURED}: these trainings end at {', '.join(ends)}" if ends else ""
    return Judgement("; ".join(told), _holds(table, len(every)), sentences(unsecured))


def _at_one_permille(stored: StoredTables) -> Judgement:
    tree = stored.cell("p3/convergence", "ResNet-20", PLAIN_TREE, TO_DENSE)
    top = stored.find("p3/convergence", "ResNet-20", "topk", TO_DENSE)
    here = f"{from_dense(tree)}, TopK-SGD {from_dense(top) if top else MISSING}"
    return Judgement(here, word_of([like_dense(tree)]), sentences(NOT_THE_RATE))


def _at_higher_densities(stored: StoredTables) -> Judgement:
    gaps = {each: stored.find("p3/density", "gTop-k", f"gTop-k, {each:g}", TO_DENSE) for each in DENSITIES}
    own = [gap for gap in gaps.values() if gap] or raise_missing("gTop-k")
    told = ", ".join(f"{from_dense(gap) if gap else MISSING} at {100 * density:g} %" for density, gap in gaps.items())
    return Judgement(told, word_of(map(like_dense, own), len(gaps)), sentences(NOT_THE_RATE))


def _on_other_models(stored: StoredTables) -> Judgement:
    """Compare gTop-k with dense and TopK-SGD on VGG-16 and LSTM-PTB; one that was not trained leaves it open."""
    told, beside, better = [], [], ""
    parts: list[Held] = []
    for model in OTHERS:
        title = model_title(model)
        try:
            table = stored.table("beyond/evidence", f"{ON_OTHERS}: {title}")
        except MissingResult:
            told.append(f"{title} {MISSING}")
            continue
        rows = {row.cells[0]: dict(zip(table.headings, row.cells, strict=True)) for row in table.rows}
        own = {label: first_number(cells[table.headings[1]]) for label, cells in rows.items()}
        tree, cells = own[PLAIN_TREE], rows[PLAIN_TREE]
        if "dense" not in own:
            told.append(f"{title} {tree:.1f}, dense {MISSING}")
            continue
        dense, less = own["dense"], table.headings[1] != SCORE
        parts.append(near_perplexity(tree, dense, int(cells["seeds"])) if less else like_dense(cells[TO_DENSE]))
        unit = "perplexity, less is better" if less else "%"
        told.append(f"{title} {tree:.1f}, dense {dense:.1f} ({unit})")
        beside += [f"{own['topk']:.1f} ({title}, {cells['steps']} steps)"] if "topk" in own else []
        better = better or _at_another_rate(stored, title, cells["steps"], dense)
    word = word_of(parts, len(OTHERS))
    more = sentences(f"TopK-SGD ends at {', '.join(beside)}" if beside else "", better, NOT_THE_RATE)
    return Judgement("; ".join(told), word, more)


def _at_another_rate(stored: StoredTables, title: str, steps: str, dense: float) -> str:
    """Return what dense reaches in as many steps with another rate than here, if one was searched; less is better."""
    with suppress(MissingResult):
        table = stored.table("beyond/accuracy", f"The search for rates: {title}, {steps} steps")
        cells = stored.row("beyond/accuracy", table.caption, "dense")
        chosen = next((at for at, cell in enumerate(cells) if cell.endswith("*")), None) or raise_missing("a best rate")
        best, rate = first_number(cells[chosen]), table.headings[chosen]
        if best < dense:
            return f"{title} has P1's rate here; with {rate} dense ends at {best:.1f} in {steps} steps"
    return ""


def _growth(stored: StoredTables) -> Judgement:
    rows = {row.cells[0].split(" (")[0]: row.cells for row in stored.table("p3/traffic", "Bytes a worker").rows}
    top, tree = (first_number(rows["0.001, 128 workers"][at]) for at in (3, 5))
    here = f"128 workers: all-gather sends {top:.0f} k entries, gTop-k's root {tree:.0f} k"
    computed = "computed from the tree, not measured"
    with suppress(MissingResult):
        own = [row.cells for row in stored.table("p3/traffic", COUNTED).rows if row.cells[0] == NAMES["gtopk"]]
        ratios = [first_number(cells[3]) for cells in own] or raise_missing(COUNTED)
        most = max(int(cells[1]) for cells in own)
        computed += (
            f"; of gTop-k with up to {most} workers a network interface counted {min(ratios):.3f} to {max(ratios):.3f} "
            "times what is computed, all workers together"
        )
    return Judgement(here, word_for(top == 127 and tree == 7, True), sentences(computed))


CLAIMS = (
    Claim("p3/convergence", f"gTop-k at 0.1 % ends like dense SGD ({THE_END})", SAME_ORDER, _at_one_permille),
    Claim(
        "p3/density", "gTop-k at 0.1, 0.5 and 1 % is no worse than random-k on the sum", NOT_THERE, _condition
    ),
    Claim(
        "p3/density", f"gTop-k at 0.1, 0.5 and 1 % ends like dense SGD ({THE_END})", SAME_ORDER, _at_higher_densities
    ),
    Claim(
        "beyond/evidence", "P3: gTop-k is no worse than random-k on the sum, on VGG-16 and LSTM-PTB", NOT_THERE,
        _condition_elsewhere,
    ),
    Claim(
        "beyond/evidence", f"P3: gTop-k at 0.1 % ends like dense SGD on VGG-16 and LSTM-PTB ({THE_END})", SAME_ORDER,
        _on_other_models, ("beyond/accuracy",),
    ),
    Claim(
        "p3/traffic", "a worker sends O(k log P) entries with gTop-k and O(k P) with all-gather", "the orders", _growth
    ),
)  # fmt: skip
