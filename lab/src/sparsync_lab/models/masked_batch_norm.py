"""Batch norm of sequences of different lengths, side by side in one batch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _NormBase


class MaskedBatchNorm(_NormBase):
    """``nn.BatchNorm1d`` or ``2d`` over real frames alone, with its parameters and buffers; all others become 0.

    It never waits for the host. ``x`` is ``(batch, channels, ..., frames)``, ``real`` says of ``(batch, frames)`` which
    are.
    """

    def __init__(self, channels: int, momentum: float = 0.1) -> None:
        super().__init__(channels, momentum=momentum)

    def forward(self, x: Tensor, real: Tensor) -> Tensor:
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        x, real = x.unsqueeze(1), real.unsqueeze(1)  # as of one worker
        if self.training:
            mean, variance, unbiased = masked_statistics(x, real)
            update_running_statistics((self.running_mean, self.running_var), (mean[0], unbiased[0]), self.momentum)
            self.num_batches_tracked.add_(1)
        else:
            mean, variance = self.running_mean.unsqueeze(0), self.running_var.unsqueeze(0)
        weight, bias = self.weight.unsqueeze(0), self.bias.unsqueeze(0)
        return masked_norm(x, real, mean, variance + self.eps, weight, bias).squeeze(1)


def masked_statistics(x: Tensor, real: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return mean, variance and unbiased variance of every worker's channels, ``(workers, channels)``.

    Args:
        x: ``(batch, workers, channels, ..., frames)``.
        real: ``(batch, workers, frames)``; one or more of each worker.
    """
    over, mask = [0, *range(3, x.dim())], _expand_mask(real, x)
    count = (real.sum((0, 2)) * x.shape[3:-1].numel()).unsqueeze(1).to(x.dtype)
    mean = (x * mask).sum(over) / count
    variance = ((x - _expand_channels(mean, x)) * mask).square().sum(over) / count
    return mean, variance, variance * (count / (count - 1).clamp(min=1))


@torch.no_grad()
def update_running_statistics(running: Sequence[Tensor], now: Sequence[Tensor], momentum: float | None) -> None:
    """Move running statistics towards those of a batch."""
    assert momentum is not None
    for tensor, value in zip(running, now, strict=True):
        tensor.lerp_(value, momentum)


def masked_norm(x: Tensor, real: Tensor, mean: Tensor, variance: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Return ``(x - mean) / √variance * weight + bias`` where frames are real, else 0; of every worker's channels."""
    scale = _expand_channels(variance.rsqrt() * weight, x)
    return ((x - _expand_channels(mean, x)) * scale + _expand_channels(bias, x)) * _expand_mask(real, x)


def _expand_mask(real: Tensor, x: Tensor) -> Tensor:
    """Return ``(batch, workers, frames)`` with the dimensions of ``x``."""
    return real.reshape(*real.shape[:2], *[1] * (x.dim() - 3), real.shape[2])


def _expand_channels(own: Tensor, x: Tensor) -> Tensor:
    """Return ``(workers, channels)`` with the dimensions of ``x``."""
    return own.reshape(*own.shape, *[1] * (x.dim() - 3))
