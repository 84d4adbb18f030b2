"""Momentum behind sparse feedback: the residual already delays gradients, so the optimizer's momentum is taken out."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch

MOMENTA = ("keep", "move", "correct")
KEPT = "sparsync_momentum"  # in a parameter group, and so in the optimizer's checkpoints: what was taken out of it
ADAM = (0.5, 0.99)  # the most that is left of Adam's betas


class TakenMomentum:
    """An optimizer without its momentum m: SGD steps with 0 and lr (1 - beta) / (1 - m), Adam with small betas.

    Between steps the learning rate is what it was, so schedulers go on working on it.

    Args:
        optimizer: with ``momentum`` (SGD), or ``betas`` (Adam and its kin; only without ``beta``).
        beta: momentum that acts before the residual instead.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, beta: float = 0.0) -> None:
        keys = [_key(group) for group in optimizer.param_groups]
        if not all(keys) or (beta and "betas" in keys):
            wanted = "with momentum, as SGD" if beta else "with momentum or betas, as SGD or Adam"
            mode = "correct" if beta else "move"
            raise ValueError(f"momentum='{mode}' needs an optimizer {wanted}, got {type(optimizer).__name__}")
        self.optimizer, self.beta = optimizer, beta
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
        give_back(self.optimizer)

    def describe(self) -> str:
        """Return what was done, in a few words."""
        words = []
        for group in self.optimizer.param_groups:
            kept = group.get(KEPT)
            if kept is None:
                words.append("the optimizer had none")
            elif _key(group) == "betas":
                words.append("betas {:g}, {:g} lowered to {:g}, {:g}".format(*kept, *group["betas"]))
            else:
                factor = (1 - self.beta) / (1 - kept)
                words.append(f"{kept:g} taken out of the optimizer, which steps with {factor:g} x its learning rate")
        return "; ".join(dict.fromkeys(words))

    def _take(self) -> None:
        """Take momentum out of every group; also out of those that a checkpoint, or the user, brought since."""
        for group in self.optimizer.param_groups:
            key = _key(group)
            assert key is not None
            small = 0.0 if key == "momentum" else tuple(map(min, group["betas"], ADAM))
            if group[key] != small:
                group[KEPT], group[key] = group[key], small

    def _raise_rates(self) -> None:
        self._take()
        self._rates = [group["lr"] for group in self.optimizer.param_groups]
        for group in self.optimizer.param_groups:
            if "momentum" in group and group.get(KEPT):
                group["lr"] = group["lr"] * (1 - self.beta) / (1 - group[KEPT])

    def _restore_rates(self) -> None:
        for group, rate in zip(self.optimizer.param_groups, self._rates, strict=True):
            group["lr"] = rate


def _key(group: dict[str, Any]) -> str | None:
    return next((key for key in ("momentum", "betas") if key in group), None)


def possible(mode: str, optimizer: torch.optim.Optimizer | None) -> str:
    """Return ``mode``, or what is nearest to it with this optimizer: Adam's betas can only be moved."""
    keys = [None] if optimizer is None else [_key(group) for group in optimizer.param_groups]
    if not all(keys):
        return "keep"
    if mode != "correct":
        return mode
    if "betas" in keys:
        return "move"
    return mode if all(g["momentum"] or g.get(KEPT) for g in optimizer.param_groups) else "keep"  # type: ignore[union-attr]


def give_back(optimizer: torch.optim.Optimizer) -> None:
    """Put momentum that was taken out, perhaps before a checkpoint, back in its place."""
    for group in optimizer.param_groups:
        if KEPT in group:
            key = _key(group)
            assert key is not None
            group[key] = group.pop(KEPT)


def warn_of_momentum(optimizer: torch.optim.Optimizer, density: float) -> None:
    """Say so when an optimizer keeps a large momentum behind a low density."""
    momentum = max(float(group.get("momentum", 0.0)) for group in optimizer.param_groups)
    if momentum >= 0.9 and density <= 0.01:
        warnings.warn(
            f"the optimizer's momentum of {momentum:g} stays behind a density of {density:g}: an entry is then delayed "
            "twice, by the residual and by the momentum. After 50 steps on scikit-learn's digits at a density of 0.001 "
            "83 % of the test images were right with momentum kept, 90 % with momentum='move', 96 % dense; after 300 "
            "steps 96.4, 96.8 and 97.1 % (`sparsync bench momentum`). attach(..., momentum='move') avoids it",
            stacklevel=5,
        )


def take_momentum(
    optimizer: torch.optim.Optimizer | None, mode: str, beta: float, density: float
) -> TakenMomentum | None:
    """Take the optimizer's momentum out of it where ``mode`` says so, or see that it has its own.

    Args:
        mode: one of ``MOMENTA``.
        beta: momentum that acts before the residual instead.
        density: share of the entries that is sent; 1 for all.
    """
    if optimizer is None:
        return None
    if mode != "keep":
        return TakenMomentum(optimizer, beta)
    give_back(optimizer)
    warn_of_momentum(optimizer, density)
    return None


def rates_by_name(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> dict[str, float]:
    """Return the optimizer's learning rates by parameter name; ``names``: by the parameter's ``id``."""
    groups = optimizer.param_groups
    return {names[id(p)]: float(group["lr"]) for group in groups for p in group["params"] if id(p) in names}
