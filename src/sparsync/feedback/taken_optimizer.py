"""An optimizer whose moments are the exchange's: the object stays the user's, its update rule is ours for a while."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from sparsync.feedback.optimizer_rules import Moments, rules_of
from sparsync.feedback.preconditioner import Preconditioner
from sparsync.feedback.replaced_step import ReplacedStep
from sparsync.feedback.residual import Feedback
from sparsync.feedback.second_moment import FEW, AdamRule
from sparsync.kernels.apply_update import ParameterChange, apply_update, subtract
from sparsync.kernels.learn_clip import Clipping, find_undo, learn_clip, recognise
from sparsync.layout import Parameter
from sparsync.local_shard import local_shard, shared_like
from sparsync.workspace import Workspace


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
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        names: Mapping[int, str],
        parameters: Mapping[str, Parameter],
        preconditioner: Preconditioner,
        feedbacks: Sequence[Feedback],
    ) -> None:
        self._rules = rules_of(optimizer)
        _refuse_others(optimizer, names)
        self.optimizer, self._parameters = optimizer, parameters
        self.preconditioner, self.feedbacks = preconditioner, list(feedbacks)
        self._names = names
        self._unapplied: list[tuple[Tensor, Tensor, Tensor]] = []  # parameter, what its gradient showed, the factor
        self._kept_back: dict[int, Tensor] = {}
        self._dropped: set[int] = set()  # parameters whose gradients were zeroed while an update waited
        self._stepped = False
        self._said: list[tuple[AdamRule, list[int]]] = []
        self._rule_of: dict[str, AdamRule] = {}
        self._probed: list[tuple[Tensor, str]] | None = None
        self._watched: dict[int, RemovableHandle] = {}
        self._workspace = Workspace()
        self._take_state()
        self._step = ReplacedStep(optimizer, self.apply, names)
        self._hooks = [
            optimizer.register_state_dict_post_hook(self._fill_state_dict),
            optimizer.register_load_state_dict_post_hook(lambda _: self._take_state()),
        ]

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

    # ---- the step ---------------------------------------------------------------------------------------------------

    def apply(self) -> None:
        """Apply the exchanged update, with decoupled weight decay beside it."""
        if not self.preconditioner.pending:  # nothing was exchanged: somebody steps to make state
            return
        self.preconditioner.pending = False
        undo, names, shown = self._recognise_factor(), self._names, self.preconditioner.shown
        changes: list[ParameterChange] = []
        for group in self.optimizer.param_groups:
            decoupled = _decoupled(self.optimizer, group)
            kept = 1 - float(group["lr"]) * float(group["weight_decay"]) if decoupled else 1.0
            for parameter in group["params"]:
                grad, own = parameter.grad, shown.get(names.get(id(parameter), ""))
                if grad is not None and own is not None:
                    changes.append(ParameterChange(local_shard(parameter), local_shard(grad), kept, own))
        apply_update(changes, undo, getattr(self.optimizer, "found_inf", None), self._workspace)
        for parameter, held, factor in self._unapplied:
            subtract(parameter, held, 1 / factor)
        self._unapplied, self._kept_back = [], {}

    def _recognise_factor(self) -> Tensor:
        """Return by what to multiply, so that a uniform factor that somebody put on all gradients is undone.

        A loss scaler divides by its scale; one that we do not know of, by a power of 2. What is below 1 beside that is
        the user's own clipping: a cut behind the residual would destroy what was taken out of it, so from the next step
        on its ``max_norm`` acts before the velocity. It is looked for in the tensors that travel dense, which are few
        entries, all of them written; in all tensors only where there is none of these.
        """
        preconditioner, moment = self.preconditioner, self.preconditioner.moment
        probes = [
            (local_shard(p.grad), moment.tensors[name].number) for p, name in self._probes() if p.grad is not None
        ]
        grads, numbers = [grad for grad, _ in probes], tuple(number for _, number in probes)
        waits = getattr(self.optimizer, "grad_scale", None) is not None  # the scaler leaves dividing to the step
        scale = 1.0 if waits else preconditioner.loss_scale
        clipping = Clipping(preconditioner.norms, moment.vectors.summary, moment.max_norm, scale)
        if self._stepped:
            return find_undo(grads, numbers, clipping, self._workspace)
        self._stepped = True  # the first gradient came in before anybody knew, and the second moment keeps it for long
        factor = recognise(grads, numbers, clipping)
        cut = learn_clip(factor, clipping)
        fresh = torch.where(cut & (moment.steps.max() == 1), factor * scale / moment.clip, 1.0)
        self._scale_moments(fresh)
        if moment.preconditioning.sgd:  # whose update is as large as the gradient: it is made smaller afterwards
            for feedback in self.feedbacks:
                feedback.scale_residuals(fresh, but=preconditioner.dense_names)
            factor = factor / fresh
        return 1 / factor

    def _probes(self) -> list[tuple[Tensor, str]]:
        """Return the parameters, and their names, in which a factor is looked for."""
        if self._probed is None:
            named, probes = ((p, self._names[id(p)]) for p in self._tracked()), self.preconditioner.probes
            self._probed = [(p, name) for p, name in named if name in probes]
        return self._probed

    def _scale_moments(self, ratio: Tensor) -> None:
        """Make all moments those of gradients ``ratio`` times as large."""
        self.preconditioner.moment.scale(ratio)
        for feedback in self.feedbacks:
            feedback.scale_velocities(ratio)

    def _tracked(self) -> list[Tensor]:
        return [p for group in self.optimizer.param_groups for p in group["params"] if id(p) in self._names]

    # ---- the optimizer's state --------------------------------------------------------------------------------------

    def undo(self, mean_of: Callable[[Tensor], Tensor] | None = None) -> None:
        """Give the optimizer its rule back, and its state.

        Args:
            mean_of: makes the sum of velocities here the mean over all ranks; by default it is that over those whose
                gradients come in here.
        """
        self._step.undo()
        for hook in [*self._hooks, *self._watched.values()]:
            hook.remove()
        for parameter in self._tracked():
            state = self._state_of(parameter, mean_of or self._mean)
            if state is not None:
                self.optimizer.state[parameter] = state

    def _state_of(self, parameter: Tensor, mean_of: Callable[[Tensor], Tensor]) -> dict[str, Tensor] | None:
        """Return a parameter's state as torch's own rule would have it; ``None`` if that keeps nothing."""
        name, moment = self._names[id(parameter)], self.preconditioner.moment
        tensor, group = moment.tensors.get(name), self._group_of(parameter)
        own, shard = self._parameters[name], local_shard(parameter)
        velocity = torch.zeros_like(shard, memory_format=torch.preserve_format).float()
        if tensor is None:  # without entries here; of a shard that has none, others have some, and a state
            steps = float(moment.steps.max()) if moment.tensors else 0.0
            state = self._rules.to_state(group, shard, Moments(velocity, velocity, steps, (1.0, 1.0)))
            return self._shared(parameter, state) if shard is not parameter else None
        if name in moment.dense:
            velocity = moment.means[tensor.place : tensor.place + tensor.size].as_strided(own.shape, own.stride)
        else:
            kept = [v for v in (own.velocity(name, newest=True) for own in self.feedbacks) if v is not None]
            velocity = mean_of(sum(kept, velocity))
        squares = moment.sizes_of(name).as_strided(own.shape, own.stride)
        steps, *powers = (float(kept[tensor.number]) for kept in (moment.steps, moment.powers1, moment.powers2))
        state = self._rules.to_state(group, shard, Moments(velocity, squares, steps, (powers[0], powers[1])))
        return self._shared(parameter, state)

    def _group_of(self, parameter: Tensor) -> dict[str, Any]:
        return next(g for g in self.optimizer.param_groups if any(p is parameter for p in g["params"]))

    def _shared(self, parameter: Tensor, state: dict[str, Tensor] | None) -> dict[str, Tensor] | None:
        """Return a state of this rank's shard as one that is shared as the parameter is."""
        return state and {key: kept if kept.dim() == 0 else shared_like(parameter, kept) for key, kept in state.items()}

    def _mean(self, total: Tensor) -> Tensor:
        """Return a sum of velocities as their mean over the ranks whose gradients come in here."""
        return total / max(1, sum(feedback.ranks for feedback in self.feedbacks))

    def _take_state(self) -> None:
        """Make the optimizer's state ours, and free it; what is ours already stays."""
        moment, velocities = self.preconditioner.moment, {}
        for group in self.optimizer.param_groups:
            rule = self._rules.hyperparameters(group)
            for parameter in group["params"]:
                state = self.optimizer.state.get(parameter)
                name = self._names.get(id(parameter))
                if not state or name is None or name not in moment.tensors or self._rules.key not in state:
                    continue
                state = {key: local_shard(kept) for key, kept in state.items()}
                beta = rule.betas[0]
                if name not in moment.dense:
                    beta = moment.preconditioning.beta_for(beta, FEW)
                taken = self._rules.from_state(group, state, beta, float(moment.steps[moment.tensors[name].number]))
                if taken is not None:
                    own = self._parameters[name]
                    squares = None if taken.squares is None else _in_memory_order(taken.squares, own)
                    mean = _in_memory_order(taken.velocity, own)
                    moment.load(name, squares, mean, taken.steps, taken.powers)
                    velocities[name] = taken.velocity
                del self.optimizer.state[parameter]
        for feedback in self.feedbacks if velocities else ():
            if feedback.ranks:  # a sum of gradients has a sum of velocities
                own_sums = {n: feedback.ranks * v for n, v in velocities.items() if n not in moment.dense}
                feedback.load_velocities(own_sums)

    def _fill_state_dict(self, optimizer: Any, state_dict: dict[str, Any]) -> None:
        """Add to a ``state_dict`` what torch's own rule would have kept; of velocities this rank's."""
        for group, packed in zip(optimizer.param_groups, state_dict["param_groups"], strict=True):
            for parameter, index in zip(group["params"], packed["params"], strict=True):
                state = self._state_of(parameter, self._mean) if id(parameter) in self._names else None
                if state is not None:
                    state_dict["state"][index] = state


def _decoupled(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> bool:
    return isinstance(optimizer, torch.optim.AdamW) or bool(group.get("decoupled_weight_decay"))


def _in_memory_order(tensor: Tensor, parameter: Parameter) -> Tensor:
    """Return a tensor's entries as the parameter's lie in memory."""
    flat = torch.empty(parameter.numel, dtype=tensor.dtype, device=tensor.device)
    flat.as_strided(parameter.shape, parameter.stride).copy_(tensor.view(parameter.shape))
    return flat
