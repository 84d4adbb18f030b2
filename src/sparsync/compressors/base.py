"""Which entries are sent: the protocol of compressors, and the base of those that only choose."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from sparsync.kernels import Memory, Rows, clip_scale, sweep, take, take_all
from sparsync.kernels.clip import clip_scales
from sparsync.kernels.reference import Rounding
from sparsync.layout import Layout, Segment
from sparsync.sparse import NONFINITE, SparseGrad

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
        asleep: parameters whose gradient is all zero on this rank and that must not be sent from: if no rank uses
            them, DDP throws their result away.
        workspace: lives as long as the layout; a compressor may keep buffers there.
    """

    step: int = 0
    rank: int = 0
    seed: int = 0
    rounding: Rounding | None = None
    shared: bool = False
    whole: bool = False
    clip: float | None = None
    asleep: frozenset[str] = frozenset()
    values: str = "fp32"
    workspace: dict[str, Any] = field(default_factory=dict)


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
        runs = segment.runs(ctx.asleep)
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
        return collect(memory, chosen, layout, ctx, worst)


def sweep_segment(grad: Tensor, memory: Memory, segment: Segment, ctx: Context) -> tuple[Rows, int]:
    """Add the gradient of a segment into its residual; the rows of what may be sent from, and the first bad index."""
    if ctx.asleep:  # what sleeps has a zero gradient: its residual is only carried over
        for span in segment.spans:
            if span.name in ctx.asleep:
                both = [(memory.before, memory.after)]
                both += [(memory.velocity.before, memory.velocity.after)] if memory.velocity else []
                for before, after in both:
                    after[span.start : span.stop].copy_(before[span.start : span.stop])
    runs = segment.runs(ctx.asleep)
    return sweep(grad, memory, runs, clip_scale(grad, runs, ctx.clip))


def segment_scales(grad: Tensor, layout: Layout, ctx: Context) -> Tensor | None:
    """For the kernels: what each segment's gradient is multiplied by, if it is clipped."""
    return None if ctx.clip is None else clip_scales(grad, layout, ctx.clip, ctx.workspace)


def collect(memory: Memory, chosen: Sequence[Tensor], layout: Layout, ctx: Context, bad: int) -> SparseGrad:
    """Take the chosen entries out of the residual and put them into buffers of fixed capacity."""
    residual = memory.after
    flat = torch.cat(list(chosen)) if chosen else torch.empty(0, dtype=torch.int64, device=residual.device)
    if ctx.whole:
        sleepers = [(span.start, span.stop) for span in layout.spans if span.name in ctx.asleep]
        sent = take_all(residual, flat, layout.segment_of(flat), len(layout.segments), ctx.rounding, sleepers)
    else:
        flat, sent = take(residual, flat, layout.segment_of(flat), len(layout.segments), ctx.rounding)
    if memory.velocity is not None and memory.velocity.masking:
        memory.velocity.after[flat[sent != 0]] = 0
    count = flat.numel()
    assert count <= layout.capacity
    indices = torch.zeros(layout.capacity, dtype=torch.int64, device=residual.device)
    values = torch.zeros(layout.capacity, dtype=residual.dtype, device=residual.device)
    indices[:count], values[:count] = flat, sent
    flags, where = flag(bad, layout, residual.device)
    return SparseGrad(indices, values, torch.tensor(count, device=residual.device), layout.numel, flags, where)


def flag(bad: int, layout: Layout, device: torch.device) -> tuple[Tensor, Tensor]:
    """Flags, and the number of the parameter, of a gradient that is not finite at index ``bad`` (-1: nowhere)."""
    where = next((i for i, span in enumerate(layout.spans) if span.start <= bad < span.stop), -1)
    words = torch.tensor([NONFINITE if bad >= 0 else 0, where], dtype=torch.int32, device=device)
    return words[0], words[1]
