"""What a rank does in a cell: a few steps of a training whose gradients are whole numbers, so that sums are exact."""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import sparsync
from sparsync.collectives import Channel
from sparsync.collectives.comm import store_monitor
from sparsync.engine.bucketing import Unit
from sparsync.engine.unit_step import compress_unit
from sparsync.kernels.cpu import LEAST
from tests.failures.ddp_training import logged
from tests.failures.reducers import error_of
from tests.matrix.cells import Cell
from tests.matrix.faults import Injection
from tests.matrix.steps import WRITE

STEPS = 5
RATE = 0.125
SCALE = 2.0**10
SHAPES = {"a": (40, 30), "b": (25, 20), "c": (30, 10), "small": (60,)}  # the last travels dense
DEADLINES = {"stop": 5.0, "kill": 8.0}  # seconds; of the others, who wait for nobody, 30
NODES = {3: [[0, 1], [2]], 5: [[0, 1], [2, 3, 4]]}
METHODS: dict[str, dict[str, Any]] = {
    "allgather": {"compressor": "topk"},
    "global": {"compressor": "threshold", "scope": "global"},
    "shared": {"compressor": "random", "collective": "shared"},
    "gtopk": {"compressor": "topk", "collective": "gtopk"},
    "balanced": {"compressor": "topk", "collective": "balanced"},
    "dense": {"compressor": "none"},
    "sketches": {"compressor": "topk", "precondition": True},
    "nodes": {"compressor": "topk"},
}


def gradient(rank: int, step: int, name: str) -> Tensor:
    """Return the gradient of a parameter: whole numbers, the same in every run."""
    seed = 1000 * step + 10 * rank + list(SHAPES).index(name)
    return torch.randint(-99, 100, SHAPES[name], generator=torch.Generator().manual_seed(seed)).float()


def deadline_of(cell: Cell) -> float:
    return DEADLINES.get(cell.fault, 30.0)


def options_of(cell: Cell) -> dict[str, Any]:
    """Return what a rank gives to ``attach``."""
    options = {"density": 0.05, "dense_below": 0, **METHODS[cell.collective]}
    if cell.collective == "dense":
        del options["density"]
    if cell.collective == "nodes":
        options["per_node"] = NODES[cell.size]
    return options


class Model(nn.Module):
    """Parameters whose gradients are given."""

    def __init__(self) -> None:
        super().__init__()
        for name, shape in SHAPES.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(shape)))

    def forward(self, rank: int, step: int) -> Tensor:
        return torch.stack([(p * gradient(rank, step, name)).sum() for name, p in self.named_parameters()]).sum()


class Training:
    """A model under DDP and Sparsync, as everybody trains it."""

    def __init__(self, cell: Cell, deadline: float) -> None:
        self.model = Model()
        self.ddp = DistributedDataParallel(self.model, bucket_cap_mb=0.002)
        kind: Any = torch.optim.AdamW if cell.collective == "sketches" else torch.optim.SGD
        self.optimizer = kind(self.model.parameters(), lr=RATE)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=SCALE) if cell.scaled else None
        own = {"optimizer": self.optimizer, "scaler": self.scaler, "deadline": deadline}
        self.handle = sparsync.attach(self.ddp, **own, **options_of(cell))

    def step(self, rank: int, step: int) -> None:
        self.optimizer.zero_grad()
        loss = self.ddp(rank, step)
        if self.scaler is None:
            loss.backward()
            if all(p.grad.isfinite().all() for p in self.model.parameters() if p.grad is not None):
                self.optimizer.step()
        else:
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
        self.handle._running()._comm_thread.drain()  # so that what it does belongs to this step

    def weights(self) -> dict[str, Any]:
        return {name: p.detach().numpy().copy() for name, p in self.model.named_parameters()}

    def residuals(self) -> dict[str, Any]:
        kept = {name: self.handle.residual(name) for name in SHAPES}
        return {name: np.zeros(SHAPES[name], np.float32) if t is None else t.numpy().copy() for name, t in kept.items()}


