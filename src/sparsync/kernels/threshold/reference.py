"""Find a threshold without sorting, in plain PyTorch: candidates above the one of the last step, a histogram of them,
and the threshold for the next step. The specification of every faster version.

Of every segment the entries at or above its carried threshold are candidates: about 2 k of them. A histogram of their
magnitudes tells from where on at most k are left, and those are sent; if that leaves more than 1 % of k free, as many
of the next bin, which are nearly equal, go too. The threshold for the next step comes from the same histogram.
Magnitudes are compared as the integers their fp32 bits make, and all arithmetic is on integers: every device finds the
same.

Behind a threshold residuals pile up just below it, so bins are fine above it (256 bins to a sixteenth of a factor of
two), coarser over the next half (160 bins) and coarse beyond (96 bins to twelve factors of two and the rest).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sparsync.kernels.accumulate.reference import Rows
from sparsync.kernels.topk.reference import above, limit, reach
from sparsync.layout import locate

OCTAVE = 1 << 23  # a factor of two
FINE, MIDDLE, WIDE = 11, 15, 20  # bits of a magnitude within a bin of each kind
MIDDLE_FROM, WIDE_FROM = 256, 416  # the first bin of the latter two kinds
BINS = 512
MIDDLE_BITS = MIDDLE_FROM << FINE  # above the threshold
WIDE_BITS = MIDDLE_BITS + (WIDE_FROM - MIDDLE_FROM << MIDDLE)
NEAR = 128  # bins next to the threshold that tell how many entries to expect just below it
SAMPLE = 8192  # entries that a threshold is estimated from
COARSE = 20  # bits of a magnitude within a bin of the sample's histogram
LOWEST = 1  # a threshold that every magnitude but 0 reaches


@dataclass
class Threshold:
    """The carried threshold of one segment: its bits (0: not known yet), the k it was made for, and candidates to
    expect above it: those that stayed (``left``) and those that a gradient lifts over it (``inflow``, a running mean).
    """

    bits: int
    k: int
    left: int
    inflow: int


def room_for(k: int) -> int:
    """Return how many candidates are looked at."""
    return 12 * k + 256


def target_for(k: int) -> int:
    """Return how many candidates are hoped for."""
    return 2 * k + 16


def jumped(count: int, k: int) -> bool:
    """Return whether candidates are so few or so many that they tell nothing about the next threshold."""
    return count == 0 or count > 8 * room_for(k)


def bits_of(u: Tensor) -> Tensor:
    """Return magnitudes as integers in the same order."""
    return u.float().abs().view(torch.int32).long()


def magnitude(bits: int) -> float:
    """Return the magnitude that an integer stands for."""
    return torch.tensor(bits, dtype=torch.int32, device="cpu").view(torch.float32).item()


def bins_of(bits: Tensor, threshold: int) -> Tensor:
    """Return the bin of each magnitude at or above the threshold."""
    up = bits - threshold
    wide = (WIDE_FROM + (up - WIDE_BITS >> WIDE)).clamp(max=BINS - 1)
    middle = MIDDLE_FROM + (up - MIDDLE_BITS >> MIDDLE)
    return torch.where(up < MIDDLE_BITS, up >> FINE, torch.where(up < WIDE_BITS, middle, wide))


class Candidates:
    """Entries of a segment at or above its threshold.

    Attributes:
        reached: of every bin how many of them lie in it or above.

    Args:
        rows: of what may be sent.
        threshold: its bits.
    """

    def __init__(self, u: Tensor, rows: Rows, threshold: int) -> None:
        self._found = above(u, rows, magnitude(threshold))
        self._bins = bins_of(bits_of(u.index_select(0, self._found)), threshold)
        self.reached = from_above(torch.bincount(self._bins, minlength=BINS))

    def pick(self, edge: int, capacity: int, step: int) -> Tensor:
        """Return the indices, in ascending order, of those in bin ``edge`` or above; if these are more than
        ``capacity``, of the lowest bin only as many as are missing, from another place on in each step."""
        going = reach(self._bins, edge)
        sent = self._found.index_select(0, going)
        if sent.numel() <= capacity:
            return sent
        level = self._bins.index_select(0, going)
        sure, rest = sent[level > edge], sent[level == edge]
        return torch.cat([sure, limit(rest, capacity - sure.numel(), step)]).sort().values


def from_above(counts: Tensor) -> Tensor:
    """Return sums from each bin to the last."""
    return counts.flip(0).cumsum(0).flip(0)


def edge_bits(bin: int) -> int:
    """Return how far above the threshold a bin starts."""
    if bin < MIDDLE_FROM:
        return bin << FINE
    return MIDDLE_BITS + (bin - MIDDLE_FROM << MIDDLE) if bin < WIDE_FROM else WIDE_BITS + (bin - WIDE_FROM << WIDE)


def sample_positions(numel: int, device: torch.device) -> Tensor:
    """Return evenly spaced positions below ``numel``; the spacing is odd, not to march in step with a matrix's rows."""
    return torch.arange(0, numel, max(1, numel // SAMPLE) | 1, dtype=torch.int64, device=device)


def estimate(u: Tensor, runs: Sequence[tuple[int, int]], k: int) -> int:
    """Return the bits of a threshold that about ``target_for(k)`` entries of ``runs`` reach, from a sample, or 0."""
    numel = sum(stop - start for start, stop in runs)
    sample = bits_of(u[locate(sample_positions(numel, u.device), runs)])
    real = sample[sample > 0]
    if not real.numel():
        return 0
    wanted = min(real.numel(), -(-target_for(k) * sample.numel() // numel))
    reached = from_above(torch.bincount(real >> COARSE, minlength=2048))
    return max(LOWEST, (int((reached >= wanted).sum()) - 1) << COARSE)


def edge_for(reached: Tensor, k: int) -> int:
    """Return the lowest bin from which on at most ``k`` entries are left; ``reached[j]``: how many lie in j or above.

    Where that leaves more than 1 % of ``k`` free, the bin below: as many of its entries as are missing go.
    """
    edge = min(BINS - 1, int((reached > k).sum()))
    return edge - 1 if edge and 100 * int(reached[edge]) < 99 * k else edge


def next_threshold(last: Threshold, reached: Tensor, edge: int) -> Threshold:
    """Return the threshold for the next step, unless the gradient jumped."""
    count, sent = int(reached[0]), min(last.k, int(reached[edge]))
    target = target_for(last.k)
    inflow = (3 * last.inflow + max(0, count - last.left)) // 4
    left = count - sent
    if left + inflow > target:  # up to where fewer are expected, but not above what was sent
        expected = (reached - sent).clamp(min=0) * count + inflow * reached  # in units of 1 / count
        higher = min(edge, int((expected > target * count).sum()))
        up = int(reached[higher])
        return Threshold(last.bits + edge_bits(higher), last.k, max(0, up - sent), inflow * up // count)
    missing = target - left - inflow
    near = max(1, count - int(reached[NEAR]))
    down = min(missing * (NEAR << FINE) // near, OCTAVE // 4)
    if 2 * int(reached[BINS - 1]) > last.k:
        down = 0  # any lower and the histogram could not tell the largest apart
    return Threshold(max(LOWEST, last.bits - down), last.k, left + missing, inflow)
