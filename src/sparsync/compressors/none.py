"""No compression: every entry is sent."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from sparsync.compressors.base import Context, State, flag, path_of
from sparsync.compressors.selecting import accumulate_segment
from sparsync.kernels import KernelPath, Memory
from sparsync.kernels.clip import clip_scale, clip_scales
from sparsync.kernels.dense_pass.launch import ENTRIES, send_dense
from sparsync.layout import Layout
from sparsync.sparse import SparseGrad
from sparsync.value_range import limit


@dataclass(frozen=True)
class NoCompression:
    """Every entry, every step. With fp32 values this is plain data-parallel training, bit for bit."""

    dense = True
    random = False
    block = False
    graph_safe = True
    fuses_precondition = False
    density = 1.0

    def capacity(self, k: int, numel: int) -> int:
        return numel

    def init(self, layout: Layout) -> State:
        return {}

    def accepts(self, bag: Mapping[str, Tensor]) -> bool:
        return True

    def rescale(self, state: State, ratio: float) -> None:
        return None

    def path(self, grad: Tensor, memory: Memory | None, layout: Layout, ctx: Context) -> KernelPath:
        one_norm = ctx.clip is None or memory is None or len(layout.segments) == 1
        simple = one_norm and ctx.rounding is None and not ctx.unused
        return path_of(grad, memory, ctx, ENTRIES if simple else 0)

    def begin(self, grad: Tensor, memory: Memory, layout: Layout, ctx: Context, state: State) -> None:
        return None

    def compress(self, grad: Tensor, memory: Memory | None, layout: Layout, ctx: Context, state: State) -> SparseGrad:
        path = self.path(grad, memory, layout, ctx)
        if path is KernelPath.TRITON:
            scale = None if ctx.clip is None else clip_scales(grad, layout, ctx.clip, ctx.workspace, together=True)
            return send_dense(grad, memory, layout, ctx.workspace, scale)
        if memory is None:  # nothing is cut off, so nothing is kept
            factor = clip_scale(grad, [(0, layout.numel)], ctx.clip)
            if factor != 1:
                grad.mul_(factor)
            # Yet what was sent beside it must go back if an entry is not finite. A sum is a cheap look; as it may
            # overflow by itself, only then every entry is looked at.
            bad = -1 if torch.isfinite(grad.sum(dtype=torch.float64)) else _first(~torch.isfinite(grad))
            return SparseGrad.dense(grad, *flag(bad, layout, grad.device))
        nonfinite = [accumulate_segment(grad, memory, segment, ctx, path)[1] for segment in layout.segments]
        total = memory.after.clone()
        parts = torch.zeros(1, dtype=torch.int64, device=grad.device).expand(layout.numel)
        most = layout.most
        sent = limit(total, total, most) if ctx.rounding is None else ctx.rounding(total, parts, 1, most)
        rest = total - sent
        exact = torch.zeros_like(total, dtype=torch.bool)
        for start, stop in (run for segment in layout.segments for run in segment.runs(ctx.unused)):
            exact[start:stop] = True
        exact &= (rest + sent == total) & (total - rest == sent)  # what could not be put together again stays home
        torch.where(exact, rest, total, out=memory.after)
        return SparseGrad.dense(torch.where(exact, sent, 0), *flag(max(nonfinite, default=-1), layout, grad.device))


def _first(mask: Tensor) -> int:
    """Return the index of the first true entry, or -1."""
    return int(mask.nonzero()[0]) if mask.any() else -1
