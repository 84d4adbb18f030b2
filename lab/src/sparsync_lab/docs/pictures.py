"""The pictures of docs/pictures: charts from results/, and drawings of how things work.

Each is an SVG whose colours are those of the page that it stands in. Alone, as where a repository is looked at, it has
the colours that ``docs/site.css`` gives to light and dark pages.
"""

from __future__ import annotations

import re
from pathlib import Path

from sparsync_lab.docs.charts import CHARTS
from sparsync_lab.docs.drawings import DRAWINGS
from sparsync_lab.docs.sources import Sources
from sparsync_lab.report.plots import svg

PLACE, COLOURS = "docs/pictures", "docs/site.css"
SCHEMES = re.compile(r'\[data-md-color-scheme="(?P<name>\w+)"\] \{(?P<body>.*?)\}', re.DOTALL)
SERIES = re.compile(r"--(?:series-\d|paper): #\w+;")


def draw(root: Path) -> dict[str, str]:
    """Return every picture by the name of its file, as results/ and docs/site.css have it."""
    sources, style = Sources(root / "results", "results"), _style((root / COLOURS).read_text(encoding="utf-8"))
    made = {name: svg(chart(sources), name) for name, chart in CHARTS.items()} | dict(DRAWINGS)
    return {f"{name}.svg": _alone(text, style) for name, text in made.items()}


def write(root: Path) -> list[Path]:
    """Write the pictures that are not what they should be; return where they are."""
    (root / PLACE).mkdir(parents=True, exist_ok=True)
    written = []
    for name, text in draw(root).items():
        path = root / PLACE / name
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
            written.append(path)
    return written


def _alone(text: str, style: str) -> str:
    head, rest = text.split(">", 1)
    xmlns = "" if "xmlns=" in head else ' xmlns="http://www.w3.org/2000/svg"'
    return f"{head}{xmlns}>{style}{rest}\n"


def _style(css: str) -> str:
    schemes = {found["name"]: "".join(SERIES.findall(found["body"])) for found in SCHEMES.finditer(css)}
    light, dark = (f"svg{{{schemes[name]}color:var(--series-0)}}" for name in ("default", "slate"))
    return f"<style>{light}@media(prefers-color-scheme:dark){{{dark}}}</style>"
