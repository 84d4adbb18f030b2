"""Where ``sparsync bench`` writes: never over older figures unless it is told to."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Annotated

import typer

FOLDER = Path("runs/bench")
Out = Annotated[
    Path | None,
    typer.Option(help="CSV file to write, or a folder for it.", show_default=f"a new folder in {FOLDER}"),
]


def bench_file(out: Path | None, name: str) -> Path:
    """Return the CSV file to write, in a folder that is there.

    Args:
        out: what was asked for: a file, a folder, or ``None`` for a folder that nobody has written to.
        name: of the file in a folder.
    """
    if out is None:
        out = FOLDER / datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d-%H%M%S")
    path = out if out.suffix == ".csv" else out / name
    path.parent.mkdir(parents=True, exist_ok=True)
    return path
