"""What P1 claims of the time of selection (figure 4), and how that is judged."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import inf

from sparsync_lab.papers.claims.claim import (
    Claim,
    Judge,
    Judgement,
    at_most_partly,
    sentences,
    undecided_as,
    word_for,
    word_of,
)
from sparsync_lab.papers.claims.p1_times import (
    COPIED,
    LINS_DGC,
    PUBLISHED,
    SUMMED,
    faster,
    how_many,
    our_device,
    summed_masks,
)
from sparsync_lab.papers.claims.stored_tables import StoredTables, first_number, raise_missing
from sparsync_lab.papers.iteration_times import THEIRS
from sparsync_lab.papers.published import P1_STEP_TIMES
from sparsync_lab.papers.selection_times import AUTHORS_DGC, LEAST, METHODS, ORDER
from sparsync_lab.report import Table

SLIGHT = 0.1  # of a step's compute: a selection that takes no more is slight
RESNET_50 = "25.6 M"  # entries
DGC = ORDER[1]
PRINTED, AUTHORS = (METHODS[name] for name in ORDER[2:])  # columns of the forms of Gaussian_k
LINS_COLUMN, AUTHORS_COLUMN = METHODS[DGC], METHODS[AUTHORS_DGC]  # of DGC_k
Compared = dict[str, tuple[bool, str]]  # whether something holds, and the times in words, by size
Compare = Callable[[Table, bool], Compared]  # of a table; of sizes below P1's, or of P1's
ONE_MASK = "on a normal vector, where one mask is enough; not timed with error feedback"


def _times(table: Table, heading: str, small: bool = False) -> dict[str, float]:
    """Return a column in ms, by size; empty if it was not timed.

    Args:
        small: of the sizes below P1's instead of P1's.
    """
    if heading not in table.headings:
        return {}
    at = list(table.headings).index(heading)
    sizes = {row.cells[0]: row.cells[at] for row in table.rows if (first_number(row.cells[0]) * 1e6 < LEAST) == small}
    return {size: first_number(cell) for size, cell in sizes.items() if cell != "–"}


def _how(table: Table) -> str:
    return "alone" if "alone" in table.caption else "with error feedback"


def _places(held: Sequence[bool], sizes: Mapping[str, object]) -> str:
    """Return at how many of P1's sizes and ways to measure something holds, and which sizes these are."""
    first, last = ([*sizes][at] for at in (0, -1))
    named = f"{first.removesuffix(' M')}–{last}" if len(sizes) > 1 else last
    ways = " and ways to measure" if len(held) > len(sizes) else ""
    return f"at {how_many(sum(held), len(held))} sizes{ways} ({named})"


def _compared(stored: StoredTables, compare: Compare) -> tuple[list[Compared], list[bool], str]:
    """Return what is compared at P1's sizes, by table, what holds there, and in words where a smaller size says
    otherwise."""
    tables = stored.result("p1/fig4").tables
    timed = [found for table in tables if (found := compare(table, False))]
    held = [one for found in timed for one, _ in found.values()] or raise_missing("P1's sizes")
    others = [said for table in tables for one, said in compare(table, True).values() if one not in held]
    return timed, held, f"below P1's sizes another order holds: {', '.join(others)}" if others else ""


def _faster_than_topk(form: str) -> Judge:
    """Compare Top-k and a form of Gaussian-k in plain PyTorch, at P1's sizes: alone, where that was measured, and with
    error feedback. What is told is ResNet-50's size, of which P1 gives a number, and smaller sizes where these say
    otherwise. The authors' form stops at the first mask that it accepts: without error feedback that is its best case.
    """

    def pairs(table: Table, small: bool) -> Compared:
        own, top = (_times(table, heading, small) for heading in (form, METHODS[ORDER[0]]))
        told = {size: f"{_how(table)}: torch.topk {top[size]:.2f} ms, Gaussian-k {ms:.2f}" for size, ms in own.items()}
        return {size: (faster(ms, top[size]), f"{size} {told[size]}") for size, ms in own.items()}

    def judge(stored: StoredTables) -> Judgement:
        timed, held, otherwise = _compared(stored, pairs)
        told = [found[RESNET_50 if RESNET_50 in found else [*found][-1]][1] for found in timed]
        kernels = [stored.number("p1/fig4", "Time of selection with", RESNET_50, f"ours: {name}")
                   for name in ("topk", "gaussian")]  # fmt: skip
        ours = f"our kernels take {kernels[0]:.2f} and {kernels[1]:.2f} ms with error feedback"
        best = form == AUTHORS and not any(
            _times(table, form) for table in stored.result("p1/fig4").tables if _how(table) != "alone"
        )
        here = f"{stored.device('p1/fig4')}, {told[0]}; faster {_places(held, timed[0])}" + f"; {ONE_MASK}" * best
        word = at_most_partly(word_for(sum(held), len(held)), complete=not best)
        ways = [
            f"{_how(table)} {how_many(sum(one for one, _ in found.values()), len(found))}"
            for table, found in zip(stored.result("p1/fig4").tables, timed, strict=False)
        ]
        where = f"faster at sizes: {', '.join(ways)}; alone, on a normal vector, one mask is enough"
        said = sentences(*told[1:], where if form == AUTHORS and not best else "", otherwise, ours)
        if not summed_masks(stored, "p1/fig4"):
            return Judgement(here, word, said)
        return undecided_as(COPIED, Judgement(here, word, f"{said} {sentences(SUMMED)}"))

    return judge


