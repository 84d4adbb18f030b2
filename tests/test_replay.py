"""Steps that are replayed, and the same steps without: CUDA graphs on a GPU; elsewhere what launches them is tested."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from sparsync.collectives import Channel
from sparsync.engine import replay
from sparsync.engine.bucketing import Bucket
from sparsync.engine.completion import Deferred
from sparsync.engine.reducer import Reducer
from sparsync.engine.replay import KnownPlaces
from sparsync.layout import Parameter
from sparsync.wire import Wire
from tests.methods import COLLECTIVES, make, reducer_of
from tests.pairs import DEVICE, INTERPRETED, MARKS
from tests.recorded_launches import recorded_on_the_cpu
from tests.world import World

pytestmark = MARKS

SIZES = (
    {"a": 2003, "small": 40, "b": 700, "c": 300}
    if INTERPRETED
    else {"a": 300_003, "small": 700, "b": 150_000, "c": 20_000}
)
KEPT = ("a", "b", "c")
FIRST, SECOND = (("b", "c"), ("a", "small")), (("c",), ("b", "small"), ("a",))  # buckets, before and after a rebuild
WARM_UPS = 0 if INTERPRETED else replay.WARM_UPS
Names = tuple[tuple[str, ...], ...]


class Side:
    """One reducer, and the buckets that it is fed with."""

    def __init__(self, group: Any, name: str, values: str, indices: str, collective: str, **options: Any) -> None:
        channel = Channel(group, Wire(values, indices), 60.0, torch.device(DEVICE))
        channel.may_defer = True  # over Gloo, too
        parameters = [Parameter.of(name, torch.zeros(size)) for name, size in SIZES.items()]
        self.reducer: Reducer = reducer_of(
            parameters, make(name, 0.02), COLLECTIVES[collective], channel, dense_names=frozenset({"small"}), **options
        )
        assert isinstance(self.reducer.completion, Deferred)
        self.buckets: dict[Names, list[Tensor]] = {}

    def step(self, grads: dict[str, Tensor], names: Names) -> dict[str, Tensor]:
        """Make a step; return what became of the gradients."""
        if names not in self.buckets:
            self.buckets[names] = [torch.zeros(sum(SIZES[n] for n in own), device=DEVICE) for own in names]
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


def compared(group: Any, name: str, **options: Any) -> list[int]:
    """Return how many graphs there were after each part. All bits were the same as without; ``ThresholdK``, which on a
    GPU may choose any of entries that are nearly equal, lost nothing."""
    turns, rank = WARM_UPS + 2, 0 if group is None else dist.get_rank(group)
    alone, exact = group is None or dist.get_world_size(group) == 1, name != "threshold" or INTERPRETED
    schedule = lambda step: 0.04 if step < turns else 0.02  # noqa: E731
    replayed, plain = (Side(group, name, density=schedule, **options) for _ in range(2))
    plain.reducer.path.replays = None
    rng = torch.Generator(device=DEVICE).manual_seed(rank)
    counts, number, kept = [], 0, {n: torch.zeros(SIZES[n], device=DEVICE) for n in KEPT}

    def steps(many: int, names: Names, bad: int = -1) -> None:
        nonlocal number
        for i in range(many):
            grads = {n: torch.randn(s, device=DEVICE, generator=rng) * (1 + number) ** 0.5 for n, s in SIZES.items()}
            if i == bad:
                grads["a"][5] = float("nan")
            ours, theirs = replayed.step(grads, names), plain.step(grads, names)
            assert bool(ours["a"].isnan().any()) == (i == bad)
            for n in SIZES if exact else ():
                torch.testing.assert_close(ours[n], theirs[n], rtol=0, atol=0, equal_nan=True, msg=f"{number} {n}")
            for n, before in kept.items():
                after, other = (side.reducer.residual(n) for side in (replayed, plain))
                assert after is not None
                assert not exact or torch.equal(after, other), (number, n)
                if i != bad and alone and options.get("clip") is None:
                    assert torch.equal(ours[n] + after, before + grads[n]), (number, n)
                before.copy_(after)
            number += 1
        counts.append(replayed.graphs())

    steps(turns, FIRST)
    steps(turns + 2, FIRST, bad=turns)  # another density, another layout
    for side in (replayed, plain):
        side.reducer.load_state_dict(side.reducer.state_dict())
    counts.append(replayed.graphs())
    steps(turns + 1, FIRST, bad=turns)
    steps(turns + 1, SECOND)
    for side in (replayed, plain):
        total = side.reducer.newest_stats().total
        counts += [total.steps, total.bytes, total.entries if exact else 0, side.reducer.channel.sequence]
        side.reducer.close()
    return counts


def case_compared(rank: int, size: int, backend: str, cases: list[tuple[str, dict[str, Any]]]) -> list[list[int]]:
    with ExitStack() as stack:
        if INTERPRETED:
            stack.enter_context(recorded_on_the_cpu())
            stack.enter_context(patch.object(replay, "WARM_UPS", WARM_UPS))
        else:
            torch.cuda.set_device(0)
        group = dist.new_group(backend=backend)
        return [compared(group, name, **options) for name, options in cases]


PLAIN, SHORT = {"values": "fp32", "indices": "int"}, {"values": "sign", "indices": "ef"}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "undone": ("threshold", {"scope": "layer", "collective": "allgather", "transactional": True, **PLAIN}),
    "threshold": ("threshold", {"scope": "layer", "collective": "allgather", **PLAIN}),
    "topk": ("topk", {"scope": "bucket", "collective": "allgather", "clip": 30.0, **SHORT}),
    "balanced": ("threshold", {"scope": "global", "collective": "balanced", **SHORT}),
}


def check_counts(options: dict[str, Any], counts: list[int]) -> None:
    first, second, loaded, third, rebuilt, *totals = counts
    if "transactional" not in options:  # whose two residuals take turns
        units = 2 if options["scope"] == "global" else 3  # with what travels dense
        assert (first, second, third) == (units, units, units), counts
    assert min(first, second, third, rebuilt) > 0, counts
    assert loaded == 0, counts
    assert totals[:4] == totals[4:], counts


@pytest.mark.skipif(INTERPRETED, reason="on a GPU")
def test_replayed_steps_are_those_without_graphs():
    """Bit for bit, through another density, a step that is not finite, a loaded state and a rebuild of the buckets."""
    exact = ("topk", {"scope": "layer", "collective": "allgather", **PLAIN})
    cases = [exact, *CASES.values()]
    ((finished, answer),) = World.once(1, case_compared, timeout=170, backend="nccl", cases=cases)
    assert finished, answer
    for (_, options), counts in zip(cases, answer, strict=True):
        check_counts(options, counts)


@pytest.mark.skipif(not INTERPRETED, reason="launches are noted by what interprets them")
@pytest.mark.parametrize("case", ["undone", *(pytest.param(c, marks=pytest.mark.slow) for c in ("topk", "balanced"))])
def test_recorded_steps_are_those_without(case):
    """Likewise, of what is launched."""
    name, options = CASES[case]
    with recorded_on_the_cpu(), patch.object(replay, "WARM_UPS", WARM_UPS):
        check_counts(options, compared(None, name, **options))


@pytest.mark.skipif(not INTERPRETED, reason="ranks cannot share a GPU over NCCL")
@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_recorded_steps_of_several_ranks_are_those_without(worlds, size):
    """Between what is recorded, messages are exchanged anew."""
    answers = worlds[size].run(case_compared, backend="gloo", cases=[CASES["threshold"]])
    assert all(answer == answers[0] for answer in answers)
    check_counts(CASES["threshold"][1], answers[0][0])
