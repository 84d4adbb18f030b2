"""Apply an update to parameters, in plain PyTorch: the specification of the kernel."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Change(NamedTuple):
    """What becomes of a parameter: ``kept * parameter - factor * grad``; ``factor``: a 0-d tensor on its device."""

    parameter: Tensor
    grad: Tensor
    kept: float
    factor: Tensor


def apply_update(changes: Sequence[Change], skip: Tensor | None) -> None:
    """Change parameters in place; where ``skip``, a tensor of one number on their device, is above 0, none is."""
    decayed: defaultdict[float, list[Tensor]] = defaultdict(list)
    for change in changes:
        decayed[change.kept].append(change.parameter)
    for kept, parameters in decayed.items():
        if kept != 1:
            torch._foreach_mul_(parameters, kept if skip is None else torch.where(skip > 0, 1.0, kept))
    for parameter, grad, _, factor in changes:
        came = grad if skip is None else torch.where(skip > 0, torch.zeros_like(grad), grad)
        parameter.addcmul_(came, factor.to(grad.dtype), value=-1)
