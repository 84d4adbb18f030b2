"""Steps that are replayed from CUDA graphs, and the same steps without: run on a GPU (`make test-gpu`)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from sparsync.collectives import Channel
from sparsync.engine.bucketing import Bucket
from sparsync.engine.reducer import Reducer
from sparsync.engine.replay import KnownPlaces
from sparsync.layout import Parameter
from sparsync.wire import Wire
from tests.methods import COLLECTIVES, make, reducer_of
from tests.world import World

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SIZES = {"a": 300_003, "small": 700, "b": 150_000, "c": 20_000}
FIRST, SECOND = (("b", "c"), ("a", "small")), (("c",), ("b", "small"), ("a",))  # buckets, before and after a rebuild


class Side:
    """One reducer, and the buckets that it is fed with."""

    def __init__(self, group: Any, name: str, values: str, indices: str, collective: str, **options: Any) -> None:
        device = torch.device("cuda", 0)
        channel = Channel(group, Wire(values, indices), 60.0, device)
        parameters = [Parameter.of(name, torch.zeros(size)) for name, size in SIZES.items()]
        self.reducer: Reducer = reducer_of(
            parameters, make(name, 0.01), COLLECTIVES[collective], channel, dense_names=frozenset({"small"}), **options
        )
        self.buckets: dict[tuple[tuple[str, ...], ...], list[Tensor]] = {}

    def step(self, grads: dict[str, Tensor], names: tuple[tuple[str, ...], ...]) -> dict[str, Tensor]:
        """Make a step; return what became of the gradients."""
        if names not in self.buckets:
            self.buckets[names] = [torch.zeros(sum(SIZES[n] for n in own), device="cuda") for own in names]
        buffers, futures, results = self.buckets[names], [], {}
        for i, (own, buffer) in enumerate(zip(names, buffers, strict=True)):
            buffer.copy_(torch.cat([grads[name] for name in own]))
            futures.append(self.reducer.push(Bucket(i, buffer, own, i == len(names) - 1)))
        for own, future in zip(names, futures, strict=True):
            results.update(zip(own, future.wait().split([SIZES[name] for name in own]), strict=True))
        return results

    def graphs(self) -> int:
        """How many recordings its units have by now."""
        known = [unit.workspace.find(KnownPlaces) or {} for unit in self.reducer.buckets.units]
        return sum(place.replay is not None for places in known for place in places.values())


def case_replay(rank: int, size: int, cases: list[tuple[str, dict[str, Any]]]) -> list[list[int]]:
    torch.cuda.set_device(0)
    group = dist.new_group(backend="nccl")
    return [compared(group, name, **options) for name, options in cases]


def compared(group: Any, name: str, **options: Any) -> list[int]:
    """Return how many graphs there were after each part; all bits were the same as without."""
    schedule = lambda step: 0.02 if step < 10 else 0.01  # noqa: E731
    replayed, plain = (Side(group, name, density=schedule, **options) for _ in range(2))
    plain.reducer._replays = None
    rng = torch.Generator(device="cuda").manual_seed(0)
    counts, number = [], 0

    def steps(many: int, names: tuple[tuple[str, ...], ...], bad: int = -1) -> None:
        nonlocal number
        for i in range(many):
            grads = {n: torch.randn(s, device="cuda", generator=rng) * (1 + number) ** 0.5 for n, s in SIZES.items()}
            if i == bad:
                grads["a"][5] = float("nan")
            ours, theirs = replayed.step(grads, names), plain.step(grads, names)
            for n in SIZES:
                torch.testing.assert_close(ours[n], theirs[n], rtol=0, atol=0, equal_nan=True, msg=f"{number} {n}")
            assert bool(ours["a"].isnan().any()) == (i == bad)
            for n in ("a", "b", "c"):
                assert torch.equal(replayed.reducer.residual(n), plain.reducer.residual(n)), (number, n)
            number += 1
        counts.append(replayed.graphs())

    steps(10, FIRST)
    steps(14, FIRST, bad=12)  # another density, another layout
    for side in (replayed, plain):
        side.reducer.load_state_dict(side.reducer.state_dict())
    counts.append(replayed.graphs())
    steps(14, FIRST, bad=13)
    steps(14, SECOND)
    for side in (replayed, plain):
        total = side.reducer.newest_stats().total
        counts += [total.steps, total.entries, total.bytes]
        side.reducer.close()
    return counts


CASES: list[tuple[str, dict[str, Any]]] = [
    ("threshold", {"scope": "layer", "values": "fp32", "indices": "int", "collective": "allgather"}),
    ("topk", {"scope": "bucket", "values": "sign", "indices": "ef", "collective": "allgather", "clip": 100.0}),
    ("threshold", {"scope": "global", "values": "sign", "indices": "ef", "collective": "balanced"}),
    ("gaussian", {"scope": "layer", "values": "bf16", "indices": "int", "collective": "allgather"}),
    ("topk", {"scope": "layer", "values": "fp32", "indices": "ef", "collective": "allgather", "transactional": True}),
]


def test_replayed_steps_are_those_without_graphs():
    """Bit for bit, through another density, a step that is not finite, a loaded state and a rebuild of the buckets."""
    ((finished, answer),) = World.once(1, case_replay, timeout=170, cases=CASES)
    assert finished, answer
    for (name, options), counts in zip(CASES, answer, strict=True):
        first, second, loaded, third, rebuilt, *totals = counts
        units = 2 if options["scope"] == "global" else 3  # with what travels dense
        places = 2 if "transactional" in options else 1
        assert (first, second, third) == (units * places,) * 3 if places == 1 else first + second + third > 0, counts
        assert loaded == 0, (name, counts)
        assert rebuilt > 0, (name, counts)
        assert totals[:3] == totals[3:], (name, counts)
