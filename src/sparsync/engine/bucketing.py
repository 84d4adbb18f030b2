"""Buckets and units, which are compressed and exchanged as one; and what is copied from one to the other."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.futures import Future

from sparsync.collectives import Collective, Traffic
from sparsync.compressors import Compressor
from sparsync.kernels.accumulate import Rounding
from sparsync.kernels.accumulate.parts import AddedParts
from sparsync.layout import Layout, Span
from sparsync.wire import Wire
from sparsync.workspace import Workspace

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
