"""Local steps: workers train weights of their own, and exchange every so many steps how far they went."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Module

from sparsync.compressors import Compressor
from sparsync.engine.stats import Stats, Totals
from sparsync.errors import SparsyncError
from sparsync.hosts.first_replica import copy_first_replica
from sparsync.hosts.unwrap import plain_name, unwrap_model, unwrap_optimizer
from sparsync.local_steps.fragment import Fragment
from sparsync.local_steps.round_plan import check_arguments, cut, round_plan, trained_parameters
from sparsync.local_steps.shared_moments import SharedMoments, numel_of
from sparsync.local_steps.state import SCHEMA, State, check_states

log = logging.getLogger("sparsync")


class OuterLoop:
    """Trains a model by local steps: each worker steps weights of its own, and every so many steps they exchange how
    far they went. All ranks make one, with the same arguments, and call ``step`` after each step of their optimizer.

    ::

        outer = sparsync.OuterLoop(model, every=30)
        for batch in batches:
            loss(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
            outer.step()

    In a round, *pseudo-gradients* are exchanged, the shared weights that local steps began from less those that they
    led to, as ``attach`` exchanges gradients: sparse, with feedback. An outer SGD steps the shared weights by the mean,
    and all go on from there. Rates of 1 without momentum are plain averaging.

    Args:
        model: the plain model, on its device, not wrapped by DDP. All ranks begin with the first one's weights and
            buffers; buffers are then each rank's own.
        compressor: as ``attach`` takes it.
        optimizer: the local one, if it is torch's Adam or AdamW and its second moments are to be shared in every round,
            as means of rows and columns: a few numbers, and what is left of it is the user's as ever.
        every: local steps of a round, H.
        fragments: parts of the model that travel at different times of a round.
        overlap: local steps that are made while a part is on its way; its result is then applied, and what was learned
            meanwhile stays.
        outer_lr, outer_momentum: of the outer SGD, with Nesterov's momentum where there is any: 0.7 and 0.9 are
            DiLoCo's.
        budget: share of the bytes of a dense fp32 ring all-reduce *in every step*, as ``attach`` has it: a round may
            take ``every`` times as much; what makes a round's a 20th, if neither this nor a density is given.
        total_steps: local steps of the training.
        process_group: of the ranks that take part; the default one.
        options: ``attach``'s ``recipe``, ``density``, ``values``, ``indices``, ``collective``, ``scope``, ``clip``,
            ``dense_below``, ``dense_1d``, ``deadline``, ``seed`` and ``debug``.
    """

    def __init__(
        self,
        model: Module,
        compressor: str | Compressor | None = None,
        *,
        optimizer: torch.optim.Optimizer | None = None,
        every: int = 30,
        fragments: int = 1,
        overlap: int = 0,
        outer_lr: float = 1.0,
        outer_momentum: float = 0.0,
        budget: float | None = None,
        total_steps: int | None = None,
        process_group: Any = None,
        **options: Any,
    ) -> None:
        self._model = unwrap_model(model)
        self._own = own = trained_parameters(self._model)
        self.every, self.overlap, self.outer_lr, self.outer_momentum = every, overlap, outer_lr, outer_momentum
        check_arguments(every, fragments, overlap, outer_lr, outer_momentum, len(own))
        optimizer, _ = unwrap_optimizer(optimizer)
        beside = numel_of(own) / sum(p.numel() for p in own.values()) if optimizer is not None else 0.0
        plan = round_plan(compressor, budget, total_steps, every, options, beside)
        self.steps = 0
        self._loaded: int | None = None  # steps of a state that the ranks have not compared yet
        self.fragments: list[Fragment] = []
        workers = dist.get_world_size(process_group) if dist.is_initialized() else 1
        if workers < 1:
            raise ValueError("this rank is not in process_group=, and has nobody to exchange with")
        parts = cut(own, fragments, plan, workers)
        moments = [SharedMoments(optimizer, part) if optimizer is not None else None for part, _ in parts]
        given = {"every": every, "overlap": overlap, "outer_lr": outer_lr, "outer_momentum": outer_momentum}
        given["optimizer"] = optimizer is not None
        try:
            for number, ((part, own_plan), shared) in enumerate(zip(parts, moments, strict=True), 1):
                rule = number * every // fragments % every, outer_lr, outer_momentum
                self.fragments.append(Fragment(part, *rule, own_plan, process_group, shared))
            channel = self.fragments[0].channel
            channel.assert_consistent("outer loop", "\n".join(f"{name}={value}" for name, value in given.items()))
            copy_first_replica(self._model, channel)
        except Exception:
            for fragment in self.fragments:
                fragment.handle.detach()
            raise
        for fragment in self.fragments:
            fragment.begin()
        log.log(logging.INFO if channel.rank == 0 else logging.DEBUG, "%s", self.describe())

    def step(self, miss: bool = False) -> None:
        """Count a local step; exchange what is due.

        Args:
            miss: this rank has nothing to give to rounds that are due now, as one that fell behind or has no data. The
                others' results are applied here as well; what was learned here goes with the next round.
        """
        if not self.fragments[0].handle.is_attached():
            raise SparsyncError("detach() was called: make another OuterLoop")
        self.steps += 1
        for fragment in self.fragments:
            leaves = self.steps % self.every == fragment.offset
            try:
                # A state of another every= or overlap= may have what is due after the next round.
                if fragment.future is not None and (leaves or fragment.due == self.steps):
                    fragment.take()
                if leaves:
                    self._check_round(fragment)
                    fragment.send(self.steps, self.overlap, miss)
                    if not self.overlap:
                        fragment.take()
            except Exception as error:  # the others must hear of it
                fragment.handle.fail(error)
                raise

    def shared(self) -> dict[str, Tensor]:
        """Return the shared weights by the names of the model's parameters: the same bits on all ranks."""
        return {name: p.detach() for part in self.fragments for name, p in part.shared.by_name.items()}

    def residual(self, name: str) -> Tensor | None:
        """Return what a parameter's pseudo-gradients have left to send; ``None`` if nothing was ever kept."""
        found = next((part for part in self.fragments if name in part.own), None)
        if found is None:
            raise ValueError(f"no parameter of this name is trained: {name!r}")
        return found.handle.residual(name)

    def stats(self) -> Stats:
        """Return bytes, entries, times and energy: of the last round (``.step``) and of all (``.total``)."""
        parts = [fragment.handle.stats() for fragment in self.fragments]
        timeline = [record for part in parts for record in part.timeline]
        return Stats(_sum([part.step for part in parts]), _sum([part.total for part in parts]), timeline)

    def describe(self) -> str:
        """Return in plain words how often and how what is exchanged; what is called a step there is a round."""
        many, momentum = len(self.fragments), self.outer_momentum
        outer = f"SGD of rate {self.outer_lr:g}" + (f" with Nesterov momentum {momentum:g}" if momentum else "")
        first = f"Outer loop: a round every {self.every} local steps, {many} fragment{'s' * (many > 1)}, "
        when = f"{self.overlap} step{'s' * (self.overlap > 1)} later" if self.overlap else "at once"
        first += f"applied {when}, by {outer}"
        first += ", with Adam's second moments shared" if self.fragments[0].moments is not None else ""
        first += ". In each round, called a step here:"
        return "\n".join([first, *(fragment.handle.describe() for fragment in self.fragments)])

    def state_dict(self) -> dict[str, Any]:
        """Return all that this rank goes on from, its model's weights and buffers included: tensors and plain types
        only.

        Save one per rank, beside the optimizer's state, which is each rank's own, too.
        """
        parts = [fragment.state_dict() for fragment in self.fragments]
        buffers = {name: buffer.clone() for name, buffer in self._buffers().items()}
        return {"schema": SCHEMA, "steps": self.steps, "fragments": parts, "buffers": buffers}

    def load_state_dict(self, state: State | Sequence[State]) -> None:
        """Go on from ``state_dict()``: this rank's own, or those of all ranks of a run of any size, in order."""
        if not isinstance(state, Mapping | list | tuple):
            raise ValueError(f"a state is a dictionary, or a list of those of all ranks, not {type(state).__name__}")
        states = [state] if isinstance(state, Mapping) else list(state)
        shapes = [{name: p.shape for name, p in part.own.items()} for part in self.fragments]
        buffers = self._buffers()
        check_states(states, shapes, {name: buffer.shape for name, buffer in buffers.items()})
        parts = [[one["fragments"][number] for one in states] for number in range(len(self.fragments))]
        own = [part[0] if isinstance(state, Mapping) else part for part in parts]
        for fragment, part in zip(self.fragments, own, strict=True):
            fragment.check_state(part)
        for fragment in self.fragments:
            if fragment.future is not None:
                fragment.wait()  # or it would write over what is loaded
        for fragment, part in zip(self.fragments, own, strict=True):  # nothing has changed before
            fragment.load_state_dict(part)
        saved = states[self.fragments[0].channel.rank % len(states)].get("buffers", {})
        for name, buffer in buffers.items():
            if name in saved:
                buffer.copy_(saved[name])
        self.steps = self._loaded = states[0]["steps"]

    def _check_round(self, fragment: Fragment) -> None:
        """Refuse a round that would not exchange all that is trained, or whose ranks go on from different steps."""
        for name, p in self._model.named_parameters():
            if p.requires_grad and self._own.get(plain_name(name)) is not p:
                raise SparsyncError(
                    f"{plain_name(name)!r} is trained, and was not when OuterLoop was made: where that changes, "
                    "detach() after a round and make another OuterLoop"
                )
        if self._loaded is not None:
            loaded, self._loaded = self._loaded, None
            fragment.channel.assert_consistent("loaded state", f"local steps {loaded}")

    def _buffers(self) -> dict[str, Tensor]:
        """Return the model's buffers that belong in a checkpoint."""
        kept = self._model.state_dict().keys()
        return {plain_name(name): b.detach() for name, b in self._model.named_buffers() if name in kept}

    def detach(self) -> None:
        """Stop, and leave the model with the shared weights, which are the same on all ranks.

        What is on its way is applied. What was learned since the last round is dropped with the residuals: detach after
        a round, or take ``state_dict()`` before.
        """
        for fragment in self.fragments:
            if fragment.handle.is_attached():
                try:
                    if fragment.future is not None:
                        fragment.take()
                except Exception as error:  # whatever it was: all are detached
                    log.warning("what was on its way is not applied: %s", error)
                with torch.no_grad():
                    torch._foreach_copy_(fragment.weights, fragment.parameters)
                fragment.handle.detach()


def _sum(parts: Sequence[Totals]) -> Totals:
    """Return the figures of all fragments: a round is one of each."""
    total = Totals(**{field.name: sum(getattr(part, field.name) for part in parts) for field in fields(Totals)})
    total.steps = max(part.steps for part in parts)
    return total
