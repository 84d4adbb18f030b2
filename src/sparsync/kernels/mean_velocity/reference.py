"""Put momentum into a mean, in plain PyTorch: the specification of every faster version."""

from torch import Tensor


def move(total: Tensor, scale: float, velocity: Tensor, beta: float, out: Tensor) -> None:
    """Make ``velocity`` what it was times ``beta``, plus ``scale * total``; and ``out`` the same.

    Args:
        total: in any precision, up to that of the others; may be ``out``.
    """
    out.copy_(total).mul_(scale)
    velocity.mul_(beta).add_(out)
    out.copy_(velocity)
