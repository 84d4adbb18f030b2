"""Entries above a threshold that is estimated anew in every step, from a random sample."""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import ceil

import torch
from torch import Tensor

from sparsync.compressors.base import Context, Selecting, State
from sparsync.kernels import Rows, above, largest
from sparsync.layout import Segment

ROUNDS = 10
LEAST, MOST = 0.8, 1.3  # counts that are accepted, as shares of k


@dataclass(frozen=True)
class DGCK(Selecting):
    """The selection of "Deep Gradient Compression" (Lin et al.): between 0.8 k and 1.3 k of the largest entries.

    Use it to compare with DGC: its random sample is meant for devices on which exact top-k is slow, and on a CPU, after
    the pass that leaves the rows' peaks behind, ``TopK`` costs no more and its count is exact.

    Args:
        density: share of the entries to send, in (0, 1].
        sample: share of the entries the threshold is estimated from, in (0, 1]; never fewer than 2/density entries.
    """

    sample: float = 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (isinstance(self.sample, int | float) and 0 < self.sample <= 1):
            raise ValueError(f"sample must be above 0 and at most 1, got {self.sample!r}")

    def capacity(self, k: int, numel: int) -> int:
        return min(numel, ceil(MOST * k))

    def choose(self, u: Tensor, rows: Rows, segment: Segment, ctx: Context, state: State) -> Tensor:
        runs, k = segment.runs(ctx.asleep), segment.k
        numel = sum(stop - start for start, stop in runs)
        if k >= numel:
            return above(u, rows, 0.0)
        wanted = min(numel, max(ceil(self.sample * numel), ceil(2 * numel / k)))
        seed = zlib.crc32(f"{ctx.seed} {ctx.step} {segment.name}".encode())
        sample = u[_draw(runs, numel, wanted, seed, u.device)].abs()
        threshold = torch.topk(sample, max(1, round(wanted * k / numel))).values[-1].item()
        found = above(u, rows, threshold)
        for _ in range(ROUNDS):
            if found.numel() >= LEAST * k or threshold == 0:
                break
            threshold *= 0.8
            found = above(u, rows, threshold)
        # The k largest of the survivors are the k largest of all.
        return found if found.numel() <= segment.capacity else largest(u, rows, k)


def _draw(runs: Sequence[tuple[int, int]], numel: int, wanted: int, seed: int, device: torch.device) -> Tensor:
    """``wanted`` random indices out of ``runs``, or each once if all are wanted, without torch's own random state."""
    if wanted == numel:
        picked = torch.arange(numel, device=device)
    else:
        rng = torch.Generator(device).manual_seed(seed)
        picked = torch.randint(numel, (wanted,), generator=rng, device=device)
    ends = list(accumulate(stop - start for start, stop in runs))
    run = torch.bucketize(picked, torch.tensor(ends, device=device), right=True)
    shifts = [stop - end for (_, stop), end in zip(runs, ends, strict=True)]
    return picked + torch.tensor(shifts, device=device)[run]
