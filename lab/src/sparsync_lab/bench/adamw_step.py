"""What hook and update of preconditioned feedback cost together, against torch's own AdamW step, in one run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

import sparsync
from sparsync_lab.bench.clock import Clock, allocations, synchronizes
from sparsync_lab.bench.preconditioned_methods import COLS, cut

FUSED = "AdamW(fused=True)"
FALL = 0.99  # by what a falling learning rate is multiplied in every step
WARM_UP = 10
HEAD_START = 80  # some 5 ms on an H200: a backward pass keeps the device busy for longer than a step keeps the host
LOOKS = 5  # steps that are looked at, beside those that are timed


@dataclass(frozen=True)
class Case:
    """What is timed.

    Args:
        options: what ``attach`` is asked for.
        falls: the learning rate falls in every step, and residuals with it.
        nccl: messages go through NCCL, to this worker itself; else they go nowhere.
    """

    name: str
    options: dict[str, str]
    falls: bool = False
    nccl: bool = False


LAYER = {"compressor": "threshold", "scope": "layer"}
CASES = (
    Case("threshold, layer", LAYER),
    Case("threshold, rate falls", LAYER, falls=True),
    Case("threshold, NCCL", LAYER, nccl=True),
    Case("topk, layer", {"compressor": "topk", "scope": "layer"}),
    Case("topk, global", {"compressor": "topk", "scope": "global"}),
)


@dataclass
class AdamWRow:
    """One method's times in milliseconds, on the device and of the host; and what it asks of a GPU in a step.

    Args:
        launches: kernels and copies; ``None`` where there is no GPU, as in what follows.
        allocated: blocks of memory.
        waits: the host waits for the device.
        state: bytes kept between steps, over those of the parameters.
        profile: the host's most expensive calls, as a table.
    """

    method: str
    parameters: int
    density: float
    times: list[float] = field(default_factory=list)
    host: list[float] = field(default_factory=list)
    launches: float | None = None
    allocated: float | None = None
    waits: bool | None = None
    state: float | None = None
    profile: str = ""


class Weights(nn.Module):
    """Matrices that nobody multiplies with, and a vector, as every model has some: their gradients are made up."""

    def __init__(self, numel: int, device: torch.device) -> None:
        super().__init__()
        shapes = [(t.matrices.rows, t.matrices.cols) for t in cut(numel - COLS) if t.matrices]
        shapes += [(numel - sum(rows * cols for rows, cols in shapes),)]  # type: ignore[list-item]
        self.weights = nn.ParameterList([torch.randn(shape, device=device) for shape in shapes])


class OwnStep:
    """Torch's fused AdamW on gradients that are there."""

    def __init__(self, numel: int, density: float, device: torch.device) -> None:
        self.model = Weights(numel, device)
        self.parameters = list(self.model.parameters())
        self.buffer = torch.zeros(numel, device=device)
        self.optimizer = torch.optim.AdamW(self.parameters, lr=1e-3, fused=True)
        self.row = AdamWRow(FUSED, numel, density)
        for parameter, part in zip(self.parameters, self._parts(), strict=True):
            parameter.grad = part

    def _parts(self) -> list[Tensor]:
        """Return the gradients, which are views of one bucket."""
        parts = torch.split(self.buffer, [parameter.numel() for parameter in self.parameters])
        return [part.view_as(parameter) for part, parameter in zip(parts, self.parameters, strict=True)]

    def start(self, grad: Tensor) -> None:
        """Make the first steps, and note what is kept for the next ones beside parameters and gradients."""
        before = _allocated(self.buffer.device)
        self.attach()
        for _ in range(2):
            self.prepare(grad)
            self.step()
        if self.buffer.is_cuda:
            self.row.state = (_allocated(self.buffer.device) - before) / self.buffer.nbytes

    def attach(self) -> None:
        """Do nothing: the optimizer steps by its own rule."""

    def prepare(self, grad: Tensor) -> None:
        """Make the next step's gradient, outside of what is timed."""
        self.buffer.copy_(grad)

    def step(self) -> None:
        self.optimizer.step()

    def close(self) -> AdamWRow:
        return self.row


