"""How things work, drawn: the path of a gradient, what is kept, and how entries are summed over the workers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from sparsync_lab.docs.canvas import CELL, CELLS, Canvas

WIDE = CELL * CELLS
COLUMNS = [(Canvas.WIDTH / 4) * column + 7 for column in range(4)]  # where the strips of four workers begin
SENT = ((1, 6), (3, 6), (1, 9), (4, 11))  # the entries that each of them sends
ALL = (6, 1, 3, 9, 4, 11)  # all of those, the largest sum first
SUM = 6  # the colour of sums


def path() -> str:
    """Draw the way of a gradient from its bucket to the optimizer, and the one way back."""
    drawn = Canvas("path", 452, "The path of a gradient: from DDP's bucket through residual, choice, message and sum "
                                "to the optimizer; what is not applied goes back to the residual.")  # fmt: skip
    steps = (
        ("a bucket of gradients", "DDP hands it over during backward", 0),
        ("add it to the residual", "with Adam: the update it asks for", 1),
        ("choose what is sent", "the compressor, in the same pass", 1),
        ("one message of fixed size", "header, indices, values", 2),
        ("sum over the workers", "the collective, on a thread or stream of its own", 2),
        ("divide once, write the bucket", "the same bits on every worker", 3),
        ("optimizer.step()", "", 0),
    )
    for number, (what, how, series) in enumerate(steps):
        top = 8 + 64 * number
        drawn.box(88, top, 264, 44, [what, how] if how else [what], series)
        if number:
            drawn.arrow([(220, top - 20), (220, top - 2)])
    drawn.arrow([(88, 158), (46, 158), (46, 94), (86, 94)], 1)
    drawn.text(42, 130, "the rest", "end", 12, 1)
    drawn.text(42, 145, "stays", "end", 12, 1)
    drawn.arrow([(352, 286), (398, 286), (398, 94), (354, 94)], 7, dashed=True)
    drawn.text(402, 180, "left", "start", 12, 7)
    drawn.text(402, 195, "out or", "start", 12, 7)
    drawn.text(402, 210, "failed", "start", 12, 7)
    return drawn.svg()


def feedback() -> str:
    """Draw three steps of error feedback on eight entries, two of which are sent in each."""
    drawn = Canvas("feedback", 372, "Error feedback: in every step the two largest of residual plus gradient are sent, "
                                    "the others wait; after three steps small ones have been sent, too.")  # fmt: skip
    gradient = [(0.9, 0.3, -0.2, 0.5, 0.1, -0.6, 0.35, 0.15), (0.7, 0.3, -0.3, 0.2, 0.1, -0.5, 0.35, 0.1),
                (0.2, 0.35, -0.3, 0.3, 0.15, -0.2, 0.4, 0.15)]  # fmt: skip
    residual, unit = [0.0] * 8, 34.0
    for column, words in enumerate(("gradient", "+ residual", "kept for later")):
        drawn.text(98 + 126 * column, 20, words)
    for step, came in enumerate(gradient):
        foot = 84 + 116 * step
        total = [kept + own for kept, own in zip(residual, came, strict=True)]
        chosen = sorted(range(8), key=lambda entry, total=total: -abs(total[entry]))[:2]  # type: ignore[misc]
        residual = [0.0 if entry in chosen else value for entry, value in enumerate(total)]
        drawn.text(6, foot + 4, f"step {step + 1}", "start", 12)
        for column, (values, marked) in enumerate(((came, ()), (total, chosen), (residual, ()))):
            drawn.bars(50 + 126 * column, foot, values, marked, unit)
        drawn.text(224, foot + 46, "sent: the two largest", "middle", 11, 2)
    return drawn.svg()


def _workers(drawn: Canvas, top: float, words: str = "worker") -> None:
    for rank, x in enumerate(COLUMNS):
        drawn.text(x + WIDE / 2, top, f"{words} {rank}", size=12)


def _filled(cells: Sequence[int], series: int) -> dict[int, int]:
    return dict.fromkeys(cells, series)


def _fan(drawn: Canvas, top: float, bottom: float) -> None:
    """Draw arrows from everybody to everybody."""
    for first in COLUMNS:
        for second in COLUMNS:
            drawn.arrow([(first + WIDE / 2, top), (second + WIDE / 2, bottom)], 0)


def allgather() -> str:
    """Draw an all-gather."""
    drawn = Canvas("allgather", 214, "All-gather: every worker gets every worker's entries and adds them up.")
    _workers(drawn, 18)
    for rank, x in enumerate(COLUMNS):
        drawn.strip(x, 28, _filled(SENT[rank], rank + 1))
        drawn.strip(x, 148, _filled(ALL, SUM))
    _fan(drawn, 50, 142)
    drawn.text(220, 190, "everyone has everyone's message, and adds up in rank order:")
    drawn.text(220, 207, "(P − 1) k entries a worker")
    return drawn.svg()


def shared() -> str:
    """Draw an all-reduce of entries that all draw alike."""
    drawn = Canvas("shared", 198, "Shared indices: all workers draw the same entries; their values are summed.")
    _all_reduce(drawn, (2, 7), "all-reduce of the values alone")
    drawn.text(220, 176, "all draw the same entries, so no index travels:")
    drawn.text(220, 193, "2 (P − 1)/P k values a worker")
    return drawn.svg()


def dense() -> str:
    """Draw a dense all-reduce."""
    drawn = Canvas("dense", 198, "Dense: every entry of every worker is summed by the backend's all-reduce.")
    _all_reduce(drawn, range(CELLS), "all-reduce of everything")
    drawn.text(220, 176, "every entry, every step:")
    drawn.text(220, 193, "2 (P − 1)/P n values a worker")
    return drawn.svg()


def _all_reduce(drawn: Canvas, cells: Sequence[int], what: str) -> None:
    """Draw how the same entries of all workers are summed."""
    _workers(drawn, 18)
    for rank, x in enumerate(COLUMNS):
        drawn.strip(x, 28, _filled(cells, rank + 1))
        drawn.strip(x, 132, _filled(cells, SUM))
        drawn.arrow([(x + WIDE / 2, 48), (x + WIDE / 2, 68)])
        drawn.arrow([(x + WIDE / 2, 106), (x + WIDE / 2, 126)])
    drawn.box(20, 70, 400, 34, [what], 2)


def gtopk() -> str:
    """Draw partial sums that climb a tree."""
    drawn = Canvas("gtopk", 340, "gTop-k: partial sums climb a tree; only the k largest go on, and the result comes "
                                 "down to all.")  # fmt: skip
    _workers(drawn, 18)
    for rank, x in enumerate(COLUMNS):
        drawn.strip(x, 28, _filled(SENT[rank], rank + 1))
    drawn.strip(COLUMNS[0], 108, _filled((1, 6), SUM), left=(3,))
    drawn.strip(COLUMNS[2], 108, _filled((1, 4), SUM), left=(9, 11))
    drawn.strip(COLUMNS[0], 188, _filled((1, 6), SUM), left=(4,))
    for end, above in ((0, 1), (2, 3)):
        drawn.arrow([(COLUMNS[end] + WIDE / 2, 48), (COLUMNS[end] + WIDE / 2, 102)])
        drawn.arrow([(COLUMNS[above] + WIDE / 2, 48), (COLUMNS[end] + WIDE - 8, 102)])
    drawn.arrow([(COLUMNS[0] + WIDE / 2, 128), (COLUMNS[0] + WIDE / 2, 182)])
    drawn.arrow([(COLUMNS[2] + 20, 128), (COLUMNS[0] + WIDE - 4, 182)])
    for x in COLUMNS:
        drawn.arrow([(COLUMNS[0] + WIDE / 2, 208), (x + WIDE / 2, 262)], 3)
        drawn.strip(x, 268, _filled((1, 6), SUM))
    drawn.text(330, 190, "framed: dropped, stays with", size=12, series=7)
    drawn.text(330, 205, "the worker that drops it", size=12, series=7)
    drawn.text(220, 310, "log₂ P rounds up, log₂ P down:")
    drawn.text(220, 327, "2 (P − 1)/P k entries a worker on average, k log₂ P for the root")
    return drawn.svg()


def balanced() -> str:
    """Draw both rounds of a balanced exchange."""
    drawn = Canvas("balanced", 352, "Balanced: every worker owns a part of the indices, adds up what it is sent, and "
                                    "sends its largest sums to all.")  # fmt: skip
    _workers(drawn, 18)
    owned: Mapping[int, int] = {0: 1, 1: 3, 2: 6, 3: 9}
    for rank, x in enumerate(COLUMNS):
        drawn.strip(x, 28, _filled(SENT[rank], rank + 1), owners=True)
        left = [entry for entry in ALL if entry // 3 == rank and entry != owned[rank]]
        drawn.strip(x, 142, {owned[rank]: SUM}, left, owners=True)
        drawn.strip(x, 262, _filled(tuple(owned.values()), SUM))
    _fan(drawn, 50, 136)
    _fan(drawn, 164, 256)
    drawn.text(220, 300, "round 1: each entry to the owner of its index (colour);")
    drawn.text(220, 317, "round 2: each owner's largest sums to all (framed: left out, stays):")
    drawn.text(220, 340, "about k + share · k entries a worker, whatever P is")
    return drawn.svg()


def preconditioned() -> str:
    """Draw Adam behind a residual beside Adam before it."""
    drawn = Canvas("preconditioned", 366, "Gradient feedback feeds bursts to Adam; preconditioned feedback makes "
                                          "the update first, from a second moment that all share.")  # fmt: skip
    columns = (
        ("gradient feedback", (("gradient", 0), ("+ residual, choose", 1), ("sum over workers", 2), ("Adam: m, v", 5),
                               ("update of bursts", 7))),
        ("preconditioned feedback", (("gradient", 0), ("sketch → shared v", 2), ("Adam: m̂ / √v̂", 5),
                                     ("+ residual, choose", 1), ("sum = the update", 3))),
    )  # fmt: skip
    for column, (title, steps) in enumerate(columns):
        left = 8 + 222 * column
        drawn.text(left + 101, 22, title)
        for number, (what, series) in enumerate(steps):
            top = 40 + 66 * number
            drawn.box(left, top, 202, 38, [what], series)
            if number:
                drawn.arrow([(left + 101, top - 26), (left + 101, top - 2)])
    return drawn.svg()


def per_node() -> str:
    """Draw two machines that exchange one message each."""
    drawn = Canvas("per-node", 236, "per_node: ranks of a machine are summed dense inside it; only their leaders "
                                    "exchange, sparsely.")  # fmt: skip
    for machine in range(2):
        left = 10 + 224 * machine
        drawn.box(left, 8, 196, 210, [""], 0)
        drawn.text(left + 98, 28, f"machine {machine}", size=12)
        for rank in range(4):
            x = left + 8 + 46 * rank
            drawn.box(x, 40, 40, 30, [f"{4 * machine + rank}"], 1)
            drawn.arrow([(x + 20, 70), (left + 98, 104)], 1)
        drawn.box(left + 28, 106, 140, 34, ["dense sum, fp32"], 1)
        drawn.arrow([(left + 98, 140), (left + 98, 160)], 0)
        drawn.box(left + 28, 162, 140, 40, ["leader", "residual, choice"], 2)
    drawn.arrow([(178, 182), (260, 182)], 2)
    drawn.arrow([(262, 190), (180, 190)], 2)
    drawn.text(220, 232, "one message a machine over the slow links", size=12, series=2)
    return drawn.svg()


_MADE: Sequence[Callable[[], str]] = (
    path,
    feedback,
    allgather,
    shared,
    dense,
    gtopk,
    balanced,
    preconditioned,
    per_node,
)
DRAWINGS: Mapping[str, str] = {made.__name__.replace("_", "-"): made() for made in _MADE}
