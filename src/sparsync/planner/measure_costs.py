"""Measure what a method takes on a device: the engine's own path, with a network that answers at once."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from sparsync.collectives import Channel
from sparsync.config import ExchangePlan
from sparsync.engine.bucketing import Bucket
from sparsync.engine.reducer import Reducer
from sparsync.engine.traffic import exchanges_of
from sparsync.feedback import rules_of
from sparsync.layout import Parameter
from sparsync.planner.costs import LocalCost, MethodCost, features
from sparsync.planner.links import fit_times
from sparsync.schedule import as_schedule
from sparsync.sparse import SparseGrad
from sparsync.wire import Shape, Wire

COLUMNS = 512  # of the matrix that stands for a model
SIZES = {"cpu": (2**16, 2**18, 2**21), "cuda": (2**19, 2**22, 2**25)}
WORKERS = (2, 8)
WARM_UPS, ROUNDS = 3, 7  # of which the quickest counts: others may use the machine
ATTEMPTS, ENOUGH = 3, 0.25  # how often all is measured, and the relative error that is good enough


class EchoWire(Wire):
    """Remembers the last message."""

    last: Tensor

    def encode(self, sent: SparseGrad, segment_of: Callable[[Tensor], Tensor], shape: Shape, header: Tensor) -> Tensor:
        message = super().encode(sent, segment_of, shape, header)
        object.__setattr__(self, "last", message)
        return message


class EchoChannel(Channel):
    """P workers of which all say what this one says, at once."""

    def __init__(self, wire: EchoWire, workers: int, device: torch.device) -> None:
        super().__init__(None, wire, device=device)
        self.echo, self.size, self.divisor, self.ranks = wire, workers, workers, range(workers)

    def room_for(self, message: Tensor) -> Tensor:
        return message.new_empty(self.size, *message.shape)

    def all_gather(self, message: Tensor, room: Tensor | None = None) -> Tensor:
        out = self.room_for(message) if room is None else room
        return out.copy_(message.expand_as(out))

    def all_to_all(self, messages: Tensor, room: Tensor | None = None) -> Tensor:
        out = torch.empty_like(messages) if room is None else room
        return out.copy_(messages[:1].expand_as(out))

    def send(self, message: Tensor, to: int) -> None:
        pass

    def receive(self, out: Tensor, source: int) -> Tensor:
        return out.copy_(self.echo.last)


class Sample(NamedTuple):
    """A step of a single matrix: what it is counted in, and the seconds of its two parts."""

    counted: tuple[float, float, float, float]
    select: float
    finish: float


def measure_method(plan: ExchangePlan, device: torch.device) -> MethodCost:
    """Return what a method takes on a device, from steps of several sizes with several numbers of workers.

    Where they do not fit together others have used the machine meanwhile: then they are measured again, and of each the
    quickest counts.
    """
    cases = [(numel, workers) for numel in SIZES[kind_of(device)] for workers in WORKERS]
    select, finish = np.full(len(cases), np.inf), np.full(len(cases), np.inf)
    for _ in range(ATTEMPTS):
        samples = [measure_step(plan, numel, workers, device) for numel, workers in cases]
        select = np.minimum(select, [sample.select for sample in samples])
        finish = np.minimum(finish, [sample.finish for sample in samples])
        counted = np.array([sample.counted for sample in samples])
        fitted = [_fit(counted, times) for times in (select, finish)]
        if max(error for _, error in fitted) < ENOUGH:
            break
    return MethodCost(*(cost for cost, _ in fitted))


def _fit(counted: np.ndarray, times: np.ndarray) -> tuple[LocalCost, float]:
    """Return the cost that explains times, and by how much it is off at most, relatively."""
    if not times.any():
        return LocalCost(), 0.0
    found = fit_times(counted, np.maximum(times, 1e-7))
    return LocalCost(*found), float(np.abs(counted @ found / np.maximum(times, 1e-7) - 1).max())


def kind_of(device: torch.device) -> str:
    return "cuda" if device.type == "cuda" else "cpu"


def measure_step(plan: ExchangePlan, numel: int, workers: int, device: torch.device) -> Sample:
    """Time steps of a matrix of ``numel`` entries through the reducer; the shortest of several times counts."""
    density = plan.density_at(2**31)
    plan = replace(plan, budget=None, spending=None, dense=frozenset(), density=as_schedule(density), deadline=300.0)
    weight = torch.empty(numel // COLUMNS, COLUMNS, dtype=torch.float32, device="meta")
    parameters, names = [Parameter.of("weight", weight)], frozenset[str]()
    (main,) = (e for e in exchanges_of(plan, {"weight": weight}, workers)(density) if not e.sketch)
    channel = EchoChannel(EchoWire(plan.values, plan.indices), workers, device)
    reducer = Reducer(parameters, plan, channel, dense_names=names, device=device)
    if plan.precondition:
        assert plan.optimizer is not None
        rule = rules_of(plan.optimizer).hyperparameters(plan.optimizer.param_groups[0])
        reducer.path.rules = lambda: {"weight": rule}
    generator = torch.Generator("cpu").manual_seed(0)
    gradient = torch.randn(numel, generator=generator, dtype=torch.float32, device="cpu").to(device)
    selects, finishes = [], []
    for turn in range(WARM_UPS + ROUNDS):
        buffer = gradient.roll(turn * 7919)
        _wait(device)
        begun = time.perf_counter()
        reducer.push(Bucket(0, buffer, ("weight",), True)).wait()
        _wait(device)
        whole = time.perf_counter() - begun
        select = 0.0
        if device.type == "cpu":  # on a GPU everything runs beside backward, and only the end is seen
            records = reducer.stats.timeline
            own = [r for r in records if not plan.precondition or r.unit.startswith("sketch")]
            select = sum(record.compressed - record.arrived for record in own)
        selects.append(select)
        finishes.append(whole - select)
    reducer.close()
    counted = features(numel, main.traffic)
    return Sample(counted, min(selects[WARM_UPS:]), min(finishes[WARM_UPS:]))


def measure_cast(device: torch.device) -> LocalCost:
    """Return what DDP's own bf16 hook takes beside its sum."""
    counted, times = [], []
    for numel in SIZES[kind_of(device)]:
        buffer, taken = torch.randn(numel, dtype=torch.float32, device=device), []
        for _ in range(WARM_UPS + ROUNDS):
            _wait(device)
            begun = time.perf_counter()
            buffer.copy_(buffer.to(torch.bfloat16).div_(2))
            _wait(device)
            taken.append(time.perf_counter() - begun)
        counted.append([1.0, float(numel)])
        times.append(min(taken[WARM_UPS:]))
    return LocalCost(*fit_times(np.array(counted), np.array(times)))


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
