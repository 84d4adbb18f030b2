"""From buckets to units: what is compressed and exchanged as one.

Parameters that are selected within their bucket (scope ``layer`` and ``bucket``) stay where they are, so a bucket is a
unit as soon as it arrives. The others are gathered from all buckets of a step, in the model's order, and are a unit
when the last bucket has come: the whole model in scope ``global``, and the small tensors that travel dense. That order,
unlike the buckets', is the same in every run, so a resumed training repeats the same bits.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.futures import Future

from sparsync.collectives import Collective, DenseAllReduce
from sparsync.compressors import Compressor, NoCompression
from sparsync.layout import Layout, Parameter, Span
from sparsync.workspace import Workspace


@dataclass
class Bucket:
    """Gradients that are ready: ``buffer`` holds those of the parameters ``names``, one after another."""

    index: int
    buffer: Tensor
    names: tuple[str, ...]
    last: bool


@dataclass
class Unit:
    """What is compressed and exchanged as one. ``grad`` is its flat gradient and, after the exchange, the result."""

    key: str
    id: int
    scope: str
    spans: tuple[Span, ...]
    grad: Tensor
    compressor: Compressor
    collective: Collective
    known: tuple[float, Layout] | None = None
    workspace: dict[str, Any] = field(default_factory=dict)  # of the layout: buffers that stay
    buffers: Workspace = field(default_factory=Workspace)  # the same, of the compressor
    unused: set[str] = field(default_factory=set)
    delivered: set[str] = field(default_factory=set)

    def layout_at(self, density: float) -> tuple[Layout, bool]:
        """The unit's layout at this density, and whether it is another one than before."""
        if self.known is not None and self.known[0] == density:
            return self.known[1], False
        names = zlib.crc32(repr([span.name for span in self.spans]).encode())
        layout = Layout.cut(
            self.spans,
            numel=self.grad.numel(),
            scope=self.scope,
            density=density,
            capacity=self.compressor.capacity,
            id=self.id,
            name=f"{self.key}:{names:08x}",
        )
        fresh = self.known is None or self.known[1] != layout
        self.known, self.workspace, self.buffers = (density, layout), {}, Workspace()
        return layout, fresh


