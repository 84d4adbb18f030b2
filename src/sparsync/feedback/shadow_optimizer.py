"""An optimizer's own update rule with other hyperparameters than it holds."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch


class ShadowOptimizer:
    """A copy of an optimizer: it shares parameters, gradients and state, and steps with groups that it is given.

    So the rule, with all that torch does for ``foreach``, ``fused``, sparse gradients and learning rates that are
    tensors, is torch's, and the optimizer itself never holds a value that is not its user's, even when a step raises.

    Args:
        optimizer: of a class whose rule is known; its hooks and its ``step`` are not run.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._shadow = copy.copy(optimizer)  # as it is unpickled: without hooks, and without a scheduler's step
        # Torch wraps ``step`` for hooks and profilers, which count steps: they are to see the optimizer's own alone.
        self._rule: Any = type(optimizer).step.__wrapped__  # type: ignore[attr-defined]

    def step(self, groups: Sequence[dict[str, Any]]) -> None:
        """Update the parameters of ``groups``, which are in form like the optimizer's."""
        shadow: Any = self._shadow
        shadow.state, shadow.param_groups = self._optimizer.state, groups  # a checkpoint brings a new state
        for name in ("grad_scale", "found_inf"):  # which a loss scaler leaves to ``fused`` steps
            setattr(shadow, name, getattr(self._optimizer, name, None))
        self._rule(shadow)
