"""Packages that the laboratory needs only for some commands."""

from __future__ import annotations

from importlib.util import find_spec


def require(*packages: str) -> None:
    """Raise the error of a missing package now, not after hours of training."""
    for package in packages:
        if find_spec(package) is None:
            raise ModuleNotFoundError(f"No module named {package!r}", name=package)
