"""From buckets to units: what is compressed and exchanged as one.

Parameters that are selected within their bucket (scope ``layer`` and ``bucket``) stay where they are, so a bucket is a
unit as soon as it arrives. The others are gathered from all buckets of a step, in the model's order, and are a unit
when the last bucket has come: the whole model in scope ``global``, and the small tensors that travel dense. That order,
unlike the buckets', is the same in every run, so a resumed training repeats the same bits. With a preconditioner the
tensors that travel dense go with their bucket's sketches instead.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.futures import Future

from sparsync.collectives import Collective, DenseAllReduce, ReduceByParts, Traffic
from sparsync.compressors import Compressor, NoCompression
from sparsync.config import ExchangePlan
from sparsync.kernels.accumulate import Rounding
from sparsync.kernels.accumulate.parts import AddedParts
from sparsync.layout import Layout, Parameter, Span
from sparsync.wire import Wire
from sparsync.workspace import Workspace

SKETCHES = -1000  # the number of the first bucket's sketch
STEP_END = "the end of the step"  # what a bucket of a step that can be undone waits for, beside its units


@dataclass
class Bucket:
    """Gradients that are ready: ``buffer`` holds those of the parameters ``names``, one after another.

    ``frozen``: they are zeros, and nothing is to be sent from the residual of these parameters either.
    """

    index: int
    buffer: Tensor
    names: tuple[str, ...]
    last: bool
    frozen: bool = False


@dataclass
class Unit:
    """What is compressed and exchanged as one. ``grad`` is its flat gradient and, after the exchange, the result.

    Args:
        rounding: values -> values as they travel, or ``None`` when they travel unchanged.
        keeps: something of it may stay in the residual.
        feeds_preconditioner: it holds sketches, and its result goes to the preconditioner.
        rounded: of sketches, the tensors in front whose own gradients travel: what rounding cuts off them is kept.
        workspace: of the layout: buffers that stay.
        unused: parameters whose gradient was all zero on this rank, and that must not be sent from.
        delivered: parameters that buckets have brought in this step.
        places: where buckets expect the result, in ascending order, if it can be written there at once: where each
            parameter starts, and its place; otherwise it is copied from ``grad``.
        added: adds them to the residual as they come, in this step; ``grad`` then has the result alone.
    """

    key: str
    id: int
    scope: str
    spans: tuple[Span, ...]
    grad: Tensor
    compressor: Compressor
    collective: Collective
    rounding: Rounding | None
    keeps: bool
    feeds_preconditioner: bool = False
    rounded: tuple[Span, ...] = ()
    cut: tuple[float, Layout] | None = None  # by density
    workspace: Workspace = field(default_factory=Workspace)
    unused: set[str] = field(default_factory=set)
    delivered: set[str] = field(default_factory=set)
    added: AddedParts | None = None
    places: list[tuple[int, Tensor]] = field(default_factory=list)

    def layout_at(self, density: float) -> tuple[Layout, bool]:
        """Return the unit's layout at this density, and whether it is another one than before."""
        if self.cut is not None and self.cut[0] == density:
            return self.cut[1], False
        names = zlib.crc32(repr([span.name for span in self.spans]).encode())
        layout = Layout.cut(
            self.spans,
            numel=self.grad.numel(),
            scope=self.scope,
            density=density,
            capacity=self.compressor.capacity,
            id=self.id,
            name=f"{self.key}:{names:08x}",
            dtype=self.grad.dtype,
        )
        fresh = self.cut is None or self.cut[1] != layout
        self.cut, self.workspace = (density, layout), Workspace()
        return layout, fresh

    def forget_layout(self) -> None:
        """Make the layout, its buffers, and the compressors' state for it, anew when it is next needed."""
        self.cut, self.workspace = None, Workspace()

    def traffic(self, layout: Layout, wire: Wire, workers: int, dtype: torch.dtype) -> Traffic:
        """Return what an exchange of the unit costs."""
        return self.workspace.get(Traffic, dtype, lambda: self.collective.traffic(layout, wire, workers, dtype))


