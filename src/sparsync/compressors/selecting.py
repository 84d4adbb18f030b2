"""Base of compressors that only choose entries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sparsync.compressors.base import Context, State, check_density, flag, path_of, vouches
from sparsync.kernels import KernelPath, Memory
from sparsync.kernels.accumulate import Rows, accumulate, take
from sparsync.kernels.accumulate.parts import AddedParts
from sparsync.kernels.clip import clip_scale, clip_scales
from sparsync.kernels.codecs import CODEC_NUMBERS
from sparsync.kernels.precondition import came_in
from sparsync.layout import Layout, Segment
from sparsync.sparse import SparseGrad


@dataclass(frozen=True)
class Selecting:
    """Base of compressors that only choose entries; adding, taking out and rounding are done here.

    Args:
        density: share of the entries to send, in (0, 1].
    """

    density: float = 0.001
    dense = False
    random = False
    block = False
    graph_safe = False
    fuses_precondition = False
    takes_parts = False  # whether this class's ``compress`` works on gradients that were added in parts

    def __post_init__(self) -> None:
        check_density(self.density)

    def capacity(self, k: int, numel: int) -> int:
        return k

    def init(self, layout: Layout) -> State:
        return {}

    def accepts(self, bag: Mapping[str, Tensor]) -> bool:
        return True

    def rescale(self, state: State, ratio: float) -> None:
        return None

    @property
    def kernel_limit(self) -> int:
        """A gradient must have fewer entries for the Triton kernels that ``launch`` runs; 0: there are none."""
        return 0

    def launch(self, grad: Tensor, memory: Memory, layout: Layout, ctx: Context, state: State) -> SparseGrad:
        """Compress by Triton kernels."""
        raise NotImplementedError(f"{type(self).__name__} has a kernel_limit but no launch()")

    def path(self, grad: Tensor, memory: Memory | None, layout: Layout, ctx: Context) -> KernelPath:
        known = ctx.values in CODEC_NUMBERS and not ctx.whole and not ctx.unused and bool(layout.segments)
        known = known and vouches(self, "launch", "choose")  # which is what the kernels do
        return path_of(grad, memory, ctx, self.kernel_limit if known else 0)

    def low(self, segment: Segment, state: State) -> int:
        """Return the bits of the magnitude from which on ``choose`` is going to look at entries; 0: not known yet."""
        return 0

    def choose(self, u: Tensor, rows: Rows, segment: Segment, ctx: Context, state: State) -> Tensor:
        """Return ascending indices, at most ``segment.capacity``, of the entries of ``u`` to send.

        ``rows`` says where to look. A compressor defines this, or the simpler ``select``.
        """
        runs = segment.runs(ctx.unused)
        if not runs:
            return rows.start
        place = torch.cat([torch.arange(start, stop, dtype=torch.int64, device=u.device) for start, stop in runs])
        picked = self.select(u[place], min(segment.k, place.numel()))
        return place[picked].sort().values

    def select(self, u: Tensor, k: int) -> Tensor:
        """Return ``k`` positions in the 1-D tensor ``u``: all that a simple compressor has to define."""
        raise NotImplementedError(f"{type(self).__name__} defines neither select() nor choose()")

    def begin(self, grad: Tensor, memory: Memory, layout: Layout, ctx: Context, state: State) -> AddedParts | None:
        simple = vouches(self, "takes_parts", "compress") and len(layout.segments) == 1 and ctx.clip is None
        if not simple or self.path(grad, memory, layout, ctx) is not KernelPath.NUMBA:
            return None
        (segment,) = layout.segments
        return AddedParts(memory, segment, self.low(segment, state))

    def compress(self, grad: Tensor, memory: Memory | None, layout: Layout, ctx: Context, state: State) -> SparseGrad:
        assert memory is not None
        path = self.path(grad, memory, layout, ctx) if ctx.added is None else KernelPath.NUMBA
        if path is KernelPath.TRITON:
            return self.launch(grad, memory, layout, ctx, state)
        grad = came_in(grad, memory, ctx.workspace)
        chosen, known, worst = list[Tensor](), list[Tensor | None](), -1
        for segment in layout.segments:
            if ctx.added is None:
                rows, bad = accumulate_segment(grad, memory, segment, ctx, path, self.low(segment, state))
            else:
                rows, bad = ctx.added.finish(grad)
            worst = bad if worst < 0 else worst
            chosen.append(self.choose(memory.after, rows, segment, ctx, state))
            known.append(rows.collected.take_values(chosen[-1]))
        flat = _joined(chosen) if chosen else torch.empty(0, dtype=torch.int64, device=grad.device)
        values = [own for own in known if own is not None]
        about = flag(worst, layout, grad.device)
        return send_chosen(
            memory, flat, layout.segment_of(flat), layout, ctx, *about, path,
            _joined(values) if chosen and len(values) == len(chosen) else None,
        )  # fmt: skip


def _joined(parts: Sequence[Tensor]) -> Tensor:
    """Return all parts in one; not a copy of a single one."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def accumulate_segment(
    grad: Tensor, memory: Memory, segment: Segment, ctx: Context, path: KernelPath, low: int = 0
) -> tuple[Rows, int]:
    """Add the gradient of a segment to its residual; return the rows of what may be sent from, and the index of the
    first non-finite entry. Entries whose magnitudes, as bits, are ``low`` or more may be collected meanwhile."""
    if ctx.unused:  # an unused parameter has a zero gradient: its residual is only carried over
        for span in segment.spans:
            if span.name in ctx.unused:
                memory.carry_over(span.start, span.stop)
    runs = segment.runs(ctx.unused)
    return accumulate(grad, memory, runs, clip_scale(grad, runs, ctx.clip), path, low)


