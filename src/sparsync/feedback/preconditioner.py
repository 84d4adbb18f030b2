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

    @property
    def dense_names(self) -> frozenset[str]:
        """Of the tensors that travel dense."""
        return frozenset(self.moment.dense)

    @property
    def good(self) -> Tensor:
        """0-d tensor: everything that came in in this step was finite, on all workers."""
        return self.moment.good

    def places(self, spans: Sequence[Span], sketches: Sequence[Span] = ()) -> list[Sketched]:
        """Return where in the moments the tensors of a flat gradient are.

        Args:
            sketches: of those tensors, and of others: where they are in the flat gradient's sketch.
        """
        at = {span.name: span.start for span in sketches}
        return [replace(self.moment.tensors[s.name], start=s.start, at=at.get(s.name, 0)) for s in spans]

    def begin_step(self, rules: Mapping[str, AdamRule], density: float, loss_scale: float | None) -> None:
        """Begin a step: read the optimizer's hyperparameters, draw signs."""
        if self.transactional:
            self.moment.save()
        self.loss_scale = loss_scale or 1.0
        self._signs.copy_(self.moment.begin_step(rules, density))  # in their place, which kernels know

    def sketch(self, tensors: Sequence[Sketched], grad: Tensor, out: Tensor, workspace: Workspace) -> None:
        """Write the sketch of a flat gradient; ``workspace``: of its layout, for those who sketch one after another."""
        sketch(grad, tensors, self._signs, out, workspace)

    def add_sketch(self, spans: Sequence[Span], mean: Tensor) -> None:
        """Take the mean over the workers of sketches, and of gradients that travel dense, one after another."""
        index = self.moment.index_of([self.moment.tensors[span.name] for span in spans])
        self.moment.sums.index_copy_(0, index, mean)

    def update(self) -> None:
        """Make this step's preconditioner, once the means of all sketches are there."""
        self.moment.update(self.loss_scale)
        self.pending = True

    def write_dense(self, places: Mapping[str, Tensor]) -> None:
        """Write the updates of tensors that travel dense; ``places``: where to, by parameter name, flat."""
        if not places:
            return
        names, outs = self.moment.dense, list(places.values())
        updates = self.moment.dense_updates(names)
        factor = give_norm(updates, self.moment.norm_of(names), self.loss_scale)
        sizes = [self.moment.tensors[name].size for name in names]
        parts = dict(zip(names, torch.split(updates, sizes), strict=True))
        torch._foreach_copy_(outs, [parts[name] for name in places])
        self._show(list(places), outs, factor)

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
        names = [span.name for span in spans]
        factor = multiply(result, self.moment.norm_of(names), self.loss_scale)
        # A change of the tensors that travel dense tells of all, and they are few.
        self._show(names, [] if self.moment.dense else [result[s.start : s.stop] for s in spans], factor)

    def _show(self, names: Sequence[str], results: list[Tensor], factor: Tensor) -> None:
        """Note what results were multiplied by, and the norms that they have now."""
        self.shown.update(dict.fromkeys(names, factor))
        if results:
            double = any(result.dtype == torch.float64 for result in results)
            norms = torch._foreach_norm(results, 2, dtype=torch.float64 if double else torch.float32)
            self.norms.update(zip(names, norms, strict=True))

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
