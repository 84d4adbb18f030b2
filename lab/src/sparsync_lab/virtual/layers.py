"""Batched layers: one set of weights, and a gradient of them for every worker."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from sparsync.kernels.device import usable_on
from sparsync_lab.models import masked_batch_norm
from sparsync_lab.virtual.per_worker_params import PerWorkerParams, rows_by_worker

Sizes = tuple[int, ...]  # one for each dimension of an image
SMALL = 32  # channels of a convolution; with more, cuDNN is faster


class BatchedConv(nn.Module):
    """A convolution in one or two dimensions."""

    def __init__(self, of: nn.Conv1d | nn.Conv2d, params: PerWorkerParams) -> None:
        super().__init__()
        self.weight, self.bias, self._how = of.weight, of.bias, (of.stride, of.padding, of.groups)
        self._params = params

    def forward(self, x: Tensor) -> Tensor:
        self._params.check(x, self.weight.dim(), self)
        bias = None if self.bias is None else self._params.of(self.bias)
        y: Tensor = _Convolution.apply(x, self._params.of(self.weight), bias, *self._how)  # type: ignore[no-untyped-call]
        return y


class BatchedLinear(nn.Module):
    def __init__(self, of: nn.Linear, params: PerWorkerParams) -> None:
        super().__init__()
        self.weight, self.bias = of.weight, of.bias
        self._params = params

    def forward(self, x: Tensor) -> Tensor:
        self._params.check(x, 2, self, or_more=True)
        bias = None if self.bias is None else self._params.of(self.bias)
        return product(x, self._params.of(self.weight), bias)


class BatchedBatchNorm2d(nn.Module):
    """Batch norm with the statistics of every worker's own examples.

    Of the running statistics only rank 0's, the first C, are ever read: ``mean`` and ``variance`` are views of them.
    """

    def __init__(self, of: nn.BatchNorm2d, params: PerWorkerParams) -> None:
        super().__init__()
        assert of.running_mean is not None
        assert of.running_var is not None
        self.weight, self.bias, self.momentum, self.eps = of.weight, of.bias, of.momentum, of.eps
        self._means, self._variances = (t.repeat(params.workers) for t in (of.running_mean, of.running_var))
        self.mean, self.variance = self._means[: of.num_features], self._variances[: of.num_features]
        self.uses = 0  # since this was last set to 0
        self._params = params

    def forward(self, x: Tensor) -> Tensor:
        self._params.check(x, 4, self)
        self.uses += 1
        weight, bias = (self._params.of(p).flatten() for p in (self.weight, self.bias))
        beside = x.reshape(-1, len(weight), *x.shape[2:])
        assert self.momentum is not None
        y = nn.functional.batch_norm(beside, self._means, self._variances, weight, bias, True, self.momentum, self.eps)
        return y.reshape(x.shape)


class BatchedMaskedBatchNorm(nn.Module):
    """The same of real frames alone; ``mean`` and ``variance`` are rank 0's."""

    def __init__(self, of: masked_batch_norm.MaskedBatchNorm, params: PerWorkerParams) -> None:
        super().__init__()
        assert of.running_mean is not None
        assert of.running_var is not None
        self.weight, self.bias, self.momentum, self.eps = of.weight, of.bias, of.momentum, of.eps
        self.mean, self.variance = of.running_mean.clone(), of.running_var.clone()
        self.uses = 0
        self._params = params

    def forward(self, x: Tensor, real: Tensor) -> Tensor:
        self._params.check(x, 3, self, or_more=True)
        self.uses += 1
        own, seen = (torch.unflatten(t, 0, (-1, self._params.workers)) for t in (x, real))
        mean, variance, unbiased = masked_batch_norm.masked_statistics(own, seen)
        masked_batch_norm.update_running_statistics((self.mean, self.variance), (mean[0], unbiased[0]), self.momentum)
        weight, bias = (self._params.of(p) for p in (self.weight, self.bias))
        return masked_batch_norm.masked_norm(own, seen, mean, variance + self.eps, weight, bias).flatten(0, 1)


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, stride: Sizes, padding: Sizes, groups: int
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.how = stride, padding, groups
        ctx.small = bias is None and takes_small(x, weight[0], stride, padding, groups)
        if ctx.small:
            from sparsync_lab.virtual import convolve

            return convolve.convolve(x.contiguous(), weight[0], stride[0])
        plain: Any = nn.functional.conv1d if x.dim() == 3 else nn.functional.conv2d
        y: Tensor = plain(x, weight[0], None if bias is None else bias[0], stride, padding, groups=groups)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        to_x = to_weight = to_bias = None
        stride = ctx.how[0][0]
        if ctx.small:
            from sparsync_lab.virtual import convolve

            x, grad = x.contiguous(), grad.contiguous()
        if ctx.needs_input_grad[0]:
            own = ctx.small and stride == 1
            to_x = convolve.to_input(grad, weight[0]) if own else _backward(x, grad, weight[0], *ctx.how, wanted=0)
        if ctx.needs_input_grad[1] and ctx.small:
            to_weight = convolve.to_weights(x, grad, len(weight), stride)
        elif ctx.needs_input_grad[1]:
            to_weight = weight_gradients(x, grad, weight.shape, *ctx.how)
        if ctx.needs_input_grad[2]:
            to_bias = torch.unflatten(grad, 0, (-1, len(weight))).sum([0, *range(3, grad.dim() + 1)])
        return to_x, to_weight, to_bias, None, None, None


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return nn.functional.linear(x, weight[0], None if bias is None else bias[0])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        own = rows_by_worker(grad, len(weight))
        to_x = grad @ weight[0] if ctx.needs_input_grad[0] else None
        to_weight = own.transpose(1, 2) @ rows_by_worker(x, len(weight)) if ctx.needs_input_grad[1] else None
        to_bias = own.sum(1) if ctx.needs_input_grad[2] else None
        return to_x, to_weight, to_bias


