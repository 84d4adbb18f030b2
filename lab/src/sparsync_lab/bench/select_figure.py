"""The figure of ``sparsync bench select``: time over size and over density, one line a method."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from sparsync_lab.bench.bench_methods import FLOOR, ZEROING_FLOOR
from sparsync_lab.bench.preconditioned_methods import PRECONDITIONED_FLOOR
from sparsync_lab.bench.select import SelectRow

USUAL = 0.001  # the density of the papers
# A colour and a marker for each way of choosing; ours are solid lines, plain PyTorch's dotted.
LOOKS = {
    "threshold": ("#d62728", "o"),
    "topk": ("#1f77b4", "s"),
    "dgc": ("#2ca02c", "^"),
    "gaussian": ("#9467bd", "D"),
    "trimmed": ("#8c564b", "v"),
}
STYLE: dict[Any, Any] = {
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.alpha": 0.3,
    "axes.titlesize": 10.0,
    "axes.titlelocation": "left",
}
Coordinate = Callable[[SelectRow], float]


def draw(rows: Sequence[SelectRow], path: Path, caption: str) -> None:
    """Write the figure: a line of panels for each dtype. Only what is compared with ``e += g``."""
    import matplotlib
    from matplotlib.figure import Figure

    others = (ZEROING_FLOOR, PRECONDITIONED_FLOOR)
    rows = [row for row in rows if row.floor == FLOOR and row.method not in others]
    dtypes = list(dict.fromkeys(row.bench.dtype for row in rows))
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(9.5, 0.4 + 3.7 * len(dtypes)), dpi=160, layout="constrained")
        axes = figure.subplots(len(dtypes), 2, squeeze=False)
        for dtype, (left, right) in zip(dtypes, axes, strict=True):
            mine = [row for row in rows if row.bench.dtype == dtype]
            densities, sizes = {row.bench.density for row in mine}, {row.bench.size for row in mine}
            density = USUAL if USUAL in densities else max(densities)
            size = max(sizes, key=lambda n: (len({row.bench.density for row in mine if row.bench.size == n}), n))
            _panel(left, [row for row in mine if row.bench.density == density], lambda row: row.bench.size)
            _panel(right, [row for row in mine if row.bench.size == size], lambda row: row.bench.density)
            left.set(
                xlabel="entries of the gradient", ylabel="milliseconds", title=f"{dtype} gradient, density {density:g}"
            )
            right.set(xlabel="density", title=f"{dtype} gradient, {size / 1e6:g} million entries")
        handles: dict[str, Any] = {}
        for axis in axes.flat:
            for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
                handles.setdefault(label, handle)
        figure.legend(handles.values(), handles.keys(), loc="outside right center", frameon=False, fontsize=9)
        figure.supxlabel(caption, fontsize=8)
        figure.savefig(path)


def _panel(axis: Any, rows: Sequence[SelectRow], at: Coordinate) -> None:
    """Draw the medians of every method, and bars from the 20th to the 80th percentile."""
    for method in dict.fromkeys(row.method for row in rows):
        line = sorted((row for row in rows if row.method == method), key=at)
        x, y = [at(row) for row in line], [row.ms() for row in line]
        if line[0].family == "floor":
            axis.plot(x, y, "k--", marker=".", linewidth=1.5, label=method)
            continue
        colour, marker = LOOKS[method.split(" ")[0].rstrip(",")]
        spread = [[m - row.ms(0.2) for m, row in zip(y, line, strict=True)]]
        spread += [[row.ms(0.8) - m for m, row in zip(y, line, strict=True)]]
        plain = line[0].family != "ours"
        axis.errorbar(
            x,
            y,
            spread,
            color=colour,
            marker=marker,
            markersize=5,
            markerfacecolor="white" if plain else colour,
            linestyle="-." if "authors" in method else ":" if plain else "--" if "(graph)" in method else "-",
            linewidth=1.5,
            elinewidth=0.8,
            label=method,
        )
    axis.set(xscale="log", yscale="log")
