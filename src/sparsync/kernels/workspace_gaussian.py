"""Tables and buffers of the Gaussian-k kernels for one flat gradient: made once, the same memory in every step."""

from __future__ import annotations

from functools import partial
from statistics import NormalDist

import torch
from torch import Tensor

from sparsync.kernels.launcher import Launcher
from sparsync.kernels.search import Digits
from sparsync.kernels.workspace import BLOCK, CHUNK
from sparsync.layout import Layout
from sparsync.sparse import SparseGrad

BLOCKS = 8  # of a program, 16 at most; a small gradient needs many programs instead
SMALL = 1 << 22
ROOM = 4096  # entries of a region: a segment's list is cut into these
# What the first threshold is multiplied by, in two steps, to make those that may be counted, in ascending order. Two
# more stand for nothing: kernels count in powers of 2.
FACTORS = ((0.5, 0.5, 0.5, 1, 1.5, 1.5, 0, 0), (0.5, 1, 1.5, 1, 1, 1.5, 0, 0))
FLAT = 2.0**-44  # a variance below this share of the mean square is the rounding of sums


class GaussianSpace:
    """What the kernels need beside gradient and residual, on their device.

    Args:
        layout: of the flat gradient.
        two_sided: which quantile of the normal distribution.
        refine: the k largest go instead of a mask that is more than 10 % off.
        device: where it is.
    """

    def __init__(self, layout: Layout, two_sided: bool, refine: bool, device: torch.device) -> None:
        self.layout, self.device, self.launch = layout, device, Launcher()
        self.asked = two_sided, refine
        self.digits = Digits(layout, device) if refine else None
        self.blocks = 1 if layout.numel < SMALL else BLOCKS
        self._cut(two_sided)
        self.spans = self._table([span.start for span in layout.spans])
        parts = len(layout.segments)
        zeros = partial(torch.zeros, device=device, dtype=torch.int32)
        self.sums = torch.zeros(2 * self.strip_count, device=device, dtype=torch.float64)
        self.thresholds = torch.zeros(parts, device=device, dtype=torch.float64)
        self.factors = torch.tensor(FACTORS, device=device, dtype=torch.float64)
        self.bounds, self.tallies = zeros(parts * len(FACTORS[0])), zeros(self.strip_count * 3)
        self.counts, self.found, self.turn = zeros(parts * 32), zeros(self.regions), zeros(1)
        self.given, self.peaks = zeros(parts), zeros(parts)
        self.shares, self.choice = zeros(parts, dtype=torch.int64), zeros(parts * 4, dtype=torch.int64)
        index = torch.int32 if layout.numel < 2**31 else torch.int64
        self.places = torch.full((self.candidates + 1,), -1, device=device, dtype=index)  # the last: what is not finite
        self.values = torch.zeros(self.candidates, device=device)
        self.out_places = zeros(layout.capacity, dtype=torch.int64)
        self.out_values = torch.zeros(layout.capacity, device=device)
        self.total, self.flags = zeros((), dtype=torch.int64), zeros(2)
        self._sent = SparseGrad(
            self.out_places, self.out_values, self.total, layout.numel, self.flags[0], self.flags[1]
        )

    def _cut(self, two_sided: bool) -> None:
        """Cut the layout into strips, one a program, and the list into regions."""
        strips: list[tuple[int, ...]] = []
        segments: list[tuple[int, ...]] = []
        owners: list[int] = []
        quantiles: list[float] = []
        size = BLOCK * self.blocks
        self.candidates = self.chunks = 0
        for i, segment in enumerate(self.layout.segments):
            first = len(strips)
            for span_start, stop in segment.runs():
                start = span_start // 128 * 128  # aligned, so that loads are wide
                strips += [(at, max(at, span_start), min(at + size, stop), i) for at in range(start, stop, size)]
            room = min(segment.capacity, ROOM)
            regions = -(-segment.capacity // room)
            # As ``fused.SEGMENT``, with the first strip and how many they are in the samples' place.
            row = (segment.k, segment.capacity, len(owners), regions, room, self.candidates)
            segments.append((*row, first, len(strips) - first, segment.numel))
            owners += [i] * regions
            self.candidates += regions * room
            self.chunks = max(self.chunks, -(-room // CHUNK))
            tail = segment.k / segment.numel / (2 if two_sided else 1)
            quantiles.append(NormalDist().inv_cdf(1 - tail) if segment.k < segment.numel else 0.0)
        self.strips, self.segments, self.owners = self._table(strips), self._table(segments), self._table(owners)
        self.quantiles = torch.tensor(quantiles, dtype=torch.float64, device=self.device)
        self.strip_count, self.regions = len(strips), len(owners)
        self.longest = max(row[7] for row in segments)  # strips of a segment

    def _table(self, rows: list[tuple[int, ...]] | list[int]) -> Tensor:
        return torch.tensor(rows, dtype=torch.int64, device=self.device).flatten()

    def sent(self) -> SparseGrad:
        """The message that the last kernel left behind."""
        return self._sent
