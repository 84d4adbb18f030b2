"""Charts as SVG for a page, which follow its colours, and as PNG.

Drawn small, so that their text stays readable on a phone. Curves differ in dash and marker as well as in colour, and
the legend stands below the data. The same chart gives the same bytes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from io import BytesIO, StringIO
from pathlib import Path
from textwrap import wrap
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, FuncFormatter, LogLocator, MaxNLocator, NullFormatter
from PIL import Image  # matplotlib needs it, too

# The page has a light and a dark value for each; the first is its text's colour. These are the light ones.
INK, PAPER = "#1b1f24", "#ffffff"
COLOURS = (INK, "#0b66b0", "#c34a00", "#007d5a", "#9c3f86", "#8a6400", "#0a7f94", "#b0263e")
DASHES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (1, 1.3)), (0, (6, 2, 1, 2)), (0, (3, 1)), (0, (8, 2, 1, 1, 1, 2)))
MARKERS = "os^Dv*XP<>hd"
COLUMNS = 3  # charts of a picture side by side
SIZE = (4.5, 3.6)  # inches; 432 pixels wide, so that text of 10 points has 10 pixels on a phone
ROW = 0.35  # inches of that are for a legend; what it needs beyond them is added
SMALL = 8.5  # points, in a legend that is one chart's own
PALETTE = 128  # colours of a picture
LABEL = 46  # letters of a line of a legend
STYLE: dict[Any, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 10.0,
    "axes.titlesize": 11.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.alpha": 0.2,
    "legend.frameon": False,
    "legend.handlelength": 3.2,
    "svg.fonttype": "none",
    "svg.hashsalt": "sparsync",
    "text.parse_math": False,
    **dict.fromkeys(
        ("text.color", "axes.edgecolor", "axes.labelcolor", "axes.titlecolor", "xtick.color", "ytick.color"), INK
    ),
    "grid.color": INK,
}


@dataclass(frozen=True)
class Curve:
    """One line of a chart: ``y`` over ``x``, and the band from ``low`` to ``high`` around it, if there is one.

    Args:
        look: number of its colour, dash and marker, where several charts show the same; else its place in the chart.
    """

    label: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] = ()
    high: Sequence[float] = ()
    look: int | None = None


@dataclass(frozen=True)
class LineChart:
    """Curves over a common axis.

    Args:
        title: what is seen.
        x_label: what is on the horizontal axis.
        curves: the first is drawn in the text's colour: the one the others are compared with.
        y_range: lowest and highest y shown; all of them if ``None``.
        y_unit: written after each number of the vertical axis.
        log_x: spread the horizontal axis by powers of ten; points at 0 are then left out.
        x_unit: written after each number of the horizontal axis.
        log_y: spread the vertical axis by powers of ten.
    """

    title: str
    x_label: str
    curves: Sequence[Curve]
    y_range: tuple[float, float] | None = None
    y_unit: str = ""
    log_x: bool = False
    x_unit: str = ""
    log_y: bool = False

    def summary(self) -> str:
        """Describe the chart in words."""
        ends = [f"{c.label} ends at {c.y[-1]:.3g}{_spaced(self.y_unit)}" for c in self.curves if c.y]
        return f"Line chart: {self.title}, over {self.x_label}. " + "; ".join(ends) + "."

    def draw(self, axes: Axes) -> None:
        for i, curve in enumerate(self.curves):
            shown = [j for j, x in enumerate(curve.x) if x > 0 or not self.log_x]
            x, y = [curve.x[j] for j in shown], [curve.y[j] for j in shown]
            look = i if curve.look is None else curve.look
            colour, dash, marker = (looks[look % len(looks)] for looks in (COLOURS, DASHES, MARKERS))
            every = max(1, len(x) // 6)
            (line,) = axes.plot(x, y, color=colour, linestyle=dash, linewidth=1.7, marker=marker, markersize=4.5)
            line.set(label=curve.label, zorder=3 - 0.01 * i)
            line.set_markevery((i % every, every))  # markers of neighbours do not fall on each other
            if curve.low:
                low, high = [curve.low[j] for j in shown], [curve.high[j] for j in shown]
                axes.fill_between(x, low, high, color=colour, alpha=0.13, linewidth=0)
        if self.log_x:
            axes.set_xscale("log")
            first, last = axes.get_xlim()
            if last < 100 * first:  # as below
                axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
                axes.xaxis.set_minor_formatter(NullFormatter())
        if self.log_y:
            axes.set_yscale("log", nonpositive="mask")
            least, most = axes.get_ylim()
            if most < 100 * least:  # powers of ten alone would be one or two
                axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
                axes.yaxis.set_minor_formatter(NullFormatter())
        if self.x_unit or max((abs(x) for curve in self.curves for x in curve.x), default=0) >= 1000:
            axes.xaxis.set_major_formatter(EngFormatter(self.x_unit, sep=" " if self.x_unit else ""))
        else:
            axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
        if not self.log_x:
            axes.xaxis.set_major_locator(MaxNLocator(6, steps=(1, 2, 2.5, 5, 10)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}{_spaced(self.y_unit)}"))
        if self.y_range:
            axes.set_ylim(*self.y_range)
        axes.set_xlabel(self.x_label)
        axes.set_title(self.title, loc="left")


@dataclass(frozen=True)
class Bar:
    """A bar and what is written at its end."""

    label: str
    value: float
    note: str


@dataclass(frozen=True)
class BarChart:
    """Horizontal bars from 0, or from 1 on an axis of powers; the first on top.

    Args:
        title: what is seen.
        x_label: what is on the horizontal axis.
        bars: in the order of the curves of the other charts, whose colours they take.
        x_unit: written after each number of the horizontal axis.
        log_x: spread the horizontal axis by powers of ten, for factors.
    """

    title: str
    x_label: str
    bars: Sequence[Bar]
    x_unit: str = ""
    log_x: bool = False

    def summary(self) -> str:
        """Describe the chart in words."""
        return f"Bar chart: {self.title}. " + "; ".join(f"{bar.label}: {bar.note}" for bar in self.bars) + "."

    def draw(self, axes: Axes) -> None:
        most = max((bar.value for bar in self.bars), default=0) or 1
        if self.log_x:
            axes.set_xscale("log")
            least, most = min(1.0, *(bar.value for bar in self.bars)), max(most, 10.0)
        for i, bar in enumerate(self.bars):
            start, colour = (1.0 if self.log_x else 0.0), COLOURS[i % len(COLOURS)]
            axes.barh(i, bar.value - start, left=start, height=0.62, color=colour)
            share = math.log(bar.value / least) / math.log(most / least) if self.log_x else bar.value / most
            inside = share > 0.55  # there is no room behind a long bar
            look: dict[str, Any] = {"color": PAPER, "ha": "right"} if inside else {"ha": "left"}
            place: dict[str, Any] = {"xytext": (-6 if inside else 6, 0), "textcoords": "offset points", "va": "center"}
            axes.annotate(bar.note, (bar.value, i), **place, **look)
        axes.set_yticks(range(len(self.bars)), [bar.label for bar in self.bars])
        axes.set_ylim(len(self.bars) - 0.4, -0.6)
        axes.set_xlim(*((0.97 * least, 1.1 * most) if self.log_x else (0, 1.02 * most)))
        axes.grid(visible=False)  # it would run through the notes
        axes.tick_params(axis="y", length=0)
        axes.spines["left"].set_visible(False)
        axes.xaxis.set_major_locator(LogLocator() if self.log_x else MaxNLocator(5))
        axes.xaxis.set_major_formatter(
            FuncFormatter(lambda x, _: f"{x:g} ×") if self.log_x else EngFormatter(self.x_unit, sep=" ")
        )
        axes.set_xlabel(self.x_label)
        axes.set_title(self.title, loc="left")


Chart = LineChart | BarChart


def png(charts: Sequence[Chart], path: Path) -> None:
    """Draw charts on white, three in a row at most, four as two rows, and save them as PNG."""
    drawn = BytesIO()
    with matplotlib.rc_context(STYLE):
        _figure(charts).savefig(drawn, format="png", dpi=160)
    few = Image.open(drawn).convert("RGB").quantize(PALETTE, dither=Image.Dither.NONE)  # a third of the bytes
    few.save(path, "PNG", optimize=True)


def svg(chart: Chart, name: str) -> str:
    """Return a chart as an ``<svg>`` element for a page; ``name`` makes its ids unique on the page."""
    text = StringIO()
    with matplotlib.rc_context(STYLE):
        _figure([chart]).savefig(text, format="svg", transparent=True, metadata={"Date": None})
    return _for_page(text.getvalue(), name, chart.summary())


def _figure(charts: Sequence[Chart]) -> Figure:
    """Draw charts; those with the same curves have one legend below all of them, others one each: what it needs is
    added to the height."""
    columns = 2 if len(charts) == 4 else min(COLUMNS, len(charts))
    rows = [charts[i : i + columns] for i in range(0, len(charts), columns)]
    own = len({tuple(labels) for labels in map(_labels, charts) if labels}) > 1
    heights = [SIZE[1] + (max(_legend_inches(chart) for chart in row) if own else 0) for row in rows]
    figure = Figure(figsize=(SIZE[0] * columns, sum(heights)), layout="constrained")
    parts = figure.subfigures(len(rows), columns, squeeze=False, height_ratios=heights)
    places = [part.subplots() for part in parts.flat[: len(charts)]]
    for chart, axes in zip(charts, places, strict=True):
        chart.draw(axes)
        if own and axes.lines:
            handles, _ = axes.get_legend_handles_labels()
            axes.figure.legend(
                handles, _labels(chart), loc="outside lower center", ncols=_legend_columns(chart), fontsize=SMALL
            )
    lined = [(axes, chart) for axes, chart in zip(places, charts, strict=True) if axes.lines]
    if lined and not own:
        axes, chart = lined[0]
        _add_legend(figure, axes.get_legend_handles_labels()[0], _labels(chart))
    return figure


def _labels(chart: Chart) -> list[str]:
    """Return the labels of the curves, broken where they are long."""
    return ["\n".join(wrap(curve.label, LABEL)) for curve in chart.curves] if isinstance(chart, LineChart) else []


def _legend_columns(chart: Chart) -> int:
    longest = max(len(line) for label in _labels(chart) for line in label.splitlines())
    return max(1, int(SIZE[0] / (0.65 + 0.0075 * SMALL * longest)))


def _legend_inches(chart: Chart) -> float:
    labels = _labels(chart)
    if not labels:
        return 0.0
    columns = _legend_columns(chart)
    each = [label.count("\n") + 1 for label in labels]
    height = -(-len(each) // columns)  # as matplotlib fills them: one column after another
    return 1.45 / 72 * SMALL * max(sum(each[i : i + height]) for i in range(0, len(each), height))


def _add_legend(figure: Figure, handles: list[Any], labels: list[str]) -> None:
    """Add a legend below the axes, in as many columns as there is room for."""
    height = figure.get_figheight()
    lines = sum(label.count("\n") + 1 for label in labels)
    figure.set_figheight(max(height, 0.3 * lines + 1))  # so that beside none of those that are tried the axes collapse
    for columns in sorted({-(-len(labels) // rows) for rows in range(1, len(labels) + 1)}, reverse=True):
        legend = figure.legend(handles, labels, loc="outside lower center", ncols=columns)
        extent = legend.get_window_extent()  # does not depend on where it is: not all that are tried need be drawn
        if columns == 1 or extent.width <= figure.bbox.width:
            figure.draw_without_rendering()
            figure.set_figheight(height + max(0.0, extent.height / figure.dpi - ROW))
            return
        legend.remove()


def _spaced(unit: str) -> str:
    return unit and f" {unit}"


def _for_page(text: str, name: str, label: str) -> str:
    """Leave out what a file of its own needs and a page does not; colours and fonts become the page's."""
    text = text[text.index("<svg") :].strip()
    text = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>|<!--.*?-->", "", text, flags=re.DOTALL)
    text = text.replace("xlink:href", "href")
    text = re.sub(r'(?<=\bid=")|(?<=url\(#)|(?<=\bhref="#)', f"{name}-", text)
    for i, colour in enumerate(COLOURS):
        text = text.replace(colour, f"var(--series-{i}, {colour})")
    text = text.replace(PAPER, f"var(--paper, {PAPER})")
    text = re.sub(r"'DejaVu Sans'[^;\"]*", "var(--font, sans-serif)", text)
    box = re.search(r'viewBox="[^"]*"', text)
    assert box is not None
    head = f'<svg class="chart" {box.group()} role="img" aria-label="{escape(label)}">'
    return head + text[text.index(">") + 1 :]
