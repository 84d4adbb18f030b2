"""Run seeded defects: ``python -m tests.mutants [NAME ...] [--room ROOM ...] [--guards] [--since COMMIT] [-j N]
[--output FILE]``.

A defect whose test stays green, or whose place in the source is gone, ends the run with exit code 1. The same tests
are first run without a defect, and must pass.
"""

from __future__ import annotations

import argparse
import ast
import csv
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import cache, partial
from pathlib import Path

import sparsync_lab
from sparsync_lab.environment import environment
from sparsync_lab.report.table import write_csv
from tests.mutants import Mutant, in_room, load_rooms
from tests.mutants.guards import table

ROOT = Path(__file__).parent.parent.parent


def changed_since(commit: str) -> set[str]:
    """Return the files that differ from ``commit``, those that git does not know yet included."""
    commands = (["diff", "--name-only", commit, "--"], ["ls-files", "--others", "--exclude-standard"])
    answers = [subprocess.run(["git", *command], cwd=ROOT, capture_output=True, text=True) for command in commands]
    for answer in answers:
        if answer.returncode:
            raise SystemExit(answer.stderr.strip())
    return {line for answer in answers for line in answer.stdout.splitlines()}


def rooms_touched(rooms: dict[str, list[Mutant]], changed: Iterable[str]) -> list[str]:
    """Return the rooms of which the source, the list of defects or a test of theirs is among the ``changed`` files."""
    changed, guards = set(changed), {row.guard for row in table()}
    touched = []
    for room, mutants in rooms.items():
        files = {f"tests/mutants/{room}.py", "tests/conftest.py"}
        if any(mutant.name in guards for mutant in mutants):
            files |= {"tests/mutants/guards.csv", "tests/mutants/guards.py"}
        files |= modules_behind({mutant.test.partition("::")[0] for mutant in mutants})
        if files & changed or any(in_room(file, room) for file in changed):
            touched.append(room)
    return touched


def modules_behind(files: Iterable[str]) -> set[str]:
    """Return files of the tests and the modules of ``tests`` that they import, directly or through others."""
    seen: set[str] = set()
    ahead = set(files)
    while ahead:
        seen.add(file := ahead.pop())
        ahead |= imported_by(file) - seen
    return seen


@cache
def imported_by(file: str) -> set[str]:
    """Return the modules of ``tests`` that a file imports, as paths."""
    nodes = [node for node in ast.walk(ast.parse((ROOT / file).read_text())) if isinstance(node, ast.ImportFrom)]
    ours = [node for node in nodes if (node.module or "").split(".")[0] == "tests"]
    modules = {f"{node.module}{tail}" for node in ours for tail in ("", *(f".{name.name}" for name in node.names))}
    paths = {f"{module.replace('.', '/')}.py" for module in modules}
    return {path for path in paths if (ROOT / path).exists()}


def passes(tests: list[str], source: Path, interpreted: bool) -> tuple[bool, str]:
    """Return whether the tests pass on this source, and pytest's last line, which counts them."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    environment = (
        os.environ
        | {"PYTHONPATH": f"{source / 'src'}:{source / 'lab/src'}"}
        | ({"TRITON_INTERPRET": "1"} if interpreted else {})
    )
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if done.returncode not in (0, 1):
        raise SystemExit(f"pytest could not run {tests}:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    return done.returncode == 0, done.stdout.rstrip().rpartition("\n")[2]


def plant(mutant: Mutant) -> tuple[bool, str]:
    """Return whether the defect is found, and the line that says so."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder)
        # Loops that numba has compiled are taken along, or each run would compile them anew; but not where one of those
        # is to change that others, which do not know of it, are made of.
        ignore = shutil.ignore_patterns("__pycache__") if "/kernels/" in mutant.file else None
        for part in ("src", "lab/src"):
            shutil.copytree(ROOT / part, source / part, ignore=ignore)
        path = source / mutant.file
        text = path.read_text() if path.exists() else ""
        if text.count(mutant.good) != 1:
            times = text.count(mutant.good)
            return False, f"GONE      {mutant.name}: its place in {mutant.file} occurs {times} times"
        path.write_text(text.replace(mutant.good, mutant.bad))
        survived, counts = passes([mutant.test], source, mutant.interpreted)
        skipped = " (skipped here)" if survived and "passed" not in counts else ""
        return not survived, f"{'SURVIVED' if survived else 'found   '}  {mutant.name}: {mutant.test}{skipped}"