def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return ``x`` through a linear layer, with a gradient of its weights for every worker.

    Args:
        x: ``(B * P, ..., inputs)``.
        weight, bias: views by worker of ``(outputs, inputs)`` and ``(outputs,)``.
    """
    y: Tensor = _Product.apply(x, weight, bias)  # type: ignore[no-untyped-call]
    return y


def takes_small(x: Tensor, weight: Tensor, stride: Sizes, padding: Sizes, groups: int) -> bool:
    """Return whether a convolution is for our own kernels: 3 x 3, of squares, with few channels, on a GPU in TF32."""
    if weight.shape[2:] != (3, 3) or max(weight.shape[:2]) > SMALL or x.shape[2] != x.shape[3]:
        return False
    plain = stride in ((1, 1), (2, 2)) and padding == (1, 1) and groups == 1
    fits = x.dtype == weight.dtype == torch.float32 and weight.is_contiguous() and x.numel() < 2**31
    return plain and fits and usable_on(x.device) and (not x.is_cuda or _in_tf32())


def _in_tf32() -> bool:
    """Return whether cuDNN's convolutions use TF32; asked by kind, as its ``allow_tf32`` raises where kinds differ."""
    return bool(torch.backends.cudnn.conv.fp32_precision == "tf32")  # type: ignore[attr-defined]


def weight_gradients(
    x: Tensor, grad: Tensor, shape: torch.Size, stride: Sizes, padding: Sizes, groups: int = 1
) -> Tensor:
    """Return a convolution's gradient for every worker, ``shape``: that of one convolution with groups for each of
    them.

    Args:
        x: what went in, ``(B * P, inputs, ...)``.
        grad: of what came out, ``(B * P, outputs, ...)``.
        shape: ``(P, outputs, inputs / groups, ...)``.
    """
    workers = shape[0]
    beside = [t.reshape(-1, workers * t.shape[1], *t.shape[2:]) for t in (x, grad)]
    weight = x.new_empty(workers * shape[1], *shape[2:])  # of which only the shape counts
    return _backward(beside[0], beside[1], weight, stride, padding, workers * groups, wanted=1).view(shape)


def _backward(
    x: Tensor, grad: Tensor, weight: Tensor, stride: Sizes, padding: Sizes, groups: int, *, wanted: int
) -> Tensor:
    """Return one of a convolution's gradients: 0, of the input; 1, of the weights."""
    ones, zeros = [1] * len(stride), [0] * len(stride)
    found: tuple[Tensor, ...] = torch.ops.aten.convolution_backward(
        grad, x, weight, None, stride, padding, ones, False, zeros, groups, (wanted == 0, wanted == 1, False)
    )
    return found[wanted]
