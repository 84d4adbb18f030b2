"""Sparsync in host frameworks: ``ddp`` is DistributedDataParallel; the others are imported when first named."""

from importlib import import_module
from types import ModuleType

FRAMEWORKS = ("accelerate", "lightning", "transformers")


def __getattr__(name: str) -> ModuleType:
    """Import an adapter, and its framework with it: ``sparsync.hosts.transformers``."""
    if name in FRAMEWORKS:
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
