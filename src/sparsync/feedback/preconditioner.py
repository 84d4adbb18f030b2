"""What all workers do to a gradient before it enters the residual: velocity over the shared second moment's root.

The residual then holds what is left of the update itself, learning rate included, in units that are alike in all
layers; and the mean of what the workers send *is* the update.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from sparsync.feedback.residual import FlatBuffer
from sparsync.feedback.second_moment import AdamRule, SecondMoment
from sparsync.kernels import Update
from sparsync.kernels.learn_clip import ProbedPart, note_norms, note_norms_of
from sparsync.kernels.second_moment import write_dense
from sparsync.kernels.sketch import Sketched, sketch
from sparsync.layout import Span
from sparsync.value_range import HALF
from sparsync.workspace import Workspace

SHOWN = 2.0**64  # largest loss scale that results are shown in: beyond, a norm may leave fp32 where no entry does
PROBED = 1 << 14  # entries, the first of a compressed tensor, in which a change of what is shown is looked for


class TensorPlaces:
    """Where in the moments the tensors of a flat gradient are."""

    def __init__(self, tensors: list[Sketched]) -> None:
        self.tensors = tensors


class UnitNorms:
    """The norms of a unit's mean gradients, tensor by tensor, in a place that stays."""

    def __init__(self, spans: Sequence[Span], tensors: list[Sketched], norms: Tensor) -> None:
        self.spans, self.tensors, self.workspace = spans, tensors, Workspace()
        self.numbers = torch.tensor([tensor.number for tensor in tensors], dtype=torch.int64, device=norms.device)
        self.norms = torch.zeros(len(tensors), dtype=torch.float32, device=norms.device)
        self.probed = tuple(ProbedPart(t.start, min(t.numel, PROBED), t.number) for t in tensors)

    def read(self, norms: Tensor) -> Tensor:
        """Return them, as they are now among those of all tensors."""
        return torch.index_select(norms, 0, self.numbers, out=self.norms)


class DenseUpdates:
    """The updates of all tensors that travel dense, one after another, in the order of the model."""

    def __init__(self, moment: SecondMoment) -> None:
        self.tensors, self.workspace, start = list[Sketched](), Workspace(), 0
        names = [name for name in moment.tensors if name in moment.dense]
        for name in names:
            self.tensors.append(replace(moment.tensors[name], start=start))
            start += self.tensors[-1].numel
        self.updates = torch.zeros(start, dtype=torch.float32, device=moment.device)
        sizes = [tensor.numel for tensor in self.tensors]
        self.parts = dict(zip(names, torch.split(self.updates, sizes) if names else (), strict=True))
        self._numbers: dict[tuple[str, ...], Tensor] = {}

    def numbers_of(self, names: tuple[str, ...]) -> Tensor:
        """Return the numbers of tensors, on the device."""
        if names not in self._numbers:
            numbers = {name: tensor.number for name, tensor in zip(self.parts, self.tensors, strict=True)}
            self._numbers[names] = torch.tensor(
                [numbers[name] for name in names], dtype=torch.int64, device=self.updates.device
            )
        return self._numbers[names]


