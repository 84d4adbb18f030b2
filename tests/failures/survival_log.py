"""What happens in the long test of survivors, printed, and written into a file if one is asked for."""

from __future__ import annotations

import logging
import textwrap
from pathlib import Path

from sparsync_lab.environment import environment

VARIABLE = "SPARSYNC_SURVIVE_LOG"  # the file
COMMAND = f"{VARIABLE}=results/survive.txt python -m pytest tests/failures/test_survivors.py -m slow -k 2000"
WHAT = """4 processes over Gloo, top-k of 5 % with SGD, a deadline of 10 s. Processes are killed (SIGKILL) or frozen
(SIGSTOP, woken up at the end) at random points, between steps and while the others go on, and others are started, which
join. Each of the 60 events has its part of the first nine tenths of the steps: the others train slowly where one takes
long. After every step the weights, and at the end weights and residuals of all survivors, are compared bit for bit with
a model of it in one process, which goes through the same changes."""
THEN = """First what happened, as the test and rank 0 saw it; then the generations that trained, with the numbers of
their processes (each has one for life), from which step on; then the counts. Left out: on which exchange each rank
noticed a loss."""


class SurvivalLog:
    """Says what happens; the file is there once all has come out as expected.

    Args:
        path: of the file; ``None``: none is written.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path.absolute() if path else None
        self.part = self._path.with_suffix(".part") if self._path else None  # where workers may add a line, too
        if self.part:
            at = environment()
            machine = f"{at['cpus']} cores of {at['device']}, load {at['load']}"
            versions = f"Python {at['python']}, torch {at['torch']}, sparsync {at['sparsync']}"
            where = f"{at['date']}, commit {at['commit']}, {versions}, {machine}"
            rows = {"command": COMMAND, "what it is": WHAT, "environment": where}
            head = ['Kills at random points over 2,000 steps, with attach(..., on_loss="continue").', ""]
            for name, text in rows.items():
                first, *more = textwrap.wrap(text, 108)
                head += [f"{name:<13}{first}", *(f"{'':13}{line}" for line in more)]
            self.part.write_text("\n".join([*head, "", *textwrap.wrap(THEN, 120), "", ""]), encoding="utf-8")

    def say(self, text: str) -> None:
        print(text, flush=True)
        if self.part:
            with self.part.open("a", encoding="utf-8") as file:
                file.write(f"{text}\n")

    def end(self) -> None:
        if self.part and self._path:
            self.part.rename(self._path)


def add_changes(part: Path) -> None:
    """Let the library's own words of who was lost, and who goes on, be added by this process."""
    handler = logging.FileHandler(part, encoding="utf-8")
    handler.setFormatter(logging.Formatter("sparsync: %(message)s"))
    handler.addFilter(lambda record: str(record.msg).startswith(("lost: ", "training goes on ")))
    logging.getLogger("sparsync").addHandler(handler)
