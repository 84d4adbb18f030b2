"""Layers of language models, batched over all workers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from sparsync_lab.models.gpt import TiedOutput as Scores
from sparsync_lab.virtual.layers import product
from sparsync_lab.virtual.per_worker_params import PerWorkerParams


class BatchedEmbedding(nn.Module):
    def __init__(self, of: nn.Embedding, params: PerWorkerParams) -> None:
        super().__init__()
        self.weight = of.weight
        self._params = params

    def forward(self, words: Tensor) -> Tensor:
        self._params.check(words, 1, self, or_more=True)
        y: Tensor = _Lookup.apply(words, self._params.of(self.weight))  # type: ignore[no-untyped-call]
        return y


class BatchedTiedOutput(nn.Module):
    def __init__(self, of: Scores, params: PerWorkerParams) -> None:
        super().__init__()
        self.weight = of.weight
        self._params = params

    def forward(self, x: Tensor) -> Tensor:
        self._params.check(x, 2, self, or_more=True)
        return product(x, self._params.of(self.weight), None)


class BatchedLayerNorm(nn.Module):
    def __init__(self, of: nn.LayerNorm, params: PerWorkerParams) -> None:
        super().__init__()
        self.weight, self.bias, self.shape, self.eps = of.weight, of.bias, of.normalized_shape, of.eps
        self._params = params

    def forward(self, x: Tensor) -> Tensor:
        self._params.check(x, 1 + len(self.shape), self, or_more=True)
        normed = nn.functional.layer_norm(x, self.shape, None, None, self.eps)
        if self.weight is None:
            return normed
        bias = None if self.bias is None else self._params.of(self.bias)
        y: Tensor = _Scale.apply(normed, self._params.of(self.weight), bias)  # type: ignore[no-untyped-call]
        return y


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, words: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(words)
        ctx.shape = weight.shape
        return nn.functional.embedding(words, weight[0])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (words,) = ctx.saved_tensors
        workers, count, width = ctx.shape
        first = count * torch.arange(workers, device=words.device)  # every worker's rows come after another's
        rows = torch.unflatten(words, 0, (-1, workers)) + first.view(-1, *[1] * (words.dim() - 1))
        to_weight = grad.new_zeros(workers * count, width)
        to_weight.index_add_(0, rows.flatten(), grad.reshape(-1, width))
        return None, to_weight.view(ctx.shape)


class _Scale(torch.autograd.Function):
    """Multiply what is normed by a weight and add a bias."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight[0] if bias is None else torch.addcmul(bias[0], x, weight[0])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors

        def sums(of: Tensor) -> Tensor:
            own = torch.unflatten(of, 0, (-1, len(weight)))
            return own.sum([0, *range(2, own.dim() - weight.dim() + 1)])

        to_x = grad * weight[0] if ctx.needs_input_grad[0] else None
        to_weight = sums(grad * x) if ctx.needs_input_grad[1] else None
        to_bias = sums(grad) if ctx.needs_input_grad[2] else None
        return to_x, to_weight, to_bias
