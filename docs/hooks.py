"""What the site takes from outside of docs/, and what it makes of pictures and formulas.

Links are written as they work in the repository (``../results/demo.csv``); the site has these files in its own tree.
Pictures of docs/pictures become part of their page, so that they take its colours, light or dark; formulas become
MathML, which browsers draw by themselves. Nothing is loaded from elsewhere.
"""

from __future__ import annotations

import re
from html import unescape
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
PAGES = {"CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
RESULTS = (".csv", ".json", ".log", ".png", ".txt")
PICTURE = re.compile(r'<img alt="(?P<alt>[^"]*)" src="[^"]*pictures/(?P<name>[\w-]+)\.svg"[^>]*>')
STYLE = re.compile(r"<style>.*?</style>", re.DOTALL)  # the colours of a picture that stands alone
FORMULA = re.compile(r'<(?P<tag>span|div) class="arithmatex">\\[(\[](?P<tex>.*?)\\[)\]]</(?P=tag)>', re.DOTALL)


def on_files(files: Files, config: Any) -> Files:
    """Add the files."""
    for name, page in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / name).read_text(encoding="utf-8")))
    for path in sorted((ROOT / "results").rglob("*")):
        if path.suffix in RESULTS:
            files.append(File.generated(config, path.relative_to(ROOT).as_posix(), abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Point links at where the files are in the site."""
    up = "../" * page.file.src_uri.count("/")
    markdown = markdown.replace(f"](../{up}results/", f"]({up}results/")
    for name, target in PAGES.items():
        markdown = re.sub(rf"\]\((\.\./)*{name}", f"]({up}{target}", markdown)
    return re.sub(r"\]\(docs/", "](", markdown)


def on_page_content(html: str, **_: Any) -> str:
    """Put pictures into the page, and make MathML of formulas."""
    return FORMULA.sub(_math, PICTURE.sub(_inline, html))


def _inline(found: re.Match[str]) -> str:
    drawn = (ROOT / "docs/pictures" / f"{found['name']}.svg").read_text(encoding="utf-8")
    return f'<span class="picture" title="{found["alt"]}">{STYLE.sub("", drawn)}</span>'


def _math(found: re.Match[str]) -> str:
    block = found["tag"] == "div"
    drawn = convert(unescape(found["tex"]).strip(), display="block" if block else "inline")
    return f'<div class="formula">{drawn}</div>' if block else drawn