def _slow_dgc(stored: StoredTables) -> Judgement:
    """Judge whether DGC_k is slow where d is large: whether anything else in PyTorch is faster than it. P1's text has
    Lin et al.'s, its authors' code another: as long as that is not timed, a fast one leaves it open."""

    def pairs(form: str) -> Compare:
        def compare(table: Table, small: bool) -> Compared:
            own, *others = (
                _times(table, name, small) for name in (form, *(METHODS[name] for name in ORDER if name != DGC))
            )
            rest = {size: min(other.get(size, inf) for other in others) for size in own}
            told = {size: f"{_how(table)} {ms:.2f} ms, the fastest other {rest[size]:.2f}" for size, ms in own.items()}
            return {size: (faster(rest[size], ms), f"{size} {told[size]}") for size, ms in own.items()}

        return compare

    timed, slower, otherwise = _compared(stored, pairs(LINS_COLUMN))
    told = [*timed[0].values()][-1][1]
    fastest = _places([not held for held in slower], timed[0])
    if not any(_times(table, AUTHORS_COLUMN) for table in stored.result("p1/fig4").tables):
        word = word_of(held or None for held in slower)
        return Judgement(f"the fastest of P1's in PyTorch {fastest}; {LINS_DGC}", word, sentences(told, otherwise))
    timed_theirs, slow, _ = _compared(stored, pairs(AUTHORS_COLUMN))
    here = f"in its authors' code the fastest of P1's {_places([not held for held in slow], timed_theirs[0])}"
    here += f"; Lin et al.'s, as in P1's text, at {how_many(slower.count(False), len(slower))}"
    code = f"in its authors' code, which permutes all d entries, {[*timed_theirs[0].values()][-1][1]}"
    word = at_most_partly(word_of(slow), complete=all(slower))
    return Judgement(here, word, sentences(code, f"Lin et al.'s: {told}", otherwise))


def _beside_compute(method: str, slight: bool) -> Judge:
    """Judge whether selection with error feedback is slight beside the compute of a step, or is not. What P1's own
    table has beside compute, and how times grow with the entries, is told.

    Args:
        method: of table 2.
        slight: what is claimed; else that it is not.
    """
    published = [100 * (100 / shares[PUBLISHED.index(method)] - 1) for *_, shares in P1_STEP_TIMES]
    least, most = min(published), max(published)

    def judge(stored: StoredTables) -> Judgement:
        rows = stored.result("p1/table2").rows or raise_missing("what was measured")
        times = zip(*(rows[name] for name in ("model", "method", "selection_s", "compute_s")), strict=True)
        shares = {
            model: float(took) / float(own) for model, name, took, own in times if name == method and took and own
        }
        held = [(share <= SLIGHT) == slight for share in shares.values()]
        told = ", ".join(f"{model} {100 * share:.2g} %" for model, share in shares.items())
        p1s = f"in P1's own table 2 selection and exchange take {least:,.0f} to {most:,.0f} % of compute"
        grown = [_grown(table, METHODS[f"{THEIRS[method]} (PyTorch)"]) for table in stored.result("p1/fig4").tables]
        here = f"{told} of compute ({our_device(stored)})"
        summed = SUMMED if method == "Gaussian" and summed_masks(stored, "p1/table2") else ""
        return Judgement(here, word_for(sum(held), len(held)), sentences(p1s, *grown, summed))

    return judge


def _grown(table: Table, heading: str) -> str:
    """Return how times grow from the least to the most entries of P1's sizes."""
    sizes = [(first_number(size), ms) for size, ms in _times(table, heading).items()]
    if len(sizes) < 2:
        return ""
    (least, low), *_, (most, high) = sizes
    return f"{_how(table)} {most / least:.1f} times the entries take {high / low:.1f} times as long"


EFFICIENT = '"much more efficient than existing top-k selection algorithms on GPUs"; V100, 25.6 M: top-k 400 ms'
CLAIMS = (
    Claim(
        "p1/fig4", "on a GPU Gaussian-k as printed is faster than top-k selection",
        EFFICIENT, _faster_than_topk(PRINTED),
    ),
    Claim(
        "p1/fig4", "on a GPU Gaussian-k in its authors' form is faster than top-k selection", EFFICIENT,
        _faster_than_topk(AUTHORS),
    ),
    Claim(
        "p1/fig4", "DGC_k is slow where d is large", '"also becomes inefficient if d is large"', _slow_dgc,
    ),
    Claim(
        "p1/fig4", f"top-k selection takes more than {100 * SLIGHT:g} % of a step's compute",
        '"becomes very slow with a large number of parameters"', _beside_compute("TopK", slight=False), ("p1/table2",),
    ),
    Claim(
        "p1/fig4", f"Gaussian-k as printed takes at most {100 * SLIGHT:g} % of a step's compute",
        '"only generates slight overheads"', _beside_compute("Gaussian", slight=True), ("p1/table2",),
    ),
)  # fmt: skip
