"""What is kept: the residual of every parameter, by name, through bucket rebuilds, rollbacks and checkpoints.

Residuals live in flat arenas that match how gradients arrive (a bucket, or the whole model), because adding, selecting
and clearing are one pass over memory. The name decides whose residual it is: when DDP regroups its buckets, new arenas
are filled from the old ones, name by name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sparsync.kernels import Memory
from sparsync.layout import Parameter, Span
from sparsync.sparse import SparseGrad


@dataclass
class Arena:
    """One flat residual; with two buffers, the first is committed and the second is written by the step under way."""

    spans: tuple[Span, ...]
    buffers: list[Tensor]
    written: bool = False

    @property
    def committed(self) -> Tensor:
        return self.buffers[0]

    @property
    def working(self) -> Tensor:
        return self.buffers[-1]

    def commit(self) -> None:
        if self.written:
            self.buffers.reverse()
            self.written = False

    def rollback(self) -> None:
        self.written = False


class Feedback:
    """The residuals of one model on one rank.

    Args:
        parameters: all parameters that may keep a residual.
        transactional: keep two buffers, so that a step can be undone.
    """

    def __init__(self, parameters: Iterable[Parameter], transactional: bool = False) -> None:
        self.parameters = {parameter.name: parameter for parameter in parameters}
        self.transactional = transactional
        self._arenas: dict[str, Arena] = {}
        self._home: dict[str, tuple[Arena, Span]] = {}
        self._waiting: dict[str, Tensor] = {}  # loaded, and not asked for yet: flat, in memory order

    def memory(self, key: str, spans: Sequence[Span], numel: int, device: torch.device) -> Memory:
        """The memory of the flat gradient ``key``, whose parameters lie at ``spans``."""
        spans = tuple(spans)
        if key not in self._arenas or self._arenas[key].spans != spans:
            self._arrange(key, spans, numel, device)
        arena = self._arenas[key]
        arena.written = True
        return Memory(arena.committed, arena.working)

    def come_home(self, key: str, rejected: SparseGrad) -> None:
        """Entries that this rank sent, or dropped for others, go back into its residual."""
        if key in self._arenas:  # otherwise nothing was taken out of it either
            rejected.add_to(self._arenas[key].working)

    def commit(self) -> None:
        """What the last step wrote is now the residual."""
        for arena in self._arenas.values():
            arena.commit()

    def rollback(self) -> None:
        """The last step never happened."""
        assert self.transactional
        for arena in self._arenas.values():
            arena.rollback()

    def rescale(self, ratios: Mapping[str, float]) -> None:
        """Multiply the committed residual of each parameter named in ``ratios``."""
        for name, ratio in ratios.items():
            if name in self._home:
                self._view(name).mul_(ratio)
            elif name in self._waiting:
                self._waiting[name].mul_(ratio)

    def residual(self, name: str, newest: bool = False) -> Tensor | None:
        """The residual of a parameter in logical order and shape, or ``None`` if it never had one.

        ``newest``: with what the last step did to it, though it may yet be undone.
        """
        parameter = self.parameters[name]
        flat = self._view(name, newest) if name in self._home else self._waiting.get(name)
        return None if flat is None else flat.as_strided(parameter.shape, parameter.stride)

    def state_dict(self) -> dict[str, Tensor]:
        """Copies of the committed residuals by parameter name, in logical order."""
        kept = {name: self.residual(name) for name in self.parameters}
        return {name: tensor.detach().clone().contiguous() for name, tensor in kept.items() if tensor is not None}

    def load_state_dict(self, residuals: Mapping[str, Tensor]) -> None:
        """Replace all residuals; a parameter that is not in ``residuals`` starts from zero."""
        for name, tensor in residuals.items():
            if name not in self.parameters:
                raise ValueError(f"the checkpoint holds a residual for {name!r}, which this model does not have")
            if tuple(tensor.shape) != self.parameters[name].shape:
                raise ValueError(
                    f"the checkpoint's residual for {name!r} has shape {tuple(tensor.shape)}, "
                    f"the model's parameter {self.parameters[name].shape}"
                )
        self._arenas.clear()
        self._home.clear()
        self._waiting = {}
        for name, tensor in residuals.items():
            parameter = self.parameters[name]
            flat = torch.empty(parameter.numel, dtype=accumulation_dtype(parameter.dtype), device=tensor.device)
            flat.as_strided(parameter.shape, parameter.stride).copy_(tensor)
            self._waiting[name] = flat

    def _view(self, name: str, newest: bool = False) -> Tensor:
        arena, span = self._home[name]
        flat = arena.working if newest and arena.written else arena.committed
        return flat[span.start : span.stop]

    def _arrange(self, key: str, spans: tuple[Span, ...], numel: int, device: torch.device) -> None:
        """Make the arena ``key`` and move in what its parameters kept elsewhere."""
        dtype = accumulation_dtype(self.parameters[spans[0].name].dtype)
        flat = torch.zeros(numel, dtype=dtype, device=device)
        buffers = [flat, torch.zeros_like(flat)] if self.transactional else [flat]
        arena = Arena(spans, buffers)
        for span in spans:
            place = flat[span.start : span.stop]
            if span.name in self._home:
                place.copy_(self._view(span.name))
            elif span.name in self._waiting:
                place.copy_(self._waiting.pop(span.name))
        for span in spans:
            self._home[span.name] = (arena, span)
        self._arenas[key] = arena
        lived_in = {id(home) for home, _ in self._home.values()}
        self._arenas = {key: arena for key, arena in self._arenas.items() if id(arena) in lived_in}


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The residual's dtype: fp32 for fp16 and bf16 gradients, which would lose small additions."""
    return torch.float64 if dtype == torch.float64 else torch.float32
