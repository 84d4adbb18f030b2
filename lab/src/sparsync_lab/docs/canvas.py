"""Boxes, arrows and strips of entries as SVG, in the colours of a page."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape

SIZE = 13  # of letters; a drawing is 440 wide, so that they stay readable on a phone
CELL, CELLS = 8, 12  # of a strip: how wide each is, and how many


class Canvas:
    """A drawing that grows as things are put on it.

    Args:
        name: makes its ids unique on a page.
        height: of it; the width is always the same.
        label: what is seen, in words.
    """

    WIDTH = 440

    def __init__(self, name: str, height: int, label: str) -> None:
        self.name, self.height, self.label = name, height, label
        self.parts: list[str] = []

    def text(self, x: float, y: float, words: str, anchor: str = "middle", size: float = SIZE, series: int = 0) -> None:
        """Write a line; ``x`` is its middle, ``y`` its foot."""
        look = f'text-anchor="{anchor}" font-size="{size}" fill="{_colour(series)}"'
        self.parts.append(f'<text x="{x:g}" y="{y:g}" {look}>{escape(words)}</text>')

    def box(self, x: float, y: float, width: float, height: float, lines: Sequence[str], series: int = 0) -> None:
        """Draw a box with lines of text; the first is what it is, the others are smaller."""
        place = f'x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="5"'
        colour = _colour(series)
        self.parts.append(f'<rect {place} fill="{colour}" fill-opacity="0.1" stroke="{colour}"/>')
        foot = y + height / 2 - 7.5 * (len(lines) - 1) + 4.5
        for number, line in enumerate(lines):
            self.text(x + width / 2, foot + 15 * number, line, size=SIZE if number == 0 else SIZE - 2)

    def arrow(self, points: Sequence[tuple[float, float]], series: int = 0, dashed: bool = False) -> None:
        """Draw an arrow through points."""
        path = "M" + "L".join(f"{x:g} {y:g}" for x, y in points)
        dash = ' stroke-dasharray="4 3"' if dashed else ""
        end = f'marker-end="url(#{self.name}-end-{series})"'
        self.parts.append(f'<path d="{path}" fill="none" stroke="{_colour(series)}" stroke-width="1.4"{dash} {end}/>')

    def strip(
        self, x: float, y: float, sent: Mapping[int, int], left: Iterable[int] = (), owners: bool = False
    ) -> None:
        """Draw the entries of a gradient as cells.

        Args:
            sent: the colours of those that are filled.
            left: those that are marked as left behind.
            owners: every three of them belong to a worker, and have its colour behind them.
        """
        for cell in range(CELLS):
            place = f'x="{x + CELL * cell:g}" y="{y:g}" width="{CELL}" height="16"'
            back = f'fill="{_colour(cell // 3 + 1)}" fill-opacity="0.16"' if owners else 'fill="none"'
            self.parts.append(f'<rect {place} {back} stroke="{_colour(0)}" stroke-opacity="0.35"/>')
            if cell in sent:
                self.parts.append(f'<rect {place} fill="{_colour(sent[cell])}"/>')
            if cell in left:
                inside = f'x="{x + CELL * cell + 1.5:g}" y="{y + 1.5:g}" width="{CELL - 3}" height="13"'
                self.parts.append(f'<rect {inside} fill="none" stroke="{_colour(7)}" stroke-width="1.6"/>')

    def bars(self, x: float, foot: float, values: Sequence[float], marked: Iterable[int], unit: float) -> None:
        """Draw values as bars around a line; those that are marked in another colour."""
        chosen = set(marked)
        for number, value in enumerate(values):
            top, height = foot - max(value, 0) * unit, abs(value) * unit
            colour = _colour(2 if number in chosen else 1)
            place = f'x="{x + 13 * number:g}" y="{top:g}" width="10" height="{height:g}"'
            self.parts.append(f'<rect {place} fill="{colour}"/>')
        line = f"M{x - 3:g} {foot:g}H{x + 13 * len(values):g}"
        self.parts.append(f'<path d="{line}" stroke="{_colour(0)}" stroke-opacity="0.6"/>')

    def svg(self) -> str:
        """Return the drawing."""
        drawn = "\n".join(self.parts)
        ends = "".join(
            f'<marker id="{self.name}-end-{series}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
            f'markerHeight="7" orient="auto"><path d="M0 0L8 4L0 8z" fill="{_colour(series)}"/></marker>'
            for series in range(8)
            if f"#{self.name}-end-{series}" in drawn
        )
        head = f'<svg class="drawing" viewBox="0 0 {self.WIDTH} {self.height}" role="img" '
        label = f'aria-label="{escape(self.label)}" font-family="var(--font, sans-serif)"'
        return f"{head}{label}>\n<defs>{ends}</defs>\n{drawn}\n</svg>"


def _colour(series: int) -> str:
    return "currentColor" if series == 0 else f"var(--series-{series})"
