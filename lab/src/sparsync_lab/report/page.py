"""Results on one page: a file that needs nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from sparsync_lab.report.plots import COLOURS, Chart, svg
from sparsync_lab.report.table import Table

CONTENTS = 4  # parts, from which on a page lists them


@dataclass(frozen=True)
class Text:
    """Paragraphs, under a heading if it is not empty; ``level`` 3 belongs to the heading of level 2 before it."""

    heading: str
    paragraphs: Sequence[str] = ()
    level: int = 2


@dataclass(frozen=True)
class Figure:
    """A chart and what is to be seen in it."""

    chart: Chart
    caption: str


Section = Text | Table | Figure


@dataclass(frozen=True)
class Page:
    """What a page holds.

    Args:
        title: of the page.
        intro: paragraphs below it.
        sections: texts, tables and figures in the order they are shown; figures that follow each other stand side by
            side where there is room.
        footer: where and when the numbers were measured, as names and values.
        before_contents: parts that come before the list of contents.
    """

    title: str
    intro: Sequence[str]
    sections: Sequence[Section]
    footer: Mapping[str, str] = field(default_factory=dict)
    before_contents: int = 0


def render(page: Page) -> str:
    """Return the page as HTML."""
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup

    # Dark values are lighter tints of the same hues, in the same order.
    dark = ("#e6e8eb", "#6cb6ff", "#ff9a5c", "#4ecb9f", "#e59ad2", "#dcb34a", "#56c8dd", "#ff8a9a")
    assert len(dark) == len(COLOURS)
    surroundings = Environment(
        loader=PackageLoader("sparsync_lab.report", ""),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    surroundings.tests["text"] = lambda section: isinstance(section, Text)
    surroundings.tests["table"] = lambda section: isinstance(section, Table)
    parts = [n for n, one in enumerate(page.sections, 1) if isinstance(one, Text) and one.heading and one.level == 2]
    surroundings.filters["svg"] = lambda figure, number: Markup(svg(figure.chart, f"figure-{number}"))
    return (
        surroundings.get_template("page.html.jinja").render(
            page=page,
            light=COLOURS,
            dark=dark,
            contents_at=parts[page.before_contents] if len(parts) >= CONTENTS else 0,
        )
        + "\n"
    )


def write(page: Page, path: Path) -> None:
    """Write the page to a file."""
    path.write_text(render(page), encoding="utf-8")
