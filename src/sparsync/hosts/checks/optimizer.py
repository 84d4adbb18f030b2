"""Noticing that another optimizer steps than the one that ``attach`` was given, and has made its changes for."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

SENTENCE = (
    "an optimizer ({kind}) steps this model that attach() was not given: what was changed for the other one does not "
    "reach it, and it trains worse; call detach(), then attach(..., optimizer=optimizer) with the one that steps"
)


def notice_other_optimizer(
    optimizer: torch.optim.Optimizer, tell: weakref.WeakMethod[Callable[[str], None]]
) -> Callable[[], None]:
    """Look, at each step of any optimizer, whether it updates what ``optimizer`` holds; ``tell`` of it once.

    The hook is every optimizer's, for the life of the process: so it holds neither ``optimizer`` nor who tells.

    Returns:
        What ends the search.
    """
    given, told = weakref.ref(optimizer), False
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}

    def look(stepping: Any, *_: object) -> None:
        nonlocal told
        if told or stepping is given():
            return
        if any(id(p) in held and p.grad is not None for group in stepping.param_groups for p in group["params"]):
            told, say = True, tell()
            if say is not None:
                say(SENTENCE.format(kind=type(stepping).__name__))

    remove = register_optimizer_step_pre_hook(look).remove
    weakref.finalize(optimizer, remove)
    return remove
