"""How a threshold is found without sorting: candidates above a floor, a histogram of them, and the next floor.

Of every segment the entries at or above its floor are candidates: about 2 k of them. A histogram of their magnitudes
tells from where on at most k are left, and those are sent; if that leaves more than 1 % of k free, as many of the next
bin, which are nearly equal, go too. The floor for the next step comes from the same histogram.
Magnitudes are compared as the integers their fp32 bits make, and all arithmetic is on integers: every device finds the
same.

Behind a threshold residuals pile up just below it, so bins are fine above the floor (256 bins to a sixteenth of a
factor of two), coarser over the next half (160 bins) and coarse beyond (96 bins to twelve factors of two and the rest).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sparsync.layout import locate

OCTAVE = 1 << 23  # a factor of two
FINE, MIDDLE, WIDE = 11, 15, 20  # bits of a magnitude within a bin of each kind
MIDDLE_FROM, WIDE_FROM = 256, 416  # the first bin of the latter two kinds
BINS = 512
MIDDLE_BITS = MIDDLE_FROM << FINE  # above the floor
WIDE_BITS = MIDDLE_BITS + (WIDE_FROM - MIDDLE_FROM << MIDDLE)
NEAR = 128  # bins next to the floor that tell how many entries to expect just below it
SAMPLE = 8192  # entries that a floor is guessed from
COARSE = 20  # bits of a magnitude within a bin of the sample's histogram
LOWEST = 1  # below every magnitude but 0


@dataclass
class Floor:
    """Of one segment, between steps: the floor's bits, the k it was made for, and candidates to expect above it: those
    that stayed (``left``) and those that a gradient lifts over it (``inflow``, a running mean)."""

    bits: int
    k: int
    left: int
    inflow: int


def room_for(k: int) -> int:
    """How many candidates are looked at."""
    return 12 * k + 256


def target_for(k: int) -> int:
    """How many are hoped for."""
    return 2 * k + 16


def jumped(count: int, k: int) -> bool:
    """Whether candidates are so few or so many that they tell nothing about where the next floor should be."""
    return count == 0 or count > 8 * room_for(k)


def bits_of(u: Tensor) -> Tensor:
    """Magnitudes as integers in the same order."""
    return u.float().abs().view(torch.int32).long()


def magnitude(bits: int) -> float:
    """The magnitude that an integer stands for."""
    return torch.tensor(bits, dtype=torch.int32).view(torch.float32).item()


def bins_of(bits: Tensor, floor: int) -> Tensor:
    """The bin of each magnitude at or above the floor."""
    up = bits - floor
    wide = (WIDE_FROM + (up - WIDE_BITS >> WIDE)).clamp(max=BINS - 1)
    middle = MIDDLE_FROM + (up - MIDDLE_BITS >> MIDDLE)
    return torch.where(up < MIDDLE_BITS, up >> FINE, torch.where(up < WIDE_BITS, middle, wide))


def histogram(u: Tensor, found: Tensor, floor: int) -> tuple[Tensor, Tensor]:
    """The bin of each entry of ``u`` at ``found``, and of every bin how many lie in it or above."""
    bins = bins_of(bits_of(u.index_select(0, found)), floor)
    return bins, from_above(torch.bincount(bins, minlength=BINS))


def from_above(counts: Tensor) -> Tensor:
    """Sums from each bin to the last."""
    return counts.flip(0).cumsum(0).flip(0)


def edge_bits(bin: int) -> int:
    """How far above the floor a bin starts."""
    if bin < MIDDLE_FROM:
        return bin << FINE
    return MIDDLE_BITS + (bin - MIDDLE_FROM << MIDDLE) if bin < WIDE_FROM else WIDE_BITS + (bin - WIDE_FROM << WIDE)


def sample_positions(numel: int, device: torch.device) -> Tensor:
    """Evenly spaced positions out of ``numel``; the spacing is odd, not to march in step with a matrix's rows."""
    return torch.arange(0, numel, max(1, numel // SAMPLE) | 1, device=device)


def guess(u: Tensor, runs: Sequence[tuple[int, int]], k: int) -> int:
    """The bits of a floor that about ``target_for(k)`` entries of ``runs`` reach, from a sample; 0 if that is 0."""
    numel = sum(stop - start for start, stop in runs)
    sample = bits_of(u[locate(sample_positions(numel, u.device), runs)])
    real = sample[sample > 0]
    if not real.numel():
        return 0
    wanted = min(real.numel(), -(-target_for(k) * sample.numel() // numel))
    reached = from_above(torch.bincount(real >> COARSE, minlength=2048))
    return max(LOWEST, (int((reached >= wanted).sum()) - 1) << COARSE)


def edge_for(reached: Tensor, k: int) -> int:
    """The lowest bin from which on at most ``k`` entries are left; ``reached[j]``: how many lie in bin j or above.

    Where that leaves more than 1 % of ``k`` free, the bin below: as many of its entries as are missing go.
    """
    edge = min(BINS - 1, int((reached > k).sum()))
    return edge - 1 if edge and 100 * int(reached[edge]) < 99 * k else edge


def steer(floor: Floor, reached: Tensor, edge: int) -> Floor:
    """The floor for the next step, unless the gradient jumped."""
    count, sent = int(reached[0]), min(floor.k, int(reached[edge]))
    target = target_for(floor.k)
    inflow = (3 * floor.inflow + max(0, count - floor.left)) // 4
    left = count - sent
    if left + inflow > target:  # up to where fewer are expected, but not above what was sent
        expected = (reached - sent).clamp(min=0) * count + inflow * reached  # in units of 1 / count
        higher = min(edge, int((expected > target * count).sum()))
        up = int(reached[higher])
        return Floor(floor.bits + edge_bits(higher), floor.k, max(0, up - sent), inflow * up // count)
    missing = target - left - inflow
    near = max(1, count - int(reached[NEAR]))
    down = min(missing * (NEAR << FINE) // near, OCTAVE // 4)
    if 2 * int(reached[BINS - 1]) > floor.k:
        down = 0  # any lower and the histogram could not tell the largest apart
    return Floor(max(LOWEST, floor.bits - down), floor.k, left + missing, inflow)
