"""Sketches travel beside backward: each bucket's is summed before the next bucket's gradients exist."""

from __future__ import annotations

import gc
import threading
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import sparsync
from sparsync.collectives import ReduceByParts, Reduced
from sparsync.hosts.handle import Handle
from tests.world import World

WIDTH = 64
BUCKETS = 3
LIMIT = 60.0  # seconds; a sketch that is sent only after backward would never come


class Watched:
    """The events of a step, in their order: buckets that backward hands over, and sums of whole vectors."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.changed = threading.Condition()

    def add(self, event: str) -> None:
        with self.changed:
            self.events.append(event)
            self.changed.notify_all()

    def wait_for_sums(self) -> None:
        """Wait until there are as many sums as buckets."""
        with self.changed:
            assert self.changed.wait_for(lambda: self.count("sum") >= self.count("bucket"), LIMIT), self.events

    def count(self, kind: str) -> int:
        return sum(event.startswith(kind) for event in self.events)


class Gate(torch.autograd.Function):
    """Identity whose backward waits until the sketches of all layers behind it are summed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, watched: Watched) -> Tensor:
        ctx.watched = watched
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.watched.wait_for_sums()
        return grad, None


class Gated(nn.Module):
    """Three matrices, each a bucket of its own, with a gate between one and the next."""

    def __init__(self, watched: Watched) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(BUCKETS))
        self.watched = watched

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            x = layer(x if number == 0 else Gate.apply(x, self.watched)).tanh()
        return x


def case_events(rank: int, size: int) -> list[str]:
    """Return the events of a step after DDP's bucket rebuild; backward has passed the gates."""
    watched = Watched()
    push, reduce = Handle.push, ReduceByParts.reduce

    def watch_push(self: Handle, index: int, *rest: Any) -> Any:
        watched.add(f"bucket {index}")
        return push(self, index, *rest)

    def watch_sum(self: ReduceByParts, *args: Any) -> Reduced:
        reduced = reduce(self, *args)
        watched.add(f"sum {args[0].numel}")
        return reduced

    model = Gated(watched)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.01)
    handle = sparsync.attach(ddp, "topk", density=0.05, optimizer=optimizer, precondition=True)
    Handle.push, ReduceByParts.reduce = watch_push, watch_sum  # type: ignore[method-assign]
    try:
        for _ in range(3):
            watched.events.clear()
            optimizer.zero_grad()
            ddp(torch.randn(8, WIDTH)).square().mean().backward()
            optimizer.step()
    finally:
        Handle.push, ReduceByParts.reduce = push, reduce  # type: ignore[method-assign]
    handle.detach()
    del ddp
    gc.collect()
    return watched.events


def test_only_the_last_sketch_is_waited_for(worlds: dict[int, World]) -> None:
    sketch = f"sum {2 * WIDTH}"  # rows and columns
    for events in worlds[2].run(case_events):
        assert events == [event for number in range(BUCKETS) for event in (f"bucket {number}", sketch)]
