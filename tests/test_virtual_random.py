"""The random kinds of virtual workers, as a CUDA graph would have them: without one, on the CPU and on no device."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sparsync.compressors import Context, random
from sparsync.compressors.random import SpanTable, key_of
from sparsync.engine.unit_step import cut_unit
from sparsync.kernels.accumulate import accumulate_flat
from sparsync.simulate import exchange
from sparsync.simulate.exchange import VirtualExchange
from sparsync.simulate.virtual_units import Keys
from sparsync_lab.virtual import VirtualWorkers
from tests.test_virtual import ALL_SPARSE, loss_fn, make, optimizer_of

WORKERS, STEPS = 3, 6
CPU = torch.device("cpu")
CASES: dict[str, dict[str, Any]] = {
    "random": {"compressor": "random", "scope": "global"},
    "random-layers": {"compressor": "random", "scope": "layer", "values": "levels", "indices": "ef", "seed": 7},
    "random-correct": {"compressor": "random", "values": "fp16", "momentum": "correct"},
    "block": {"compressor": "block", "scope": "global"},
    "block-starts": {"compressor": "block", "scope": "layer", "values": "fp16", "indices": "block"},
    "shared": {"compressor": "random", "collective": "shared", "scope": "layer"},
    "shared-block": {"compressor": "block", "collective": "shared", "scope": "global", "values": "bf16"},
}


def exchange_of(name: str, device: str = "cpu", **more: Any) -> VirtualExchange:
    model = make("net").to(device)
    options = CASES[name] | ALL_SPARSE | {"density": 0.05} | more
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return VirtualWorkers(model, loss_fn, optimizer_of("net", model), WORKERS, **options)._exchange


def advance(of: VirtualExchange, start: int, stop: int) -> list[Tensor]:
    """The means of every step."""
    means = []
    for step in range(start, stop):
        for number, part in enumerate(of.units):
            part.rows.copy_(torch.randn(part.rows.shape, generator=torch.Generator().manual_seed(100 * step + number)))
        with torch.no_grad():
            of.reduce()
        means += [part.mean.clone() for part in of.units]
    return means


@pytest.mark.parametrize("shared", [False, True])
def test_keys_are_those_of_processes_and_stay_where_they_are(shared):
    keys = Keys(5, WORKERS, shared, CPU)
    places = [key.data_ptr() for key in keys.of]
    for step in (3, 1000):
        keys.turn(step)
        expected = [key_of(Context(step, rank, 5, shared=shared)) for rank in range(WORKERS)]
        assert [int(key) for key in keys.of] == expected
        assert len(set(expected)) == (1 if shared else WORKERS)
    assert [key.data_ptr() for key in keys.of] == places


class Crossings(TorchDispatchMode):
    """Finds what goes from the host to the device, which a graph cannot do again."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = func(*args, **kwargs or {})
        devices = {t.device.type for t in tree_leaves((args, kwargs, given)) if isinstance(t, Tensor)}
        if len(devices) > 1:
            self.found.append(str(func))
        return given


class Lists(TorchFunctionMode):
    """Finds tensors that are made of Python's numbers, on the device."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        given = func(*args, **kwargs or {})
        if func in (torch.tensor, torch.as_tensor) and given.device != CPU:
            self.found.append(func.__name__)
        return given


@pytest.mark.parametrize("name", CASES)
def test_nothing_in_an_exchange_waits_for_the_host(name):
    """Tensors without data go a GPU's way, and whoever asks for what they hold fails."""
    of = exchange_of(name, "meta")
    for part in of.units:
        layout, _ = cut_unit(part.unit, of.plan, of.tally.steps, of.workers)
        with torch.no_grad():
            of._act(part, layout, ())  # makes the tables
            with Crossings() as crossings, Lists() as lists:
                of._act(part, layout, ())
        assert not crossings.found
        assert not lists.found


def test_this_sees_what_there_is_to_see():
    there = torch.zeros(3, device="meta")
    with Crossings() as crossings, Lists() as lists:
        there.copy_(torch.zeros(3))
        torch.tensor([1, 2], device="meta")
        for asking in (lambda: there.sum().item(), lambda: there[there > 0], lambda: there.tolist()):
            with pytest.raises((RuntimeError, NotImplementedError)):
                asking()
    assert crossings.found == ["aten.copy_.default"]
    assert lists.found == ["tensor"]


class Tape(TorchDispatchMode):
    """Notes every operator, and runs all again on the same tensors, as a CUDA graph does."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = func(*args, **kwargs or {})
        self.calls.append((func, args, kwargs or {}, given))
        return given

    def replay(self):
        for func, args, kwargs, given in self.calls:
            again = func(*args, **kwargs)
            if isinstance(given, Tensor) and func._schema.returns[0].alias_info is None:
                given.copy_(again)


class Tapes:
    """Stands in for ``GraphReplays``: the first time as it is, then from a tape."""

    def __init__(self):
        self.seen, self.tapes, self.replayed = set(), {}, 0

    def run(self, name, layout, act):
        if name not in self.seen:
            self.seen.add(name)
            return act(())
        if name not in self.tapes:
            with Tape() as tape:
                self.tapes[name] = tape, act(())
        else:
            self.tapes[name][0].replay()
            self.replayed += 1
        return self.tapes[name][1]


def accumulated_as_on_a_gpu(grad, memory, layout, ctx, path):
    spans = ctx.workspace.get(SpanTable, id(layout), lambda: SpanTable(layout, grad.device))
    return spans.flag(accumulate_flat(grad, memory, spans.mine))


@pytest.mark.parametrize("name", CASES)
def test_the_same_operators_on_the_same_tensors_exchange_the_same_bits(monkeypatch, name):
    plain, taped = exchange_of(name), exchange_of(name)
    expected = advance(plain, 0, STEPS)
    monkeypatch.setattr(random, "accumulate_all", accumulated_as_on_a_gpu)
    monkeypatch.setattr(exchange, "repeatable", lambda *_, **__: True)
    taped._replays = tapes = Tapes()
    for ours, theirs in zip(advance(taped, 0, STEPS), expected, strict=True):
        assert torch.equal(ours, theirs)
    assert tapes.replayed == (STEPS - 2) * len(taped.units)
    for ours, theirs in zip(taped.state_dict(), plain.state_dict(), strict=True):
        for kind in ("residuals", "velocities"):
            assert all(torch.equal(ours[kind][key], tensor) for key, tensor in theirs[kind].items())
    assert vars(taped.tally) == vars(plain.tally)