class SpanViews:
    """Parameters in a flat tensor, which stays what it is from step to step."""

    def __init__(self, spans: Sequence[Span]) -> None:
        self.spans = tuple(spans)
        self.names = [span.name for span in spans]
        self._flat: Tensor | None = None
        self._views: list[Tensor] = []

    def of(self, flat: Tensor) -> list[Tensor]:
        """Return the parameters in ``flat``."""
        if self._flat is not flat:
            self._flat, self._views = flat, [flat[span.start : span.stop] for span in self.spans]
        return self._views


class BucketSlice:
    """What of a bucket is gathered into one unit.

    Args:
        here, there: the same parameters, where they lie in the bucket and where in the unit.
    """

    def __init__(self, unit: Unit, here: Sequence[Span], there: Sequence[Span]) -> None:
        self.unit, self.here, self.there = unit, SpanViews(here), SpanViews(there)
        self.names = frozenset(self.there.names)

    def views(self, buffer: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Return the parameters in ``buffer`` and in the unit."""
        return self.here.of(buffer), self.there.of(self.unit.grad)

    def gather(self, buffer: Tensor) -> None:
        """Copy the gradients of ``buffer`` into the unit, unless they are added to its residual from where they are."""
        if self.unit.added is None:
            here, there = self.views(buffer)
            torch._foreach_copy_(there, here)


@dataclass(frozen=True)
class BucketPlan:
    """What a bucket of certain parameters is made of: its own unit, if any, and what is gathered from it.

    Args:
        units: that it waits for, by key.
        sketch: the unit of its sketches, with which what is ``dense`` travels.
        workspace: buffers that stay as long as the bucket is made of these.
    """

    spans: tuple[Span, ...]
    own: Unit | None
    slices: tuple[BucketSlice, ...]
    units: frozenset[str]
    sketch: Unit | None = None
    dense: SpanViews | None = None
    workspace: Workspace = field(default_factory=Workspace)


@dataclass
class PendingBucket:
    """A bucket on its way; its future completes when every unit it feeds has been written back and, where the step can
    be undone, when it is known whether all of it is good."""

    bucket: Bucket
    plan: BucketPlan
    future: Future[Tensor]
    waits_for: set[str]
    delivered: bool = False

    def gather(self) -> None:
        """Copy what units gather from the bucket."""
        for part in self.plan.slices:
            part.gather(self.bucket.buffer)

    def complete(self) -> None:
        """Let backward have the bucket, if nothing is missing any more."""
        if not self.waits_for and not self.future.done():
            self.delivered = True
            self.future.set_result(self.bucket.buffer)


def gather_beside(unit: Unit, buckets: Sequence[PendingBucket]) -> None:
    """Gather what other units take from the bucket that ``unit`` is, if it is one."""
    for pending in buckets:
        if pending.plan.own is unit:
            pending.gather()


def scatter_result(unit: Unit, buckets: Sequence[PendingBucket]) -> None:
    """Copy the result that ``unit`` holds into each bucket that fed it, unless it is there; they wait no longer."""
    if not unit.places:
        copy_result(unit, buckets)
    unit.places = []
    for pending in buckets:
        pending.waits_for.discard(unit.key)


def copy_result(unit: Unit, buckets: Sequence[PendingBucket]) -> None:
    """Copy the result that ``unit`` holds into ``buckets``, all in one."""
    here, there = [], []
    for pending in buckets:
        for part in pending.plan.slices:
            if part.unit is unit:
                views = part.views(pending.bucket.buffer)
                here += views[0]
                there += views[1]
    if here:
        torch._foreach_copy_(here, there)


def places_in(unit: Unit, buckets: Sequence[PendingBucket]) -> list[tuple[int, Tensor]]:
    """Return where buckets expect the result of a unit, in ascending order; empty if they do not expect all of it."""
    places = list[tuple[int, Tensor]]()
    for pending in buckets:
        for part in pending.plan.slices:
            if part.unit is unit:
                starts = (span.start for span in part.there.spans)
                places += zip(starts, part.here.of(pending.bucket.buffer), strict=True)
    whole = sum(place.numel() for _, place in places) == unit.grad.numel()
    return sorted(places, key=lambda place: place[0]) if whole else []


def future_on(device: torch.device) -> Future[Tensor]:
    """Return a future for a tensor; on CUDA, who takes the tensor waits for the stream that made it."""
    return Future(devices=[device]) if device.type == "cuda" else Future()


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
        grad, half = torch.zeros(start, device=bucket.buffer.device), preconditioning.second_moment == "sketch"
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
