"""What ``Reducer`` does on every rank, for all workers of one process: compress, sum, write the mean, bring home."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from sparsync.checkpoint import SCHEMA
from sparsync.collectives import Reduced
from sparsync.collectives.base import shape_of
from sparsync.compressors import Context, State
from sparsync.feedback import Feedback
from sparsync.handle import Handle
from sparsync.layout import Layout, Parameter, Span
from sparsync.sparse import SparseGrad
from sparsync.units import Assembly, Bucket, Unit

log = logging.getLogger("sparsync")

COUNT_EVERY = 100  # steps between messages that are encoded only to count their bytes


@dataclass
class Worker:
    """What one worker keeps between steps."""

    rank: int
    feedback: Feedback
    state: State = field(default_factory=dict)
    workspaces: dict[str, dict[str, Any]] = field(default_factory=dict)  # by unit


@dataclass
class Part:
    """A unit of the exchange: its gradients, one row a worker, and their mean."""

    unit: Unit
    rows: Tensor
    mean: Tensor
    counted: Layout | None = None  # whose message was encoded


@dataclass
class Tally:
    """Sums over all steps.

    Args:
        steps: that were made.
        bytes: one worker put on the network (mean over the workers), by the collective's ``traffic``. The messages that
            it goes by are encoded now and then, and their true size is compared.
        entries: sent by all workers; on the device.
        possible: entries they could have sent.
        spoilt: steps in which a gradient was not finite.
    """

    steps: int = 0
    bytes: float = 0.0
    entries: Tensor | int = 0
    possible: int = 0
    spoilt: int = 0

    @property
    def density(self) -> float:
        """Share of the entries that was sent."""
        return int(self.entries) / self.possible if self.possible else 0.0


class Exchange:
    """The exchange of P workers' gradients.

    Args:
        handle: of the model, with the options; it is never started.
        workers: P.
    """

    def __init__(self, handle: Handle, workers: int) -> None:
        self.compressor, self.wire, self.density = handle.compressor, handle.wire, handle.density
        self.seed, self.clip, self.correction = handle.options.seed, handle.options.clip, handle.correction
        self.workers = [Worker(rank, Feedback(handle.parameters, False, handle.correction)) for rank in range(workers)]
        self._has_residuals = not self.compressor.dense or self.wire.codec.round is not None or bool(self.correction)
        device = next(handle.module.parameters()).device
        self.parts = [
            Part(unit, torch.zeros(workers, *unit.grad.shape, dtype=unit.grad.dtype, device=device), unit.grad)
            for unit in units_of(handle, device)
        ]
        self._places = {span.name: (part, span) for part in self.parts for span in part.unit.spans}
        self.rates: dict[str, float] = {}
        self.tally = Tally()

    def place(self, parameter: Parameter) -> tuple[list[Tensor], Tensor]:
        """Where a parameter's gradients go, one view a worker, and where their mean is found."""
        part, span = self._places[parameter.name]
        views = [_view(flat, span, parameter) for flat in (*part.rows, part.mean)]
        return views[:-1], views[-1]

    def reduce(self) -> None:
        """One step: the rows hold the gradients; afterwards ``mean`` holds what every rank would be given."""
        given: list[tuple[Part, Worker, SparseGrad]] = []  # what was sent, less what came home
        spoilt = False
        for part in self.parts:
            layout = self._layout(part.unit)
            sents = [self._compress(part, worker, layout) for worker in self.workers]
            self._count(part, layout, sents)
            given += [(part, worker, sent) for worker, sent in zip(self.workers, sents, strict=True)]
            results = part.unit.collective.reduce_local(sents, layout, {}, self.wire)
            bad = self._write_mean(part, layout, results[0])
            for worker, result in zip(self.workers, results, strict=True):
                if result.rejected is not None:
                    worker.feedback.come_home(part.unit.key, result.rejected)
                    negative = SparseGrad(**vars(result.rejected) | {"values": -result.rejected.values})
                    given.append((part, worker, negative))
            if bad or spoilt:
                spoilt = True
                starts = [span.start for span in layout.spans]
                part.mean[torch.tensor(starts, device=part.mean.device)] = math.nan
                for where, worker, sent in given:
                    if self._keeps(where.unit):
                        worker.feedback.come_home(where.unit.key, sent)
                given = []
        self.tally.steps += 1
        self.tally.spoilt += spoilt

    def follow(self, rates: Mapping[str, float]) -> None:
        """Divide the residuals by each change of the learning rate; a rate of 0 leaves them alone."""
        now = {name: rate for name, rate in rates.items() if rate}
        last = self.rates
        ratios = {name: last[name] / now[name] for name in now if last.get(name, now[name]) != now[name]}
        for worker in self.workers:
            worker.feedback.rescale(ratios)
        self.rates = last | now

    def state_dict(self) -> list[dict[str, Any]]:
        """Of every worker, what its handle's ``state_dict()`` would be in a process of its own."""
        return [
            {
                "schema": SCHEMA,
                "rank": worker.rank,
                "workers": len(self.workers),
                "step": self.tally.steps,
                **worker.feedback.state_dict(),
                "compressor": _copy(worker.state),
                "loss_scale": None,
                "rates": dict(self.rates),
            }
            for worker in self.workers
        ]

    def load_state_dict(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Continue from ``state_dict()``, of as many workers."""
        for worker, state in zip(self.workers, states, strict=True):
            worker.feedback.load_state_dict(state["residuals"], state["velocities"])
            worker.state = _copy(state["compressor"])
        self.rates = dict(states[0]["rates"])
        for part in self.parts:
            part.unit.known = None  # the compressors' state for it is completed when it is next cut

    # ---- as the reducer does it -----------------------------------------------------------------------------------

    def _compress(self, part: Part, worker: Worker, layout: Layout) -> SparseGrad:
        unit, grad = part.unit, part.rows[worker.rank]
        memory = None
        if self._keeps(unit):
            memory = worker.feedback.memory(unit.key, tuple(layout.spans), grad.numel(), grad.device)
        ctx = Context(
            step=self.tally.steps,
            rank=worker.rank,
            seed=self.seed,
            rounding=self._rounding(unit),
            shared=unit.collective.shared,
            whole=unit.collective.shared or self.wire.indices == "block",
            clip=self.clip,
            values=self.wire.values,
            workspace=worker.workspaces.setdefault(unit.key, {}),
        )
        return unit.compressor.compress(grad, memory, layout, ctx, worker.state)

    def _layout(self, unit: Unit) -> Layout:
        layout, fresh = unit.layout_at(1.0 if unit.compressor.dense else self.density(self.tally.steps))
        if fresh:
            for worker in self.workers:
                worker.state = unit.compressor.init(layout) | worker.state
        return layout

    def _keeps(self, unit: Unit) -> bool:
        return not unit.compressor.dense or self._rounding(unit) is not None or self.correction is not None

    def _rounding(self, unit: Unit) -> Any:
        return self.wire.codec.round if unit.compressor is self.compressor else None

    def _write_mean(self, part: Part, layout: Layout, reduced: Reduced) -> bool:
        """Write the result; whether some gradient was not finite, or the sum is not."""
        overflow = torch.zeros((), dtype=torch.int32, device=part.mean.device)
        reduced.write_mean(part.mean, overflow if self._has_residuals else None)
        spans = list(layout.spans)
        for rank, where in reduced.bad:
            name, step = spans[where].name, self.tally.steps
            log.warning("step %d: the gradient of %s was not finite on rank %d", step, name, rank)
        return bool(reduced.bad) or bool(overflow)

    def _count(self, part: Part, layout: Layout, sents: Sequence[SparseGrad]) -> None:
        collective, dtype = part.unit.collective, sents[0].values.dtype
        message = sents[0].indices is not None and not collective.shared  # else the values alone travel
        if message and (part.counted is not layout or self.tally.steps % COUNT_EVERY == 0):
            part.counted = layout
            self._check_size(layout, sents[0])
        self.tally.bytes += collective.traffic(layout, self.wire, len(self.workers), dtype).mean_bytes
        self.tally.entries = self.tally.entries + torch.stack([sent.count for sent in sents]).sum()
        self.tally.possible += len(self.workers) * layout.sendable

    def _check_size(self, layout: Layout, sent: SparseGrad) -> None:
        """Encode a message, and see that it is as large as ``traffic`` takes it to be."""
        shape = shape_of(layout, sent.values.dtype)
        header = self.wire.header(sent, self.tally.steps, layout.id, layout.digest)
        size = self.wire.encode(sent, layout.segment_of, shape, header).nbytes
        assert size == self.wire.bytes(shape), f"a message of {size} bytes where {self.wire.bytes(shape)} were counted"


def units_of(handle: Handle, device: torch.device) -> list[Unit]:
    """The units that the handle's reducer would exchange, if DDP had all gradients in one bucket per dtype."""
    scope = "bucket" if handle.compressor.dense else handle.options.scope
    assembly = Assembly(handle.parameters, handle.compressor, handle.collective, scope, handle.small, may_skip=False)
    kinds = sorted({(p.name in handle.small, str(p.dtype)) for p in handle.parameters if p.numel})
    units: list[Unit] = []
    for number, kind in enumerate(kinds):  # what travels dense stands apart, so that no unit has holes
        own = [p for p in handle.parameters if p.numel and (p.name in handle.small, str(p.dtype)) == kind]
        buffer = torch.zeros(sum(p.numel for p in own), dtype=own[0].dtype, device=device)
        last = number == len(kinds) - 1
        units += assembly.arrive(Bucket(number, buffer, tuple(p.name for p in own), last))[1]
    return units


def _view(flat: Tensor, span: Span, parameter: Parameter) -> Tensor:
    return flat[span.start : span.stop].as_strided(parameter.shape, parameter.stride)


def _copy(state: State) -> State:
    return {name: {key: tensor.clone() for key, tensor in bag.items()} for name, bag in state.items()}
