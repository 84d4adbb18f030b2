"""Forward and backward of all workers: one after another, or replayed from a CUDA graph."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from sparsync.simulate.graphs import WARM_UPS, new_stream, side_by_side

# One worker's mini-batch, and what it carries on from one step to the next; perhaps nothing, ().
Batch = tuple[Tensor, ...]
Carried = tuple[Tensor, ...]
Loss = Callable[[nn.Module, Batch, Carried], tuple[Tensor, Carried]]


class SequentialPasses:
    """P forward and backward passes over one set of weights.

    Every worker has its own copy of the model's buffers and the same parameters. As with DDP, all start a step from the
    buffers of rank 0.

    Args:
        model: rank 0's; in training mode.
        loss_fn: ``(model, batch, carried) -> (loss, carried)``.
        parameters: those that are trained ...
        views: ... and where their gradients go, one list a worker.
        carried: what every worker starts from.
        graph: replay a CUDA graph. Batches must then always have the same shapes.
        streams: of the GPU, in the graph: as many workers run side by side.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Loss,
        parameters: Sequence[Tensor],
        views: Sequence[Sequence[Tensor]],
        carried: Carried,
        graph: bool,
        streams: int,
    ) -> None:
        self.loss_fn, self.parameters, self.views = loss_fn, list(parameters), [list(row) for row in views]
        shared = {id(p): p for p in model.parameters()}
        self.models = [model] + [copy.deepcopy(model, dict(shared)) for _ in views[1:]]
        device = self.parameters[0].device
        self.first = tuple(tensor.detach().to(device) for tensor in carried)
        self.carried: list[Carried] = [tuple(tensor.clone() for tensor in self.first) for _ in views]
        self.losses = torch.zeros(len(views), dtype=torch.float32, device=device)
        self.inputs: list[Batch] = []
        self._wants_graph = graph
        self._graph: torch.cuda.CUDAGraph | None = None
        self._streams = [new_stream() for _ in range(streams)] if graph and streams > 1 else []

    def run(self, batches: Sequence[Batch]) -> Tensor:
        """Fill every worker's gradients from its batch; the workers' losses, which the next call overwrites."""
        if len(batches) != len(self.models):
            raise ValueError(f"batches must be {len(self.models)}, one a worker, got {len(batches)}")
        if not self._wants_graph:
            self.inputs = self._gather(batches)
            self._all()
            self.inputs = []
            return self.losses
        if self._graph is None:
            self.inputs = [tuple(t.to(self.losses.device, copy=True) for t in b) for b in self._gather(batches)]
            self._graph = self._capture()
        self._fill(batches)
        self._graph.replay()
        return self.losses

    def carry(self, states: Sequence[Carried]) -> None:
        """Set what every worker carries on."""
        for own, new in zip(self.carried, states, strict=True):
            shapes = [[tuple(tensor.shape) for tensor in state] for state in (own, new)]
            if shapes[0] != shapes[1]:
                raise ValueError(f"what is carried must have the shapes {shapes[0]}, got {shapes[1]}")
            for tensor, value in zip(own, new, strict=True):
                tensor.copy_(value)

    def _gather(self, batches: Sequence[Batch]) -> list[Batch]:
        """Return what goes into the passes."""
        return [tuple(batch) for batch in batches]

    def _all(self) -> None:
        """Make a pass of every worker; on the current stream, or forked from it and joined again."""
        self._broadcast()
        side_by_side([partial(self._one, rank) for rank in range(len(self.models))], self._streams)

    def _one(self, rank: int) -> None:
        loss, after = self.loss_fn(self.models[rank], self.inputs[rank], self.carried[rank])
        grads = torch.autograd.grad(loss, self.parameters)
        with torch.no_grad():
            torch._foreach_copy_(self.views[rank], list(grads))
            self.losses[rank].copy_(loss)
            for tensor, value in zip(self.carried[rank], after, strict=True):
                tensor.copy_(value)

    @torch.no_grad()
    def _broadcast(self) -> None:
        for kind in {b.dtype for b in self.models[0].buffers()}:  # of one dtype, they are copied by few kernels
            first = [b for b in self.models[0].buffers() if b.dtype == kind]
            for model in self.models[1:]:
                torch._foreach_copy_([b for b in model.buffers() if b.dtype == kind], first)

    # ---- the graph ------------------------------------------------------------------------------------------------

    def _capture(self) -> torch.cuda.CUDAGraph:
        """Capture a pass of all workers; the passes that warm up leave nothing behind."""
        before = [tensor.clone() for tensor in self._written()]
        random = torch.cuda.get_rng_state(self.losses.device)
        side = new_stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_UPS):
                self._all()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._all()
        with torch.no_grad():
            for tensor, value in zip(self._written(), before, strict=True):
                tensor.copy_(value)
        torch.cuda.set_rng_state(random, self.losses.device)
        return graph

    def _written(self) -> list[Tensor]:
        """Return what a pass leaves behind beside gradients and losses."""
        return [*self.models[0].buffers(), *(tensor for state in self.carried for tensor in state)]

    def _fill(self, batches: Sequence[Batch]) -> None:
        for place, (static, new) in enumerate(
            zip(zip(*self.inputs, strict=True), zip(*batches, strict=True), strict=True)
        ):
            for a, b in zip(static, new, strict=True):
                self._match(place, a, b)
            torch._foreach_copy_(list(static), list(new))

    def _match(self, place: int, captured: Tensor, new: Tensor) -> None:
        if captured.shape != new.shape or captured.dtype != new.dtype:
            raise ValueError(
                f"tensor {place} of a batch must be {tuple(captured.shape)} {captured.dtype}, as in the captured "
                f"graph, got {tuple(new.shape)} {new.dtype}; graph=False takes any"
            )
