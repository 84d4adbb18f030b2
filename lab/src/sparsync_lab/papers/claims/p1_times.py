"""What P1 claims of times, and how that is judged."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from math import inf

from sparsync_lab.papers.claims.claim import Claim, Judge, Judgement, sentences, word_for
from sparsync_lab.papers.claims.stored_tables import MissingResult, StoredTables, first_number, raise_missing
from sparsync_lab.papers.iteration_times import AT_K, DENSITY, WITH_P1S_COMPUTE
from sparsync_lab.papers.published import P1_STEP_TIMES
from sparsync_lab.papers.selection_times import LEAST, METHODS, ORDER
from sparsync_lab.report import Table

RESNET_50 = "25.6 M"  # entries
PRINTED, AUTHORS = (METHODS[name] for name in ORDER[2:])  # forms of Gaussian_k
WITH_P1S_TOPK = "TopK-SGD with P1's 0.4 s"  # table of p1/table2
PREDICTED = {"Dense": "Dense, fitted", "TopK": "TopK, other models", "DGC": "DGC, other models",
             "Gaussian": "Gaussian, other models"}  # fmt: skip
PUBLISHED = ("Dense", "TopK", "DGC", "Gaussian")  # columns of P1's table 2
# How many times faster GaussianK-SGD is, at least and at most, as P1's text says.
FASTER = {"Dense": (1.19, 2.33), "TopK": (1.36, 3.63), "DGC": (1.11, 1.51)}
Compared = dict[str, tuple[bool, str]]  # whether something holds, and the times in words, by size
Compare = Callable[[Table, bool], Compared]  # of a table; of sizes below P1's, or of P1's
HOW = "compute is P1's, the exchange is modelled, and Gaussian-k sends k entries"


def _of(held: int, every: int) -> str:
    return f"all {every}" if held == every else f"{held} of {every}" if held else f"none of {every}"


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
    return f"at {_of(sum(held), len(held))} sizes and ways to measure ({named})"


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
    otherwise."""

    def pairs(table: Table, small: bool) -> Compared:
        own, top = (_times(table, heading, small) for heading in (form, METHODS[ORDER[0]]))
        return {size: (ms < top[size], f"{size} {_how(table)}: torch.topk {top[size]:.2f} ms, Gaussian-k {ms:.2f}")
                for size, ms in own.items()}  # fmt: skip

    def judge(stored: StoredTables) -> Judgement:
        timed, faster, otherwise = _compared(stored, pairs)
        told = [found[RESNET_50 if RESNET_50 in found else [*found][-1]][1] for found in timed]
        kernels = [stored.number("p1/fig4", "Time of selection with", RESNET_50, f"ours: {name}")
                   for name in ("topk", "gaussian")]  # fmt: skip
        ours = f"our kernels take {kernels[0]:.2f} and {kernels[1]:.2f} ms with error feedback"
        here = f"{stored.device('p1/fig4')}, {told[0]}; faster {_places(faster, timed[0])}"
        return Judgement(here, word_for(sum(faster), len(faster)), sentences(*told[1:], otherwise, ours))

    return judge


def _slow_dgc(stored: StoredTables) -> Judgement:
    """Judge whether DGC_k is slow where d is large: whether anything else in PyTorch is faster than it."""

    def pairs(table: Table, small: bool) -> Compared:
        own, *others = (_times(table, METHODS[name], small) for name in (ORDER[1], ORDER[0], *ORDER[2:]))
        rest = {size: min(other.get(size, inf) for other in others) for size in own}
        return {size: (rest[size] < ms, f"{size} {_how(table)} {ms:.2f} ms, the fastest other {rest[size]:.2f}")
                for size, ms in own.items()}  # fmt: skip

    timed, slower, otherwise = _compared(stored, pairs)
    fastest = _places([not held for held in slower], timed[0])
    here = f"the fastest of P1's in PyTorch {fastest}; {[*timed[0].values()][-1][1]}"
    return Judgement(here, word_for(sum(slower), len(slower)), sentences(otherwise))


def _here(stored: StoredTables) -> str:
    """Return on what the selections of table 2 were timed."""
    return f"our {stored.device('p1/table2')}"


def _order_of_times(stored: StoredTables) -> Judgement:
    """Compare dense and Top-k with P1's time of selection, and with ours."""
    models = [row.cells[0] for row in stored.table("p1/table2", WITH_P1S_TOPK).rows]

    def slower(caption: str) -> int:
        pairs = [[stored.number("p1/table2", caption, model, name) for name in ("TopK", "Dense")] for model in models]
        return sum(top > dense for top, dense in pairs)

    top, dense = (stored.cell("p1/table2", WITH_P1S_TOPK, "ResNet-50", name) for name in ("TopK", "Dense"))
    theirs, ours = slower(WITH_P1S_TOPK), slower(WITH_P1S_COMPUTE)
    here = (
        f"slower in {_of(theirs, len(models))} models with P1's 0.4 s top-k, in {_of(ours, len(models))} with that of "
        f"{_here(stored)}"
    )
    detail = sentences(f"with P1's 0.4 s ResNet-50 takes {top}, dense {dense}, in brackets as published")
    return Judgement(here, word_for(theirs + ours, 2 * len(models)), detail)


