"""Which entries are sent: the protocol of compressors, and the base of those that only choose."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from sparsync.kernels import Memory, Rows, clip_scale, sweep, take
from sparsync.kernels.clip import clip_scales
from sparsync.kernels.reference import Rounding, sweep_flat
from sparsync.layout import Layout, Segment
from sparsync.sparse import NONFINITE, SparseGrad
from sparsync.workspace import Workspace

# Small tensors by segment name and by what they are: checkpointed, rolled back, one bag per worker.
State = dict[str, dict[str, Tensor]]


@dataclass(frozen=True)
class Context:
    """What a compressor may know of the moment.

    Args:
        step: number of the step, the same on every rank.
        rank: of this worker.
        seed: shared by all ranks.
        rounding: values -> values as they travel, or ``None`` when they travel unchanged.
        values: the name of that.
        shared: all ranks send the same entries.
        whole: the chosen entries travel whatever they hold, zeros included.
        clip: largest norm that this rank's gradient may have in a segment.
        unused: parameters whose gradient is all zero on this rank and that must not be sent from: if no rank uses
            them, DDP throws their result away.
        workspace: lives as long as the layout; a compressor may keep buffers there.
        key: what random kinds draw from, a 0-d int64 tensor on the gradient's device that is another one in each step;
            ``None``, as in every process of its own: what seed, rank and step say.
    """

    step: int = 0
    rank: int = 0
    seed: int = 0
    rounding: Rounding | None = None
    shared: bool = False
    whole: bool = False
    clip: float | None = None
    unused: frozenset[str] = frozenset()
    values: str = "fp32"
    workspace: Any = field(default_factory=Workspace)
    key: Tensor | None = None


class Compressor(Protocol):
    """Frozen configuration; state lives beside it.

    ``dense``: every entry is sent, so nothing is kept when values travel unchanged and no indices travel.
    ``random``: entries are drawn, and every rank draws the same when ``ctx.shared`` asks for it.
    ``block``: when ``ctx.whole``, the k entries of every segment are neighbours, wrapping round at its end.
    """

    dense: bool
    random: bool
    block: bool

    @property
    def density(self) -> float: ...

    def capacity(self, k: int, numel: int) -> int:
        """How many entries a segment of ``numel`` that wants ``k`` may send."""
        ...

    def init(self, layout: Layout) -> State:
        """Fresh state for the segments of ``layout``."""
        ...

    def compress(self, grad: Tensor, memory: Memory | None, layout: Layout, ctx: Context, state: State) -> SparseGrad:
        """Add ``grad`` into the residual, take out what is sent, return it; update ``state`` in place."""
        ...

    def rescale(self, state: State, ratio: float) -> None:
        """Gradients and residuals were all multiplied by ``ratio``."""
        ...


def check_density(density: float) -> None:
    if not (isinstance(density, int | float) and 0 < density <= 1):
        raise ValueError(f"density must be above 0 and at most 1, got {density!r}")


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

    def __post_init__(self) -> None:
        check_density(self.density)

    def capacity(self, k: int, numel: int) -> int:
        return k

    def init(self, layout: Layout) -> State:
        return {}

    def rescale(self, state: State, ratio: float) -> None:
        return None

    def choose(self, u: Tensor, rows: Rows, segment: Segment, ctx: Context, state: State) -> Tensor:
        """Ascending indices, at most ``segment.capacity``, of the entries of ``u`` to send.

        ``rows`` says where to look. A compressor defines this, or the simpler ``select``.
        """
        runs = segment.runs(ctx.unused)
        if not runs:
            return rows.start
        place = torch.cat([torch.arange(start, stop, device=u.device) for start, stop in runs])
        picked = self.select(u[place], min(segment.k, place.numel()))
        return place[picked].sort().values

    def select(self, u: Tensor, k: int) -> Tensor:
        """``k`` positions in the 1-D tensor ``u``: all that a simple compressor has to define."""
        raise NotImplementedError(f"{type(self).__name__} defines neither select() nor choose()")

    def compress(self, grad: Tensor, memory: Memory | None, layout: Layout, ctx: Context, state: State) -> SparseGrad:
        assert memory is not None
        chosen, worst = [], -1
        for segment in layout.segments:
            rows, bad = sweep_segment(grad, memory, segment, ctx)
            worst = bad if worst < 0 else worst
            chosen.append(self.choose(memory.after, rows, segment, ctx, state))
        flat = torch.cat(chosen) if chosen else torch.empty(0, dtype=torch.int64, device=grad.device)
        return collect(memory, flat, layout.segment_of(flat), layout, ctx, *flag(worst, layout, grad.device))


def sweep_segment(grad: Tensor, memory: Memory, segment: Segment, ctx: Context) -> tuple[Rows, int]:
    """Add the gradient of a segment into its residual; the rows of what may be sent from, and the first bad index."""
    if ctx.unused:  # what sleeps has a zero gradient: its residual is only carried over
        for span in segment.spans:
            if span.name in ctx.unused:
                both = [(memory.before, memory.after)]
                both += [(memory.velocity.before, memory.velocity.after)] if memory.velocity else []
                for before, after in both:
                    after[span.start : span.stop].copy_(before[span.start : span.stop])
    runs = segment.runs(ctx.unused)
    return sweep(grad, memory, runs, clip_scale(grad, runs, ctx.clip))


def sweep_all(grad: Tensor, memory: Memory, layout: Layout, ctx: Context) -> tuple[Tensor, Tensor]:
    """Add the gradient of every segment into its residual: all at once, if none is clipped or unused. On a GPU nothing
    waits for the host then, and energy is not measured.

    Returns flags, and the number of the parameter, of what is not finite.
    """
    if ctx.clip is not None or ctx.unused:
        odd = [sweep_segment(grad, memory, segment, ctx)[1] for segment in layout.segments]
        return flag(next((bad for bad in odd if bad >= 0), -1), layout, grad.device)
    if grad.device.type == "cpu":
        return flag(sweep(grad, memory, layout.runs)[1], layout, grad.device)
    places = ctx.workspace.get("places")
    if places is None or places.layout is not layout or places.starts.device != grad.device:
        places = ctx.workspace["places"] = Places(layout, grad.device)
    return places.flag(sweep_flat(grad, memory, places.mine))


class Places:
    """Where the parameters of a layout lie, on its device: ``mine`` is true within them, if anything is without."""

    def __init__(self, layout: Layout, device: torch.device) -> None:
        self.layout, self.mine = layout, None
        self.starts = torch.tensor([span.start for span in layout.spans], dtype=torch.int64, device=device)
        if layout.runs != [(0, layout.numel)]:
            self.mine = torch.zeros(layout.numel, dtype=torch.bool, device=device)
            for start, stop in layout.runs:
                self.mine[start:stop] = True

    def flag(self, bad: Tensor) -> tuple[Tensor, Tensor]:
        """As ``flag`` below, from an index on the device."""
        where = (self.starts <= bad).sum(dtype=torch.int32) - 1
        return (bad >= 0).to(torch.int32) * NONFINITE, where


def segment_scales(grad: Tensor, layout: Layout, ctx: Context) -> Tensor | None:
    """For the kernels: what each segment's gradient is multiplied by, if it is clipped."""
    return None if ctx.clip is None else clip_scales(grad, layout, ctx.clip, ctx.workspace)


