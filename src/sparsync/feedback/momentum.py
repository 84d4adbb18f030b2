"""Momentum behind sparse feedback: the residual already delays gradients, so updates are made without it."""

from __future__ import annotations

import inspect
from collections.abc import Container, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adam, Optimizer

from sparsync.feedback.optimizer_rules import momentum_gain
from sparsync.feedback.replaced_step import ReplacedStep
from sparsync.feedback.shadow_optimizer import ShadowOptimizer
from sparsync.feedback.taken_optimizer import TakenOptimizer

MOMENTA = ("keep", "move", "correct")
KNOWN = "torch's SGD, Adam and AdamW"
PLAIN = {"momentum": 0.0, "dampening": 0.0, "nesterov": False}
ADAM = (0.5, 0.99)  # the most that is left of Adam's betas
WHY = "momentum behind the residual delays every entry a second time"
OLD = "sparsync_momentum"  # in groups of older checkpoints: what had been taken out of them


class TakenMomentum:
    """An optimizer whose steps are made without its momentum, until ``undo``; its groups keep the user's values.

    SGD: with momentum m and dampening t, b ← m b + (1 − t) d moves a parameter by lr · b, where d is gradient plus
    weight decay. A d that goes on for long makes b = d (1 − t) / (1 − m), and so the rate of the plain step is
    lr (1 − t) / (1 − m). Nesterov steps by lr (d + m b), and torch wants t = 0 for it: d + m d / (1 − m) = d / (1 − m),
    the same. Momentum ``beta`` before the residual, u ← beta u + g, makes g / (1 − beta) of a gradient in the long run,
    and nothing of weight decay: the gradient's rate is lr (1 − beta) (1 − t) / (1 − m), that of weight decay
    lr (1 − t) / (1 − m). If no group has momentum and ``beta`` is asked for, m is ``beta``, so that the rate is lr.
    These are read from the groups at every step, so schedulers may change any of them.

    Momentum buffers that SGD had are as they were until a step makes them out of date: they are dropped then. After
    ``undo``, or from a checkpoint, SGD builds its momentum up anew, as in its first steps.

    Adam, only without ``beta``: betas above 0.5 and 0.99 count as these.

    Args:
        optimizer: of a rule that is known.
        beta: momentum that acts before the residual instead.
        ours: ids of the parameters that are exchanged, all by default; the others keep the optimizer's own rule.
    """

    def __init__(self, optimizer: Optimizer, beta: float = 0.0, ours: Container[int] | None = None) -> None:
        rule = known_rule(optimizer)
        if rule is None or (beta and rule is not SGD):
            mode, wanted = ("correct", "torch's SGD") if beta else ("move", KNOWN)
            raise ValueError(
                f"momentum='{mode}' works with the update rule of {wanted} alone, got {type(optimizer).__name__}; "
                "leave momentum out, or set it to 'keep'"
            )
        if any(group["differentiable"] for group in optimizer.param_groups):
            raise ValueError("an update without momentum cannot be differentiated: differentiable=True needs 'keep'")
        self.optimizer, self.beta, self._is_sgd, self._ours = optimizer, beta, rule is SGD, ours
        self._groups()  # which refuses what has no such step
        self._shadow = ShadowOptimizer(optimizer)
        self._replaced = ReplacedStep(optimizer, self._step, ours)

    def undo(self) -> None:
        """Give the optimizer its own update back."""
        self._replaced.undo()

    def describe(self) -> str:
        """Return in a few words how steps differ from the optimizer's own."""
        changes = self._changes()
        return f"the optimizer steps with {changes}" if changes else "the optimizer has none"

    def announcement(self) -> str | None:
        """Return the sentence that tells a user of it: what, why, how to turn it off; ``None`` if nothing differs."""
        changes = self._changes()
        if not changes:
            return None
        before = f" and momentum of {self.beta:g} before the residual" if self.beta else ""
        return (
            f"until detach(), {type(self.optimizer).__name__} steps with {changes}{before}, because {WHY}; "
            "its groups and state_dict() keep your values, and attach(..., momentum='keep') turns this off"
        )

    def _step(self) -> None:
        groups = self._groups()
        self._shadow.step([{**group, "params": [p for p in group["params"] if self._is_ours(p)]} for group in groups])
        if self._is_sgd:
            self._drop_buffers()

    def _groups(self) -> list[dict[str, Any]]:
        """Return the groups of a step without momentum."""
        restore_old_groups(self.optimizer)
        if not self._is_sgd:
            return [{**group, "betas": _lowered(group["betas"])} for group in self.optimizer.param_groups]
        return [
            {**group, "lr": group["lr"] * factor, "weight_decay": group["weight_decay"] / (1 - self.beta)} | PLAIN
            for group, factor in zip(self.optimizer.param_groups, self._factors(), strict=True)
        ]

    def _factors(self) -> list[float]:
        """Return, for every group of SGD, what its learning rate is multiplied by."""
        groups = self.optimizer.param_groups
        missing = 0.0 if any(group["momentum"] for group in groups) else self.beta
        return [_rate_factor(group, self.beta, missing) for group in groups]

    def _changes(self) -> str:
        """Return in words what differs from the optimizer's groups, each change once."""
        groups = self.optimizer.param_groups
        if self._is_sgd:
            words = [
                f"momentum {group['momentum']:g} left out and {factor:g} x its learning rate"
                for group, factor in zip(groups, self._factors(), strict=True)
                if group["momentum"] or factor != 1
            ]
        else:
            words = [
                "betas {:g}, {:g} lowered to {:g}, {:g}".format(*group["betas"], *used["betas"])
                for group, used in zip(groups, self._groups(), strict=True)
                if tuple(group["betas"]) != used["betas"]
            ]
        return "; ".join(dict.fromkeys(words))

    def _drop_buffers(self) -> None:
        """Drop the momentum buffers that the step has made out of date."""
        for parameter, state in self.optimizer.state.items():
            if parameter.grad is not None and self._is_ours(parameter):
                state.pop("momentum_buffer", None)

    def _is_ours(self, parameter: Tensor) -> bool:
        return self._ours is None or id(parameter) in self._ours