def record(path: Path, outcomes: dict[str, bool], mutants: Iterable[Mutant]) -> None:
    """Write what came of defects, by name, and where and when; what the file has of others among ``mutants`` stays."""
    known: dict[str, dict[str, object]] = {}
    if path.exists():
        with path.open(newline="", encoding="utf-8") as file:
            known = {line["name"]: dict(line) for line in csv.DictReader(file)}
    where = environment()
    for name, found in outcomes.items():
        known[name] = {"name": name, "found": int(found), **where}
    write_csv(path, [known[mutant.name] for mutant in mutants if mutant.name in known])


def run(chosen: list[Mutant], jobs: int, note: Callable[[dict[str, bool]], None] = lambda outcomes: None) -> int:
    """Run the tests without a defect, then once for every defect; return the exit code.

    Args:
        note: is told, after each, which defects were found so far and which were not.
    """
    started = time.monotonic()
    with ThreadPoolExecutor(jobs) as pool:
        groups = {flag: sorted({m.test for m in chosen if m.interpreted == flag}) for flag in (False, True)}
        clean = [pool.submit(passes, tests, ROOT, flag) for flag, tests in groups.items() if tests]
        if not all(future.result()[0] for future in clean):
            print("the tests fail without any defect")
            return 1
        outcomes: dict[str, bool] = {}
        planted = {pool.submit(plant, mutant): mutant.name for mutant in chosen}
        for number, future in enumerate(as_completed(planted), 1):
            outcomes[planted[future]], line = future.result()
            print(f"{line}  [{number}/{len(chosen)}, {time.monotonic() - started:.0f} s]", flush=True)
            note(outcomes)
    found, seconds = sum(outcomes.values()), time.monotonic() - started
    missed = len(chosen) - found
    print(f"{len(chosen)} seeded defects, {found} found, {missed} not, in {seconds:.0f} s")
    return 1 if missed else 0


def main(arguments: list[str] | None = None) -> int:
    rooms = load_rooms()
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description="Run seeded defects.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="names of defects (default: all)")
    parser.add_argument("--room", nargs="+", action="extend", choices=list(rooms), help="only defects of these rooms")
    parser.add_argument("--guards", action="store_true", help="only the guards of tests/mutants/guards.csv")
    parser.add_argument("--since", metavar="COMMIT", help="only rooms whose source or tests differ from this commit")
    parser.add_argument("-j", "--jobs", type=int, default=2, help="defects at a time (default: %(default)s)")
    parser.add_argument("--output", type=Path, metavar="FILE", help="note there, as CSV, which were found")
    options = parser.parse_args(arguments)
    if unknown := set(options.names) - {mutant.name for mutants in rooms.values() for mutant in mutants}:
        parser.error(f"no defect is called {', '.join(sorted(map(repr, unknown)))}")
    if options.output and not Path(sparsync_lab.__file__).is_relative_to(ROOT):
        parser.error(
            f"--output would note the commit of {sparsync_lab.__file__}; set PYTHONPATH to src and lab/src here"
        )
    kept = set(options.room or rooms)
    if options.since:
        kept &= set(rooms_touched(rooms, changed_since(options.since)))
        print(f"rooms changed since {options.since}: {', '.join(sorted(kept)) or 'none'}", flush=True)
    every = [mutant for mutants in rooms.values() for mutant in mutants]
    named = set(options.names or [mutant.name for mutant in every])
    if options.guards:
        named &= {row.guard for row in table()}
    chosen = [mutant for room in rooms if room in kept for mutant in rooms[room] if mutant.name in named]
    return run(chosen, options.jobs, *([partial(record, options.output, mutants=every)] if options.output else []))


if __name__ == "__main__":
    sys.exit(main())
