"""What P1 claims of iteration times (table 2), and how that is judged."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from sparsync_lab.papers.claims.claim import (
    Claim,
    Judge,
    Judgement,
    partly_as,
    sentences,
    undecided_as,
    word_for,
    word_of,
)
from sparsync_lab.papers.claims.stored_tables import MissingResult, StoredTables, first_number
from sparsync_lab.papers.iteration_times import AT_K, DENSITY, MEASURED, WITH_P1S_COMPUTE
from sparsync_lab.papers.published import P1_STEP_TIMES
from sparsync_lab.papers.selection_times import AUTHORS_DGC, METHODS, SUMMED_MASKS

EQUAL = 0.01  # of a time: what is closer is equal
WITH_P1S_TOPK = "TopK-SGD with P1's 0.4 s"  # table of p1/table2
PREDICTED = {"Dense": "Dense, fitted", "TopK": "TopK, other models", "DGC": "DGC, other models",
             "Gaussian": "Gaussian, other models"}  # fmt: skip
PUBLISHED = ("Dense", "TopK", "DGC", "Gaussian")  # columns of P1's table 2
# How many times faster GaussianK-SGD is, at least and at most, as P1's text says.
FASTER = {"Dense": (1.19, 2.33), "TopK": (1.36, 3.63), "DGC": (1.11, 1.51)}
LINS_DGC = "DGC as Lin et al. have it, not as P1's authors"
COPIED = "our count copies the mask"
SUMMED = "each mask of Gaussian-k was summed, which copies it; its authors' code does not, and takes less"
HOW = "the exchange is modelled, and Gaussian-k sends k entries"


def faster(ms: float, than: float) -> bool:
    """Return whether a time is shorter than another, and not equal to it."""
    return than / ms - 1 >= EQUAL


def how_many(held: int, every: int) -> str:
    """Return how many of them it is, in words."""
    return f"all {every}" if held == every else f"{held} of {every}" if held else f"none of {every}"


def _modelled(found: Judgement) -> Judgement:
    """Return the judgement of a whole iteration: its exchange is modelled."""
    return partly_as("the exchange is modelled", found)


def our_device(stored: StoredTables) -> str:
    """Return on what selections and compute of table 2 were timed."""
    return f"our {stored.device('p1/table2')}"


def summed_masks(stored: StoredTables, item: str) -> bool:
    """Return whether what an item shows was measured while Gaussian-k in PyTorch summed its masks."""
    return not SUMMED_MASKS.isdisjoint(stored.result(item).where.get("commit", "").split(", "))


def _order_of_times(stored: StoredTables) -> Judgement:
    """Compare dense and Top-k with our time of selection. What P1's makes of it is told beside."""
    models = [row.cells[0] for row in stored.table("p1/table2", WITH_P1S_COMPUTE).rows]

    def slower(caption: str) -> int:
        pairs = [[stored.number("p1/table2", caption, model, name) for name in ("Dense", "TopK")] for model in models]
        return sum(faster(*pair) for pair in pairs)

    ours = slower(WITH_P1S_COMPUTE)
    here = f"slower in {how_many(ours, len(models))} models with selection on {our_device(stored)}"
    planned = ""
    with suppress(MissingResult):
        top, dense = (stored.cell("p1/table2", WITH_P1S_TOPK, "ResNet-50", name) for name in ("TopK", "Dense"))
        theirs = how_many(slower(WITH_P1S_TOPK), len(models))
        planned = (
            f"the planner, with P1's 0.4 s of selection, has it slower in {theirs}: "
            f"ResNet-50 takes {top}, dense {dense}, in brackets as published"
        )
    return _modelled(Judgement(here, word_for(ours, len(models)), sentences(planned)))


def _order_of_methods(stored: StoredTables) -> Judgement:
    """Compare P1's three sparse methods at k entries, with our time of selection."""
    caption, names = WITH_P1S_COMPUTE, (AT_K, "DGC", "TopK")
    models = [row.cells[0] for row in stored.table("p1/table2", caption).rows]
    times = {model: [stored.number("p1/table2", caption, model, name) for name in names] for model in models}
    first = sum(faster(own[0], min(own[1:])) for own in times.values())
    last = sum(faster(max(own[:2]), own[2]) for own in times.values())
    as_timed = sum(
        faster(stored.number("p1/table2", caption, model, "Gaussian"), min(own[1:])) for model, own in times.items()
    )
    here = (
        f"at equal counts Gaussian-k is fastest in {how_many(first, len(models))} models, Top-k "
        f"slowest in {how_many(last, len(models))} ({our_device(stored)}, Lin et al.'s DGC)"
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
        f"the fastest in {how_many(as_timed, len(models))}"
    )
    why = f"its selection takes {gauss:.2f} ms, Top-k's {top:.2f}"
    summed = summed_masks(stored, "p1/table2")
    detail = sentences(f"ResNet-50: {told}", why, fewer, LINS_DGC, SUMMED if summed else "")
    found = _modelled(Judgement(here, word_for(first + last, 2 * len(models)), detail))
    return undecided_as(COPIED, found) if summed else found


