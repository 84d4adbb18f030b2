"""From buckets to units: what is compressed and exchanged as one.

Parameters that are selected within their bucket (scope ``layer`` and ``bucket``) stay where they are, so a bucket is a
unit as soon as it arrives. The others are gathered from all buckets of a step, in the model's order, and are a unit
when the last bucket has come: the whole model in scope ``global``, and the small tensors that travel dense. That order,
unlike the buckets', is the same in every run, so a resumed training repeats the same bits. With a preconditioner the
tensors that travel dense go with their bucket's sketches instead.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sparsync.collectives import DenseAllReduce, ReduceByParts
from sparsync.compressors import NoCompression
from sparsync.config import ExchangePlan
from sparsync.engine.bucketing import (
    STEP_END,
    Bucket,
    BucketPlan,
    BucketSlice,
    PendingBucket,
    SpanViews,
    Unit,
    future_on,
)
from sparsync.layout import Parameter, Span

SKETCHES = -1000  # the number of the first bucket's sketch


class BucketMapper:
    """Turns the buckets of a step into units.

    Args:
        dense_names: parameters that travel dense, as they are, whatever the others do.
        may_skip: note parameters whose gradient is all zero, so that nothing is sent from them.
    """

    def __init__(
        self, parameters: Sequence[Parameter], plan: ExchangePlan, dense_names: frozenset[str], may_skip: bool
    ) -> None:
        self.parameters = {parameter.name: parameter for parameter in parameters}
        self.plan, self.dense_names, self.may_skip = plan, dense_names, may_skip
        self._bucket_plans: dict[tuple[int, tuple[str, ...]], BucketPlan] = {}
        self._bucket_units: dict[int, Unit] = {}
        self._gathered: dict[str, Unit] = {}
        self._gathered_by: dict[str, Unit] = {}  # parameter -> the unit it is gathered into
        if plan.unit_scope == "global":
            self._gather("global", [p for p in parameters if p.name not in dense_names], dense=False)
        if plan.preconditioning is None:
            self._gather("dense", [p for p in parameters if p.name in dense_names], dense=True)

    def add(self, bucket: Bucket) -> tuple[PendingBucket, list[Unit]]:
        """Return the bucket on its way, and the units that are complete with it once its gradients are gathered."""
        plan = self._plan_of(bucket)
        waits_for = {*plan.units, STEP_END} if self.plan.transactional else set(plan.units)
        pending = PendingBucket(bucket, plan, future_on(bucket.buffer.device), waits_for)
        if plan.own is not None:
            plan.own.grad = bucket.buffer
        for part in plan.slices:
            if part.unit.grad.device != bucket.buffer.device:
                part.unit.grad = torch.zeros_like(part.unit.grad, device=bucket.buffer.device)
            part.unit.delivered |= part.names
        if self.may_skip or bucket.frozen:
            self._note_unused(pending)
        pending.complete()
        return pending, ([plan.own] if plan.own else []) + (self._complete() if bucket.last else [])

    @property
    def gathered(self) -> list[Unit]:
        """The units that are gathered from all buckets."""
        return list(self._gathered.values())

    @property
    def units(self) -> list[Unit]:
        """The units that are known so far."""
        return [*self._bucket_units.values(), *self._gathered.values()]

    def forget_layouts(self) -> None:
        """Make every layout, and the compressors' state for it, anew when it is next needed."""
        for unit in self.units:
            unit.forget_layout()

    def _complete(self) -> list[Unit]:
        """Return the gathered units; a parameter that no bucket brought counts as zero."""
        units = [unit for unit in self._gathered.values() if unit.delivered]
        for unit in units:
            for span in unit.spans:
                if span.name not in unit.delivered:
                    unit.grad[span.start : span.stop].zero_()
            unit.delivered = set()
        return units

    def _note_unused(self, pending: PendingBucket) -> None:
        for span in pending.plan.spans:
            unit = self._gathered_by.get(span.name, pending.plan.own)
            if unit is not None and not pending.bucket.buffer[span.start : span.stop].any():
                unit.unused.add(span.name)

    def _plan_of(self, bucket: Bucket) -> BucketPlan:
        known = self._bucket_plans.get((bucket.index, bucket.names))
        if known is not None:
            return known
        spans, start = [], 0
        for name in bucket.names:
            numel = self.parameters[name].numel
            if numel:
                spans.append(Span(name, start, numel))
            start += numel
        assert start == bucket.buffer.numel(), f"bucket {bucket.index}: {start} entries, {bucket.buffer.numel()} came"
        own_spans = tuple(s for s in spans if s.name not in self._gathered_by and s.name not in self.dense_names)
        slices, own = [], None
        for unit in self._gathered.values():
            here = [span for span in spans if self._gathered_by.get(span.name) is unit]
            places = {span.name: span for span in unit.spans}
            if here:
                slices.append(BucketSlice(unit, here, [places[span.name] for span in here]))
        here_now = set(bucket.names)
        for old in [old for old in self._bucket_plans if old[0] == bucket.index or not here_now.isdisjoint(old[1])]:
            del self._bucket_plans[old]  # the buckets were regrouped: buffers of those that are gone must not be kept
            self._bucket_units.pop(old[0], None)
        if own_spans:
            key = f"bucket {bucket.index}"
            own = self._unit(key, bucket.index, self.plan.unit_scope, own_spans, bucket.buffer, dense=False)
            self._bucket_units[bucket.index] = own
        units, sketch, dense = [part.unit for part in slices] + ([own] if own else []), None, None
        if self.plan.preconditioning is not None and spans:
            sketch, whole = self._sketch(bucket, spans), [s for s in spans if s.name in self.dense_names]
            if whole:
                units, dense = [*units, sketch], SpanViews(whole)
        plan = BucketPlan(tuple(spans), own, tuple(slices), frozenset(unit.key for unit in units), sketch, dense)
        self._bucket_plans[bucket.index, bucket.names] = plan
        return plan

    def _sketch(self, bucket: Bucket, spans: Sequence[Span]) -> Unit:
        """Make the unit in which a bucket's sketches travel, behind the tensors that travel dense."""
        preconditioning, places, start = self.plan.preconditioning, list[Span](), 0
        assert preconditioning is not None
        for span in sorted(spans, key=lambda span: span.name not in self.dense_names):
            dense = span.name in self.dense_names
            matrices = None if dense else preconditioning.matrices(self.parameters[span.name])
            places.append(Span(span.name, start, span.numel if matrices is None else matrices.sums))
            start = places[-1].stop
        grad = torch.zeros(start, dtype=torch.float32, device=bucket.buffer.device)
        half = preconditioning.second_moment == "sketch"
        rounded = tuple(place for place in places if half and place.name in self.dense_names)
        collective = ReduceByParts(half, full_sums=rounded[-1].stop if rounded else 0)
        return Unit(
            f"sketch {bucket.index}", SKETCHES - bucket.index, "global", tuple(places), grad, NoCompression(),
            collective, None, keeps=False, feeds_preconditioner=True, rounded=rounded,
        )  # fmt: skip

    def _gather(self, kind: str, parameters: Sequence[Parameter], dense: bool) -> None:
        """Make one gathered unit per dtype."""
        for dtype in sorted({p.dtype for p in parameters}, key=str):
            spans, start = [], 0
            for parameter in parameters:
                if parameter.dtype == dtype and parameter.numel:
                    spans.append(Span(parameter.name, start, parameter.numel))
                    start += parameter.numel
            if not spans:
                continue
            key = f"{kind} {str(dtype).removeprefix('torch.')}"
            number = -1 - len(self._gathered)
            place = torch.empty(start, dtype=dtype, device="meta")  # real once a bucket comes, on that bucket's device
            unit = self._unit(key, number, "global", tuple(spans), place, dense)
            self._gathered[key] = unit
            self._gathered_by.update({span.name: unit for span in spans})

    def _unit(self, key: str, number: int, scope: str, spans: tuple[Span, ...], grad: Tensor, dense: bool) -> Unit:
        """Make a unit; ``dense``: its parameters travel as they are, whatever the others do."""
        plan = self.plan
        if dense:
            keeps = plan.correction is not None
            return Unit(key, number, scope, spans, grad, NoCompression(), DenseAllReduce(exact=True), None, keeps)
        rounding = plan.wire.codec.round
        return Unit(key, number, scope, spans, grad, plan.compressor, plan.collective, rounding, plan.keeps_residuals)
