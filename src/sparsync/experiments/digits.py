"""scikit-learn's bundled handwritten digits: 1,797 images of 8 x 8, no download."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

TEST = 450


@dataclass(frozen=True)
class Digits:
    """Images of shape ``(n, 64)``, standardised by the training images' mean and deviation, and labels ``(n,)``."""

    train_x: Tensor
    train_y: Tensor
    test_x: Tensor
    test_y: Tensor

    def shard(self, rank: int, workers: int) -> tuple[Tensor, Tensor]:
        """The training images of one worker: every ``workers``-th, all shards of the same size."""
        size = len(self.train_x) // workers
        return self.train_x[rank::workers][:size], self.train_y[rank::workers][:size]


def load_digits() -> Digits:
    """The same split every time: 450 images for the test, 1,347 for training."""
    from sklearn import datasets

    images, labels = datasets.load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(images))
    x = torch.tensor(images[order], dtype=torch.float32)
    y = torch.tensor(labels[order], dtype=torch.int64)
    mean, deviation = x[TEST:].mean(0), x[TEST:].std(0)
    x = (x - mean) / torch.where(deviation > 0, deviation, 1.0)  # some corner pixels are always 0
    return Digits(x[TEST:], y[TEST:], x[:TEST], y[:TEST])
