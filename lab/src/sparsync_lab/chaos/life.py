"""One life of a worker, from its start to its end, however that comes."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

import sparsync
from sparsync_lab.chaos.events import EventfulTraining
from sparsync_lab.chaos.faults import Injected
from sparsync_lab.chaos.ledger import LawBroken
from sparsync_lab.chaos.schedule import Life
from sparsync_lab.chaos.told import told_by_torch
from sparsync_lab.chaos.training import Outcome
from sparsync_lab.training.local_workers import Worker


def live(
    worker: Worker, life: Life, folder: Path, known: dict[int, bytes], prepare: Callable[[], None] | None
) -> Outcome:
    """Train until the life ends; ``known``: digests of weights that steps have to come to again."""
    logging.getLogger("sparsync").setLevel(logging.CRITICAL)
    warnings.simplefilter("ignore")
    if prepare is not None:
        prepare()
    outcome = Outcome(step=life.first)
    deadline = timedelta(seconds=life.deadline)
    dist.init_process_group("gloo", rank=worker.rank, world_size=worker.count, timeout=deadline)
    training = EventfulTraining(worker, life, folder, known, outcome)
    try:
        training.start()
        training.train()
    except LawBroken as error:
        outcome.end, outcome.error = "broken", str(error)
    except Exception as error:
        if isinstance(error, Injected) and not life.fault.kind.endswith("leave"):
            os._exit(1)  # as a script that nobody has caught an exception of
        outcome.end, outcome.error = "failed", f"{type(error).__name__}: {error}"
        outcome.by_torch = told_by_torch(error, training.sync, training.joining)
        outcome.expected = outcome.by_torch or isinstance(error, sparsync.SparsyncError | Injected)
        try:
            training.after_failure()
        except LawBroken as broken:
            outcome.end, outcome.error = "broken", f"{broken} (after {outcome.error})"
    outcome.faulted = training.faults.happened
    training.close(alone=outcome.end != "done")
    return outcome
