"""Finding the model and torch's optimizer inside what frameworks put around them; no framework is imported for it."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import Module

COMPILED = "_orig_mod"  # under which ``torch.compile`` holds the module that it was given
# Wrappers that step the optimizer which they hold as ``.optimizer``, and have no hooks of their own.
KNOWN = {"AcceleratedOptimizer": ("accelerate",), "LightningOptimizer": ("lightning", "pytorch_lightning")}


def unwrap_model(model: Any) -> Any:
    """Return the module that ``torch.compile`` was given, any other as it is."""
    while isinstance(model, Module) and COMPILED in model._modules:
        model = model._modules[COMPILED]
    return model


def plain_name(name: str) -> str:
    """Return a parameter's name as it is without ``torch.compile``, so that states fit with it and without."""
    return name.replace(f"{COMPILED}.", "")


def unwrap_optimizer(optimizer: Any, scaler: Any = None) -> tuple[torch.optim.Optimizer | None, Any]:
    """Return the optimizer that makes the steps, and the loss scaler that a wrapper makes them with.

    Raises ``ValueError`` for what has no step hooks: a wrapper that is not known, or no optimizer at all.

    Args:
        scaler: goes before a wrapper's.
    """
    given = type(optimizer).__name__
    while _is_wrapper(optimizer):
        own = getattr(optimizer, "scaler", None)
        if scaler is None and own is not None and own.is_enabled():
            scaler = own
        optimizer = optimizer.optimizer
    if optimizer is None:
        return None, scaler
    if not (isinstance(optimizer, torch.optim.Optimizer) and hasattr(optimizer, "_optimizer_step_pre_hooks")):
        parts = getattr(optimizer, "__dict__", {})
        inside = [name for name, part in parts.items() if isinstance(part, torch.optim.Optimizer)]
        hint = f"it holds one as {inside[0]!r}: pass that" if inside else "pass the torch.optim.Optimizer itself"
        if isinstance(optimizer, list | tuple):
            hint = "attach() takes one torch.optim.Optimizer: make the parameters of several groups of one"
        raise ValueError(f"optimizer= is a {given}, whose steps cannot be followed; {hint}")
    return optimizer, scaler


def _is_wrapper(optimizer: Any) -> bool:
    return any(c.__module__.split(".")[0] in KNOWN.get(c.__name__, ()) for c in type(optimizer).__mro__)