_left: list[Training] = []  # of a cell that is over, to be ended together


def case_undisturbed(rank: int, size: int, cell: Cell) -> list[dict[str, Any]]:
    """Return weights and residuals after every number of steps, where nothing goes wrong."""
    with paths_of(cell):
        training, seen = Training(cell, 60.0), []
        for step in range(STEPS + 1):
            seen.append({"weights": training.weights(), "residuals": training.residuals()})
            if step < STEPS:
                training.step(rank, step)
        training.handle.detach()
    return seen


def case_struck(rank: int, size: int, cell: Cell) -> dict[str, Any]:
    """Train while a fault strikes one rank; return what came of it."""
    store_monitor.PATIENCE, store_monitor.GRACE = 0.1, 1.0  # quicker than usual
    injection = Injection(cell.place, cell.fault, cell.after, cell.last, word=-1 if cell.last else 4)
    whole: dict[str, Any] = {}
    began = time.monotonic()
    with ExitStack() as stack:
        stack.enter_context(paths_of(cell))
        told = stack.enter_context(logged(logging.DEBUG))
        if cell.collective == "sketches":
            stack.enter_context(patch("sparsync.engine.unit_exchange.compress_unit", noting(whole)))
        first = Injection(WRITE, "raise", after=False, last=False, word=0)
        if rank == cell.starter:
            stack.enter_context(first.armed())
        if rank == cell.rank:
            stack.enter_context(injection.armed())
        try:
            training = Training(cell, deadline_of(cell))
        except Exception as error:
            raised = type(error).__name__, str(error)
            return {"struck": injection.struck, "error": raised, "seconds": time.monotonic() - began}
        _left.append(training)
        for step in range(STEPS):
            began, injection.now, first.now = time.monotonic(), step, step
            if error_of(training.step, rank, step)[0] != "none":
                break
        error = error_of(training.handle.check)
        seconds = time.monotonic() - began
    reducer = training.handle._running()
    assert reducer.completion.waits != cell.deferred
    return {
        "struck": injection.struck,
        "error": error,
        "seconds": seconds,
        "again": error_of(training.ddp, rank, STEPS)[0],
        "completed": reducer.vote.completed if error[0] != "none" else reducer.step,
        "saved": training.handle.state_dict()["step"],
        "weights": training.weights(),
        "residuals": training.residuals(),
        "whole": whole,
        "scale": reducer.worker.loss_scale or 1.0,  # that of the residuals
        "told": told,
    }


def noting(whole: dict[str, Any]) -> Callable[..., Any]:
    """Return ``compress_unit`` that notes, by name, what a residual holds before anything is taken out of it."""

    def compress(unit: Unit, *others: Any) -> Any:
        sent, memory = compress_unit(unit, *others)
        if memory is not None:
            flat = memory.after.index_add(0, sent.indices, sent.values)
            whole.update({s.name: flat[s.start : s.stop].view(SHAPES[s.name]).numpy() for s in unit.spans})
        return sent, memory

    return compress


@contextmanager
def paths_of(cell: Cell) -> Iterator[None]:
    """Let numba's loops work on gradients as small as these, and the device decide over Gloo, where a cell asks."""
    made = Channel.__init__

    def make(channel: Channel, *arguments: Any) -> None:
        made(channel, *arguments)
        channel.may_defer = cell.deferred

    least = 1 if cell.collective == "global" and not cell.deferred else LEAST
    with patch("sparsync.kernels.cpu.LEAST", least), patch.object(Channel, "__init__", make):
        yield


def case_end(rank: int, size: int) -> None:
    """End a cell, when all ranks are there: nobody learns anything from a connection that another one closes."""
    dist.barrier()
    for training in _left:
        training.handle.abandon()
    _left.clear()
    gc.collect()
