"""Apply an update to parameters, in plain PyTorch: the specification of the kernel."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class ParameterChange(NamedTuple):
    """What becomes of a parameter: ``kept * parameter - grad * undo / shown``.

    ``shown``: by what its update was multiplied, a 0-d tensor on its device.
    """

    parameter: Tensor
    grad: Tensor
    kept: float
    shown: Tensor


def apply_update(changes: Sequence[ParameterChange], undo: Tensor, skip: Tensor | None) -> None:
    """Change parameters in place.

    Args:
        undo: undoes what was done to all gradients: a 0-d tensor on their device.
        skip: a tensor of one number there; where it is above 0, nothing is changed.
    """
    decayed: defaultdict[float, list[Tensor]] = defaultdict(list)
    for change in changes:
        decayed[change.kept].append(change.parameter)
    for kept, parameters in decayed.items():
        if kept != 1:
            torch._foreach_mul_(parameters, kept if skip is None else torch.where(skip > 0, 1.0, kept))
    factors = {id(change.shown): undo / change.shown for change in changes}
    for parameter, grad, _, shown in changes:
        came = grad if skip is None else torch.where(skip > 0, torch.zeros_like(grad), grad)
        subtract(parameter, came, factors[id(shown)])


def subtract(parameter: Tensor, grad: Tensor, factor: Tensor) -> None:
    """Subtract a gradient times a factor, a 0-d tensor in fp32: in half precision that may be 0."""
    if grad.dtype.itemsize < factor.dtype.itemsize:
        parameter.copy_(parameter.float() - grad.float() * factor)
    else:
        parameter.addcmul_(grad, factor.to(grad.dtype), value=-1)
