"""Whether what a user gave is a number: texts and truth values are none, numpy's are."""

from __future__ import annotations

from numbers import Integral, Real
from typing import TypeGuard


def is_number(value: object) -> TypeGuard[float]:
    """Return whether this is a real number."""
    return isinstance(value, Real) and not isinstance(value, bool)


def is_whole(value: object) -> TypeGuard[int]:
    """Return whether this is a whole number."""
    return isinstance(value, Integral) and not isinstance(value, bool)
