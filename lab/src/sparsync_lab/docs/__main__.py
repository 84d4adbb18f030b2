"""``python -m sparsync_lab.docs``: write the generated blocks of README.md and docs/, and the pictures, anew."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from sparsync_lab.docs.blocks import fill
from sparsync_lab.docs.pictures import write

PAGES = ("README.md", "docs/**/*.md")


def pages(root: Path) -> list[Path]:
    """Return the pages that may hold blocks."""
    return sorted(path for pattern in PAGES for path in root.glob(pattern))


def main(arguments: Sequence[str] | None = None) -> None:
    """Write every page whose blocks are not what results/ gives."""
    parser = argparse.ArgumentParser(prog="python -m sparsync_lab.docs", description=__doc__)
    parser.add_argument("--root", type=Path, default=Path(), help="folder of README.md, docs/ and results/")
    root = parser.parse_args(arguments).root
    if not (root / "results").is_dir():
        parser.error(f"{root / 'results'} is no folder: run it where README.md, docs/ and results/ are")
    for path in pages(root):
        old = path.read_text(encoding="utf-8")
        new = fill(old, root / "results", path.relative_to(root))
        if new != old:
            path.write_text(new, encoding="utf-8")
            print(f"{path} written")
    for path in write(root):
        print(f"{path} written")


if __name__ == "__main__":
    main()
