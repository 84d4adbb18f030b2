"""An optimizer whose update rule is ours for a while; the object, its groups and its hooks stay the user's."""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import Any

import torch
from torch import Tensor


class ReplacedStep:
    """Runs ``apply`` whenever the optimizer steps, in place of its own rule, until ``undo``.

    The optimizer's own ``step`` still runs, and finds no gradient: so schedulers, loss scalers, profilers and
    ``fused=True`` see what they always see, and not one hyperparameter is touched. Gradients are back after it. A
    closure is run first, as the optimizer itself would do.

    Args:
        optimizer: whose rule is replaced.
        apply: makes the update from the gradients that it finds.
        ours: ids of the parameters that it updates, all by default; the others are left to the optimizer's own rule.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, apply: Callable[[], None], ours: Container[int] | None = None
    ) -> None:
        self.optimizer, self._apply, self._ours = optimizer, apply, ours
        self._hidden: list[tuple[Tensor, Tensor]] = []
        self._hooks = [
            optimizer.register_step_pre_hook(self._before),
            optimizer.register_step_post_hook(lambda *_: self._show()),
        ]

    def undo(self) -> None:
        """Give the optimizer its own rule back."""
        self._show()
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _before(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        closure = args[1] if len(args) > 1 else kwargs.get("closure")  # args[0] is the optimizer itself
        if closure is None:
            self._step()
            return None

        def evaluate() -> Any:
            loss = closure()
            self._step()
            return loss

        return ((args[0], evaluate, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": evaluate})

    def _step(self) -> None:
        self._show()  # a step that raised behind us has not done it
        with torch.no_grad():
            self._apply()
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and (self._ours is None or id(parameter) in self._ours):
                    self._hidden.append((parameter, parameter.grad))
                    parameter.grad = None

    def _show(self) -> None:
        for parameter, grad in self._hidden:
            if parameter.grad is None:
                parameter.grad = grad
        self._hidden = []