def collect(
    memory: Memory, indices: Tensor, segments: Tensor, layout: Layout, ctx: Context, flags: Tensor, where: Tensor
) -> SparseGrad:
    """Take the chosen entries out of the residual and put them into buffers of fixed capacity; nothing waits for the
    host.

    Args:
        indices, segments: of the chosen entries.
        flags, where: of the gradient, as in ``SparseGrad``.
    """
    residual, chosen, capacity = memory.after, indices.numel(), layout.capacity
    assert chosen <= capacity
    sleepers = [(span.start, span.stop) for span in layout.spans if span.name in ctx.unused] if ctx.whole else []
    sent = take(residual, indices, segments, len(layout.segments), ctx.rounding, sleepers)
    goes = sent != 0
    if memory.velocity is not None and memory.velocity.masking:
        speed = memory.velocity.after
        speed.index_copy_(0, indices, torch.where(goes, 0, speed.index_select(0, indices)))
    room = torch.zeros(capacity + 1, dtype=torch.int64, device=residual.device)
    values = torch.zeros(capacity + 1, dtype=residual.dtype, device=residual.device)
    if ctx.whole:
        room[:chosen], values[:chosen] = indices, sent
        count = torch.full((), chosen, device=residual.device)
    else:
        number = goes.cumsum(0)
        count = number[-1:].sum()
        place = torch.where(goes, number - 1, capacity)  # what stays goes behind the end
        room.scatter_(0, place, indices)
        values.scatter_(0, place, sent)
    return SparseGrad(room[:capacity], values[:capacity], count, layout.numel, flags, where)


def flag(bad: int, layout: Layout, device: torch.device) -> tuple[Tensor, Tensor]:
    """Flags, and the number of the parameter, of a gradient that is not finite at index ``bad`` (-1: nowhere)."""
    where = next((i for i, span in enumerate(layout.spans) if span.start <= bad < span.stop), -1)
    words = torch.tensor([NONFINITE if bad >= 0 else 0, where], dtype=torch.int32, device=device)
    return words[0], words[1]
