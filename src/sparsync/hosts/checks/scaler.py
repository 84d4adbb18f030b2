"""Noticing a loss scaler that ``attach`` was not told of."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType

import torch

DEPTH = 16  # calls between a scaler's ``step`` and the optimizer's hooks, and some more
SENTENCE = (
    "a GradScaler steps this optimizer, and attach() does not know it: a step that it skips loses what was sent, and "
    "the residual does not follow the loss scale; pass attach(..., scaler=scaler)"
)


def notice_scaler(optimizer: torch.optim.Optimizer, tell: Callable[[str], None]) -> Callable[[], None]:
    """Look, at every step until one is found, whether a loss scaler makes the optimizer step; ``tell`` of it once.

    Gradients that were unscaled look like any others, and to compare them with those that were exchanged would make
    the host wait for the GPU; but whoever calls ``optimizer.step`` stands on the call stack.

    Returns:
        What ends the search.
    """
    found = False

    def look(*_: object) -> None:
        nonlocal found
        if found:  # a hook cannot be removed while hooks are run
            return
        if getattr(optimizer, "grad_scale", None) is not None or _called_by_scaler(sys._getframe(1)):
            found = True
            tell(SENTENCE)

    return optimizer.register_step_pre_hook(look).remove


def _called_by_scaler(frame: FrameType | None) -> bool:
    """Return whether an enabled ``GradScaler`` is among the callers."""
    for _ in range(DEPTH):
        if frame is None:
            return False
        caller = frame.f_locals.get("self") if frame.f_code.co_name == "step" else None
        if isinstance(caller, torch.amp.GradScaler):
            return caller.is_enabled()
        frame = frame.f_back
    return False
