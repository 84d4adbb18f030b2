"""How much a gradient is clipped, in plain PyTorch: the specification of the kernels."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from sparsync.kernels.accumulate.reference import Run, chunks


def clip_scale(grad: Tensor, runs: Sequence[Run], clip: float | None) -> float:
    """Return what to multiply ``grad`` by so that its norm over ``runs``, non-finite entries left out, is at most
    ``clip``."""
    if clip is None:
        return 1.0
    parts = [torch.linalg.vector_norm(grad[a:b], dtype=torch.float64).item() for a, b in chunks(runs, grad.device)]
    if not all(map(math.isfinite, parts)):
        finite = (grad[a:b].double().nan_to_num(0.0, 0.0, 0.0) for a, b in chunks(runs, grad.device))
        parts = [torch.linalg.vector_norm(part).item() for part in finite]
    norm = math.hypot(*parts)
    return clip / norm if norm > clip else 1.0
