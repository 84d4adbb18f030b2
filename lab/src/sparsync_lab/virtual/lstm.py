"""LSTMs, batched over all workers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from sparsync_lab.virtual.layers import product
from sparsync_lab.virtual.per_worker_params import PerWorkerParams, rows_by_worker

State = tuple[Tensor, Tensor]


class BatchedLSTM(nn.Module):
    """An LSTM whose input is brought to the gates by a product of our own; from there on it is torch's LSTM, layer by
    layer.

    Torch's are given the identity as input weights: the gradient of what comes into them is that of their gates, and
    times the hidden states one step before it is that of the recurrent weights.
    """

    def __init__(self, of: nn.LSTM, params: PerWorkerParams) -> None:
        super().__init__()
        self.width, self.dropout = of.hidden_size, of.dropout
        self._parts = [[getattr(of, name) for name in names] for names in of._all_weights]
        self._cells = [_cell(self.width, of.get_parameter("weight_hh_l0")) for _ in self._parts]
        self._copied: list[Tensor | None] = [None for _ in self._parts]
        self._params = params

    def forward(self, x: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        self._params.check(x, 3, self)
        if state is None:
            zeros = x.new_zeros(len(self._parts), len(x), self.width)
            state = zeros, zeros
        ends: list[State] = []
        for layer in range(len(self._parts)):
            if layer and self.dropout:
                x = nn.functional.dropout(x, self.dropout)
            x, end = self._layer(layer, x, (state[0][layer : layer + 1], state[1][layer : layer + 1]))
            ends.append(end)
        return x, (torch.cat([h for h, _ in ends]), torch.cat([c for _, c in ends]))

    def _layer(self, layer: int, x: Tensor, state: State) -> tuple[Tensor, State]:
        input_weight, recurrent, *biases = (self._params.of(p) for p in self._parts[layer])
        cell = self._cells[layer]
        if self._copied[layer] is not recurrent:  # once in a pass
            with torch.no_grad():
                cell.get_parameter("weight_hh_l0").copy_(recurrent[0])
            self._copied[layer] = recurrent
        seen = [state[0].detach()]
        gates = product(x, input_weight, biases[0] + biases[1] if biases else None)
        watched: Tensor = _Recurrent.apply(gates, recurrent, seen)  # type: ignore[no-untyped-call]
        y, end = cell(watched, state)
        seen.append(y.detach())
        return y, end


class _Recurrent(torch.autograd.Function):
    """Pass the gates on; with their gradient and what the LSTM has returned, find that of the recurrent weights.

    ``seen``: hidden states, the first ``(1, B * P, width)`` and, by the time of the backward pass, those that came out.
    """

    @staticmethod
    def forward(ctx: Any, gates: Tensor, weight: Tensor, seen: list[Tensor]) -> Tensor:
        ctx.workers, ctx.seen = len(weight), seen
        return gates.view_as(gates)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        to_weight = None
        if ctx.needs_input_grad[1]:
            first, hidden = ctx.seen
            before = torch.cat([first.transpose(0, 1), hidden[:, :-1]], 1)
            to_weight = rows_by_worker(grad, ctx.workers).transpose(1, 2) @ rows_by_worker(before, ctx.workers)
        return grad, to_weight, None


def _cell(width: int, like: Tensor) -> nn.LSTM:
    """Return a layer whose gates are given; its recurrent weights are yet to be set."""
    made = nn.LSTM(4 * width, width, bias=False, batch_first=True, device="meta", dtype=like.dtype)  # draws nothing
    cell = made.to_empty(device=like.device).requires_grad_(False)
    cell.get_parameter("weight_ih_l0").copy_(torch.eye(4 * width, dtype=like.dtype, device=like.device))
    return cell
