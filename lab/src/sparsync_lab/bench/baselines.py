"""Selection with error feedback as the papers' authors write it, in plain PyTorch: what ours is measured against.

Each adds the gradient to the residual, takes ``k`` entries or about as many out of it, and returns their indices and
values. None of them keeps anything else from step to step.
"""

from __future__ import annotations

from collections.abc import Callable
from math import ceil
from statistics import NormalDist

import torch
from torch import Tensor

Baseline = Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]]


def topk(grad: Tensor, residual: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Select the k largest magnitudes by ``torch.topk``."""
    residual += grad
    return _take(residual, torch.topk(residual.abs(), k, sorted=False).indices)


def dgc(grad: Tensor, residual: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Select by a threshold from a random sample of 1 %, lowered until 0.8 k pass; of more than 1.3 k, the k largest
    (Lin et al., 2018)."""
    residual += grad
    size, numel = residual.abs(), residual.numel()
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
    return _take(residual, found)


def gaussian(grad: Tensor, residual: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Select by the quantile of a fitted normal distribution and at most four masks, of which the last counts, however
    many it holds (Shi et al., 2019, Algorithm 1 as printed)."""
    residual += grad
    size, numel = residual.abs(), residual.numel()
    threshold = residual.mean().item() + residual.std().item() * NormalDist().inv_cdf(1 - k / numel)
    for _ in range(4):
        mask = size > threshold
        count = int(mask.sum())
        if count < 2 * k / 3:
            threshold *= 0.5
        elif count > 4 * k / 3:
            threshold *= 1.5
        else:
            break
    return _take(residual, mask.nonzero().squeeze(1))


def trimmed(grad: Tensor, residual: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Select by thresholds that step down from the largest magnitude towards the mean until k survive; of these, the k
    largest (Fang et al., 2019)."""
    residual += grad
    size = residual.abs()
    mean, peak = size.mean(), size.max()
    for share in (0.8, 0.6, 0.4, 0.2, 0.0):
        found = (size > mean + share * (peak - mean)).nonzero().squeeze(1)
        if found.numel() >= k:
            return _take(residual, found[torch.topk(size[found], k, sorted=False).indices])
    return _take(residual, torch.topk(size, k, sorted=False).indices)  # fewer than k lie above the mean


def _take(residual: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    values = residual[indices]
    residual[indices] = 0
    return indices, values


BASELINES: dict[str, Baseline] = {"topk": topk, "dgc": dgc, "gaussian": gaussian, "trimmed": trimmed}
