"""What the masks of Gaussian-k count under error feedback, on a synthetic gradient."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from math import prod

import torch

from sparsync.kernels import Memory
from sparsync.kernels.accumulate.reference import accumulate
from sparsync.kernels.gaussian.reference import MASKS, search

NUMEL, K, STEPS = 100_000, 100, 30
ROOM = 8 * K  # of a message


@cache
def masks_note() -> str:
    """Return why both forms send a fraction of k."""
    return (
        "Why Gaussian-k as printed and in its authors' form send a fraction of k, a synthetic gradient shows: to "
        f"{NUMEL:,} entries the same normal vector was added in each of {STEPS} steps, and what was sent taken out. "
        f"{_told(two_sided=False, masks=MASKS)} {_told(two_sided=True, masks=MASKS - 1)} What lay beyond the last mask "
        "went a step before. The rest grows, but the deviation with it, and so the threshold, which hardly any entry "
        "overtakes."
    )


def _told(two_sided: bool, masks: int) -> str:
    form = "In its authors' form" if two_sided else "As printed"
    first, last = (mask_counts(steps, two_sided, masks) for steps in (1, STEPS))
    counts = [", ".join(f"{count / K:.3g}" for count in own) for own in (first, last)]
    return (
        f"{form} the masks count {counts[0]} times k in the first step and {counts[1]} in the last, where the last "
        f"mask lies at {last_threshold(last):.4g} times the fitted quantile."
    )


def last_threshold(counts: Sequence[int]) -> float:
    """Return where the last mask lies, in times the fitted quantile, by what those before it count."""
    return prod(0.5 if count < 2 * K / 3 else 1.5 for count in counts[:-1])


def mask_counts(steps: int, two_sided: bool, masks: int) -> list[int]:
    """Return the counts of the masks in the last of so many steps.

    Args:
        two_sided: as of ``search``.
        masks: as of ``search``.
    """
    grad = torch.randn(NUMEL, generator=torch.Generator().manual_seed(0))
    u, whole, counts = torch.zeros(NUMEL), [(0, NUMEL)], list[int]()
    for _ in range(steps):
        rows, _ = accumulate(grad, Memory(u, u), whole)
        found, counts = search(u, rows, whole, K, two_sided, masks)
        u[found[:ROOM]] = 0
    return counts
