"""What preconditioned feedback knows of an optimizer's class: its hyperparameters, and its state in torch's form."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer

from sparsync.feedback.second_moment import AdamRule

SGD_BETA2 = 0.99  # of the second moment, which SGD itself does not have
SGD_EPS = 1e-8  # of the tensor's root mean square


@dataclass
class Moments:
    """What is kept of one tensor.

    Args:
        velocity: in the parameter's shape.
        squares: second moment of every entry, in its shape; ``None`` if the optimizer does not know it.
        steps: in which the tensor had a gradient.
        powers: products over these steps of the momenta of both.
    """

    velocity: Tensor
    squares: Tensor | None
    steps: float
    powers: tuple[float, float]


class OptimizerRule(Protocol):
    """One class of optimizers.

    ``key``: of the velocity in torch's state. ``why``: it does not step by its own rule. ``unknown``: its flags that
    are refused.
    """

    key: str
    why: str
    unknown: tuple[str, ...]

    def hyperparameters(self, group: Mapping[str, Any]) -> AdamRule:
        """Return what a group says of its parameters."""

    def to_state(self, group: Mapping[str, Any], parameter: Tensor, kept: Moments) -> dict[str, Tensor] | None:
        """Return a parameter's state as torch's own rule would have it; ``None`` if that keeps nothing."""

    def from_state(
        self, group: Mapping[str, Any], state: Mapping[str, Any], beta: float, steps: float
    ) -> Moments | None:
        """Return what torch's state comes to; ``None`` if that is known already, or is nothing.

        Args:
            beta: momentum that the velocity is going to have.
            steps: that are known of.
        """


class AdamRules:
    """Adam and AdamW: two moments, with bias correction."""

    key = "exp_avg"
    why = "behind a residual its moments would lag"
    unknown: tuple[str, ...] = ("amsgrad", "maximize", "differentiable")

    def hyperparameters(self, group: Mapping[str, Any]) -> AdamRule:
        first, second = map(float, group["betas"])
        return AdamRule(float(group["lr"]), (first, second), float(group["eps"]))

    def to_state(self, group: Mapping[str, Any], parameter: Tensor, kept: Moments) -> dict[str, Tensor] | None:
        # Torch divides by the bias corrections of its own betas.
        first, second = (
            (1 - float(beta) ** kept.steps) / (1 - power) if power != 1 else 1.0
            for beta, power in zip(group["betas"], kept.powers, strict=True)
        )
        fused = group.get("fused") or group.get("capturable")
        assert kept.squares is not None
        return {
            "step": torch.tensor(kept.steps, dtype=torch.float32, device=parameter.device if fused else None),
            "exp_avg": torch.empty_like(parameter).copy_(kept.velocity * first),
            "exp_avg_sq": torch.empty_like(parameter).copy_(kept.squares * second),
        }

    def from_state(
        self, group: Mapping[str, Any], state: Mapping[str, Any], beta: float, steps: float
    ) -> Moments | None:
        known, steps = steps, float(state["step"])
        if steps == known:
            return None
        ours, theirs = 1 - beta**steps, 1 - float(group["betas"][0]) ** steps
        mean = state["exp_avg"].float() * (ours / theirs if theirs else 1.0)
        return Moments(mean, state["exp_avg_sq"].float(), steps, (beta**steps, float(group["betas"][1]) ** steps))


class SgdRules:
    """SGD: a momentum buffer, without bias correction; what it comes to in the long run is the rate's, not the
    velocity's."""

    key = "momentum_buffer"
    why = "precondition=True evens out rows and columns before the residual"
    unknown: tuple[str, ...] = ("maximize", "differentiable")

    def hyperparameters(self, group: Mapping[str, Any]) -> AdamRule:
        return AdamRule(float(group["lr"]) * self._gain(group), (float(group["momentum"]), SGD_BETA2), SGD_EPS)

    def to_state(self, group: Mapping[str, Any], parameter: Tensor, kept: Moments) -> dict[str, Tensor] | None:
        if not group["momentum"]:
            return None
        return {"momentum_buffer": torch.empty_like(parameter).copy_(kept.velocity * self._gain(group))}

    def from_state(
        self, group: Mapping[str, Any], state: Mapping[str, Any], beta: float, steps: float
    ) -> Moments | None:
        """Do as the protocol says: a buffer does not tell its step, so it is taken while there is none of ours."""
        buffer = state["momentum_buffer"]
        return None if buffer is None or steps else Moments(buffer.float() / self._gain(group), None, 0.0, (1.0, 1.0))

    def _gain(self, group: Mapping[str, Any]) -> float:
        momentum, dampening = float(group["momentum"]), float(group["dampening"])
        if momentum and not (momentum < 1 and dampening < 1):
            raise ValueError(
                f"preconditioned feedback needs SGD's momentum and dampening below 1, got {momentum!r}, {dampening!r}"
            )
        return momentum_gain(momentum, dampening)


def momentum_gain(momentum: float, dampening: float) -> float:
    """Return how many times a gradient that goes on for long SGD steps by it, with Nesterov's momentum, too."""
    return (1 - dampening) / (1 - momentum) if momentum else 1.0  # torch ignores dampening without momentum


def is_adam(optimizer: Optimizer | None) -> bool:
    """Return whether this is torch's own Adam or AdamW, whose rule is known."""
    return type(optimizer) in (Adam, AdamW)


def is_sgd(optimizer: Optimizer | None) -> bool:
    """Return whether this is torch's own SGD."""
    return type(optimizer) is SGD


def rules_of(optimizer: Optimizer | None) -> OptimizerRule:
    """Return the rules of an optimizer; refuse, with a sentence, what cannot be preconditioned."""
    if not (is_adam(optimizer) or is_sgd(optimizer)):
        kind = "none" if optimizer is None else type(optimizer).__name__
        raise ValueError(f"precondition=True needs optimizer= of torch's Adam, AdamW or SGD, got {kind}")
    assert optimizer is not None
    rules: OptimizerRule = AdamRules() if is_adam(optimizer) else SgdRules()
    for group in optimizer.param_groups:
        for name in rules.unknown:
            if group.get(name):
                raise ValueError(
                    f"preconditioned feedback does not know {name}=True; "
                    f"precondition=False and momentum='keep' leave {type(optimizer).__name__} as it is"
                )
        rules.hyperparameters(group)  # which refuses what has no such step
    return rules
