"""What somebody does to gradients between backward and the optimizer's step: recognised, undone and learned."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from sparsync.feedback.preconditioner import PROBED, Preconditioner
from sparsync.feedback.residual import Feedback
from sparsync.kernels.learn_clip import Clipping, find_undo, learn_clip, recognise
from sparsync.layout import Parameter
from sparsync.workspace import Workspace

CUT_APART = (
    "gradients were changed between backward and optimizer.step(), not all by the same factor, as by clip_grad_value_ "
    "or by clip_grad_norm_ on some of the parameters: they hold the update that was exchanged, and what is cut off it "
    "is lost, so that training may stall; use attach(..., clip=max_norm), or one clip_grad_norm_ over all parameters"
)


class UsersClipping:
    """Looks what became of the gradients that show an update, before it is applied.

    A loss scaler divides by its scale; one that we do not know of, by a power of 2. What is below 1 beside that is the
    user's own clipping: a cut behind the residual would destroy what was taken out of it, so it is undone, and from the
    next step on its ``max_norm`` acts before the velocity. That is so for one factor on all gradients. Whatever else
    was done to them stays, and is told once; on a GPU some steps later, as nobody waits for it.

    Args:
        preconditioner: which has shown the update.
        parameters: of the model, by name.
        feedbacks: whose velocities follow; several of virtual workers.
        tell: warns the user.
    """

    def __init__(
        self,
        preconditioner: Preconditioner,
        parameters: Mapping[str, Parameter],
        feedbacks: Sequence[Feedback],
        tell: Callable[[str], None],
    ) -> None:
        self._preconditioner, self._parameters, self._feedbacks = preconditioner, parameters, feedbacks
        self._workspace, self._first, self._tell = Workspace(), True, tell
        device = preconditioner.device
        self._apart = torch.zeros((), dtype=torch.float32, device=device)
        self._heard = self._apart.cpu().pin_memory() if device.type == "cuda" else self._apart
        self._copied: torch.cuda.Event | None = None
        self._told = False

    def undo_factor(self, grads: Mapping[str, Tensor], scale_waits: bool) -> Tensor:
        """Return by what to multiply all gradients, so that a factor that somebody put on them is undone; learn from it
        how they are clipped.

        Args:
            grads: by parameter name, as they are now.
            scale_waits: the loss scaler leaves dividing to the step.
        """
        preconditioner, moment = self._preconditioner, self._preconditioner.moment
        probes = [self._probe(name, grad) for name, grad in grads.items()]
        numbers = tuple(moment.tensors[name].number for name in grads)
        scale = 1.0 if scale_waits else preconditioner.loss_scale
        clipping = Clipping(preconditioner.norms, moment.vectors.summary, moment.max_norm, self._apart, scale)
        if self._first:
            self._first = False
            undo = self._learn_first(probes, numbers, clipping)
        else:
            undo = find_undo(probes, numbers, clipping, self._workspace)
        self._tell_of_parts()
        return undo

    def _probe(self, name: str, grad: Tensor) -> Tensor:
        """Return what is looked at: all of a gradient that travels dense, otherwise its first entries in memory."""
        own = self._parameters[name]
        if name in self._preconditioner.dense_names:
            return grad
        if any(n > 1 and a != b for n, a, b in zip(own.shape, grad.stride(), own.stride, strict=True)):
            grad = torch.empty_strided(own.shape, own.stride, dtype=grad.dtype, device=grad.device).copy_(grad)
        return grad.as_strided((min(own.numel, PROBED),), (1,))

    def _learn_first(self, grads: Sequence[Tensor], numbers: tuple[int, ...], clipping: Clipping) -> Tensor:
        """Do as ``undo_factor`` after the first exchange: its gradient came in before anybody knew, and the second
        moment keeps it for long."""
        moment = self._preconditioner.moment
        factor = recognise(grads, numbers, clipping)
        cut = learn_clip(factor, clipping)
        fresh = torch.where(cut & (moment.steps.max() == 1), factor * clipping.scale / moment.clip, 1.0)
        moment.scale(fresh)
        for feedback in self._feedbacks:
            feedback.scale_velocities(fresh)
        if moment.preconditioning.sgd:  # whose update is as large as the gradient: it is made smaller afterwards
            for feedback in self._feedbacks:
                feedback.scale_residuals(fresh, but=self._preconditioner.dense_names)
            factor = factor / fresh
        return 1 / factor

    def _tell_of_parts(self) -> None:
        """Tell once that gradients were cut apart, when the device has said so: nobody waits for it."""
        if self._told or not (self._copied is None or self._copied.query()):  # type: ignore[no-untyped-call]
            return
        if self._heard:
            self._told = True
            self._tell(CUT_APART)
        elif self._heard is not self._apart:
            self._heard.copy_(self._apart, non_blocking=True)
            self._copied = self._copied or torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record()
