"""Dense AdamW whose second moment is row x column, as Adafactor's: the control of preconditioned feedback."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from sparsync.feedback import Preconditioning

FLOOR, RISE = Preconditioning.floor, Preconditioning.rise


class FactoredAdamW(torch.optim.Optimizer):
    """AdamW with v = r cᵀ / mean(r) for matrices, of the exponential means r and c of the squared gradient's rows and
    columns, none of them below a share of their mean; tensors of one dimension have their exact v. A matrix's beta2
    is at most 1 - t^-rise in step t.

    A tensor of several dimensions is a matrix of its first dimension x the rest.

    Args:
        parameters, lr, betas, eps, weight_decay: as ``torch.optim.AdamW`` takes them.
        floor, rise: least r and c, as a share of their mean, and how fast beta2 rises, if at all; preconditioned
            feedback's own.
    """

    def __init__(
        self,
        parameters: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        floor: float = FLOOR,
        rise: float | None = RISE,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "floor": floor, "rise": rise}
        super().__init__(parameters, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)
        return loss

    def _update(self, parameter: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        state, (beta1, beta2) = self.state[parameter], group["betas"]
        if not state:
            state["step"], state["exp_avg"] = 0, torch.zeros_like(grad)
            shapes = ((len(grad), 1), (1, grad[0].numel())) if grad.dim() > 1 else (grad.shape,)
            state["moments"] = [grad.new_zeros(shape) for shape in shapes]
        state["step"] += 1
        state["exp_avg"].lerp_(grad, 1 - beta1)
        squares, moments = grad.square(), state["moments"]
        correction = 1 - beta2 ** state["step"]
        if len(moments) == 2 and group["rise"] is not None:
            beta2, correction = min(beta2, 1 - state["step"] ** -group["rise"]), 1.0  # 0 at first: no bias
        if len(moments) == 2:
            squares = squares.flatten(1)
            moments[0].lerp_(squares.mean(1, keepdim=True), 1 - beta2)
            moments[1].lerp_(squares.mean(0, keepdim=True), 1 - beta2)
            mean = moments[0].mean()  # of the columns, too
            rows, columns = (moment.clamp(min=group["floor"] * mean) for moment in moments)
            v = (rows / mean.clamp(min=torch.finfo(grad.dtype).tiny) * columns).view_as(grad)
        else:
            v = moments[0].lerp_(squares, 1 - beta2)
        rooted = (v / correction).sqrt_().add_(group["eps"])
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.addcdiv_(state["exp_avg"], rooted, value=-group["lr"] / (1 - beta1 ** state["step"]))
