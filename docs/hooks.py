"""What the site takes from outside of docs/: results/ that pages link to, and the pages at the repository's root.

Links are written as they work in the repository (``../results/demo.csv``); the site has these files in its own tree.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
PAGES = {"CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
RESULTS = (".csv", ".json", ".png", ".txt")


def on_files(files: Files, config: Any) -> Files:
    """Add the files."""
    for name, page in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / name).read_text(encoding="utf-8")))
    for path in sorted((ROOT / "results").rglob("*")):
        if path.suffix in RESULTS:
            files.append(File.generated(config, path.relative_to(ROOT).as_posix(), abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Point links at where the files are in the site."""
    markdown = markdown.replace("](../results/", "](results/")
    for name, page in PAGES.items():
        markdown = re.sub(rf"\]\((\.\./)?{name}", f"]({page}", markdown)
    return re.sub(r"\]\(docs/", "](", markdown)
