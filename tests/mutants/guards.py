"""Guards: what ``src/sparsync`` refuses behind an ``if``. Each has a defect that it never strikes.

A guard is a branch of an ``if`` that ends in ``raise``. It is known by its file, its function and its condition, so
that it keeps its name where lines move. Some are switched off by a defect that a room lists; for the others
``guards.csv`` names the test that turns red.
"""

from __future__ import annotations

import ast
import csv
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tests.mutants import Mutant

ROOT = Path(__file__).parent.parent.parent
TABLE = Path(__file__).with_suffix(".csv")

NOT_HERE: dict[str, str] = {}  # guards that no test on a CPU can reach, and why


@dataclass(frozen=True)
class Guard:
    name: str
    condition: str  # the name without its number among equal ones
    file: str  # from the root of the repository
    first: int  # the line of the `if`, or of the `raise` behind an `else`; the first line of the file is 0
    last: int  # the last line of the `raise`
    good: str  # lines with the guard, which occur once in the file
    bad: str  # the same without it


@dataclass(frozen=True)
class Row:
    guard: str
    test: str
    interpreted: bool


def table() -> list[Row]:
    """Return which test finds which guard switched off."""
    with TABLE.open(newline="", encoding="utf-8") as file:
        return [Row(line["guard"], line["test"], line["interpreted"] == "1") for line in csv.DictReader(file)]


@cache
def guards() -> dict[str, Guard]:
    """Return all guards by name."""
    paths = sorted((ROOT / "src/sparsync").rglob("*.py"))
    found = [guard for path in paths for guard in guards_of(path.relative_to(ROOT).as_posix(), path.read_text())]
    return {guard.name: guard for guard in found}


def mutants() -> list[Mutant]:
    """Return the defects of the table: of each guard that it names, that it never strikes."""
    known = guards()
    return [
        Mutant(row.guard, guard.file, guard.good, guard.bad, row.test, row.interpreted)
        for row in table()
        if (guard := known.get(row.guard))
    ]


def switched_off_by(written: Iterable[Mutant]) -> set[str]:
    """Return the names of those guards that defects remove, or which never strike with them."""
    by_file: dict[str, list[Guard]] = {}
    for guard in guards().values():
        by_file.setdefault(guard.file, []).append(guard)
    off: set[str] = set()
    for mutant in written:
        text = (ROOT / mutant.file).read_text()
        first = text[: text.index(mutant.good)].count("\n")
        last = first + mutant.good.count("\n")
        near = [guard for guard in by_file.get(mutant.file, ()) if first <= guard.last and guard.first <= last]
        if near:
            before = Counter(guard.condition for guard in by_file[mutant.file])
            left = Counter(guard.condition for guard in guards_of(mutant.file, text.replace(mutant.good, mutant.bad)))
            if left.total() < before.total():  # and not the same number, one with another condition
                off |= {guard.name for guard in near if left[guard.condition] < before[guard.condition]}
    return off


def guards_of(file: str, text: str) -> list[Guard]:
    """Return the guards of a file in their order."""
    if "raise" not in text:
        return []
    lines = text.splitlines(keepends=True)
    times: Counter[str] = Counter()
    found = []
    for function, node in _branches(ast.parse(text), ()):
        place = f"{file.removeprefix('src/sparsync/')} {function}".rstrip()
        for branch, kind in ((node.body, "if"), (node.orelse, "else of if")):
            if not branch or not isinstance(refusal := branch[-1], ast.Raise) or (kind == "if" and _never(node.test)):
                continue
            condition = f"{place}: {kind} {ast.unparse(node.test)}"
            times[condition] += 1
            name = condition if times[condition] == 1 else f"{condition} ({times[condition]})"
            whole, part = (node, node.test) if branch is node.body else (refusal, refusal)
            good, bad = _without(text, lines, whole, part)
            found.append(Guard(name, condition, file, whole.lineno - 1, (refusal.end_lineno or 0) - 1, good, bad))
    return found


def _branches(node: ast.AST, names: tuple[str, ...]) -> Iterator[tuple[str, ast.If]]:
    """Yield every ``if`` with the qualified name of its function."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield from _branches(child, (*names, child.name))
            continue
        if isinstance(child, ast.If):
            yield ".".join(names), child
        yield from _branches(child, names)


def _never(test: ast.expr) -> bool:
    """Return whether a condition is false whatever happens: ``False``, alone or with others that must hold, too."""
    if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And):
        return any(map(_never, test.values))
    return isinstance(test, ast.Constant) and test.value is False


def _without(text: str, lines: list[str], whole: ast.stmt, part: ast.expr | ast.stmt) -> tuple[str, str]:
    """Return lines that hold ``part`` and occur once, and the same with a condition that is never true, or with nothing
    for a ``raise``."""
    first, end = whole.lineno - 1, part.end_lineno or 0
    while text.count("".join(lines[first:end])) > 1:
        if end < (whole.end_lineno or 0):
            end += 1
        else:
            first -= 1
    start = _offset(lines, first, part.lineno, part.col_offset)
    stop = _offset(lines, first, part.end_lineno or 0, part.end_col_offset or 0)
    good = "".join(lines[first:end])
    new = "pass" if isinstance(part, ast.stmt) else f"({good[start:stop]}) and False"  # what it assigns stays assigned
    return good, good[:start] + new + good[stop:]


def _offset(lines: list[str], first: int, number: int, column: int) -> int:
    """Return how many characters after the beginning of line ``first`` a place is that ``ast`` gives in bytes."""
    return sum(map(len, lines[first : number - 1])) + len(lines[number - 1].encode()[:column].decode())