class HookAndUpdate(OwnStep):
    """The hook on one bucket that holds all gradients, and the optimizer's step: as a worker makes them."""

    def __init__(self, case: Case, group: Any, numel: int, density: float, device: torch.device) -> None:
        super().__init__(numel, density, device)
        self.row.method, self._case = case.name, case
        self._ddp = DistributedDataParallel(self.model, process_group=group)  # whose buckets are not ours

    def attach(self) -> None:
        self.handle = sparsync.attach(
            self._ddp,
            optimizer=self.optimizer,
            precondition=True,
            density=self.row.density,
            **self._case.options,  # type: ignore[arg-type]
        )

    def prepare(self, grad: Tensor) -> None:
        super().prepare(grad)
        if self._case.falls:
            self.optimizer.param_groups[0]["lr"] *= FALL

    def step(self) -> None:
        self.handle.push(0, self.buffer, self.parameters, last=True).wait()
        self.optimizer.step()

    def close(self) -> AdamWRow:
        self.handle.detach()
        return self.row


def measure(
    numel: int,
    density: float,
    rounds: int,
    device: torch.device,
    progress: Callable[[int], None] = lambda done: None,
    profiled: bool = False,
) -> list[AdamWRow]:
    """Time torch's step and every one of ``CASES``, a step each, round after round; then look at what they ask for.

    Args:
        profiled: profile the host, which on a GPU is done in any case.
    """
    if rounds < 1:
        raise ValueError(f"rounds must be 1 or more, got {rounds}")
    rng = torch.Generator(device).manual_seed(0)
    grad = torch.randn(numel, generator=rng, device=device)
    with single_worker(device) as (nowhere, nccl):
        timed, clock = [OwnStep(numel, density, device)], Clock(device, HEAD_START)
        timed[0].start(grad)
        for case in CASES:
            group = nccl if case.nccl else nowhere
            if group is not None:
                timed.append(HookAndUpdate(case, group, numel, density, device))
                timed[-1].start(grad)
        for turn in range(WARM_UP + rounds):
            for method in timed:
                method.prepare(grad.roll(4096 * turn))
                took, host = clock.time(method.step)
                if turn >= WARM_UP:
                    method.row.times.append(took)
                    method.row.host.append(host)
            progress(1)
        for method in timed if profiled or device.type == "cuda" else ():
            _look(method, device)
        rows = [method.close() for method in timed]
        del timed, method
    return rows


def _allocated(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated()


def _look(method: OwnStep, device: torch.device) -> None:
    """Count what a step asks of a GPU, and profile the host."""
    steps = [method.step] * LOOKS
    kinds = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device.type == "cuda" else [])
    with profile(activities=kinds) as seen:
        for step in steps:
            step()
    method.row.profile = seen.key_averages().table(
        sort_by="self_cpu_time_total", row_limit=10, max_name_column_width=60
    )
    if device.type == "cuda":
        torch.cuda.synchronize()
        on_device = [event for event in seen.events() if event.device_type == DeviceType.CUDA]
        method.row.launches = sum(not event.is_user_annotation for event in on_device) / LOOKS
        method.row.allocated = allocations(steps) / LOOKS
        method.row.waits = synchronizes(steps)


@contextmanager
def single_worker(device: torch.device) -> Iterator[tuple[Any, Any]]:
    """Join a group of one process, whose messages go nowhere; on a GPU, one that uses NCCL, too."""
    if device.type == "cuda":
        torch.cuda.set_device(0)
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        yield dist.group.WORLD, dist.new_group(backend="nccl") if device.type == "cuda" else None
    finally:
        dist.destroy_process_group()
