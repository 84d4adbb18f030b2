"""What hook and update of preconditioned feedback cost together, against torch's own AdamW step, in one run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel

import sparsync
from sparsync_lab.bench.clock import Clock
from sparsync_lab.bench.preconditioned_methods import cut

FUSED = "AdamW(fused=True)"
# (name, what attach is asked for)
CASES: tuple[tuple[str, dict[str, object]], ...] = (
    ("threshold, layer", {"compressor": "threshold", "scope": "layer"}),
    ("topk, layer", {"compressor": "topk", "scope": "layer"}),
    ("topk, global", {"compressor": "topk", "scope": "global"}),
)
WARM_UP = 10


@dataclass
class AdamWRow:
    """One method's times in milliseconds, on the device and of the host."""

    method: str
    parameters: int
    density: float
    times: list[float] = field(default_factory=list)
    host: list[float] = field(default_factory=list)


class Weights(nn.Module):
    """Matrices that nobody multiplies with: their gradients are made up."""

    def __init__(self, numel: int, device: torch.device) -> None:
        super().__init__()
        shapes = [(t.matrices.rows, t.matrices.cols) if t.matrices else (t.numel,) for t in cut(numel)]
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

    def step(self) -> None:
        self.optimizer.step()

    def close(self) -> AdamWRow:
        return self.row


class HookAndUpdate(OwnStep):
    """The hook on one bucket that holds all gradients, and the optimizer's step: as a worker makes them."""

    def __init__(
        self, method: str, options: dict[str, object], numel: int, density: float, device: torch.device
    ) -> None:
        super().__init__(numel, density, device)
        self.row.method = method
        ddp = DistributedDataParallel(self.model)
        self.handle = sparsync.attach(
            ddp, optimizer=self.optimizer, precondition=True, density=density, **options  # type: ignore[arg-type]
        )  # fmt: skip

    def step(self) -> None:
        self.handle.push(0, self.buffer, self.parameters, last=True).wait()
        self.optimizer.step()

    def close(self) -> AdamWRow:
        self.handle.detach()
        return self.row


def measure(
    numel: int, density: float, rounds: int, device: torch.device, progress: Callable[[int], None] = lambda done: None
) -> list[AdamWRow]:
    """Time torch's step and every one of ``CASES``, a step each, round after round."""
    if rounds < 1:
        raise ValueError(f"rounds must be 1 or more, got {rounds}")
    rng = torch.Generator(device).manual_seed(0)
    grad = torch.randn(numel, generator=rng, device=device)
    with single_worker(device):
        timed = [OwnStep(numel, density, device)]
        timed += [HookAndUpdate(name, options, numel, density, device) for name, options in CASES]
        clock = Clock(device)
        for turn in range(WARM_UP + rounds):
            for method in timed:
                method.buffer.copy_(grad.roll(4096 * turn))
                took, host = clock.time(method.step)
                if turn >= WARM_UP:
                    method.row.times.append(took)
                    method.row.host.append(host)
            progress(1)
        rows = [method.close() for method in timed]
        del timed, method
    return rows


@contextmanager
def single_worker(device: torch.device) -> Iterator[None]:
    """Join a group of one process."""
    if device.type == "cuda":
        torch.cuda.set_device(0)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", store=HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()
