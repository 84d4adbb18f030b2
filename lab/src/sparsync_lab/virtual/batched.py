"""Forward and backward of all workers in one batch."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from sparsync.simulate.sequential import Batch, Carried, Loss, SequentialPasses
from sparsync_lab.models.masked_batch_norm import MaskedBatchNorm
from sparsync_lab.virtual import layers
from sparsync_lab.virtual.per_worker_params import PerWorkerParams
from sparsync_lab.virtual.supported_layers import SUPPORTED_LAYERS, find_unsupported


class BatchedPasses(SequentialPasses):
    """One pass over the examples of all workers, with gradients and batch statistics for each of them.

    A GPU that is hardly busy with one worker's batch is busy with all of them. The gradients are those of
    ``SequentialPasses`` but for rounding; what draws random numbers, such as dropout, draws others. On a GPU an
    embedding's gradient is summed in an open order. There is no autocast. ``models`` is rank 0's for every worker.

    Args:
        model, parameters, views, graph: as ``SequentialPasses`` takes them; see ``can_be_batched``.
        loss_fn: must be a mean over examples. It is given the examples of all workers at once, and carries all on.
        carried: what a worker starts from: tensors with a row for each of its examples.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Loss,
        parameters: Sequence[Tensor],
        views: Sequence[Sequence[Tensor]],
        carried: Carried,
        graph: bool,
        streams: int = 1,
    ) -> None:
        obstacle = find_unsupported(model)
        if obstacle is not None:
            raise ValueError(f"batched passes cannot take {obstacle}; sequential passes do")
        in_eval = [name for name, module in model.named_modules() if not module.training]
        if in_eval:
            raise ValueError(f"batched passes need the model in training mode, and {in_eval[0]!r} is not")
        if not all(tensor.dim() and len(tensor) == len(carried[0]) for tensor in carried):
            shapes = [tuple(tensor.shape) for tensor in carried]
            raise ValueError(f"batched passes: what is carried must have a row for each example, got {shapes}")
        super().__init__(model, loss_fn, parameters, views[:1], carried, graph, 1)  # as if there were one worker
        workers = len(views)
        self.models = [model] * workers
        self._carried = tuple(tensor.repeat_interleave(workers, 0) for tensor in self.first)
        owned = [torch.unflatten(tensor, 0, (-1, workers)).unbind(1) for tensor in self._carried]  # these are views
        self.carried = [tuple(own[rank] for own in owned) for rank in range(workers)]
        self._places = [view for row in views for view in row]
        modules = list(model.modules())
        norms = [module for module in modules if isinstance(module, nn.BatchNorm2d | MaskedBatchNorm)]
        affine = dict.fromkeys(p for norm in norms for p in norm.parameters())
        self._params = PerWorkerParams(workers, model.parameters(), affine)
        swapped: dict[int, Any] = {
            id(m): SUPPORTED_LAYERS[type(m)](m, self._params) for m in modules if type(m) in SUPPORTED_LAYERS
        }
        self._norms: list[tuple[Any, layers.BatchedBatchNorm2d | layers.BatchedMaskedBatchNorm]] = [
            (norm, swapped[id(norm)]) for norm in norms
        ]
        self._model = copy.deepcopy(model, dict(swapped))
        self._names = {id(p): name for name, p in model.named_parameters()}
        self._checked_uses = False

    def _all(self) -> None:
        """Run a pass of all workers."""
        batch = self.inputs[0]
        self._params.refresh(len(batch[0]))
        self._statistics(back=False)
        loss, after = self.loss_fn(self._model, batch, self._carried)
        shapes = [[tuple(tensor.shape) for tensor in given] for given in ((loss, *after), self._carried)]
        if shapes[0] != [(), *shapes[1]]:
            raise ValueError(
                f"batched passes: loss_fn must return a scalar and tensors of {shapes[1]}, which are carried on, got "
                f"{shapes[0]}"
            )
        if not self._checked_uses:
            self._check_uses(loss)
        workers = len(self.models)
        params = [self._params.of(p) for p in self.parameters]
        grads = torch.autograd.grad(loss, params, torch.full_like(loss, workers))  # each worker's loss is its own mean
        with torch.no_grad():
            torch._foreach_copy_(self._places, [grad[rank] for rank in range(workers) for grad in grads])
            self.losses.copy_(loss)
            for tensor, value in zip(self._carried, after, strict=True):
                tensor.copy_(value)
        self._statistics(back=True)

    def _check_uses(self, loss: Tensor) -> None:
        """Raise, in the first step, if a parameter is used outside its layer, where it has no gradient by worker."""
        todo, seen = [loss.grad_fn], set()
        while todo:
            node = todo.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            name = self._names.get(id(getattr(node, "variable", None)))
            if name is not None:
                raise ValueError(
                    f"batched passes: {name!r} is used beside its layer, as tied weights may be; "
                    "sequential passes take it"
                )
            todo += [following for following, _ in node.next_functions]
        self._checked_uses = True

    @torch.no_grad()
    def _statistics(self, back: bool) -> None:
        """Copy rank 0's running statistics from the model to the batched layers, or back."""
        if not self._norms:
            return
        outside = [t for norm, _ in self._norms for t in (norm.running_mean, norm.running_var)]
        inside = [t for _, own in self._norms for t in (own.mean, own.variance)]
        torch._foreach_copy_(*((outside, inside) if back else (inside, outside)))
        if back:
            counts = [(norm.num_batches_tracked, own.uses) for norm, own in self._norms]
            torch._foreach_add_([count for count, _ in counts], [uses for _, uses in counts])
        for _, own in self._norms:
            own.uses = 0

    def _gather(self, batches: Sequence[Batch]) -> list[Batch]:
        return [tuple(torch.stack(tensors, 1).flatten(0, 1) for tensors in self._check_shapes(batches))]

    def _fill(self, batches: Sequence[Batch]) -> None:
        tensors = self._check_shapes(batches)
        workers = len(self.models)
        for place, (static, new) in enumerate(zip(self.inputs[0], tensors, strict=True)):
            shaped = torch.unflatten(static, 0, (-1, workers))
            self._match(place, shaped[:, 0], new[0])
            torch.stack(new, 1, out=shaped)

    def _check_shapes(self, batches: Sequence[Batch]) -> list[list[Tensor]]:
        """Check that all batches have one shape; return the tensors of all workers by their place in a batch."""
        for rank, batch in enumerate(batches):
            ours, theirs = ([(tuple(t.shape), t.dtype) for t in one] for one in (batches[0], batch))
            if ours != theirs or not all(t.dim() and len(t) == len(batch[0]) for t in batch):
                raise ValueError(
                    f"batched passes: batches must be of one shape, with as many examples in each tensor, got {ours} "
                    f"for rank 0 and {theirs} for rank {rank}"
                )
        if self.first and len(self.first[0]) != len(batches[0][0]):
            raise ValueError(
                f"batched passes: a batch must have {len(self.first[0])} examples, as what is carried has rows, got "
                f"{len(batches[0][0])}"
            )
        device = self.losses.device
        return [[tensor.to(device) for tensor in tensors] for tensors in zip(*batches, strict=True)]