class Preconditioner:
    """The step of preconditioned feedback, between a gradient and its residual; virtual workers share one.

    Args:
        moment: what it divides by; an optimizer whose state it is meanwhile (``taken_optimizer.py``) reads and writes
            it, others come here.
        transactional: a step can be undone.
        clip: largest norm of the mean gradient; one that the user's own clipping shows is taken over.
    """

    def __init__(self, moment: SecondMoment, transactional: bool = False, clip: float | None = None) -> None:
        self.moment, self.clip = moment, clip
        if clip is not None:
            self.moment.max_norm.fill_(clip)
        self.transactional, self.loss_scale = transactional, 1.0
        self.shown: dict[str, Tensor] = {}  # by parameter name: what its update was multiplied by, for all to see
        self.norms = torch.zeros_like(self.moment.norms)  # of what is shown, where a change of it is looked for
        self.pending = False  # an exchange's result waits for the optimizer's step
        self.undone = False  # the last exchange's was taken back
        self._units: dict[int, UnitNorms] = {}  # by the id of its spans
        self._dense = DenseUpdates(self.moment)

    @property
    def device(self) -> torch.device:
        """That of all tensors that are preconditioned."""
        return self.moment.device

    @property
    def dense_names(self) -> frozenset[str]:
        """Of the tensors that travel dense."""
        return self.moment.dense

    @property
    def good(self) -> Tensor:
        """0-d tensor: above 0 if everything that came in in this step was finite, on all workers."""
        return self.moment.good

    def places(self, spans: Sequence[Span], sketches: Sequence[Span] = ()) -> list[Sketched]:
        """Return where in the moments the tensors of a flat gradient are.

        Args:
            sketches: of those tensors, and of others: where they are in the flat gradient's sketch.
        """
        at = {span.name: span.start for span in sketches}
        return [replace(self.moment.tensors[s.name], start=s.start, at=at.get(s.name, 0)) for s in spans]

    def begin_step(
        self, rules: Mapping[str, AdamRule], density: float, loss_scale: float | None, last: Mapping[str, float]
    ) -> None:
        """Begin a step: read the optimizer's hyperparameters, draw signs; ``last``: rates that the residuals are in."""
        if self.transactional:
            self.moment.save()
        self.loss_scale = loss_scale or 1.0
        self.moment.begin_step(rules, density, last)

    def sketch(self, tensors: Sequence[Sketched], grad: Tensor, out: Tensor, workspace: Workspace) -> None:
        """Write the sketch of a flat gradient; ``workspace``: of its layout, for those who sketch one after another."""
        sketch(grad, tensors, self.moment.vectors.signs, out, workspace)

    def add_sketch(self, spans: Sequence[Span], mean: Tensor) -> None:
        """Take the mean over the workers of sketches, and of gradients that travel dense, one after another."""
        index = self.moment.index_of([self.moment.tensors[span.name] for span in spans])
        self.moment.sums.index_copy_(0, index, mean)

    def update(self) -> None:
        """Make this step's preconditioner, once the means of all sketches are there."""
        self.moment.update(self.loss_scale)
        self.pending, self.undone = True, False

    def write_dense(self, places: Mapping[str, Tensor]) -> None:
        """Write the updates of tensors that travel dense, with the mean gradient's norm as ``show`` gives it.

        Args:
            places: where to, by parameter name, flat.
        """
        if not places:
            return
        dense, outs = self._dense, list(places.values())
        factor = write_dense(
            self.moment.vectors, dense.tensors, dense.updates, self._shown_scale, self.norms, dense.workspace
        )
        if any(out.dtype == torch.float16 for out in outs):  # whose range may end below what the norm asks for
            peak = dense.updates.abs().amax()
            room = torch.where(peak > HALF, HALF / peak, 1.0)
            dense.updates.mul_(room)
            factor = factor * room
        torch._foreach_copy_(outs, [dense.parts[name] for name in places])
        self.shown.update(dict.fromkeys(places, factor))
        if any(out.dtype.itemsize < dense.updates.dtype.itemsize for out in outs):  # rounded, which changes their norms
            note_norms(outs, dense.numbers_of(tuple(places)), self.norms)

    def update_of(self, spans: Sequence[Span], velocity: FlatBuffer, workspace: Workspace) -> Update:
        """Return how a flat gradient becomes the update that it asks for.

        Args:
            spans: of the gradient's tensors.
            velocity: of this worker, which moves on.
            workspace: of this worker and the gradient's layout.
        """
        places = workspace.get(TensorPlaces, None, lambda: TensorPlaces(self.places(spans)))
        return Update(velocity.committed, velocity.working, places.tensors, self.moment.tables)

    def show(self, spans: Sequence[Span], result: Tensor, multiply: Callable[[Tensor, Tensor, float], Tensor]) -> None:
        """Give a result the mean gradient's norm, in the gradient's scale: so logged norms mean what they always do.

        Args:
            multiply: does as ``give_norm``.
        """
        unit = self._unit(spans)
        factor = multiply(result, unit.read(self.moment.norms), self._shown_scale)
        self.shown.update((span.name, factor) for span in spans)
        note_norms_of(result, unit.probed, self.norms, unit.workspace)

    @property
    def _shown_scale(self) -> float:
        return min(self.loss_scale, SHOWN)

    def _unit(self, spans: Sequence[Span]) -> UnitNorms:
        if id(spans) not in self._units:
            self._units[id(spans)] = UnitNorms(spans, self.places(spans), self.moment.norms)
        return self._units[id(spans)]

    def state_dict(self) -> dict[str, dict[str, Tensor]]:
        """Return copies of the moments by parameter name."""
        return self.moment.state_dict()

    def check_state(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Refuse what ``load_state_dict`` cannot take."""
        self.moment.check_state(state)

    def load_state_dict(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Go on from the moments of a checkpoint; a ``clip`` that is not the checkpoint's holds."""
        self.moment.load_state_dict(state)
        if self.clip is not None and not math.isclose(float(self.moment.max_norm), self.clip, rel_tol=0.01):
            self.moment.max_norm.fill_(self.clip)

    def undo(self) -> None:
        """Make everything what it was before the last step."""
        self.moment.undo()
        self.pending, self.undone = False, True
