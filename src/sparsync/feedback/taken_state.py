"""The state of an optimizer whose moments are the exchange's: taken over, shown as torch has it, and given back."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from sparsync.feedback.optimizer_rules import Moments, OptimizerRule
from sparsync.feedback.residual import Feedback
from sparsync.feedback.second_moment import FEW, SecondMoment
from sparsync.layout import Parameter
from sparsync.local_shard import local_shard, shared_like


class TakenState:
    """The state of an optimizer, which the exchange keeps, until ``give_back``; copies of the optimizer have it.

    Args:
        optimizer: whose state is taken, and freed.
        rules: of its class.
        names: of the model's parameters, by ``id``.
        parameters: of the model, by name.
        moment: second moments, and the velocities of what travels dense.
        feedbacks: with the other velocities; several of virtual workers.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        rules: OptimizerRule,
        names: Mapping[int, str],
        parameters: Mapping[str, Parameter],
        moment: SecondMoment,
        feedbacks: Sequence[Feedback],
    ) -> None:
        self.optimizer, self._rules, self._names, self._parameters = optimizer, rules, names, parameters
        self._moment, self._feedbacks = moment, feedbacks
        self._take()
        self._hooks = [
            optimizer.register_state_dict_post_hook(self._fill_state_dict),
            optimizer.register_load_state_dict_post_hook(lambda _: self._take()),
        ]
        vars(optimizer)["__getstate__"] = self._state_of_copies  # which copy and pickle ask the object for

    def give_back(self, mean_of: Callable[[Tensor], Tensor] | None = None) -> None:
        """Write the state into the optimizer; ``mean_of``: as of ``TakenOptimizer.undo``."""
        for hook in self._hooks:
            hook.remove()
        vars(self.optimizer).pop("__getstate__", None)
        self.optimizer.state.update(self._states(mean_of or self._mean))

    def _states(self, mean_of: Callable[[Tensor], Tensor]) -> dict[Tensor, dict[str, Tensor]]:
        """Return the state of all parameters that have one."""
        parameters = [p for group in self.optimizer.param_groups for p in group["params"] if id(p) in self._names]
        states = {parameter: self._state_of(parameter, mean_of) for parameter in parameters}
        return {parameter: state for parameter, state in states.items() if state is not None}

    def _state_of_copies(self) -> dict[str, Any]:
        """Return what a copy of the optimizer is made of, as ``Optimizer.__getstate__`` does."""
        held: dict[str, Any] = type(self.optimizer).__getstate__(self.optimizer)  # type: ignore[no-untyped-call]
        return {**held, "state": defaultdict(dict, {**held["state"], **self._states(self._mean)})}

    def _state_of(self, parameter: Tensor, mean_of: Callable[[Tensor], Tensor]) -> dict[str, Tensor] | None:
        """Return a parameter's state as torch's own rule would have it; ``None`` if that keeps nothing."""
        name, moment = self._names[id(parameter)], self._moment
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
            kept = [v for v in (own.velocity(name, newest=True) for own in self._feedbacks) if v is not None]
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
        return total / max(1, sum(feedback.ranks for feedback in self._feedbacks))

    def _take(self) -> None:
        """Make the optimizer's state ours, and free it; what is ours already stays."""
        moment, velocities = self._moment, {}
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
        for feedback in self._feedbacks if velocities else ():
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


def _in_memory_order(tensor: Tensor, parameter: Parameter) -> Tensor:
    """Return a tensor's entries as the parameter's lie in memory."""
    flat = torch.empty(parameter.numel, dtype=tensor.dtype, device=tensor.device)
    flat.as_strided(parameter.shape, parameter.stride).copy_(tensor.view(parameter.shape))
    return flat