def _order_of_methods(stored: StoredTables) -> Judgement:
    """Compare P1's three sparse methods at k entries, with our time of selection."""
    caption, names = WITH_P1S_COMPUTE, (AT_K, "DGC", "TopK")
    models = [row.cells[0] for row in stored.table("p1/table2", caption).rows]
    times = {model: [stored.number("p1/table2", caption, model, name) for name in names] for model in models}
    first = sum(own[0] == min(own) for own in times.values())
    last = sum(own[2] == max(own) for own in times.values())
    as_timed = sum(
        stored.number("p1/table2", caption, model, "Gaussian") < min(own[1:]) for model, own in times.items()
    )
    here = (
        f"at equal counts Gaussian-k is the fastest in {_of(first, len(models))} models, Top-k the slowest in "
        f"{_of(last, len(models))} (selection on {_here(stored)})"
    )
    told = ", ".join(f"{name} {seconds:.4f} s" for name, seconds in zip(names, times["ResNet-50"], strict=True))
    measured = stored.result("p1/table2").rows
    keys = list(zip(measured["model"], measured["method"], strict=True))
    sent, took, entries = ({key: float(own or 0) for key, own in zip(keys, measured[name], strict=True)}
                           for name in ("sent", "selection_s", "entries"))  # fmt: skip
    at = "ResNet-50", "Gaussian"
    share = 100 * sent[at] / (DENSITY * entries[at])
    gauss, top = (1e3 * took["ResNet-50", name] for name in ("Gaussian", "TopK"))
    fewer = (
        f"on the synthetic gradient timed here Gaussian-k as printed sends {share:.2g} % of k, and with so few it is "
        f"the fastest in {_of(as_timed, len(models))}"
    )
    why = f"its selection takes {gauss:.2f} ms, Top-k's {top:.2f}"
    return Judgement(here, word_for(first + last, 2 * len(models)), sentences(f"ResNet-50: {told}", why, fewer))


def _printed(other: str) -> list[float]:
    """Return by P1's own table how many times faster GaussianK-SGD is, in its models."""
    return [own[PUBLISHED.index(other)] / own[-1] for _, _, _, own, _ in P1_STEP_TIMES]


def _speedup(other: str) -> Judge:
    """Compare how many times faster GaussianK-SGD is with our time of selection, at k entries: whether that lies in the
    range that P1 states, or its table has. What the planner makes of P1's own times is told beside."""
    exact = _printed(other)
    least, most = min(FASTER[other][0], min(exact)), max(FASTER[other][1], max(exact))

    def judge(stored: StoredTables) -> Judgement:
        models = [row.cells[0] for row in stored.table("p1/table2", WITH_P1S_COMPUTE).rows]

        def ratios(item: str, caption: str, *pair: str) -> list[float]:
            times = [[stored.number(item, caption, model, name) for name in pair] for model in models]
            return [slow / fast for slow, fast in times]

        measured = ratios("p1/table2", WITH_P1S_COMPUTE, other, AT_K)
        held = [least <= ratio <= most for ratio in measured]
        here = f"{_range(measured)} with selection on {_here(stored)} ({sum(held)} of {len(held)} in range)"
        planned = ""
        with suppress(MissingResult):
            found = ratios("p1/table2-model", "Iteration time", PREDICTED[other], PREDICTED["Gaussian"])
            planned = f"the planner, which takes selection from P1's own times of other models, has {_range(found)}"
        own, stated = _range(exact), _range(FASTER[other])
        table = "" if own == stated else f"P1's own table 2 gives {own}"
        return Judgement(here, word_for(sum(held), len(held)), sentences(table, HOW, planned))

    return judge


def _range(times: Sequence[float]) -> str:
    return f"{min(times):.2f}× to {max(times):.2f}×"


DENSE, TOPK, DGC, GAUSSIAN = next(times for _, title, _, times, _ in P1_STEP_TIMES if title == "ResNet-50")
ON_A_V100 = 'V100, 25.6 M: top-k 400 ms; Gaussian-k "only generates slight overheads"'
CLAIMS = (
    Claim(
        "p1/fig4", "on a GPU Gaussian-k as printed is faster than top-k selection",
        ON_A_V100, _faster_than_topk(PRINTED),
    ),
    Claim(
        "p1/fig4", "on a GPU Gaussian-k in its authors' form is faster than top-k selection", ON_A_V100,
        _faster_than_topk(AUTHORS),
    ),
    Claim(
        "p1/fig4", "DGC_k is slow where d is large", '"also becomes inefficient if d is large"', _slow_dgc,
    ),
    Claim(
        "p1/table2", "at 10 Gbit/s TopK-SGD is slower than dense",
        f"4 of 4; ResNet-50 {TOPK:.3f} s against {DENSE:.3f}",
        _order_of_times,
    ),
    Claim(
        "p1/table2", "of the sparse methods GaussianK-SGD is the fastest, TopK-SGD the slowest",
        f"4 of 4; ResNet-50 {GAUSSIAN:.3f}, {DGC:.3f} (DGC), {TOPK:.3f} s", _order_of_methods,
    ),
    *(
        Claim(
            "p1/table2", f"GaussianK-SGD is as many times faster than {other}-SGD as P1 states", _range(stated),
            _speedup(other), ("p1/table2-model",),
        )
        for other, stated in FASTER.items()
    ),
)  # fmt: skip
