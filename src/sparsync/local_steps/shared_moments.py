"""Adam's second moments in local steps: each worker's own, until a round makes them the mean over all workers.

A worker's own second moment is that of few examples, the gradient that it divides among them; steps then are as large
as noise is. Of a matrix the means of rows and columns are shared, a few numbers, and their outer product over the mean
is what all go on with; a vector is shared whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from sparsync.feedback import is_adam


def means_of(moment: Tensor) -> list[Tensor]:
    """Return the means of a moment's rows and columns; of a vector the moment itself."""
    if moment.dim() < 2 or not moment.numel():
        return [moment.reshape(-1)]
    matrix = moment.flatten(1)
    return [matrix.mean(1), matrix.mean(0)]


def from_means(parts: Sequence[Tensor], shape: Sequence[int]) -> Tensor:
    """Return the moment that such means stand for."""
    if len(parts) == 1:
        return parts[0].view(*shape)
    rows, columns = parts
    return (torch.outer(rows, columns) / rows.mean().clamp(min=torch.finfo(rows.dtype).tiny)).view(*shape)


def numel_of(tensors: Mapping[str, Tensor]) -> int:
    """Return how many numbers the means of such tensors' moments are."""
    return sum(
        t.shape[0] + t.numel() // t.shape[0] if t.dim() > 1 and t.numel() else t.numel() for t in tensors.values()
    )


class SharedMoments:
    """The second moments of a fragment's parameters, in a flat buffer that is summed over the workers.

    Args:
        optimizer: torch's Adam or AdamW, of this worker.
        own: its parameters, by name.
    """

    def __init__(self, optimizer: Optimizer, own: Mapping[str, Tensor]) -> None:
        if not is_adam(optimizer):
            raise ValueError(
                f"optimizer must be torch's Adam or AdamW, got {type(optimizer).__name__}; or leave it out"
            )
        if any(group.get("amsgrad") for group in optimizer.param_groups):
            raise ValueError(
                "optimizer must be without amsgrad=True, which steps by the largest moments, not the shared"
            )
        known = {id(p) for group in optimizer.param_groups for p in group["params"]}
        if not all(id(p) in known for p in own.values()):
            raise ValueError("optimizer must be of this model: it lacks parameters that are trained")
        self.optimizer, self.parameters = optimizer, list(own.values())
        device = self.parameters[0].device
        self._places = [[part.numel() for part in means_of(p.detach())] for p in self.parameters]
        self.flat = torch.zeros(numel_of(own) + 1, dtype=torch.float32, device=device)  # the last counts workers
        self._parts = torch.split(self.flat[:-1], [numel for places in self._places for numel in places])

    def gather(self, miss: bool) -> None:
        """Fill the buffer from this worker's moments; with nothing, if it misses the round or they are not finite."""
        self.flat.zero_()
        if not miss:
            moments = (self.optimizer.state[p].get("exp_avg_sq", torch.zeros_like(p)) for p in self.parameters)
            parts = [part for moment in moments for part in means_of(moment.float())]
            torch._foreach_copy_(list(self._parts), parts)
            self.flat[-1] = 1
            if not bool(self.flat.isfinite().all()):  # they would be everybody's
                self.flat.zero_()

    def give(self) -> None:
        """Make this worker's moments those in the buffer, which holds the sum over the workers; if nobody had any to
        give, they stay, but for what is not finite."""
        workers, parts = self.flat[-1].item(), iter(self._parts)
        self.flat.div_(max(1, workers))
        for parameter, places in zip(self.parameters, self._places, strict=True):
            means = [next(parts) for _ in places]
            state = self.optimizer.state[parameter]
            if "exp_avg_sq" in state:
                if workers:
                    state["exp_avg_sq"].copy_(from_means(means, parameter.shape))
                for kept in (state["exp_avg"], state["exp_avg_sq"]):  # of a worker whose weights were not finite
                    kept.nan_to_num_(0.0, 0.0, 0.0)
