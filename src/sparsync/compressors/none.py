"""No compression: every entry is sent."""

from dataclasses import dataclass

import torch
from torch import Tensor

from sparsync.compressors.base import Context, State, flag
from sparsync.kernels import Memory
from sparsync.layout import Layout
from sparsync.sparse import SparseGrad


@dataclass(frozen=True)
class NoCompression:
    """Every entry, every step. With fp32 values this is plain data-parallel training, bit for bit."""

    dense = True
    random = False
    density = 1.0

    def capacity(self, k: int, numel: int) -> int:
        return numel

    def init(self, layout: Layout) -> State:
        return {}

    def rescale(self, state: State, ratio: float) -> None:
        return None

    def compress(self, grad: Tensor, memory: Memory | None, layout: Layout, ctx: Context, state: State) -> SparseGrad:
        if memory is None:  # nothing is cut off, so nothing is kept
            # Yet what was sent beside it must come home if an entry is not finite. A sum is a cheap look; as it may
            # overflow by itself, only then every entry is looked at.
            bad = -1 if torch.isfinite(grad.sum(dtype=torch.float64)) else _first(~torch.isfinite(grad))
            return SparseGrad.dense(grad, *flag(bad, layout, grad.device))
        assert ctx.rounding is not None
        total = torch.add(memory.before, grad, out=torch.empty_like(memory.after))
        odd = ~torch.isfinite(total)
        total = torch.where(odd, memory.before, total)
        sent = ctx.rounding(total, torch.zeros(1, dtype=torch.int64, device=grad.device).expand(layout.numel), 1)
        rest = total - sent
        exact = (rest + sent == total) & (total - rest == sent)  # what could not be put together again stays home
        for span in layout.spans:
            if span.name in ctx.asleep:
                exact[span.start : span.stop] = False
        memory.energy += torch.dot(total, total).item()
        torch.where(exact, rest, total, out=memory.after)
        return SparseGrad.dense(torch.where(exact, sent, 0), *flag(_first(odd), layout, grad.device))


def _first(mask: Tensor) -> int:
    """Index of the first true entry, or -1."""
    return int(mask.nonzero()[0]) if mask.any() else -1
