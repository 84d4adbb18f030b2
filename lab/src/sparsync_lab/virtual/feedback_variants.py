"""Preconditioned feedback with one thing changed, among virtual workers: what its ablations are made of.

They know every worker's gradient, so that second moments can be had that real workers could only have by sending all of
it. Messages and their bytes stay the library's: what takes more is not counted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from sparsync.config import ExchangePlan
from sparsync.engine.worker import WorkerState
from sparsync.feedback import AdamRule, Preconditioner, Preconditioning, SecondMoment
from sparsync.kernels.sketch import Sketched
from sparsync.layout import Parameter, Span
from sparsync.simulate.exchange import VirtualExchange
from sparsync.workspace import Workspace

SKETCH, TENSOR, ROW_COLUMN, ENTRY = "sketch", "tensor", "row x column", "entry"
KINDS = (SKETCH, TENSOR, ROW_COLUMN, ENTRY)


@dataclass(frozen=True)
class FeedbackVariant:
    """What is changed of preconditioned feedback; tensors that travel dense stay with plain AdamW.

    Args:
        second_moment: of matrices, ``"sketch"``: of rows and columns, from random signs, as the library has it;
            ``"tensor"``: the mean of these; ``"row x column"``: of rows and columns, exact; ``"entry"``: of every
            entry, exact.
        own: every worker's second moment is that of its own gradient, exact and clipped by itself.
        old: updates are divided by the second moment of the step before.
        floor: least second moment of a row or column, as a share of the mean's.
        limit: largest update of one worker, over the learning rate and the root of the number of workers; ``None``:
            there is none.
        rise: in step t beta2 of matrices is at most 1 - t^-rise; ``None``: it is the optimizer's from the start.
        shrink: residuals become smaller with the learning rate.
    """

    second_moment: str = SKETCH
    own: bool = False
    old: bool = False
    floor: float = Preconditioning.floor
    limit: float | None = Preconditioning.limit
    rise: float | None = Preconditioning.rise
    shrink: bool = True

    def __post_init__(self) -> None:
        if self.second_moment not in KINDS:
            raise ValueError(f"second_moment must be one of {', '.join(KINDS)}, got {self.second_moment!r}")
        if self.own and (self.old or not self.exact):
            raise ValueError(f"own=True is of exact moments with this step's gradient, got {self}")

    @property
    def exact(self) -> bool:
        """Whether it is made from gradients instead of sketches."""
        return self.second_moment in (ROW_COLUMN, ENTRY)


class VariantPreconditioner(Preconditioner):
    """A preconditioner with one thing changed, for all workers or for one of them.

    Args:
        plan, parameters, dense_names, device, workers: as ``VirtualExchange`` takes them.
    """

    def __init__(
        self,
        variant: FeedbackVariant,
        plan: ExchangePlan,
        parameters: Sequence[Parameter],
        dense_names: frozenset[str],
        device: torch.device,
        workers: int,
    ) -> None:
        assert plan.preconditioning is not None
        kind, rise = "exact" if variant.second_moment == ENTRY else "sketch", variant.rise or Preconditioning.rise
        changed = replace(plan.preconditioning, second_moment=kind, floor=variant.floor, rise=rise)
        moment = SecondMoment(parameters, dense_names, changed, device, plan.seed, workers)
        moment.tables.limit = math.inf if variant.limit is None else variant.limit * math.sqrt(workers)
        super().__init__(moment, clip=plan.clip)
        self.variant, self.workers = variant, workers
        self._sums: dict[int, Tensor] = {}  # of all workers' gradients, by the first of their tensors
        self._sketched: dict[int, Sequence[Sketched]] = {}  # these tensors
        self.tensors = list(moment.tensors.values())
        matrices = [tensor for name, tensor in moment.tensors.items() if name not in dense_names]
        moment.vectors.rises[[tensor.number for tensor in matrices]] = variant.rise is not None  # of every entry's, too
        self.matrices = moment.index_of(matrices)
        self.newest: Tensor | None = None  # of the matrices' sizes, where those of the step before are used

    def sketch(self, tensors: Sequence[Sketched], grad: Tensor, out: Tensor, workspace: Workspace) -> None:
        """Sketch a worker's gradient, or, where no sketch is used, add it to the others'."""
        if not self.variant.exact:
            super().sketch(tensors, grad, out, workspace)
        elif tensors[0].number in self._sums:
            self._sums[tensors[0].number] += grad
        else:
            self._sums[tensors[0].number] = grad.float().clone()
            self._sketched[tensors[0].number] = tensors

    def add_sketch(self, spans: Sequence[Span], mean: Tensor) -> None:
        if not self.variant.exact:
            super().add_sketch(spans, mean)
            return
        dense = [span for span in spans if span.name in self.dense_names]  # which are in front
        if dense:
            super().add_sketch(dense, mean[: dense[-1].stop])
        if len(dense) < len(spans):
            first = self.moment.tensors[spans[len(dense)].name].number
            self._add_exact(self._sketched[first], self._sums.pop(first) / self.workers)

    def _add_exact(self, tensors: Sequence[Sketched], grad: Tensor) -> None:
        """Take what sketches of a flat gradient would estimate."""
        self.moment.sums.index_copy_(0, self.moment.index_of(tensors), magnitudes(tensors, grad))

    def update(self) -> None:
        if self.variant.second_moment == TENSOR:
            self._level()
        super().update()
        if self.variant.old:
            sizes = self.moment.tables.sizes
            newest = sizes[self.matrices]
            if self.newest is not None:
                sizes[self.matrices] = self.newest
            self.newest = newest

    def _level(self) -> None:
        """Make the sums of a matrix's rows alike, and those of its columns, with the same sum of squares."""
        for tensor in (t for t in self.moment.tensors.values() if t.matrices):
            shape, own = tensor.matrices, self.moment.sums[tensor.place : tensor.place + tensor.size]
            assert shape is not None
            cut = shape.stack * shape.rows
            for side in (own[:cut].view(shape.stack, -1), own[cut:].view(shape.stack, -1)):
                side.copy_(side.square().mean(1, keepdim=True).sqrt().expand_as(side))

    def extra_state(self) -> dict[str, Any]:
        """Return what a checkpoint of the workers does not hold."""
        return {} if self.newest is None else {"newest": self.newest.clone()}

    def load_extra_state(self, state: Mapping[str, Any]) -> None:
        self.newest = state["newest"].to(self.matrices.device) if "newest" in state else None


