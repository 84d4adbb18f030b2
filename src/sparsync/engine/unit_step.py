"""One step of one unit: the functions that the reducer and virtual workers call alike.

compress_unit    gradient + residual -> sent
(exchange)       sent -> Reduced
finish_unit      Reduced -> the mean in the unit's place; rejected entries -> residual
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sparsync.collectives import Reduced
from sparsync.collectives.base import FiniteFlag
from sparsync.compressors import Context
from sparsync.config import ExchangePlan
from sparsync.engine.bucketing import Unit
from sparsync.engine.worker import WorkerState
from sparsync.feedback import Preconditioner, RoundingFeedback, accumulation_dtype
from sparsync.kernels import Memory
from sparsync.kernels.accumulate.parts import AddedParts
from sparsync.kernels.precondition import came_in
from sparsync.kernels.sketch import Sketched
from sparsync.layout import Layout, Span
from sparsync.sparse import SparseGrad
from sparsync.workspace import Workspace


def cut_unit(unit: Unit, plan: ExchangePlan, step: int, workers: Sequence[WorkerState]) -> tuple[Layout, bool]:
    """Return the unit's layout in this step, and whether it is a new one, for which compressors' states are made."""
    layout, fresh = unit.layout_at(1.0 if unit.compressor.dense else plan.density(step))
    if fresh:
        for worker in workers:
            worker.add_state(unit.compressor.init(layout))
    return layout, fresh


@dataclass(frozen=True)
class Moment:
    """What changes with every step: its number and, for random kinds in a CUDA graph, a key on the device."""

    step: int
    key: Tensor | None = None


def compress_unit(
    unit: Unit,
    grad: Tensor,
    layout: Layout,
    plan: ExchangePlan,
    worker: WorkerState,
    moment: Moment,
    workspace: Workspace,
) -> tuple[SparseGrad, Memory | None]:
    """Add ``grad`` into the worker's residual, take out what is sent, return it and the memory it came from."""
    memory = None
    if unit.added is not None:
        memory = unit.added.memory
    elif unit.keeps:
        memory = worker.feedback.memory(unit.key, layout.spans, grad.numel(), grad.device)
        if worker.preconditioner is not None:
            velocity = worker.feedback.velocity_buffer(unit.key, layout.spans, grad.numel(), grad.device)
            memory.update = worker.preconditioner.update_of(layout.spans, velocity, workspace)
            if not unit.compressor.fuses_precondition:
                grad = came_in(grad, memory, workspace)
    ctx = context_of(unit, plan, worker, moment, workspace)
    return unit.compressor.compress(grad, memory, layout, ctx, worker.compressor_state), memory


def begin_unit(unit: Unit, plan: ExchangePlan, worker: WorkerState, moment: Moment) -> AddedParts | None:
    """Return what adds the unit's gradient to the residual in parts, as buckets bring them; ``None`` where it has to be
    added as a whole. Not in a layout's first step, before which the ranks compare it."""
    plain = unit.keeps and not unit.compressor.dense and worker.preconditioner is None
    if not plain or unit.cut is None or unit.cut[0] != plan.density(moment.step):
        return None
    layout, grad = unit.cut[1], unit.grad
    memory = worker.feedback.memory(unit.key, layout.spans, grad.numel(), grad.device)
    ctx = context_of(unit, plan, worker, moment, unit.workspace)
    return unit.compressor.begin(grad, memory, layout, ctx, worker.compressor_state)


def context_of(unit: Unit, plan: ExchangePlan, worker: WorkerState, moment: Moment, workspace: Workspace) -> Context:
    """Return what the unit's compressor may know in a step."""
    ranks = worker.feedback.ranks
    return Context(
        step=moment.step,
        rank=worker.rank,
        seed=plan.seed,
        rounding=unit.rounding,
        shared=unit.collective.shared,
        whole=unit.collective.shared or plan.wire.indices == "block",
        clip=None if plan.clip is None or plan.precondition else plan.clip * (worker.loss_scale or 1.0) * ranks,
        unused=frozenset(unit.unused),
        values=plan.wire.values,
        workspace=workspace,
        key=moment.key,
        added=unit.added,
    )