def segment_scales(grad: Tensor, layout: Layout, ctx: Context) -> Tensor | None:
    """Return what each segment's gradient is multiplied by, if it is clipped: for the kernels."""
    return None if ctx.clip is None else clip_scales(grad, layout, ctx.clip, ctx.workspace)


def send_chosen(
    memory: Memory,
    indices: Tensor,
    segments: Tensor,
    layout: Layout,
    ctx: Context,
    flags: Tensor,
    where: Tensor,
    path: KernelPath = KernelPath.PYTORCH,
    values: Tensor | None = None,
) -> SparseGrad:
    """Take the chosen entries out of the residual and put them into buffers of fixed capacity; nothing waits for the
    host.

    Args:
        indices, segments: of the chosen entries.
        flags, where: of the gradient, as in ``SparseGrad``.
        values: what the residual holds at ``indices``, where that is known already.
    """
    residual, chosen, capacity = memory.after, indices.numel(), layout.capacity
    assert chosen <= capacity
    how = len(layout.segments), ctx.rounding, layout.most
    if path is KernelPath.NUMBA and not ctx.whole:
        from sparsync.kernels.accumulate import take_cpu

        places, travel, real = take_cpu.take(memory, indices, segments, *how, capacity, values)
        count = torch.tensor(real, dtype=torch.int64, device="cpu")
        return SparseGrad(places, travel, count, layout.numel, flags, where)
    unused = [(span.start, span.stop) for span in layout.spans if span.name in ctx.unused] if ctx.whole else []
    sent = take(residual, indices, segments, *how, unused)
    try:
        goes = sent != 0
        room = torch.zeros(capacity + 1, dtype=torch.int64, device=residual.device)
        travel = torch.zeros(capacity + 1, dtype=residual.dtype, device=residual.device)
        if ctx.whole:
            room[:chosen], travel[:chosen] = indices, sent
            count = torch.full((), chosen, dtype=torch.int64, device=residual.device)
        else:
            number = goes.cumsum(0)
            count = number[-1:].sum()
            place = torch.where(goes, number - 1, capacity)  # what stays goes behind the end
            room.scatter_(0, place, indices)
            travel.scatter_(0, place, sent)
        message = SparseGrad(room[:capacity], travel[:capacity], count, layout.numel, flags, where)
        if memory.velocity is not None and memory.velocity.masking:
            speed = memory.velocity.after
            speed.index_copy_(0, indices, torch.where(goes, 0, speed.index_select(0, indices)))
        return message
    except Exception:  # no memory for a message: what was taken out is not sent
        residual.index_add_(0, indices, sent)
        raise
