"""Random selection: k entries, or one block of k, of every segment."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor

from sparsync.compressors.base import Context, Selecting, State
from sparsync.kernels import Rows
from sparsync.layout import Segment, locate


@dataclass(frozen=True)
class RandomK(Selecting):
    """k distinct entries of every segment, drawn anew each step from (seed, step, segment), never from torch's own
    random state; every rank draws its own, or all the same if the collective shares indices.

    (Foroutan Eghlidi and Jaggi, 2020.) Costs nothing to select and, with shared indices, to name; but it sends small
    entries as readily as large ones, and learns much more slowly than top-k at the same density.

    Args:
        density: share of the entries to send, in (0, 1].
    """

    random = True

    def choose(self, u: Tensor, rows: Rows, segment: Segment, ctx: Context, state: State) -> Tensor:
        runs = segment.runs(frozenset() if ctx.whole else ctx.asleep)
        numel = sum(stop - start for start, stop in runs)
        positions = self.draw(numel, min(segment.k, numel), generator(ctx, segment.name, u.device))
        return locate(positions, runs)

    def draw(self, numel: int, k: int, rng: torch.Generator) -> Tensor:
        """``k`` distinct positions out of ``numel``."""
        device = rng.device
        if 4 * k > numel:
            return torch.randperm(numel, generator=rng, device=device)[:k].sort().values
        drawn = torch.empty(0, dtype=torch.int64, device=device)
        while drawn.numel() < k:  # once, hardly ever twice: a quarter more than needed is drawn
            more = torch.randint(numel, (k + k // 4 + 8,), generator=rng, device=device)
            drawn = torch.unique(torch.cat([drawn, more]))
        return drawn[torch.randperm(drawn.numel(), generator=rng, device=device)[:k]].sort().values


@dataclass(frozen=True)
class BlockRandomK(RandomK):
    """One block of k neighbours of every segment, at a random place, wrapping round at the end.

    (Foroutan Eghlidi and Jaggi, 2020.) As random-k, and the block is read and written at memory speed; only its start
    has to travel.

    Args:
        density: share of the entries to send, in (0, 1].
    """

    block = True

    def draw(self, numel: int, k: int, rng: torch.Generator) -> Tensor:
        if numel == 0:
            return torch.empty(0, dtype=torch.int64, device=rng.device)
        start = torch.randint(numel, (1,), generator=rng, device=rng.device)
        return (start + torch.arange(k, device=rng.device)) % numel


def generator(ctx: Context, name: str, device: torch.device) -> torch.Generator:
    """A generator of our own for this step and segment: the same on every rank where indices are shared.

    It draws where the gradient is: CPUs and GPUs do not draw the same, and never train together.
    """
    key = repr((ctx.seed, 0 if ctx.shared else ctx.rank, ctx.step, name))
    digest = hashlib.blake2b(key.encode(), digest_size=8).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest, "big") >> 1)