def _printed(other: str) -> list[float]:
    """Return by P1's own table how many times faster GaussianK-SGD is, in its models."""
    return [own[PUBLISHED.index(other)] / own[-1] for _, _, _, own, _ in P1_STEP_TIMES]


def _speedup(other: str) -> Judge:
    """Compare how many times faster GaussianK-SGD is with our time of selection, at k entries: whether that lies in the
    range that P1 states, or its table has. What the planner makes of P1's own times is told beside. DGC of P1's authors
    does more than the one that was timed: where that leaves too little, it is open."""
    exact = _printed(other)
    least, most = min(FASTER[other][0], min(exact)), max(FASTER[other][1], max(exact))

    def judge(stored: StoredTables) -> Judgement:
        models = [row.cells[0] for row in stored.table("p1/table2", WITH_P1S_COMPUTE).rows]

        def ratios(item: str, caption: str, *pair: str) -> list[float]:
            times = [[stored.number(item, caption, model, name) for name in pair] for model in models]
            return [slow / fast for slow, fast in times]

        measured = ratios("p1/table2", WITH_P1S_COMPUTE, other, AT_K)
        less = None if other == "DGC" else False
        held = [less if ratio < least else ratio <= most for ratio in measured]
        here = f"{_range(measured)} with selection on {our_device(stored)} ({held.count(True)} of {len(held)} in range)"
        here += f"; {LINS_DGC}" * (other == "DGC")
        planned = ""
        with suppress(MissingResult):
            found = ratios("p1/table2-model", "Iteration time", PREDICTED[other], PREDICTED["Gaussian"])
            planned = f"the planner, which takes selection from P1's own times of other models, has {_range(found)}"
        theirs = _with_authors_dgc(stored) if other == "DGC" else ""
        own, stated = _range(exact), _range(FASTER[other])
        table = "" if own == stated else f"P1's own table 2 gives {own}"
        return _modelled(Judgement(here, word_of(held), sentences(table, f"compute is P1's, {HOW}", theirs, planned)))

    return judge


def _with_authors_dgc(stored: StoredTables) -> str:
    """Return what DGC of P1's authors makes of ResNet-50's iteration, of whose size figure 4 has its time; empty if it
    was not timed."""
    with suppress(MissingResult):
        ms = stored.number("p1/fig4", "Time of selection with", "25.6 M", METHODS[AUTHORS_DGC])
        rows = stored.result("p1/table2").rows
        lins = next(took for *at, took in zip(rows["model"], rows["method"], rows["selection_s"], strict=True)
                    if at == ["ResNet-50", "DGC"])  # fmt: skip
        dgc, gauss = (stored.number("p1/table2", WITH_P1S_COMPUTE, "ResNet-50", name) for name in ("DGC", AT_K))
        ratio = (dgc - float(lins or 0) + ms / 1e3) / gauss
        return f"with the {ms:.2f} ms that DGC of P1's authors takes in figure 4, ResNet-50 has {ratio:.2f}×"
    return ""


def _efficiency(stored: StoredTables) -> Judgement:
    """Judge VGG-16's scaling efficiency at k entries, with P1's compute and with ours."""
    shares = []
    for caption in (WITH_P1S_COMPUTE, MEASURED):
        _, compute, *_ = stored.row("p1/table2", caption, "VGG-16")
        shares.append(100 * first_number(compute) / stored.number("p1/table2", caption, "VGG-16", AT_K))
    ours = our_device(stored)
    here = f"{shares[0]:.1f} % with P1's compute, {shares[1]:.1f} % with that of {ours}, which selects in both"
    word = word_for(sum(share >= EFFICIENCY for share in shares), len(shares))
    return _modelled(Judgement(here, word, sentences(HOW)))


def _range(times: Sequence[float]) -> str:
    return f"{min(times):.2f}× to {max(times):.2f}×"


DENSE, TOPK, DGC, GAUSSIAN = next(times for _, title, _, times, _ in P1_STEP_TIMES if title == "ResNet-50")
EFFICIENCY = next(shares[-1] for _, title, _, _, shares in P1_STEP_TIMES if title == "VGG-16")
CLAIMS = (
    Claim(
        "p1/table2", "at 10 Gbit/s TopK-SGD is slower than dense",
        f"4 of 4; ResNet-50 {TOPK:.3f} s against {DENSE:.3f}",
        _order_of_times,
    ),
    Claim(
        "p1/table2", "of the sparse methods GaussianK-SGD as printed is the fastest, TopK-SGD the slowest",
        f"4 of 4; ResNet-50 {GAUSSIAN:.3f}, {DGC:.3f} (DGC), {TOPK:.3f} s", _order_of_methods,
    ),
    *(
        Claim(
            "p1/table2", f"GaussianK-SGD as printed is as many times faster than {other}-SGD as P1 states",
            _range(stated), _speedup(other), ("p1/table2-model", *(("p1/fig4",) if other == "DGC" else ())),
        )
        for other, stated in FASTER.items()
    ),
    Claim(
        "p1/table2", "GaussianK-SGD as printed can achieve as high a scaling efficiency on VGG-16 as P1 states",
        f"{EFFICIENCY} %", _efficiency,
    ),
)  # fmt: skip
