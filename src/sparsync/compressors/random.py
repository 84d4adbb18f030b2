"""Random selection: k entries, or one block of k, of every segment."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor

from sparsync.compressors.base import Context, State, flag
from sparsync.compressors.selecting import Selecting, accumulate_segment, send_chosen
from sparsync.kernels import KernelPath, Memory
from sparsync.kernels.accumulate import accumulate, accumulate_flat
from sparsync.kernels.random_indices import random_indices_of
from sparsync.layout import Layout
from sparsync.sparse import NONFINITE, SparseGrad


@dataclass(frozen=True)
class RandomK(Selecting):
    """k distinct entries of every segment, drawn anew each step from (seed, step, segment), never from torch's own
    random state; every rank draws its own, or all the same if the collective shares indices. CPUs and GPUs draw alike.

    (Foroutan Eghlidi and Jaggi, 2020.) Costs nothing to select and, with shared indices, to name; but it sends small
    entries as readily as large ones, and learns much more slowly than top-k at the same density.

    Args:
        density: share of the entries to send, in (0, 1].
    """

    random = True
    graph_safe = True

    def compress(self, grad: Tensor, memory: Memory | None, layout: Layout, ctx: Context, state: State) -> SparseGrad:
        assert memory is not None
        path = self.path(grad, memory, layout, ctx)
        flags, where = accumulate_all(grad, memory, layout, ctx, path)
        unused = frozenset() if ctx.whole else ctx.unused
        tables = random_indices_of(layout, unused, not self.block, grad.device, ctx.workspace)
        indices, segments = tables.draw(key_of(ctx) if ctx.key is None else ctx.key)
        return send_chosen(memory, indices, segments, layout, ctx, flags, where)


@dataclass(frozen=True)
class BlockRandomK(RandomK):
    """One block of k neighbours of every segment, at a random place, wrapping round at the end.

    (Foroutan Eghlidi and Jaggi, 2020.) As random-k, and the block is read and written at memory speed; only its start
    has to travel.

    Args:
        density: share of the entries to send, in (0, 1].
    """

    block = True


def key_of(ctx: Context) -> int:
    """Return 32 bits for this step: the same on every rank where indices are shared."""
    key = repr((ctx.seed, 0 if ctx.shared else ctx.rank, ctx.step))
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=4).digest(), "big")


class SpanTable:
    """Where the parameters of a layout lie, on its device: ``mine`` is true within them, if anything is without."""

    def __init__(self, layout: Layout, device: torch.device) -> None:
        self.layout, self.mine = layout, None
        self.starts = torch.tensor([span.start for span in layout.spans], dtype=torch.int64, device=device)
        if layout.runs != [(0, layout.numel)]:
            self.mine = torch.zeros(layout.numel, dtype=torch.bool, device=device)
            for start, stop in layout.runs:
                self.mine[start:stop] = True

    def flag(self, bad: Tensor) -> tuple[Tensor, Tensor]:
        """Return what ``base.flag`` does, from an index on the device."""
        where = (self.starts <= bad).sum(dtype=torch.int32) - 1
        return (bad >= 0).to(torch.int32) * NONFINITE, where


def accumulate_all(
    grad: Tensor, memory: Memory, layout: Layout, ctx: Context, path: KernelPath
) -> tuple[Tensor, Tensor]:
    """Add the gradient of every segment to its residual: all at once, if none is clipped or unused. On a GPU nothing
    waits for the host then, and energy is not measured.

    Returns flags, and the number of the parameter, of what is not finite.
    """
    if ctx.clip is not None or ctx.unused:
        nonfinite = [accumulate_segment(grad, memory, segment, ctx, path)[1] for segment in layout.segments]
        return flag(next((bad for bad in nonfinite if bad >= 0), -1), layout, grad.device)
    if grad.device.type == "cpu":
        return flag(accumulate(grad, memory, layout.runs, path=path)[1], layout, grad.device)
    spans = ctx.workspace.get(SpanTable, (id(layout), grad.device), lambda: SpanTable(layout, grad.device))
    return spans.flag(accumulate_flat(grad, memory, spans.mine))
