"""The layers that can be batched over all workers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from sparsync_lab.models.gpt import TiedOutput
from sparsync_lab.models.masked_batch_norm import MaskedBatchNorm
from sparsync_lab.virtual import language_layers, layers, lstm
from sparsync_lab.virtual.per_worker_params import PerWorkerParams

SUPPORTED_LAYERS: dict[type[nn.Module], Callable[[Any, PerWorkerParams], nn.Module]] = {
    nn.Conv1d: layers.BatchedConv,
    nn.Conv2d: layers.BatchedConv,
    nn.Linear: layers.BatchedLinear,
    nn.BatchNorm2d: layers.BatchedBatchNorm2d,
    MaskedBatchNorm: layers.BatchedMaskedBatchNorm,
    nn.Embedding: language_layers.BatchedEmbedding,
    nn.LayerNorm: language_layers.BatchedLayerNorm,
    TiedOutput: language_layers.BatchedTiedOutput,
    nn.LSTM: lstm.BatchedLSTM,
}


def can_be_batched(model: nn.Module) -> bool:
    """Return whether ``VirtualWorkers(passes=BatchedPasses)`` takes the model.

    All that has parameters or buffers must be a plain ``Conv1d`` or ``Conv2d`` (zeros around it, no dilation),
    ``Linear``, ``BatchNorm2d`` (with weights, running statistics and a fixed momentum), ``MaskedBatchNorm``,
    ``LayerNorm``, ``Embedding`` (without ``padding_idx``, ``max_norm``, ``scale_grad_by_freq`` and ``sparse``), the
    output of ``GPT`` that is tied to one, or ``LSTM`` (``batch_first``, in one direction, without projections). What
    mixes examples in a way of its own cannot be seen from here, and must not be batched; a parameter that is used
    beside its layer is refused in the first step.
    """
    return find_unsupported(model) is None


def find_unsupported(model: nn.Module) -> str | None:
    """Return the first module that cannot be batched, in words."""
    for name, module in model.named_modules():
        why = _why_not(module)
        if why is not None:
            return f"{name or 'the model'!r} ({type(module).__name__}: {why})"
    return None


def _why_not(module: nn.Module) -> str | None:
    if type(module) not in SUPPORTED_LAYERS:
        if isinstance(module, _BatchNorm):
            return "another batch norm than BatchNorm2d and MaskedBatchNorm"
        if any(t is not None for t in (*module._parameters.values(), *module._buffers.values())):
            supported = ", ".join(kind.__name__ for kind in SUPPORTED_LAYERS)
            return f"parameters or buffers of a layer that is none of {supported}"
        return None
    known = {"weight", "bias"}
    if isinstance(module, nn.LSTM):
        known = {name for names in module._all_weights for name in names}
    if module._forward_hooks or module._forward_pre_hooks or not known >= module._parameters.keys():
        return "hooks, or parameters of its own"
    if isinstance(module, nn.Conv1d | nn.Conv2d):
        plain = set(module.dilation) == {1} and module.padding_mode == "zeros"
        if not plain or isinstance(module.padding, str):
            return "dilation, or padding by name or with other than zeros"
    if isinstance(module, nn.BatchNorm2d | MaskedBatchNorm) and not (
        module.affine and module.track_running_stats and isinstance(module.momentum, float)
    ):
        return "needs affine=True, track_running_stats=True and a float for momentum"
    if isinstance(module, nn.Embedding) and (
        module.padding_idx is not None or module.max_norm is not None or module.scale_grad_by_freq or module.sparse
    ):
        return "padding_idx, max_norm, scale_grad_by_freq or sparse"
    if isinstance(module, nn.LSTM) and (not module.batch_first or module.bidirectional or module.proj_size):
        return "needs batch_first=True, one direction and no projections"
    return None
