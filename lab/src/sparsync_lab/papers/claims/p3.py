"""What P3 claims, what we asked of where gTop-k ends, and how that is judged."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from math import log2

from sparsync_lab.papers.claims.claim import (
    UNDECIDED,
    Claim,
    Judgement,
    partly_as,
    question,
    sentences,
    word_for,
    word_of,
)
from sparsync_lab.papers.claims.p1_models import spread
from sparsync_lab.papers.claims.stored_tables import (
    SCORE,
    TO_DENSE,
    MissingResult,
    StoredTables,
    first_number,
    raise_missing,
)
from sparsync_lab.papers.differences import (
    DIVERGED,
    MISSING,
    UNDER_A_POINT,
    Held,
    from_dense,
    in_words,
    like_dense,
    near_perplexity,
    stated_gap,
)
from sparsync_lab.papers.p3 import CONDITION, DENSITIES, ON_OTHERS, OTHERS
from sparsync_lab.papers.run import model_title
from sparsync_lab.papers.traffic import COUNTED
from sparsync_lab.papers.tuned import SENT
from sparsync_lab.report import Table

PLAIN_TREE = "gTop-k, 0.001"
NOT_CLAIMED = "P3's abstract does not say this: its authors' public code draws the ratio"
NOT_SECURED = "that it holds does not secure convergence"
SAME_ORDER = "a rate 'at the same order as the vanilla minibatch SGD'"
NOT_THE_RATE = f"P3 claims {SAME_ORDER}, which where a training ends does not test"
OUR_TREE = "the tree is ours: what it drops stays in a residual and is not lost"


def _snapshots(table: Table) -> tuple[int, int, float]:
    """Return the snapshots of the condition, how often it did not hold, and the largest ratio."""
    seen, above = (sum(int(first_number(row.cells[at])) for row in table.rows) for at in (1, 4))
    return seen, above, max(first_number(row.cells[2]) for row in table.rows)


def _condition(stored: StoredTables) -> Judgement:
    table = stored.table("p3/density", CONDITION)
    seen, above, worst = _snapshots(table)
    here = f"holds at {seen - above} of {seen} snapshots, the largest ratio {worst:.4f}"
    ends = [stored.cell("p3/density", "gTop-k", row.cells[0], SCORE) for row in table.rows]
    hair = f"it is {1 - worst:.4f} below 1 at the closest" if worst < 1 else ""
    told = f"{NOT_SECURED}: these trainings end at {', '.join(ends)} %"
    return Judgement(here, _holds(table, len(DENSITIES)), sentences(NOT_CLAIMED, hair, told, OUR_TREE))


def _holds(table: Table, trainings: int) -> str:
    """Return the verdict by all snapshots of so many trainings, of which some may be missing."""
    seen, above, _ = _snapshots(table)
    untested = [None] * (trainings - len(table.rows))
    return word_of([*[True] * (seen - above), *[False] * above, *untested])


def _condition_elsewhere(stored: StoredTables) -> Judgement:
    table = stored.table("beyond/evidence", f"{ON_OTHERS}: {CONDITION}")
    seen = {row.cells[0]: row.cells for row in table.rows}
    told, ends, every = [], [], [model_title(model) for model in OTHERS]
    for title in every:
        own = seen.get(title)
        told.append(f"{title} {MISSING}" if own is None else f"{title} {own[1]} snapshots, the largest ratio {own[2]}")
        with suppress(MissingResult):
            how = stored.table("beyond/evidence", f"{ON_OTHERS}: {title}")
            cells = _cells(stored, "beyond/evidence", how.caption, PLAIN_TREE)
            last = f"{cells[how.headings[1]]}{' %' if how.headings[1] == SCORE else ''}"
            ends.append(f"{last} ({title}, {cells['steps']} steps)")
    unsecured = f"{NOT_SECURED}: these trainings end at {', '.join(ends)}" if ends else ""
    return Judgement("; ".join(told), _holds(table, len(every)), sentences(NOT_CLAIMED, unsecured, OUR_TREE))


def _rate(stored: StoredTables) -> Judgement:
    """Tell that no training here tests the order of a rate of convergence."""
    ends = from_dense(stored.cell("p3/convergence", "ResNet-20", PLAIN_TREE, TO_DENSE))
    return Judgement(f"the order of a rate is not tested; at 0.1 % gTop-k ends {ends}", UNDECIDED)


def _at_one_permille(stored: StoredTables) -> Judgement:
    tree = stored.cell("p3/convergence", "ResNet-20", PLAIN_TREE, TO_DENSE)
    top = stored.find("p3/convergence", "ResNet-20", "topk", TO_DENSE)
    here = f"{from_dense(tree)}, TopK-SGD {from_dense(top) if top else MISSING}"
    sent = (stored.find("p3/convergence", "ResNet-20", label, SENT) for label in (PLAIN_TREE, "topk"))
    each = [f"{mb} with {name}" for name, mb in zip(("gTop-k", "TopK-SGD"), sent, strict=True) if mb]
    return Judgement(
        here, word_of([like_dense(tree)]), sentences(f"a worker sends {', '.join(each)}", NOT_THE_RATE, OUR_TREE)
    )


def _at_higher_densities(stored: StoredTables) -> Judgement:
    gaps = {each: stored.find("p3/density", "gTop-k", f"gTop-k, {each:g}", TO_DENSE) for each in DENSITIES}
    own = [gap for gap in gaps.values() if gap] or raise_missing("gTop-k")
    told = ", ".join(f"{from_dense(gap) if gap else MISSING} at {100 * density:g} %" for density, gap in gaps.items())
    more = sentences(_in_fewer_bytes(stored), NOT_THE_RATE, OUR_TREE)
    return Judgement(told, word_of(map(like_dense, own), len(gaps)), more)


def _in_fewer_bytes(stored: StoredTables) -> str:
    """Return how gTop-k ends beside TopK-SGD where it sends less; empty if that was not trained."""
    told = []
    with suppress(MissingResult):
        top = _cells(stored, "p3/convergence", "ResNet-20", "topk")
        for density in DENSITIES:
            with suppress(MissingResult):
                tree = _cells(stored, "p3/density", "gTop-k", f"gTop-k, {density:g}")
                if first_number(tree[SENT]) < first_number(top[SENT]):
                    told.append(f"{_beside(tree, top)} at {tree['density']} ({_ends(tree)})")
        beside = f"TopK-SGD at {top['density']} ({_ends(top)})"
    return f"in fewer bytes than {beside} gTop-k ends {', '.join(told)}" if told else ""


def _cells(stored: StoredTables, item: str, caption: str, row: str) -> dict[str, str]:
    """Return a row by its headings."""
    return dict(zip(stored.table(item, caption).headings, stored.row(item, caption, row), strict=True))


def _ends(cells: Mapping[str, str]) -> str:
    return f"{cells[SENT]}, {cells[SCORE]} %, {in_words(int(cells['seeds']))}"


def _beside(own: Mapping[str, str], other: Mapping[str, str]) -> str:
    """Return whether one training ends higher than another, as far as their seeds tell."""
    seeds = min(int(cells["seeds"]) for cells in (own, other))
    gap = stated_gap(first_number(own[SCORE]) - first_number(other[SCORE]), seeds)
    if gap in (UNDER_A_POINT, DIVERGED):
        return f"{gap} away" if gap == UNDER_A_POINT else gap
    return "higher" if gap.startswith("+") else "lower"


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
        seeds, gap = int(cells["seeds"]), cells[TO_DENSE]
        parts.append(near_perplexity(tree, dense, seeds) if less else like_dense(gap, seeds, spread(stored, title)))
        unit = "perplexity, less is better" if less else "%"
        told.append(f"{title} {tree:.1f}, dense {dense:.1f} ({unit}, {cells['steps']} steps)")
        if "topk" in own:
            beside.append(f"{own['topk']:.1f} ({title}) and sends {rows['topk'][SENT]}, gTop-k {cells[SENT]}")
        better = better or _at_another_rate(stored, title, cells["steps"], dense)
    word = word_of(parts, len(OTHERS))
    top = f"TopK-SGD ends at {'; at '.join(beside)}" if beside else ""
    more = sentences(top, better, NOT_THE_RATE, OUR_TREE)
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
    """Compare what is sent with P - 1 and log2 P messages. Of one worker that is computed alone, and reproduces the
    claim in part."""
    rows = [row.cells for row in stored.table("p3/traffic", "Bytes a worker").rows]
    sent = [(first_number(c[0].split(", ")[1]), first_number(c[3]), first_number(c[5])) for c in rows]
    held = [top == workers - 1 and tree == log2(workers) for workers, top, tree in sent]
    workers, top, tree = max(sent)
    here = f"{workers:.0f} workers: all-gather sends {top:.0f} k entries, gTop-k's root {tree:.0f} k"
    told = f"P − 1 and log₂ P times k in {sum(held)} of {len(held)} settings, computed from the tree"
    with suppress(MissingResult):
        own = [row.cells for row in stored.table("p3/traffic", COUNTED).rows] or raise_missing(COUNTED)
        ratios, most = [first_number(cells[3]) for cells in own], max(int(cells[1]) for cells in own)
        told += (
            f"; of both with up to {most} workers a network interface counted {min(ratios):.3f} to {max(ratios):.3f} "
            "times what is computed, all workers together; one worker alone was not counted"
        )
    found = Judgement(here, word_for(sum(held), len(held)), sentences(told))
    return partly_as("what one worker sends is computed", found)


CLAIMS = (
    Claim("p3/convergence", "gTop-k S-SGD converges at a rate of the same order as dense SGD", SAME_ORDER, _rate),
    Claim(
        "p3/traffic", "a worker sends O(k log P) entries with gTop-k and O(k P) with all-gather", "the orders", _growth
    ),
)  # fmt: skip
QUESTIONS = (
    question("p3/density", "is gTop-k at 0.1, 0.5 and 1 % no worse than random-k on the sum?", _condition),
    question(
        "beyond/evidence", "is gTop-k no worse than random-k on the sum, on VGG-16 and LSTM-PTB?", _condition_elsewhere
    ),
    question("p3/convergence", "does gTop-k at 0.1 % end like dense on ResNet-20?", _at_one_permille),
    question(
        "p3/density", "does gTop-k at 0.1, 0.5 and 1 % end like dense on ResNet-20?", _at_higher_densities,
        ("p3/convergence",),
    ),
    question(
        "beyond/evidence", "does gTop-k at 0.1 % end like dense on VGG-16 and LSTM-PTB?", _on_other_models,
        ("beyond/accuracy",),
    ),
)  # fmt: skip
