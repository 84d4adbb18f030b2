"""What ``Reducer`` does on every rank, for all workers of one process: compress, sum, write the mean, bring home."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from sparsync.collectives import Balanced, Collective
from sparsync.collectives.base import shape_of
from sparsync.compressors import Context, State
from sparsync.compressors.base import flag
from sparsync.engine.bucketing import Unit
from sparsync.engine.checkpoint import SCHEMA
from sparsync.feedback.residual import Feedback
from sparsync.hosts.handle import Handle
from sparsync.layout import Layout, Parameter, Span
from sparsync.simulate.graphs import Replays, Streams, repeatable, side_by_side
from sparsync.simulate.parts import Keys, Outcome, Part, Tally, Worker, units_of
from sparsync.sparse import NONFINITE, SparseGrad
from sparsync.workspace import Workspace

log = logging.getLogger("sparsync")

COUNT_EVERY = 100  # steps between messages that are encoded only to count their bytes


class Exchange:
    """The exchange of P workers' gradients.

    Args:
        handle: of the model, with the options; it is never started.
        workers: P.
        graph: replay from a CUDA graph what never waits for the host.
        streams: in the graph, as many workers compress side by side.
    """

    def __init__(self, handle: Handle, workers: int, graph: bool = False, streams: int = 1) -> None:
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
        self._keys = Keys(self.seed, workers, handle.collective.shared, device) if self.compressor.random else None
        self._replays = Replays[Outcome](streams) if graph else None
        self.rates: dict[str, float] = {}
        self.tally = Tally()

    def place(self, parameter: Parameter) -> tuple[list[Tensor], Tensor]:
        """Where a parameter's gradients go, one view a worker, and where their mean is found."""
        part, span = self._places[parameter.name]
        views = [_view(flat, span, parameter) for flat in (*part.rows, part.mean)]
        return views[:-1], views[-1]

    def reduce(self) -> None:
        """One step: the rows hold the gradients; afterwards ``mean`` holds what every rank would be given."""
        layouts, outcomes = [], list[Outcome]()
        if self._keys:
            self._keys.turn(self.tally.steps)  # here, as a graph would repeat those of the step it was made in
        for part in self.parts:
            layouts.append(self._layout(part.unit))
            outcomes.append(self._exchange(part, layouts[-1]))
            self._count(part, layouts[-1], outcomes[-1].sents)
        spoilt = False
        words = torch.stack([outcome.words for outcome in outcomes]).tolist()  # once in a step the host waits
        for part, layout, (flags, where, counts, overflow) in zip(self.parts, layouts, words, strict=True):
            self.tally.entries += sum(counts)
            spans, bad = list(layout.spans), [rank for rank, bits in enumerate(flags) if bits & NONFINITE]
            for rank in bad:
                name, step = spans[where[rank]].name, self.tally.steps
                log.warning("step %d: the gradient of %s was not finite on rank %d", step, name, rank)
            spoilt = spoilt or bool(bad) or any(overflow)
            if spoilt:
                part.mean[torch.tensor([span.start for span in spans], device=part.mean.device)] = math.nan
        if spoilt:
            for part, outcome in zip(self.parts, outcomes, strict=True):
                self._all_home(part, outcome)
        self.tally.steps += 1
        self.tally.spoilt += spoilt

    def follow(self, rates: Mapping[str, float]) -> None:
        """Divide the residuals by each change of the learning rate."""
        last = self.rates
        for worker in self.workers:
            self.rates = worker.feedback.follow(last, rates)

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

    def _exchange(self, part: Part, layout: Layout) -> Outcome:
        """Compress, sum, write the mean and bring home: at once, or from a graph."""
        unit, act = part.unit, partial(self._act, part, layout)
        if self._replays and repeatable(unit, self.wire, self._rounding(unit) is not None, self.clip is not None):
            return self._replays.run(unit.key, layout, act)
        return act(())

    def _act(self, part: Part, layout: Layout, streams: Streams) -> Outcome:
        sents = side_by_side([partial(self._compress, part, worker, layout) for worker in self.workers], streams)
        # The sum does not depend on the flags, and must not wait for them: it is shown others, on the host.
        flags, where = flag(-1, layout, torch.device("cpu"))
        shown = [replace(sent, flags=flags, where=where) for sent in sents]
        results = part.unit.collective.reduce_local(shown, layout, {}, self.wire)
        overflow = torch.zeros((), dtype=torch.int32, device=part.mean.device)
        results[0].write_mean(part.mean, overflow if self._has_residuals else None)
        for worker, result in zip(self.workers, results, strict=True):
            if result.rejected is not None:
                worker.feedback.restore_to_residual(part.unit.key, result.rejected)
        rows = ([getattr(sent, name) for sent in sents] for name in ("flags", "where", "count"))
        words = [torch.stack(row).long() for row in rows]
        return Outcome(sents, results, torch.stack([*words, overflow.long().expand(len(sents))]))

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
            workspace=worker.workspaces.setdefault(unit.key, Workspace()),
            key=self._keys.of[worker.rank] if self._keys else None,
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

    def _all_home(self, part: Part, outcome: Outcome) -> None:
        """What was sent goes back, less what has come home already."""
        for worker, sent, result in zip(self.workers, outcome.sents, outcome.results, strict=True):
            if self._keeps(part.unit):
                if result.rejected is not None:  # first, as the reducer does
                    negative = replace(result.rejected, values=-result.rejected.values)
                    worker.feedback.restore_to_residual(part.unit.key, negative)
                worker.feedback.restore_to_residual(part.unit.key, sent)

    def _count(self, part: Part, layout: Layout, sents: Sequence[SparseGrad]) -> None:
        collective, changed = part.unit.collective, part.counted is not layout
        if changed:
            traffic = collective.traffic(layout, self.wire, len(self.workers), sents[0].values.dtype)
            part.counted, part.bytes = layout, traffic.mean_bytes
        message = sents[0].indices is not None and not collective.shared  # else the values alone travel
        if message and (changed or self.tally.steps % COUNT_EVERY == 0):
            self._check_size(collective, layout, sents)
        self.tally.bytes += part.bytes
        self.tally.possible += len(self.workers) * layout.sendable

    def _check_size(self, collective: Collective, layout: Layout, sents: Sequence[SparseGrad]) -> None:
        """Encode a message, or all that it is cut into, and see that this is what ``traffic`` takes it to be."""
        dtype = sents[0].values.dtype
        if isinstance(collective, Balanced):
            sizes = collective.rehearse(sents, layout, self.wire)
            traffic = collective.traffic(layout, self.wire, len(sents), dtype)
            counted = traffic.mean_bytes, traffic.max_bytes
            found = sum(sizes) / len(sizes), max(sizes)
            assert found == counted, f"messages of {found} bytes a worker (mean, most) where {counted} were counted"
            return
        shape = shape_of(layout, dtype)
        header = self.wire.header(sents[0], self.tally.steps, layout.id, layout.digest)
        size = self.wire.encode(sents[0], layout.segment_of, shape, header).nbytes
        assert size == self.wire.bytes(shape), f"a message of {size} bytes where {self.wire.bytes(shape)} were counted"


def _view(flat: Tensor, span: Span, parameter: Parameter) -> Tensor:
    return flat[span.start : span.stop].as_strided(parameter.shape, parameter.stride)


def _copy(state: State) -> State:
    return {name: {key: tensor.clone() for key, tensor in bag.items()} for name, bag in state.items()}
