"""No compression: every entry is sent."""

from dataclasses import dataclass

import torch
from torch import Tensor

from sparsync.compressors.base import Context, State
from sparsync.kernels import Memory
from sparsync.layout import Layout
from sparsync.sparse import NONFINITE, SparseGrad


@dataclass(frozen=True)
class NoCompression:
    """Every entry, every step. With fp32 values this is plain data-parallel training, bit for bit."""

    dense = True
    density = 1.0

    def capacity(self, k: int, numel: int) -> int:
        return numel

    def init(self, layout: Layout) -> State:
        return {}

    def rescale(self, state: State, ratio: float) -> None:
        return None

    def compress(self, grad: Tensor, memory: Memory | None, layout: Layout, ctx: Context, state: State) -> SparseGrad:
        words = torch.tensor([0, -1], dtype=torch.int32, device=grad.device)
        if memory is None:  # nothing is cut off, so nothing is kept; NaN travels as itself
            return SparseGrad.dense(grad, words[0], words[1])
        assert ctx.rounding is not None
        total = torch.add(memory.before, grad, out=torch.empty_like(memory.after))
        bad = ~torch.isfinite(total)
        if bad.any():
            total = torch.where(bad, memory.before, total)
            words[0] = NONFINITE
        sent = ctx.rounding(total, words.new_zeros(1, dtype=torch.int64).expand(layout.numel), 1)
        rest = total - sent
        exact = rest + sent == total  # what could not be put together again stays home
        memory.energy += torch.dot(total, total).item()
        torch.where(exact, rest, total, out=memory.after)
        return SparseGrad.dense(torch.where(exact, sent, 0), words[0], words[1])
