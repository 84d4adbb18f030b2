"""Momentum behind sparse feedback: the residual already delays gradients, so the optimizer's momentum is moved."""

from __future__ import annotations

import warnings
from typing import Any

import torch

MOMENTA = ("keep", "move")


class MovedMomentum:
    """An SGD whose momentum m is taken out: while it steps, momentum is 0 and the learning rate lr / (1 - m).

    Between steps the learning rate is what it was, so schedulers go on working on it.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        if not all("momentum" in group for group in optimizer.param_groups):
            raise ValueError(f"momentum='move' needs an optimizer with momentum, got {type(optimizer).__name__}")
        self.optimizer = optimizer
        self.momentum = [0.0] * len(optimizer.param_groups)
        self._rates: list[Any] = []
        self._take()
        self._hooks = [
            optimizer.register_step_pre_hook(lambda *_: self._raise_rates()),
            optimizer.register_step_post_hook(lambda *_: self._restore_rates()),
        ]

    def undo(self) -> None:
        """Give the optimizer its momentum back."""
        for hook in self._hooks:
            hook.remove()
        for group, momentum in zip(self.optimizer.param_groups, self.momentum, strict=False):
            group["momentum"] = momentum

    def _take(self) -> None:
        """Take momentum out of every group; also out of those that a checkpoint, or the user, brought since."""
        groups = self.optimizer.param_groups
        self.momentum += [0.0] * (len(groups) - len(self.momentum))
        for i, group in enumerate(groups):
            if group["momentum"]:
                self.momentum[i], group["momentum"] = group["momentum"], 0.0

    def _raise_rates(self) -> None:
        self._take()
        self._rates = [group["lr"] for group in self.optimizer.param_groups]
        for group, momentum in zip(self.optimizer.param_groups, self.momentum, strict=True):
            group["lr"] = group["lr"] / (1 - momentum)

    def _restore_rates(self) -> None:
        for group, rate in zip(self.optimizer.param_groups, self._rates, strict=True):
            group["lr"] = rate


def warn_of_momentum(optimizer: torch.optim.Optimizer, density: float) -> None:
    """Say so when an optimizer keeps a large momentum behind a low density."""
    momentum = max(float(group.get("momentum", 0.0)) for group in optimizer.param_groups)
    if momentum >= 0.9 and density <= 0.01:
        warnings.warn(
            f"the optimizer's momentum of {momentum:g} stays behind a density of {density:g}: an entry is then delayed "
            "twice, by the residual and by the momentum, which costs short trainings much accuracy; "
            "attach(..., optimizer=optimizer, momentum='move') avoids it",
            stacklevel=4,
        )
