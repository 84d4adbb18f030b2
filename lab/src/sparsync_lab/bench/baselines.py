"""Selection as the papers' authors write it, in plain PyTorch: what ours is measured against.

Each of ``SELECTIONS`` returns the indices of ``k`` entries or about as many; two are there twice, the second time as in
the code of P1's authors. With error feedback (``BASELINES``) the gradient is added to the residual first, what is
selected is taken out of it, and indices and values are returned. None of them keeps anything else from step to step.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import ceil
from statistics import NormalDist

import torch
from torch import Tensor

Selection = Callable[[Tensor, int], Tensor]
Baseline = Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]]


def topk(u: Tensor, k: int) -> Tensor:
    """Select the k largest magnitudes by ``torch.topk``."""
    return torch.topk(u.abs(), k, sorted=False).indices


def dgc(u: Tensor, k: int) -> Tensor:
    """Select by a threshold from a random sample of 1 %, lowered until 0.8 k pass; of more than 1.3 k, the k largest
    (Lin et al., 2018)."""
    size, numel = u.abs(), u.numel()
    wanted = min(numel, max(ceil(0.01 * numel), ceil(2 * numel / k)))
    sample = size[torch.randint(numel, (wanted,), device=size.device)]
    threshold = torch.topk(sample, max(1, round(wanted * k / numel)), sorted=False).values.min()
    found = (size >= threshold).nonzero().squeeze(1)
    for _ in range(10):
        if found.numel() >= 0.8 * k:
            break
        threshold = 0.8 * threshold
        found = (size >= threshold).nonzero().squeeze(1)
    if found.numel() > 1.3 * k:
        found = found[torch.topk(size[found], k, sorted=False).indices]
    return found


def dgc_of_p1(u: Tensor, k: int) -> Tensor:
    """Select by the k-th largest magnitude of a sample of 1 % that a permutation of all entries gives, far more than k
    entries; of these, the k largest (the code of Shi et al., 2019)."""
    size, numel = u.abs(), u.numel()
    wanted = min(numel, max(k, numel // 100))
    sample = size[torch.randperm(numel, device=size.device)[:wanted]]
    found = (size > torch.topk(sample, k).values[-1]).nonzero().squeeze(1)
    return found[torch.topk(size[found], k).indices] if found.numel() > 4 * k / 3 else found


def gaussian(u: Tensor, k: int, sides: int = 1, masks: int = 4) -> Tensor:
    """Select by the quantile of a fitted normal distribution and at most four masks, of which the last counts, however
    many it holds (Shi et al., 2019, Algorithm 1 as printed).

    Args:
        sides: 2 in the authors' code: magnitudes have two tails.
        masks: 3 there.
    """
    size, numel = u.abs(), u.numel()
    threshold = u.mean().item() + u.std().item() * NormalDist().inv_cdf(1 - k / (sides * numel))
    for _ in range(masks):
        found = (size > threshold).nonzero().squeeze(1)  # to sum the mask would copy it
        if found.numel() < 2 * k / 3:
            threshold *= 0.5
        elif found.numel() > 4 * k / 3:
            threshold *= 1.5
        else:
            break
    return found


def trimmed(u: Tensor, k: int) -> Tensor:
    """Select by thresholds that step down from the largest magnitude towards the mean until k survive; of these, the k
    largest (Fang et al., 2019)."""
    size = u.abs()
    mean, peak = size.mean(), size.max()
    for share in (0.8, 0.6, 0.4, 0.2, 0.0):
        found = (size > mean + share * (peak - mean)).nonzero().squeeze(1)
        if found.numel() >= k:
            return found[torch.topk(size[found], k, sorted=False).indices]
    return torch.topk(size, k, sorted=False).indices  # fewer than k lie above the mean


def with_feedback(select: Selection, grad: Tensor, residual: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Add the gradient to the residual, and take out of it what is selected."""
    residual += grad
    indices = select(residual, k)
    values = residual[indices]
    residual[indices] = 0
    return indices, values


SELECTIONS: dict[str, Selection] = {
    "topk": topk,
    "dgc": dgc,
    "gaussian": gaussian,
    "trimmed": trimmed,
    "dgc, authors' code": dgc_of_p1,
    "gaussian, authors' code": partial(gaussian, sides=2, masks=3),
}
BASELINES: dict[str, Baseline] = {name: partial(with_feedback, select) for name, select in SELECTIONS.items()}
