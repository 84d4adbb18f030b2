"""The frameworks that Sparsync works in; an adapter is imported when it is first named."""

from importlib import import_module
from typing import Any

ADAPTERS = ("accelerate", "lightning", "transformers")


def __getattr__(name: str) -> Any:
    if name in ADAPTERS:
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
