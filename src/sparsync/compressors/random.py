"""Random selection: k entries, or one block of k, of every segment."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from torch import Tensor

from sparsync.compressors.base import Context, Selecting, State, collect, sweep_all
from sparsync.kernels import Memory
from sparsync.kernels.lots import random_indices_of
from sparsync.layout import Layout
from sparsync.sparse import SparseGrad


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

    def compress(self, grad: Tensor, memory: Memory | None, layout: Layout, ctx: Context, state: State) -> SparseGrad:
        assert memory is not None
        flags, where = sweep_all(grad, memory, layout, ctx)
        unused = frozenset() if ctx.whole else ctx.unused
        lots = random_indices_of(layout, unused, not self.block, grad.device, ctx.workspace)
        indices, segments = lots.draw(key_of(ctx) if ctx.key is None else ctx.key)
        return collect(memory, indices, segments, layout, ctx, flags, where)


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
    """32 bits for this step: the same on every rank where indices are shared."""
    key = repr((ctx.seed, 0 if ctx.shared else ctx.rank, ctx.step))
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=4).digest(), "big")
