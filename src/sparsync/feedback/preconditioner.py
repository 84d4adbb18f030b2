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
from sparsync.kernels.sketch import Sketched, sketch
from sparsync.layout import Span
from sparsync.sparse import give_norm
from sparsync.workspace import Workspace


class TensorPlaces:
    """Where in the moments the tensors of a flat gradient are."""

    def __init__(self, tensors: list[Sketched]) -> None:
        self.tensors = tensors


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
        self.norms: dict[str, Tensor] = {}  # of what is shown, where a change of it is looked for
        self.pending = False  # an exchange's result waits for the optimizer's step
        self._signs = torch.empty_like(self.moment.sums)

    @property
    def device(self) -> torch.device:
        """That of all tensors that are preconditioned."""
        return self.moment.device

    def places(self, spans: Sequence[Span]) -> list[Sketched]:
        """Return where in the moments the tensors of a flat gradient are, and where in its own sketch."""
        placed, at = [], 0
        for span in spans:
            placed.append(replace(self.moment.tensors[span.name], start=span.start, at=at))
            at += placed[-1].size
        return placed

    def begin_step(self, rules: Mapping[str, AdamRule], density: float, loss_scale: float | None) -> None:
        """Begin a step: read the optimizer's hyperparameters, draw signs."""
        if self.transactional:
            self.moment.save()
        self.loss_scale = loss_scale or 1.0
        self._signs.copy_(self.moment.begin_step(rules, density))  # in their place, which kernels know

    def sketch(self, tensors: Sequence[Sketched], grad: Tensor, out: Tensor, workspace: Workspace) -> None:
        """Write the sketch of a flat gradient; ``workspace``: of its layout, for those who sketch one after another."""
        sketch(grad, tensors, self._signs, out, workspace)

    def add_sketch(self, tensors: Sequence[Sketched], mean: Tensor) -> None:
        """Take the mean over the workers of a sketch."""
        self.moment.sums.index_copy_(0, self.moment.index_of(tensors), mean)

    def add_dense(self, spans: Sequence[Span], mean: Tensor) -> None:
        """Take the mean gradient of tensors that travel dense, and lie one after another."""
        index = self.moment.index_of([self.moment.tensors[span.name] for span in spans])
        self.moment.sums.index_copy_(0, index, mean.float())

    def update(self) -> None:
        """Make this step's preconditioner, once the means of all sketches are there."""
        self.moment.update(self.loss_scale)
        self.pending = True

    def write_dense(self, spans: Sequence[Span], out: Tensor) -> None:
        """Write the updates of tensors that travel dense."""
        out.copy_(self.moment.dense_updates([span.name for span in spans]))
        self.show(spans, out, give_norm)

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
        factor = multiply(result, self.moment.norm_of([span.name for span in spans]), self.loss_scale)
        self.shown.update((span.name, factor) for span in spans)
        dense = self.moment.dense
        if not dense or spans[0].name in dense:
            parts = [result[span.start : span.stop] for span in spans]
            norms = torch._foreach_norm(parts, 2, dtype=torch.promote_types(result.dtype, torch.float32))
            self.norms.update((span.name, norm) for span, norm in zip(spans, norms, strict=True))

    def state_dict(self) -> dict[str, dict[str, Tensor]]:
        """Return copies of the moments by parameter name."""
        return self.moment.state_dict()

    def load_state_dict(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Go on from the moments of a checkpoint; a ``clip`` that is not the checkpoint's holds."""
        self.moment.load_state_dict(state)
        if self.clip is not None and not math.isclose(float(self.moment.max_norm), self.clip, rel_tol=0.01):
            self.moment.max_norm.fill_(self.clip)

    def undo(self) -> None:
        """Make everything what it was before the last step."""
        self.moment.undo()
        self.pending = False
