"""The largest entries within rows whose peaks are known, in plain PyTorch: the specification of faster versions."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from sparsync.kernels.accumulate.reference import ROW, Rows, chunk_size

TINY = 1e-30  # a threshold below may round to 0, which every entry reaches


def above(u: Tensor, rows: Rows, threshold: float) -> Tensor:
    """Return ascending indices of the non-zero entries within ``rows`` of magnitude ``threshold`` or more."""
    hot = reach(rows.peak, threshold)
    width = min(ROW, u.numel())
    windows = u.unfold(0, width, 1) if width else u.view(0, 1)
    found = []
    for block in torch.split(hot, chunk_size(u.device) // ROW):
        start, stop = rows.start[block], rows.stop[block]
        first = start.clamp(max=u.numel() - width)  # where a short row is read from, to stay within ``u``
        size = windows.index_select(0, first).abs_().view(-1)
        place = reach(size, threshold)
        if threshold < TINY:
            place = place[size[place] != 0]
        row = place // width
        index = first[row].add_(place % width)
        if bool((stop - start < ROW).any()):
            index = index[(index >= start[row]) & (index < stop[row])]
        found.append(index)
    return torch.cat(found) if found else hot


def reach(size: Tensor, threshold: float) -> Tensor:
    """Return ascending positions of what is ``threshold`` or more.

    On the CPU by numpy: several times as fast, and no threads that wait for each other over so little.
    """
    if size.device.type != "cpu":
        return (size >= threshold).nonzero().squeeze(1)
    bound = torch.tensor(threshold, dtype=size.dtype, device="cpu").numpy()
    return torch.from_numpy(np.flatnonzero(size.numpy() >= bound))


def largest(u: Tensor, rows: Rows, k: int) -> Tensor:
    """Return ascending indices of the ``k`` largest non-zero magnitudes within ``rows``; of equals, the lower index.

    The k-th largest row peak is never above the k-th largest magnitude: ``k`` rows hold an entry that large. So the
    entries above it are few and are all that has to be looked at.
    """
    threshold = torch.topk(rows.peak, k, sorted=False).values.min().item() if k <= rows.peak.numel() else 0.0
    found = above(u, rows, threshold)
    if found.numel() <= k:
        return found
    size = u.index_select(0, found).abs_()
    kth = torch.topk(size, k, sorted=False).values.min()
    keep = size > kth
    ties = (size == kth).nonzero().squeeze(1)
    keep[ties[: k - int(keep.sum())]] = True
    return found[keep]


def limit(found: Tensor, capacity: int, step: int) -> Tensor:
    """Return at most ``capacity`` of the indices ``found``, in order; where the choice starts rotates with the step."""
    if found.numel() <= capacity:
        return found
    return found.roll(-first_in_line(found.numel(), step))[:capacity].sort().values


def first_in_line(number: int, step: int) -> int:
    """Return which of so many goes first in a step."""
    return int(step * 0.6180339887498949 % 1 * number)  # golden ratio: even from the first few steps on
