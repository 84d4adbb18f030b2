"""The exchange of P workers' gradients in one process: the engine's own steps and a collective's ``reduce_local``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from sparsync.collectives.base import OverflowFlag
from sparsync.compressors.base import flag
from sparsync.config import ExchangePlan
from sparsync.config.nodes import groups_of
from sparsync.engine import checkpoint
from sparsync.engine.ledger import Cause
from sparsync.engine.non_finite_log import NonFiniteLog
from sparsync.engine.traffic import units_of
from sparsync.engine.unit_step import (
    Moment,
    compress_unit,
    cut_unit,
    finish_unit,
    keep_result,
    poison,
    round_unit,
    sketch_unit,
)
from sparsync.engine.worker import WorkerState, preconditioner_for
from sparsync.feedback import AdamRule
from sparsync.layout import Layout, Parameter, Span
from sparsync.simulate.graphs import GraphReplays, Streams, repeatable, side_by_side
from sparsync.simulate.virtual_units import Keys, Tally, UnitOutcome, VirtualSketch, VirtualUnit
from sparsync.sparse import NONFINITE, SparseGrad

COUNT_EVERY = 100  # steps between messages that are encoded only to count their bytes
VIRTUAL = "virtual"  # the training that states of virtual workers say they are of


class VirtualExchange:
    """The exchange of P workers' gradients.

    Args:
        parameters: of the model, in its order.
        dense_names: parameters that travel dense.
        workers: P. What those of a node send is the sum of their gradients, where the plan says which share one.
        device: where the gradients are.
        graph: replay from a CUDA graph what never waits for the host.
        streams: in the graph, as many workers compress side by side.
    """

    def __init__(
        self,
        plan: ExchangePlan,
        parameters: Sequence[Parameter],
        dense_names: frozenset[str],
        workers: int,
        device: torch.device,
        graph: bool = False,
        streams: int = 1,
    ) -> None:
        self.plan = plan
        self.nodes = groups_of(plan.per_node, [""] * workers)
        senders = len(self.nodes) or workers
        self.preconditioner = preconditioner_for(plan, parameters, dense_names, device, workers, senders)
        led = {group[0]: len(group) for group in self.nodes} or dict.fromkeys(range(workers), 1)
        self.workers = [
            WorkerState(rank, parameters, plan, preconditioner=self.preconditioner, ranks=led.get(rank, 0))
            for rank in range(workers)
        ]
        units, sketches = units_of(plan, parameters, dense_names, device)
        self.units = [VirtualUnit.of(unit, workers, self.nodes) for unit in units]
        self._places = {span.name: (v.rows, v.mean, span) for v in self.units for span in v.unit.spans}
        self.sketches, self._dense = list[VirtualSketch](), dict[str, Tensor]()  # by name, where updates go
        dtypes = {parameter.name: parameter.dtype for parameter in parameters}
        for found in sketches:
            grads = next((v.grads for v in self.units if v.unit is found.home), ())
            sketch = VirtualSketch.of(found, grads, dtypes[found.unit.spans[0].name], workers, self.nodes)
            self.sketches.append(sketch)
            self._places.update((span.name, (sketch.dense, sketch.mean, span)) for span in found.dense)
            self._dense.update((span.name, sketch.mean[span.start : span.stop]) for span in found.dense)
        shared = plan.collective.shared
        self._keys = Keys(plan.seed, workers, shared, device) if plan.compressor.random else None
        self._replays = GraphReplays[UnitOutcome](streams) if graph else None
        self.tally, self.non_finite = Tally(), NonFiniteLog(first=True)

    @property
    def senders(self) -> list[WorkerState]:
        """Those who compress and send: all, or the first of each node."""
        return [worker for worker in self.workers if worker.feedback.ranks]

    def place(self, parameter: Parameter) -> tuple[list[Tensor], Tensor]:
        """Return where a parameter's gradients go, one view a worker, and where their mean is found."""
        rows, mean, span = self._places[parameter.name]
        views = [_view(flat, span, parameter) for flat in (*rows, mean)]
        return views[:-1], views[-1]

    def reduce(self, rates: Mapping[str, float] | None = None, rules: Mapping[str, AdamRule] | None = None) -> None:
        """Make one step: the rows hold the gradients; afterwards ``mean`` holds what every rank would be given.

        Args:
            rates: learning rates by parameter name, if the residuals are divided by their changes.
            rules: the optimizer's hyperparameters by parameter name, if there is a preconditioner.
        """
        step, done = self.tally.steps, list[tuple[VirtualUnit, Layout, UnitOutcome]]()
        if rules is not None:
            rates = {name: rule.rate for name, rule in rules.items()}
        if self.preconditioner is not None:
            density = self.plan.density_at(step)
            self.preconditioner.begin_step(rules or {}, density, None, self.workers[0].rates)
        for worker in self.workers:
            worker.begin_step(None, rates)
        if self._keys:
            self._keys.turn(step)  # here, as a graph would repeat those of the step it was made in
        if self.preconditioner is None:
            done += [self._step(virtual, step) for virtual in self.units]
        else:
            done += [self._step(sketch.virtual, step, sketch) for sketch in self.sketches]
            self.preconditioner.update()
            for worker in self.workers:
                worker.rounding.keep(self.preconditioner.good)
            done += [self._step(virtual, step) for virtual in self.units]
            self.preconditioner.write_dense(self._dense)
        bad_step = False
        words = torch.stack([outcome.words for _, _, outcome in done]).tolist()  # once in a step the host waits
        for (virtual, layout, _), (flags, where, counts, overflow) in zip(done, words, strict=True):
            self.tally.entries += sum(counts)
            bad = [number for number, bits in enumerate(flags) if bits & NONFINITE]
            for number in bad:
                self._warn(virtual, layout, number, where[number])
            bad_step = bad_step or bool(bad) or any(overflow)
            if bad_step:
                poison(virtual.mean, layout.spans)
        for worker in self.workers:
            if bad_step:
                worker.ledger.restore(Cause.NON_FINITE)
            worker.commit()
        self.tally.steps += 1
        self.tally.bad_steps += bad_step

    def _step(
        self, virtual: VirtualUnit, step: int, sketch: VirtualSketch | None = None
    ) -> tuple[VirtualUnit, Layout, UnitOutcome]:
        """Exchange one unit; ``sketch``: what makes its gradients."""
        layout, _ = cut_unit(virtual.unit, self.plan, step, self.senders)
        if sketch is not None and self.preconditioner is not None:
            for worker, dense, out in zip(self.workers, sketch.dense, virtual.grads, strict=True):
                out[: dense.numel()].copy_(dense)
                grad = sketch.grads[worker.rank] if sketch.grads else dense
                rounding = None if self.nodes else worker.rounding
                sketch_unit(virtual.unit, sketch.spans, grad, out, self.preconditioner, rounding)
        virtual.sum_nodes(self.nodes)
        if sketch is not None and self.nodes:
            for worker, total in zip(self.senders, virtual.sums, strict=True):
                round_unit(virtual.unit, total, worker.rounding)
        outcome = self._exchange(virtual, layout)
        for worker, sent, result in zip(self.senders, outcome.sents, outcome.results, strict=True):
            worker.ledger.record_sent(virtual.unit, sent)
            worker.ledger.record_rejected(virtual.unit, result.rejected)
        if self.preconditioner is not None:
            keep_result(virtual.unit, virtual.mean, self.preconditioner, outcome.results[0])
        self._count(virtual, layout, outcome.sents)
        return virtual, layout, outcome

    def state_dict(self) -> list[dict[str, Any]]:
        """Return of every worker what its handle's ``state_dict()`` would be in a process of its own."""
        workers, steps = len(self.workers), self.tally.steps
        return [checkpoint.state_dict(worker, workers, steps, VIRTUAL, self.nodes) for worker in self.workers]

    def load_state_dict(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Continue from ``state_dict()``, of as many workers."""
        for worker, state in zip(self.workers, states, strict=True):
            checkpoint.load_state_dict(worker, len(self.workers), state, nodes=self.nodes)
        for virtual in self.units:
            virtual.unit.forget_layout()

    def _exchange(self, virtual: VirtualUnit, layout: Layout) -> UnitOutcome:
        """Compress, sum and write the mean: at once, or from a graph."""
        unit, act = virtual.unit, partial(self._act, virtual, layout)
        if self._replays and repeatable(unit, self.plan.wire, clips=self.plan.clip is not None):
            return self._replays.run(unit.key, layout, act)
        return act(())

    def _act(self, virtual: VirtualUnit, layout: Layout, streams: Streams) -> UnitOutcome:
        unit = virtual.unit
        both = zip(self.senders, virtual.sums, strict=True)
        sents = side_by_side([partial(self._compress, virtual, *sender, layout) for sender in both], streams)
        # The sum does not depend on the flags, and must not wait for them: it is given flags on the host instead.
        flags, where = flag(-1, layout, torch.device("cpu"))
        shown = [replace(sent, flags=flags, where=where) for sent in sents]
        divisor = (len(self.workers),) if self.nodes else ()
        results = unit.collective.reduce_local(shown, layout, self.plan.wire, *divisor)
        overflow = OverflowFlag(virtual.mean.device)
        finish_unit(unit, virtual.mean, overflow if self.plan.keeps_residuals else None, results, self.senders)
        rows = ([getattr(sent, name) for sent in sents] for name in ("flags", "where", "count"))
        words = [torch.stack(row).long() for row in rows]
        return UnitOutcome(sents, results, torch.stack([*words, overflow.bad.long().expand(len(sents))]))

    def _compress(self, virtual: VirtualUnit, worker: WorkerState, grad: Tensor, layout: Layout) -> SparseGrad:
        moment = Moment(self.tally.steps, self._keys.of[worker.rank] if self._keys else None)
        workspace = virtual.workspaces[worker.rank]
        return compress_unit(virtual.unit, grad, layout, self.plan, worker, moment, workspace)[0]

    def _warn(self, virtual: VirtualUnit, layout: Layout, number: int, where: int) -> None:
        """Log whose gradient was not finite; ``number``: of the sender."""
        span, group = layout.spans[where], self.nodes[number] if self.nodes else (number,)
        bad = [rank for rank in group if not virtual.grads[rank][span.start : span.stop].isfinite().all()]
        for rank in bad or group[:1]:
            self.non_finite.note(self.tally.steps, layout, rank, where)

    def _count(self, virtual: VirtualUnit, layout: Layout, sents: Sequence[SparseGrad]) -> None:
        """Count the bytes of a step; now and then the messages are encoded, to see that this is what travels."""
        unit, wire, dtype = virtual.unit, self.plan.wire, sents[0].values.dtype
        traffic = unit.traffic(layout, wire, len(sents), dtype)
        self.tally.bytes += traffic.mean_bytes
        self.tally.possible += len(sents) * layout.sendable
        changed, virtual.counted = virtual.counted is not layout, layout
        if changed or self.tally.steps % COUNT_EVERY == 0:
            sizes = unit.collective.encoded_bytes(sents, layout, wire)
            if sizes is not None:
                counted, found = (traffic.mean_bytes, traffic.max_bytes), (sum(sizes) / len(sizes), max(sizes))
                assert found == counted, f"messages of {found} bytes a worker (mean, most) where {counted} were counted"


def _view(flat: Tensor, span: Span, parameter: Parameter) -> Tensor:
    return flat[span.start : span.stop].as_strided(parameter.shape, parameter.stride)
