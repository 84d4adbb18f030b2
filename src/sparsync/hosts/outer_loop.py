"""Local steps: workers train weights of their own, and exchange every so many steps how far they went."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Module

from sparsync.compressors import Compressor
from sparsync.config import ExchangePlan, resolve
from sparsync.engine.budget import plan_for
from sparsync.engine.stats import Stats, Totals
from sparsync.errors import SparsyncError
from sparsync.hosts.first_replica import copy_first_replica
from sparsync.hosts.outer_fragment import Fragment, State
from sparsync.hosts.outer_moments import SharedMoments, numel_of
from sparsync.hosts.unwrap import plain_name, unwrap_model

log = logging.getLogger("sparsync")

SCHEMA = 1
ROUND = 1 / 20  # of a dense exchange, if nothing is said: with 16 workers about 2 % of the entries, as SparseLoCo sends
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# What belongs to the gradients of a step, or to those who sum them in stages.
REFUSED = ("scaler", "transactional", "momentum", "beta", "masking", "precondition", "second_moment",
           "follow_lr", "joined", "per_node", "on_loss")  # fmt: skip


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
        own = _trained(self._model)
        self.every, self.overlap, self.outer_lr, self.outer_momentum = every, overlap, outer_lr, outer_momentum
        self._check(fragments, len(own))
        beside = numel_of(own) / sum(p.numel() for p in own.values()) if optimizer is not None else 0.0
        plan = round_plan(compressor, budget, total_steps, every, options, beside)
        self.steps = 0
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
        first += f"applied {self.overlap} steps later, by {outer}. In each round, called a step here:"
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
        states = [state] if isinstance(state, Mapping) else list(state)
        if not states:
            raise ValueError("no state to load: the list is empty")
        shapes = [{name: p.shape for name, p in part.own.items()} for part in self.fragments]
        for one in states:
            if one.get("schema") != SCHEMA:
                raise ValueError(f"this is not an outer loop's state of schema {SCHEMA}: it says {one.get('schema')!r}")
            if [{name: t.shape for name, t in part["shared"].items()} for part in one["fragments"]] != shapes:
                raise ValueError("this state was made with another fragments=, or of another model")
        for number, fragment in enumerate(self.fragments):
            parts = [one["fragments"][number] for one in states]
            fragment.load_state_dict(parts[0] if isinstance(state, Mapping) else parts)
        saved = states[self.fragments[0].channel.rank % len(states)].get("buffers", {})
        for name, buffer in self._buffers().items():
            if name in saved:
                buffer.copy_(saved[name])
        self.steps = states[0]["steps"]

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

    def _check(self, fragments: int, tensors: int) -> None:
        if not (isinstance(self.every, int) and self.every >= 1):
            raise ValueError(f"every must be 1 or more steps, got {self.every!r}")
        if not (isinstance(fragments, int) and 1 <= fragments <= min(self.every, tensors)):
            most = f"{min(self.every, tensors)}, as many as a round has steps and the model tensors"
            raise ValueError(f"fragments must be from 1 to {most}, got {fragments!r}")
        if not (isinstance(self.overlap, int) and 0 <= self.overlap < self.every):
            raise ValueError(
                f"overlap must be from 0 to {self.every - 1} steps, less than a round, got {self.overlap!r}"
            )
        if not 0 < self.outer_lr < math.inf:
            raise ValueError(f"outer_lr must be above 0, and finite, got {self.outer_lr!r}")
        if not 0 <= self.outer_momentum < 1:
            raise ValueError(f"outer_momentum must be at least 0 and below 1, got {self.outer_momentum!r}")


def cut(
    own: Mapping[str, Tensor], parts: int, plan: ExchangePlan, workers: int
) -> list[tuple[dict[str, Tensor], ExchangePlan]]:
    """Cut tensors, in their order, into so many fragments of about the same size, none of them empty; return each with
    its plan. What follows from a budget follows from the whole model."""
    found = list[tuple[dict[str, Tensor], ExchangePlan]]()
    names, total, done, at = list(own), sum(p.numel() for p in own.values()), 0, 0
    if parts > 1:
        plan = replace(plan_for(plan, own, workers), budget=None, spending=None)
    for part in range(1, parts + 1):
        first, last = at, len(names) - (parts - part)  # one at least is left for each that follows
        while at < last and (at == first or done + own[names[at]].numel() / 2 <= part * total / parts or part == parts):
            done += own[names[at]].numel()
            at += 1
        here = {name: own[name] for name in names[first:at]}
        dense = None if plan.dense is None else plan.dense & here.keys()
        found.append((here, replace(plan, dense=dense)))
    return found


def _trained(model: Module) -> dict[str, Tensor]:
    """Return the parameters that are trained, by name; refuse those that local steps do not know."""
    if type(model).__name__ in ("DistributedDataParallel", "FullyShardedDataParallel"):
        raise ValueError("OuterLoop takes the plain model: its workers step by themselves, and DDP would sum gradients")
    own: dict[str, Tensor] = {plain_name(name): p for name, p in model.named_parameters() if p.requires_grad}
    if not own:
        raise ValueError("there is nothing to exchange: no parameter of the model is trained")
    for name, p in own.items():
        if p.dtype not in DTYPES or type(p.data).__name__ == "DTensor":
            raise ValueError(
                f"parameters must be whole, and fp32, bf16 or fp16; {name!r} is a {type(p.data).__name__} of {p.dtype}"
            )
    if len({p.device for p in own.values()}) > 1:
        raise ValueError("all parameters must be on one device")
    return own


def round_plan(
    compressor: str | Compressor | None,
    budget: float | None,
    steps: int | None,
    every: int,
    options: Mapping[str, Any],
    beside: float = 0.0,
) -> ExchangePlan:
    """Return the plan of a round.

    Args:
        budget: of every step.
        steps: of the training.
        beside: share of dense's bytes that a round takes for something else.
    """
    for name in REFUSED:
        if options.get(name) is not None:
            raise ValueError(f"{name}= is of gradients, which OuterLoop does not exchange; leave it out")
    given = {**options, "compressor": compressor, "joined": "freeze", "momentum": "keep", "total_steps": steps}
    asked, share = budget is not None, None
    if budget is not None:
        if not (isinstance(budget, int | float) and 0 < budget <= 1):
            raise ValueError(f"budget must be a share of dense's bytes, above 0 and at most 1, got {budget!r}")
        if every * budget <= beside:
            raise ValueError(f"budget must be above {beside / every:.2g}, what second moments take, got {budget!r}")
        share = min(1.0, every * budget - beside)
    elif compressor is None and options.get("density") is None and options.get("recipe") is None:
        share = ROUND
    if share is not None:
        given |= {"budget": share, "total_steps": max(1, steps // every) if steps else None}
    plan = resolve(**given)
    if plan.auto:
        raise ValueError("recipe='auto' times single steps, and a round has many: leave it out")
    if plan.budget is not None and not asked:  # it gives way to a small model, as a recipe's does
        plan = replace(plan, budget=replace(plan.budget, asked=False))
    return plan


def _sum(parts: Sequence[Totals]) -> Totals:
    """Return the figures of all fragments: a round is one of each."""
    total = Totals(**{field.name: sum(getattr(part, field.name) for part in parts) for field in fields(Totals)})
    total.steps = max(part.steps for part in parts)
    return total