def failed_unit(unit: Unit, layout: Layout) -> SparseGrad:
    """Return a message without entries that says this rank failed, in the dtype that the others send: a sum of
    different ones may be under way before anybody hears of this."""
    dtype = accumulation_dtype(unit.grad.dtype) if unit.keeps else unit.grad.dtype
    return SparseGrad.failed(layout.capacity, layout.numel, dtype, unit.grad.device)


class SketchPlaces:
    """Where in the moments the tensors of a flat gradient are, and where in its sketch."""

    def __init__(self, tensors: list[Sketched]) -> None:
        self.tensors = tensors


def sketch_unit(
    unit: Unit,
    spans: Sequence[Span],
    source: Tensor,
    out: Tensor,
    preconditioner: Preconditioner,
    rounding: RoundingFeedback | None,
) -> None:
    """Sketch the tensors at ``spans`` of the flat gradient ``source``; round those in front, which travel dense.

    Args:
        spans: of the unit's tensors; those that are missing are in ``out`` already.
        rounding: of the worker whose gradient it is; ``None`` where a sum of sketches is rounded, and not each.
    """
    if spans:
        preconditioner.sketch(sketch_places(unit, spans, preconditioner), source, out, unit.workspace)
    if rounding is not None:
        round_unit(unit, out, rounding)


def round_unit(unit: Unit, grad: Tensor, rounding: RoundingFeedback) -> None:
    """Round the tensors in front of a gradient that travel dense beside sketches, if there are any."""
    if unit.rounded:
        rounding.round(unit.key, unit.rounded, grad[: unit.rounded[-1].stop])


def sketch_places(unit: Unit, spans: Sequence[Span], preconditioner: Preconditioner) -> list[Sketched]:
    """Return where the tensors at ``spans`` of a flat gradient are in the moments, and in the unit of its sketches."""
    make = lambda: SketchPlaces(preconditioner.places(spans, unit.spans))  # noqa: E731
    return unit.workspace.get(SketchPlaces, None, make).tensors


def keep_result(unit: Unit, mean: Tensor, preconditioner: Preconditioner, reduced: Reduced) -> None:
    """Give the preconditioner the mean of what it is made of, and let it show the mean of what it has made.

    Args:
        mean: as it was written.
        reduced: where it came from.
    """
    if unit.feeds_preconditioner:
        preconditioner.add_sketch(unit.spans, mean)
    else:
        preconditioner.show(unit.spans, mean, reduced.mean.give_norm)


def finish_unit(
    unit: Unit, out: Tensor, flag: FiniteFlag | None, reduced: Sequence[Reduced], workers: Sequence[WorkerState]
) -> None:
    """Write the mean, which is the same for all workers, into ``out``, or where ``unit.places`` says; what each had
    rejected is its residual's again.

    Args:
        flag: is told if the mean is not finite; ``None`` where nothing could be kept of such a step.
    """
    if not (unit.places and reduced[0].mean.write_parts(unit.places, flag)):
        unit.places = []
        reduced[0].mean.write(out, flag)
    for worker, result in zip(workers, reduced, strict=True):
        worker.ledger.restore_rejected(unit, result.rejected)


def poison_unit(unit: Unit, spans: Sequence[Span]) -> None:
    """Do as ``poison``, wherever the unit's result is."""
    if not unit.places:
        poison(unit.grad, spans)
    for _, part in unit.places:
        part[0] = math.nan


def poison(result: Tensor, spans: Sequence[Span]) -> None:
    """Let the optimizer, or a loss scaler, see that the step is bad: NaN in the first entry of every parameter."""
    starts = torch.tensor([span.start for span in spans], dtype=torch.int64, device=result.device)
    result[starts] = math.nan
