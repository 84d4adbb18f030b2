"""How gradients are exchanged, by name: plain DDP, a recipe, a compressor, or a compressor with its collective."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sparsync.config import ExchangePlan, registry, resolve
from sparsync.config.recipes import RECIPES

DENSE = "dense"  # plain DDP, without any hook


def method_options(method: str, **given: Any) -> dict[str, Any] | None:
    """Return the keyword arguments of ``attach`` for ``method``, all but ``optimizer``; ``None`` for plain DDP.

    Args:
        method: ``"dense"``, a recipe's name, a compressor's name, or both halves as in ``"random+shared"``. Where a
            recipe and a compressor share a name, it means the recipe; ``"dgc+allgather"`` is the compressor.
        given: options of ``attach`` that override the method's own; those that are ``None`` do not.
    """
    given = {name: value for name, value in given.items() if value is not None}
    if method == DENSE:
        if given:
            names = ", ".join(f"{name}={value!r}" for name, value in given.items())
            raise ValueError(f"method 'dense' is plain DDP and takes no options of sparse methods, got {names}")
        return None
    if method in RECIPES:
        return {"recipe": method, **given}
    compressor, plus, collective = method.partition("+")
    if compressor not in registry.compressors():
        known = [DENSE, *RECIPES, *sorted(set(registry.compressors()) - set(RECIPES))]
        raise ValueError(
            f"unknown method {method!r}; known are {', '.join(known)}, and a compressor with one of the collectives "
            f"{', '.join(sorted(registry.collectives()))}, as in random+shared"
        )
    return {"compressor": compressor, **({"collective": collective} if plus else {}), **given}


def has_budget(options: Mapping[str, Any]) -> bool:
    """Return whether bytes, not a density, are what these options of ``attach`` begin from."""
    return resolve(**{**options, "momentum": "keep"}).budget is not None


def check_options(options: dict[str, Any]) -> ExchangePlan:
    """Raise what ``attach`` would raise for these options, before any process is started; else return the plan."""
    # Other momentum needs an optimizer, and the first one that is made imports seconds' worth of torch.
    return resolve(**options | {"momentum": "keep"})
