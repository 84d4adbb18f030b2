"""Targets, one after another, and a row for each of how many inputs were tried, when, where and of which commit."""

from __future__ import annotations

import csv
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from sparsync_lab.environment import environment

KEPT = Path(".fuzz")  # what atheris has found, beside atheris itself
RESULTS = Path("results/fuzz.csv")
DONE = re.compile(r"^Done (\d+) runs in (\d+) second", re.MULTILINE)


def run_targets(minutes: int, targets: Sequence[str]) -> int:
    """Run targets for so long each; return the exit code of the first that found something, or 0."""
    for target in targets:
        corpus, said = KEPT / "corpus" / target, ""
        corpus.mkdir(parents=True, exist_ok=True)
        options = [
            "-len_control=0",
            f"-max_total_time={60 * minutes}",
            f"-artifact_prefix={KEPT}/{target}-",
            str(corpus),
        ]
        command = [sys.executable, "-m", "tests.fuzz", target, *options]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, errors="replace") as process:
            assert process.stderr is not None
            for line in process.stderr:
                print(line, end="", file=sys.stderr)
                said = (said + line)[-10_000:]
        append(RESULTS, row_of(target, said, process.returncode, len([*corpus.iterdir()])))
        if process.returncode:
            return process.returncode
    return 0


def row_of(target: str, said: str, code: int, corpus: int) -> dict[str, str]:
    """Return what came of a target; ``said``: by libFuzzer, which counts its runs where it comes to an end."""
    done = DONE.search(said)
    executions, seconds = done.groups() if done else ("", "")
    return {
        "target": target,
        "executions": executions,
        "seconds": seconds,
        "corpus": str(corpus),
        "failed": str(code != 0),
        **environment(),
    }


def append(path: Path, row: dict[str, str]) -> None:
    """Add a row to a file, which begins with the names of the columns."""
    new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, list(row), lineterminator="\n")
        if new:
            writer.writeheader()
        writer.writerow(row)
