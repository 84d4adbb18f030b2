"""An optimizer whose moments are the exchange's: the object stays the user's, its update rule is ours for a while."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from sparsync.errors import SparsyncError
from sparsync.feedback.optimizer_rules import rules_of
from sparsync.feedback.preconditioner import Preconditioner
from sparsync.feedback.replaced_step import ReplacedStep
from sparsync.feedback.residual import Feedback
from sparsync.feedback.second_moment import AdamRule
from sparsync.feedback.taken_state import TakenState
from sparsync.feedback.users_clipping import UsersClipping
from sparsync.kernels.apply_update import ParameterChange, apply_update, subtract
from sparsync.layout import Parameter
from sparsync.local_shard import local_shard
from sparsync.workspace import Workspace

UNEXCHANGED = (
    "{kind} steps, and its gradients were not exchanged: nothing has come through the wrapped model's backward since "
    "the last step, so there is no update to apply, and replicas would drift apart. Call the wrapped model, ddp(x), "
    "not ddp.module(x); leave no_sync() before the last backward of a step; step once after it; or detach() first"
)


def _refuse_others(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> None:
    """Refuse complex parameters, and those that another optimizer may have: updates are exchanged, and it would find
    no gradient."""
    for parameter in (p for group in optimizer.param_groups for p in group["params"]):
        if parameter.is_complex() and id(parameter) in names:
            raise ValueError(
                f"preconditioned feedback does not know complex parameters, and {names[id(parameter)]!r} is one; "
                "pass precondition=False"
            )
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    missing = [name for key, name in names.items() if key not in held]
    if missing:
        raise ValueError(
            f"the {type(optimizer).__name__} does not hold {missing[0]!r} ({len(missing)} of {len(names)} parameters), "
            "and with preconditioned feedback these would get no gradient: add them to it, freeze them "
            "(requires_grad_(False)), or pass precondition=False"
        )


class TakenOptimizer:
    """An optimizer that applies what was exchanged, until ``undo``.

    Args:
        optimizer: of torch's Adam, AdamW or SGD.
        names: of the model's parameters, by ``id``.
        parameters: of the model, by name.
        preconditioner: whose moments are the optimizer's meanwhile.
        feedbacks: whose velocities are; several of virtual workers.
        tell: warns the user.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        names: Mapping[int, str],
        parameters: Mapping[str, Parameter],
        preconditioner: Preconditioner,
        feedbacks: Sequence[Feedback],
        tell: Callable[[str], None],
    ) -> None:
        self._rules = rules_of(optimizer)
        _refuse_others(optimizer, names)
        self.optimizer, self._parameters = optimizer, parameters
        self.preconditioner, self.feedbacks = preconditioner, list(feedbacks)
        self._names = names
        self._unapplied: list[tuple[Tensor, Tensor, Tensor]] = []  # parameter, what its gradient showed, the factor
        self._kept_back: dict[int, Tensor] = {}
        self._dropped: set[int] = set()  # parameters whose gradients were zeroed while an update waited
        self._said: list[tuple[AdamRule, list[int]]] = []
        self._rule_of: dict[str, AdamRule] = {}
        self._watched: dict[int, RemovableHandle] = {}
        self._workspace = Workspace()
        self._clipping = UsersClipping(preconditioner, parameters, self.feedbacks, tell)
        self._state = TakenState(optimizer, self._rules, names, parameters, preconditioner.moment, self.feedbacks)
        self._step = ReplacedStep(optimizer, self.apply, names)

    def announcement(self) -> str:
        """Return the sentence that tells a user of it: what, why, and how to turn it off."""
        return (
            f"until detach(), {type(self.optimizer).__name__} applies what was exchanged instead of its own rule, "
            f"because {self._rules.why}; its groups and state_dict() keep your values, and "
            "attach(..., precondition=False, momentum='keep') turns this off"
        )

    # ---- what the exchange asks -------------------------------------------------------------------------------------

    def rules(self) -> dict[str, AdamRule]:
        """Return what the optimizer says now, by parameter name; the same object as long as that is the same."""
        said = []
        for group in self.optimizer.param_groups:
            said.append((self._rules.hyperparameters(group), [*map(id, group["params"])]))
        if said != self._said:
            self._said = said
            self._rule_of = {self._names[key]: rule for rule, keys in said for key in keys if key in self._names}
        return self._rule_of

    def decays(self) -> dict[int, float]:
        """Return, by ``id``, what of a parameter enters its gradient: weight decay of Adam and SGD, not of AdamW."""
        return {
            id(parameter): float(group["weight_decay"])
            for group in self.optimizer.param_groups
            if group["weight_decay"] and not _decoupled(self.optimizer, group)
            for parameter in group["params"]
        }

    def before_forward(self) -> None:
        """Keep an update aside that waits for its step, if gradients are about to be added to what shows it."""
        if not (self.preconditioner.pending and torch.is_grad_enabled()):
            return
        for parameter in self._tracked():
            if parameter.grad is None:
                self._drop(parameter)
            elif parameter.requires_grad and id(parameter) not in self._watched and id(parameter) not in self._dropped:
                watch = parameter.register_hook(partial(self._keep_back, parameter))  # type: ignore[no-untyped-call]
                self._watched[id(parameter)] = watch

    def _drop(self, parameter: Tensor) -> None:
        """Note that the update which waits was zeroed: until the next exchange, what is there is gradients."""
        self._kept_back.pop(id(parameter), None)
        self._dropped.add(id(parameter))

    def _keep_back(self, parameter: Tensor, _: Tensor) -> None:
        """Keep what a parameter's gradient shows just before another is added to it; nothing, if it was zeroed since
        or is kept already."""
        self._watched.pop(id(parameter)).remove()
        if parameter.grad is None:
            self._drop(parameter)
        elif not self.preconditioner.pending:
            self._kept_back.pop(id(parameter), None)
        elif id(parameter) not in self._kept_back:
            self._kept_back[id(parameter)] = parameter.grad.clone()

    def correct_gradient(
        self, buffer: Tensor, parameters: Sequence[Tensor], loss_scale: Callable[[], float], may_skip: bool = False
    ) -> None:
        """Make a bucket what the last backward gave: without an update that still waits for its step, and with the
        weight decay of Adam and SGD in it.

        Args:
            buffer: holds the gradients of ``parameters``, one after another.
            may_skip: parameters may be unused: those whose gradient is all zero do not decay.
        """
        self._dropped.difference_update(map(id, parameters))
        decays, start = self.decays(), 0
        for parameter in parameters if decays or self._kept_back else ():
            own = self._parameters[self._names[id(parameter)]]
            grad = buffer[start : start + own.numel].as_strided(own.shape, own.stride)
            kept = self._kept_back.pop(id(parameter), None)
            if kept is not None:
                grad.sub_(kept.view(own.shape))
                shown = self.preconditioner.shown[self._names[id(parameter)]]
                self._unapplied.append((parameter, kept, shown.clone()))  # which the next exchange may overwrite
            if id(parameter) in decays and not (may_skip and not grad.any()):
                grad.add_(local_shard(parameter).detach().view(own.shape), alpha=decays[id(parameter)] * loss_scale())
            start += own.numel

    @property
    def update_waits(self) -> bool:
        """Whether gradients show an update that was exchanged and not applied."""
        return self.preconditioner.pending and _any_entry(self._tracked())

    # ---- the step ---------------------------------------------------------------------------------------------------

    def apply(self) -> None:
        """Apply the exchanged update, with decoupled weight decay beside it."""
        preconditioner = self.preconditioner
        if not preconditioner.pending:
            if not preconditioner.undone:
                self._refuse_unexchanged()
            return
        preconditioner.pending = False
        changes: list[ParameterChange] = []
        grads: dict[str, Tensor] = {}
        for group in self.optimizer.param_groups:
            decoupled = _decoupled(self.optimizer, group)
            kept = 1 - float(group["lr"]) * float(group["weight_decay"]) if decoupled else 1.0
            for parameter in group["params"]:
                name = self._names.get(id(parameter), "")
                if parameter.grad is not None and name in preconditioner.shown:
                    grads[name] = grad = local_shard(parameter.grad)
                    changes.append(ParameterChange(local_shard(parameter), grad, kept, preconditioner.shown[name]))
        undo = self._clipping.undo_factor(grads, getattr(self.optimizer, "grad_scale", None) is not None)
        apply_update(changes, undo, getattr(self.optimizer, "found_inf", None), self._workspace)
        for parameter, held, factor in self._unapplied:
            subtract(parameter, held, 1 / factor)
        self._unapplied, self._kept_back = [], {}

    def _refuse_unexchanged(self) -> None:
        """Refuse a step on gradients that nobody has exchanged; one without any may make state, and changes nothing."""
        if _any_entry(self._tracked()):
            raise SparsyncError(UNEXCHANGED.format(kind=type(self.optimizer).__name__))

    def _tracked(self) -> list[Tensor]:
        return [p for group in self.optimizer.param_groups for p in group["params"] if id(p) in self._names]

    def undo(self, mean_of: Callable[[Tensor], Tensor] | None = None) -> None:
        """Give the optimizer its rule back, and its state; what an update that waits has put into gradients is dropped,
        as that rule would take it for gradients.

        Args:
            mean_of: makes the sum of velocities here the mean over all ranks; by default it is that over those whose
                gradients come in here.
        """
        self._step.undo()
        for watch in self._watched.values():
            watch.remove()
        if self.update_waits:
            for parameter in self._tracked():
                parameter.grad = None
        self._state.give_back(mean_of)


def _any_entry(parameters: Iterable[Tensor]) -> bool:
    """Return whether any gradient is not 0; waits for the device."""
    grads = [grad for grad in (local_shard(p.grad) for p in parameters if p.grad is not None) if grad.numel()]
    return bool(grads) and any(torch.stack(torch._foreach_norm(grads, torch.inf)).tolist())


def _decoupled(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> bool:
    return isinstance(optimizer, torch.optim.AdamW) or bool(group.get("decoupled_weight_decay"))