class BucketSlice:
    """What of a bucket is gathered into one unit.

    Args:
        here, there: the same parameters, where they lie in the bucket and where in the unit.
    """

    def __init__(self, unit: Unit, here: Sequence[Span], there: Sequence[Span]) -> None:
        self.unit, self.here, self.there = unit, here, there
        self.names = frozenset(span.name for span in there)
        self._between: tuple[Tensor, Tensor] | None = None
        self._views: tuple[list[Tensor], list[Tensor]] = [], []

    def views(self, buffer: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """The parameters in ``buffer`` and in the unit; both stay what they are from step to step."""
        if self._between is None or self._between[0] is not buffer or self._between[1] is not self.unit.grad:
            self._between = buffer, self.unit.grad
            self._views = (
                [buffer[span.start : span.stop] for span in self.here],
                [self.unit.grad[span.start : span.stop] for span in self.there],
            )
        return self._views

    def gather(self, buffer: Tensor) -> None:
        """Copy the gradients of ``buffer`` into the unit."""
        if self.unit.grad.device != buffer.device:
            self.unit.grad = torch.zeros_like(self.unit.grad, device=buffer.device)
        here, there = self.views(buffer)
        torch._foreach_copy_(there, here)
        self.unit.delivered |= self.names


@dataclass(frozen=True)
class Plan:
    """What a bucket of certain parameters is made of: its own unit, if any, and what is gathered from it."""

    spans: tuple[Span, ...]
    own: Unit | None
    shares: tuple[BucketSlice, ...]
    units: frozenset[str]  # by key


@dataclass
class PendingBucket:
    """A bucket on its way; its future completes when every unit it feeds has been written back."""

    bucket: Bucket
    plan: Plan
    future: Future[Tensor]
    waits_for: set[str]

    def complete(self) -> None:
        """Let backward have the bucket, if nothing is missing any more."""
        if not self.waits_for and not self.future.done():
            self.future.set_result(self.bucket.buffer)


def scatter_result(unit: Unit, pending: Sequence[PendingBucket]) -> None:
    """``unit`` holds its result: copy into each bucket its share of it, all in one."""
    here, there = [], []
    for bucket_slot in pending:
        for share in bucket_slot.plan.shares:
            if share.unit is unit:
                views = share.views(bucket_slot.bucket.buffer)
                here += views[0]
                there += views[1]
        bucket_slot.waits_for.discard(unit.key)
    if here:
        torch._foreach_copy_(here, there)


def future_on(device: torch.device) -> Future[Tensor]:
    """A future for a tensor of ``device``; on CUDA, who takes the tensor then waits for the stream that made it."""
    return Future(devices=[device]) if device.type == "cuda" else Future()


class BucketMapper:
    """Turns the buckets of a step into units.

    Args:
        small: names of the parameters that travel dense.
        may_skip: note parameters whose gradient is all zero, so that nothing is sent from them.
    """

    def __init__(
        self,
        parameters: Sequence[Parameter],
        compressor: Compressor,
        collective: Collective,
        scope: str,
        small: frozenset[str],
        may_skip: bool,
    ) -> None:
        self.parameters = {parameter.name: parameter for parameter in parameters}
        self.compressor, self.collective, self.scope, self.may_skip = compressor, collective, scope, may_skip
        self._plans: dict[tuple[int, tuple[str, ...]], Plan] = {}
        self._bucket_units: dict[int, Unit] = {}
        self._gathered: dict[str, Unit] = {}
        self._gathered_by: dict[str, Unit] = {}  # parameter -> the unit it is gathered into
        if scope == "global":
            self._gather("global", [p for p in parameters if p.name not in small], compressor, collective)
        self._gather("small", [p for p in parameters if p.name in small], NoCompression(), DenseAllReduce(exact=True))

    def arrive(self, bucket: Bucket) -> tuple[PendingBucket, list[Unit]]:
        """Give the bucket's gradients to the units they belong to; returns those that are complete with it."""
        plan = self._plan(bucket)
        bucket_slot = PendingBucket(bucket, plan, future_on(bucket.buffer.device), set(plan.units))
        if plan.own is not None:
            plan.own.grad = bucket.buffer
        for share in plan.shares:
            share.gather(bucket.buffer)
        if self.may_skip:
            self._note_sleepers(bucket_slot)
        bucket_slot.complete()
        return bucket_slot, ([plan.own] if plan.own else []) + (self._complete() if bucket.last else [])

    def forget_layouts(self) -> None:
        """Make every layout, and the compressors' state for it, anew when it is next needed."""
        for unit in [*self._bucket_units.values(), *self._gathered.values()]:
            unit.known = None

    def _complete(self) -> list[Unit]:
        """The gathered units; a parameter that no bucket brought counts as zero."""
        units = [unit for unit in self._gathered.values() if unit.delivered]
        for unit in units:
            for span in unit.spans:
                if span.name not in unit.delivered:
                    unit.grad[span.start : span.stop].zero_()
            unit.delivered = set()
        return units

    def _note_sleepers(self, bucket_slot: PendingBucket) -> None:
        for span in bucket_slot.plan.spans:
            unit = self._gathered_by.get(span.name, bucket_slot.plan.own)
            assert unit is not None
            if not bucket_slot.bucket.buffer[span.start : span.stop].any():
                unit.unused.add(span.name)

    def _plan(self, bucket: Bucket) -> Plan:
        known = self._plans.get((bucket.index, bucket.names))
        if known is not None:
            return known
        spans, start = [], 0
        for name in bucket.names:
            numel = self.parameters[name].numel
            if numel:
                spans.append(Span(name, start, numel))
            start += numel
        assert start == bucket.buffer.numel(), f"bucket {bucket.index}: {start} entries, {bucket.buffer.numel()} came"
        own_spans = tuple(span for span in spans if span.name not in self._gathered_by)
        shares, own = [], None
        for unit in self._gathered.values():
            here = [span for span in spans if self._gathered_by.get(span.name) is unit]
            places = {span.name: span for span in unit.spans}
            if here:
                shares.append(BucketSlice(unit, here, [places[span.name] for span in here]))
        here_now = set(bucket.names)
        for old in [old for old in self._plans if old[0] == bucket.index or not here_now.isdisjoint(old[1])]:
            del self._plans[old]  # the buckets were regrouped: buffers of those that are gone must not be kept
            self._bucket_units.pop(old[0], None)
        if own_spans:
            key = f"bucket {bucket.index}"
            own = Unit(key, bucket.index, self.scope, own_spans, bucket.buffer, self.compressor, self.collective)
            self._bucket_units[bucket.index] = own
        units = [share.unit for share in shares] + ([own] if own else [])
        plan = Plan(tuple(spans), own, tuple(shares), frozenset(unit.key for unit in units))
        self._plans[bucket.index, bucket.names] = plan
        return plan

    def _gather(
        self, kind: str, parameters: Sequence[Parameter], compressor: Compressor, collective: Collective
    ) -> None:
        """One gathered unit per dtype."""
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
            grad = torch.zeros(start, dtype=dtype)
            unit = Unit(key, number, "global", tuple(spans), grad, compressor, collective)
            self._gathered[key] = unit
            self._gathered_by.update({span.name: unit for span in spans})