def _rate_factor(group: Mapping[str, Any], beta: float, missing: float) -> float:
    """Return by how much the rate of SGD's plain step differs; ``missing``: momentum to count with where there is 0."""
    momentum = group["momentum"] or missing
    if not momentum < 1:
        raise ValueError(f"momentum must be below 1 to be moved or corrected, got {momentum!r}")
    dampening = group["dampening"] if group["momentum"] else 0.0  # torch ignores it without momentum
    return float((1 - beta) * momentum_gain(momentum, dampening))


def _lowered(betas: tuple[Any, Any]) -> tuple[Any, Any]:
    return min(betas[0], ADAM[0]), min(betas[1], ADAM[1])


def known_rule(optimizer: Optimizer) -> type[Optimizer] | None:
    """Return ``SGD`` or ``Adam`` (AdamW too) where the optimizer steps by that class's rule, else ``None``."""
    rule = inspect.unwrap(type(optimizer).step)
    return next((known for known in (SGD, Adam) if rule is inspect.unwrap(known.step)), None)


def possible(mode: str, optimizer: Optimizer | None) -> str:
    """Return ``mode``, or what is nearest to it with this optimizer: Adam's betas can only be moved."""
    rule = None if optimizer is None else known_rule(optimizer)
    if rule is None:
        return "keep"
    if mode != "correct":
        return mode
    if rule is not SGD:
        return "move"
    assert optimizer is not None
    return mode if any(group["momentum"] or group.get(OLD) for group in optimizer.param_groups) else "keep"


def restore_old_groups(optimizer: Optimizer) -> None:
    """Put momentum back that a checkpoint of an older version holds beside its place."""
    for group in optimizer.param_groups:
        if OLD in group:
            group["betas" if "betas" in group else "momentum"] = group.pop(OLD)


def take_momentum(
    optimizer: Optimizer | None, mode: str, beta: float, ours: Container[int] | None = None
) -> TakenMomentum | None:
    """Step without the optimizer's momentum where ``mode`` says so.

    Args:
        mode: one of ``MOMENTA``.
        beta: momentum that acts before the residual instead.
        ours: ids of the parameters that are exchanged, all by default.
    """
    if optimizer is None:
        return None
    if mode != "keep":
        return TakenMomentum(optimizer, beta, ours)
    restore_old_groups(optimizer)
    return None


def momentum_notice(
    taken: TakenMomentum | TakenOptimizer | None, optimizer: Optimizer | None, asked: bool, density: float
) -> str | None:
    """Return what a user is to be told once of the optimizer's momentum, in one sentence; ``None`` for nothing.

    Args:
        taken: what makes the optimizer's steps meanwhile, if not itself.
        asked: it is known that momentum stays, or nothing stays in the residual.
        density: share of the entries that is sent; 1 for all.
    """
    if taken is not None:
        return taken.announcement()
    if optimizer is not None and known_rule(optimizer) is not None:
        momentum = max(float(group.get("momentum", 0.0)) for group in optimizer.param_groups)
        if momentum < 0.9 or density > 0.01:
            return None
        return (
            f"the optimizer's momentum of {momentum:g} stays behind a density of {density:g}: an entry is then delayed "
            "twice, by the residual and by the momentum. After 50 steps on scikit-learn's digits at a density of 0.001 "
            "83 % of the test images were right with momentum kept, 90 % with momentum='move', 96 % dense; after 300 "
            "steps 96.4, 96.8 and 97.1 % (`sparsync bench momentum`). attach(..., momentum='move') avoids it"
        )
    if asked:
        return None
    refuse = "attach(..., momentum='keep') says that this is meant"
    if optimizer is None:
        return (
            f"the optimizer is not known here, so its momentum, if any, stays, and {WHY}, which learns worst of all; "
            f"pass attach(..., optimizer=optimizer); {refuse}"
        )
    first = optimizer.param_groups[0]
    found = next((f"{key} of {first[key]}" for key in ("momentum", "betas") if first.get(key)), "momentum, if any,")
    return (
        f"{type(optimizer).__name__} is left as it is, because its update rule is not one of those that are known "
        f"({KNOWN}): its {found} stays behind the residual, which delays every entry a second time; {refuse}"
    )


def refuse_other_model(optimizer: Optimizer, model: torch.nn.Module) -> None:
    """Refuse an optimizer that holds no parameter of the model; it need not hold all, and may hold others."""
    own = {id(parameter) for parameter in model.parameters()}
    if not any(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"]):
        raise ValueError(
            f"the {type(optimizer).__name__} that is given as optimizer holds no parameter of this model; make it of "
            "the parameters of the model that is attached"
        )


def rates_by_name(optimizer: Optimizer, names: Mapping[int, str]) -> dict[str, float]:
    """Return the optimizer's learning rates by parameter name; ``names``: by the parameter's ``id``."""
    groups = optimizer.param_groups
    return {names[id(p)]: float(group["lr"]) for group in groups for p in group["params"] if id(p) in names}