class OwnPreconditioner(VariantPreconditioner):
    """One worker's: its matrices' second moment is that of its own gradient."""

    def take(self, tensors: Sequence[Sketched], grad: Tensor) -> None:
        """Take this worker's gradient; ``tensors``: as they are sketched."""
        own = [replace(self.tensors[tensor.number], start=tensor.start) for tensor in tensors]
        self._add_exact(own, grad.float())


class CommonPreconditioner(Preconditioner):
    """What workers with second moments of their own have in common: norms, and tensors that travel dense."""

    def __init__(
        self,
        variant: FeedbackVariant,
        plan: ExchangePlan,
        parameters: Sequence[Parameter],
        dense_names: frozenset[str],
        device: torch.device,
        workers: int,
    ) -> None:
        assert plan.preconditioning is not None
        moment = SecondMoment(parameters, dense_names, plan.preconditioning, device, plan.seed, workers)
        super().__init__(moment, clip=plan.clip)
        given = variant, plan, parameters, dense_names, device, workers
        self.owned = [OwnPreconditioner(*given) for _ in range(workers)]
        self._taken: dict[int, int] = {}  # how many workers' gradients, by the first of their tensors

    def sketch(self, tensors: Sequence[Sketched], grad: Tensor, out: Tensor, workspace: Workspace) -> None:
        """Sketch a worker's gradient, which is also its own moment's: they come in the order of their ranks."""
        rank = self._taken.get(tensors[0].number, 0)
        self._taken[tensors[0].number] = rank + 1
        self.owned[rank].take(tensors, grad)
        super().sketch(tensors, grad, out, workspace)

    def add_sketch(self, spans: Sequence[Span], mean: Tensor) -> None:
        assert all(count == len(self.owned) for count in self._taken.values())
        self._taken = {}
        super().add_sketch(spans, mean)

    def begin_step(
        self, rules: Mapping[str, AdamRule], density: float, loss_scale: float | None, last: Mapping[str, float]
    ) -> None:
        super().begin_step(rules, density, loss_scale, last)
        for own in self.owned:
            own.begin_step(rules, density, loss_scale, last)

    def update(self) -> None:
        super().update()
        for own in self.owned:
            own.update()

    def extra_state(self) -> dict[str, Any]:
        """Return what a checkpoint of the workers does not hold."""
        return {"moments": self.state_dict()}

    def load_extra_state(self, state: Mapping[str, Any]) -> None:
        self.load_state_dict(state["moments"])


class UnshrunkWorker(WorkerState):
    """A worker whose residuals do not follow the learning rate."""

    def begin_step(self, loss_scale: float | None, rates: Mapping[str, float] | None) -> None:
        super().begin_step(loss_scale, None)


class VariantExchange(VirtualExchange):
    """The exchange of virtual workers whose preconditioned feedback has one thing changed."""

    def __init__(
        self,
        variant: FeedbackVariant,
        plan: ExchangePlan,
        parameters: Sequence[Parameter],
        dense_names: frozenset[str],
        workers: int,
        device: torch.device,
        graph: bool = False,
        streams: int = 1,
    ) -> None:
        if not plan.precondition:
            raise ValueError(f"a variant of preconditioned feedback needs precondition=True, got {variant}")
        super().__init__(plan, parameters, dense_names, workers, device, graph, streams)
        given = variant, plan, parameters, dense_names, device, workers
        made = CommonPreconditioner(*given) if variant.own else VariantPreconditioner(*given)
        self.preconditioner = self.variant = made
        kind = WorkerState if variant.shrink else UnshrunkWorker
        owned = made.owned if isinstance(made, CommonPreconditioner) else [made] * workers
        self.workers = [kind(rank, parameters, plan, preconditioner=own) for rank, own in enumerate(owned)]

    def state_dict(self) -> list[dict[str, Any]]:
        first, *others = super().state_dict()
        return [{**first, "variant": self.variant.extra_state()}, *others]

    def load_state_dict(self, states: Sequence[Mapping[str, Any]]) -> None:
        super().load_state_dict(states)
        self.variant.load_extra_state(states[0]["variant"])


def magnitudes(tensors: Sequence[Sketched], grad: Tensor) -> Tensor:
    """Return the norms of every row and column of each matrix of a flat gradient, flat; of tensors whose entries count
    by themselves, these. Their squares are what those of a sketch estimate."""
    parts = []
    for tensor in tensors:
        own, shape = grad[tensor.start : tensor.start + tensor.numel], tensor.matrices
        if shape is None:
            parts.append(own)
            continue
        matrices = own.view(shape.stack, shape.rows, shape.cols)
        parts += [torch.linalg.vector_norm(matrices, dim=side).flatten() for side in (2, 1)]
    return torch.cat(parts)
