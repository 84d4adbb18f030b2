"""A figure or a table of a paper: what it is, how it is run, and its result."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from sparsync_lab.report import Figure, Table

Log = Callable[[str], None]


@dataclass(frozen=True)
class RunContext:
    """How an item is run.

    Args:
        quick: a tiny setting that shows that everything works, in 2 minutes on 2 CPU cores; else the paper's.
        device: where trainings and measurements run.
        data: folder of the data sets; ``None``: ``$SPARSYNC_DATA``.
        output: folder for results.
        scratch: folder for checkpoints of trainings that are not finished, and for the locks of those under way.
        seed: of weights, order of the data and random methods.
        epochs: of each training, instead of the paper's; its schedule is shortened with it.
        only: words, one of which the name of a training must hold; all trainings, if there are none.
        resume: use trainings that are finished, and go on with those that are not.
        begun: ``time.time`` at which the command began: without ``resume``, files that are older are not used.
        deadline: ``time.monotonic`` after which trainings are put aside.
        whole: begin only trainings that will be done by then, as far as their length is known.
        log: takes a line that tells how far things are.
    """

    quick: bool = False
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    data: Path | None = None
    output: Path = Path("results/papers")
    scratch: Path = Path("runs/papers")
    seed: int = 0
    epochs: float | None = None
    only: Sequence[str] = ()
    resume: bool = True
    begun: float = field(default_factory=time.time)
    deadline: float = float("inf")
    whole: bool = False
    log: Log = lambda line: None

    def __post_init__(self) -> None:
        if self.epochs is not None and not self.epochs > 0:
            raise ValueError(f"epochs must be above 0, got {self.epochs:g}")

    def in_time(self, least: float = 0.0) -> bool:
        """Return whether more than ``least`` seconds are left."""
        return time.monotonic() + least < self.deadline

    def uses(self, path: Path) -> bool:
        """Return whether a training's file is there and is to be used."""
        return path.is_file() and (self.resume or path.stat().st_mtime >= self.begun)

    @property
    def is_read_only(self) -> bool:
        """Return whether ``read_only`` made this context."""
        return self.deadline <= 0

    def read_only(self) -> RunContext:
        """Return the same context for those who train nothing and take what is stored, without a word about what is
        damaged."""
        return replace(self, deadline=0.0, log=lambda line: None)


Column = Sequence[float | int | str | None]


@dataclass(frozen=True)
class Result:
    """The result of an item.

    Args:
        tables: with the published numbers beside ours, where there are any.
        figures: charts and what is to be seen in them.
        notes: what differs from the paper and why.
        rows: measurements as columns, by name; those of trainings are in a file of each training's own.
        runs: names of these files.
        missing: the trainings that are not done yet: names, or groups of them in words.
        data: checksum of each data set that was read, by its name.
        where: machine and versions: of the trainings, if there are any; as it is stored, of what was measured, too.
        seconds: that the trainings took.
    """

    tables: Sequence[Table] = ()
    figures: Sequence[Figure] = ()
    notes: Sequence[str] = ()
    rows: Mapping[str, Column] = field(default_factory=dict)
    runs: Sequence[str] = ()
    missing: Sequence[str] = ()
    data: Mapping[str, str] = field(default_factory=dict)
    where: Mapping[str, str] = field(default_factory=dict)
    seconds: float = 0.0


@dataclass(frozen=True)
class Item:
    """A figure or a table of a paper.

    Args:
        key: paper and number: ``"p1/fig2"``.
        title: what it is.
        shows: what is to be seen in it, in a sentence or two.
        run: makes it again.
        needs: data sets and hardware the full setting asks for.
        minutes: that the full setting takes on one large GPU, about; 0: seconds on any machine.
        published: the paper's numbers, where it prints any.
        order: of an item with many trainings, the order in which they are made and what of them is done.
        by_epochs: the length of its trainings is given in epochs, which ``RunContext.epochs`` changes.
        trains: it is made of trainings, which several processes can share; else it should run alone.
        redraw: of an item that measures, makes its result again from what was measured, by ``Result.rows``.
    """

    key: str
    title: str
    shows: str
    run: Callable[[RunContext], Result]
    needs: Sequence[str] = ()
    minutes: float = 0
    published: Table | None = None
    order: Callable[[RunContext], Table] | None = None
    trains: bool = False
    by_epochs: bool = False
    redraw: Callable[[Mapping[str, Column]], Result] | None = None

    @property
    def file(self) -> str:
        """Return the name of its files, without an ending."""
        return self.key.replace("/", "-")
