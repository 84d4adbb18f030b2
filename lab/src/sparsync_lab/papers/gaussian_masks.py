"""What the masks of Gaussian-k in its authors' form count under error feedback, on a synthetic gradient."""

from __future__ import annotations

from functools import cache

import torch

from sparsync.kernels import Memory
from sparsync.kernels.accumulate.reference import accumulate
from sparsync.kernels.gaussian.reference import MASKS, search

NUMEL, K, STEPS = 100_000, 100, 30
ROOM = 8 * K  # of a message


@cache
def masks_note() -> str:
    """Return why the authors' form sends a fraction of k."""
    counts = ", ".join(f"{count / K:.3g}" for count in mask_counts(STEPS))
    return (
        "Why the authors' form sends a fraction of k, too, a synthetic gradient shows: to "
        f"{NUMEL:,} entries the same normal vector was added in each of {STEPS} steps, and what was sent taken out. In "
        f"the last step its three masks count {counts} times k: the third lies at 0.75 times the fitted quantile, and "
        "what lay beyond went a step before. The rest grows, but the deviation with it, and so the threshold, which "
        "hardly any entry overtakes."
    )


def mask_counts(steps: int) -> list[int]:
    """Return the counts of the masks in the last of so many steps."""
    grad = torch.randn(NUMEL, generator=torch.Generator().manual_seed(0))
    u, whole, counts = torch.zeros(NUMEL), [(0, NUMEL)], list[int]()
    for _ in range(steps):
        rows, _ = accumulate(grad, Memory(u, u), whole)
        found, counts = search(u, rows, whole, K, two_sided=True, masks=MASKS - 1)
        u[found[:ROOM]] = 0
    return counts
