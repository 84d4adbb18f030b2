"""Buffers that stay from step to step: each is a small class above its one user, made when it is first asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


class Workspace:
    """Buffers of one flat gradient, at most one object of each class.

    It lives as long as what it belongs to (a unit's layout, or a residual).
    """

    def __init__(self) -> None:
        self._known: dict[type, tuple[Any, Any]] = {}

    def get(self, kind: type[T], made_for: Any, make: Callable[[], T]) -> T:
        """Return the object of class ``kind``; it is made anew whenever ``made_for`` is another one than before.

        Args:
            made_for: compared with ``==``: what the object depends on, such as layout and device.
        """
        known = self._known.get(kind)
        if known is None or known[0] != made_for:
            known = self._known[kind] = made_for, make()
        found: T = known[1]
        return found

    def find(self, kind: type[T]) -> T | None:
        """Return the object of class ``kind``, if it was made."""
        known = self._known.get(kind)
        return None if known is None else known[1]
