"""Results as files: one JSON and one PNG an item."""

from __future__ import annotations

import dataclasses
import gzip
import json
import math
import os
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparsync_lab.environment import environment
from sparsync_lab.papers.item import Item, Result, RunContext
from sparsync_lab.report import Bar, BarChart, Chart, Curve, Figure, LineChart, Row, Table, png

DIGITS = 5


@dataclass(frozen=True)
class Stored:
    """A result as it was read back.

    Args:
        result: what came of the item.
        quick: whether in the tiny setting.
        command: that makes it again.
        seed: it was made with.
        seconds: that its trainings took, or all of it where there are none.
    """

    result: Result
    quick: bool
    command: str
    seed: int
    seconds: float

    @property
    def where(self) -> Mapping[str, str]:
        """Return machine, versions, commit and date."""
        return self.result.where


def save(context: RunContext, item: Item, result: Result, seconds: float) -> Path:
    """Write the item's files into ``context.output``; return the path of the JSON file."""
    context.output.mkdir(parents=True, exist_ok=True)
    path = place(context, item)
    measured = {"seconds": round(seconds, 1), "environment": hardware(context)}
    write_json(path, identity(context, item) | measured | of_trainings(result) | stated(result))
    charts, picture = [figure.chart for figure in result.figures], path.with_suffix(".png")
    if charts:
        with replacing(picture) as part:
            png(charts, part)
    else:
        picture.unlink(missing_ok=True)
    return path


def identity(context: RunContext, item: Item) -> dict[str, Any]:
    """Return of what a result is, and the command that makes it again."""
    return {
        "item": item.key,
        "quick": context.quick,
        "command": " ".join(["sparsync papers run", item.key, *(f"--{word}" for word in _options(context, item))]),
        "seed": context.seed,
    }


def of_trainings(result: Result) -> dict[str, Any]:
    """Return how long a result's trainings took and where, as it is stored; nothing of a result without trainings."""
    found = {"seconds": round(result.seconds, 1), "environment": dict(result.where)}
    return {name: value for name, value in found.items() if value}


def stated(result: Result) -> dict[str, Any]:
    """Return all that a result states, as it is stored."""
    return {
        "data": dict(result.data),
        "runs": list(result.runs),
        "missing": list(result.missing),
        "notes": list(result.notes),
        "tables": [dataclasses.asdict(table) for table in result.tables],
        "figures": [{"caption": figure.caption, "chart": _chart_to_json(figure.chart)} for figure in result.figures],
        "rows": {name: list(column) for name, column in result.rows.items()},
    }


def load(path: Path) -> Stored:
    """Read a result that ``save`` wrote."""
    plain = read_json(path)
    with whole(path):
        tables = [Table(**t | {"rows": [Row(**row) for row in t["rows"]]}) for t in plain["tables"]]
        figures = [Figure(_chart_from_json(f["chart"]), f["caption"]) for f in plain["figures"]]
        said = (plain[name] for name in ("notes", "rows", "runs", "missing", "data", "environment"))
        result = Result(tables, figures, *said)
        return Stored(result, plain["quick"], plain["command"], plain["seed"], float(plain["seconds"]))


def place(context: RunContext, item: Item) -> Path:
    """Return where an item's JSON lies; what is quick, of another seed or length does not overwrite what is not."""
    words = (word.replace(" ", "-") for word in _options(context, item))
    return context.output / f"{'-'.join([item.file, *words])}.json"


def _options(context: RunContext, item: Item) -> list[str]:
    """Return the options that make the result another one."""
    asked = {
        "quick": context.quick,
        f"seed {context.seed}": context.seed != 0,
        f"epochs {context.epochs or 0:g}": context.epochs is not None and item.by_epochs and not context.quick,
    }
    return [word for word, holds in asked.items() if holds]


def results_of(item: Item, folder: Path) -> list[Stored]:
    """Return all results of an item in a folder: the full one first; tiny settings only if there is nothing else."""
    plain = folder / f"{item.file}.json"
    options = re.compile(rf"{re.escape(item.file)}(-quick|-seed-[^-]+|-epochs-.+)+")  # else it is another item's
    others = [path for path in sorted(folder.glob(f"{item.file}-*.json")) if options.fullmatch(path.stem)]
    paths = [*([plain] if plain.is_file() else []), *others]
    full = [path for path in paths if not path.name.startswith(f"{item.file}-quick")]
    return [load(path) for path in full or paths]


def hardware(context: RunContext) -> dict[str, str]:
    """Return ``environment()``, with the GPU where that is what measured."""
    where = environment()
    if context.device.type == "cuda":
        import torch

        where["processor"], where["device"] = where["device"], torch.cuda.get_device_name(context.device)
    return where


def write_json(path: Path, content: Mapping[str, Any], **exact: Any) -> None:
    """Write JSON, as a whole or not at all: numbers to 5 digits, ``null`` for what is not finite.

    Args:
        path: where a name that ends in ``.gz`` asks for compression; the same content gives the same bytes.
        exact: comes first, with all digits.
    """
    text = json.dumps({**exact, **rounded(content)}, ensure_ascii=False, separators=(",", ":"))
    plain = (text + "\n").encode()
    with replacing(path) as part:
        part.write_bytes(gzip.compress(plain, mtime=0) if path.suffix == ".gz" else plain)


def read_json(path: Path) -> Any:
    """Return what ``write_json`` wrote."""
    with whole(path):
        stored = path.read_bytes()
        return json.loads(gzip.decompress(stored) if path.suffix == ".gz" else stored)


@contextmanager
def whole(path: Path) -> Iterator[None]:
    """Raise a clear error if what is read from a file is not what was written."""
    try:
        yield
    except (LookupError, TypeError, ValueError, EOFError, zlib.error, gzip.BadGzipFile) as error:
        cause = error if isinstance(error, ValueError) else repr(error)
        raise ValueError(f"{path} is damaged ({cause}): delete it and run it again") from None


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a path to write to, that takes the place of ``path`` as a whole: nobody reads half a file.

    It is this process's own: two that write the same file at a time do not write into each other's.
    """
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        yield part
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def rounded(value: Any) -> Any:
    """Round numbers to ``DIGITS`` digits, in whatever holds them."""
    if isinstance(value, float):
        if not math.isfinite(value):
            return None
        short = float(f"{value:.{DIGITS}g}")
        return int(short) if short.is_integer() and abs(short) < 1e15 else short
    if isinstance(value, Mapping):
        return {key: rounded(part) for key, part in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [rounded(part) for part in value]
    return value


def runs_of(values: Sequence[float]) -> list[list[float]]:
    """Return ``[value, how many of it follow each other]``: short where a column hardly changes."""
    found: list[list[float]] = []
    for value in values:
        if found and found[-1][0] == value:
            found[-1][1] += 1
        else:
            found.append([value, 1])
    return found


def _chart_to_json(chart: Chart) -> dict[str, Any]:
    return {"kind": type(chart).__name__, **dataclasses.asdict(chart)}


def _chart_from_json(plain: Mapping[str, Any]) -> Chart:
    fields = {name: value for name, value in plain.items() if name != "kind"}
    if plain["kind"] == "BarChart":
        return BarChart(**fields | {"bars": [Bar(**bar) for bar in fields["bars"]]})
    curves = [Curve(**{k: _numbers(v) for k, v in curve.items()}) for curve in fields["curves"]]
    return LineChart(**fields | {"curves": curves})


def _numbers(values: Any) -> Any:
    """Turn ``null`` into NaN, a gap in a curve."""
    return [math.nan if v is None else v for v in values] if isinstance(values, list) else values
