"""What is kept of every parameter, by name, through bucket rebuilds, rollbacks and checkpoints: its residual and, under
momentum correction, its velocity.

Both live in flat buffers that match how gradients arrive (a bucket, or the whole model), because adding, selecting and
clearing are one pass over memory. The name decides whose they are: when DDP regroups its buckets, new buffers are
filled from the old ones, name by name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from sparsync.kernels import Memory, Velocity, cpu
from sparsync.layout import Parameter, Span
from sparsync.number_checks import is_number
from sparsync.sparse import SparseGrad
from sparsync.workspace import Workspace


@dataclass
class FlatBuffer:
    """One flat buffer, or two: then the first is committed and the second is written by the step under way."""

    spans: tuple[Span, ...]
    buffers: list[Tensor]
    written: bool = False
    left: bool = False  # some of its parameters live elsewhere by now
    workspace: Workspace = field(default_factory=Workspace)

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


@dataclass(frozen=True)
class Correction:
    """Momentum correction (Lin et al., 2018): u <- beta u + g, and u, not g, enters the residual.

    Args:
        beta: momentum, in [0, 1).
        masking: clear u where an entry was sent, so that it does not push on in a direction that has been taken.
    """

    beta: float = 0.5
    masking: bool = True

    def __post_init__(self) -> None:
        if not (is_number(self.beta) and 0 <= self.beta < 1):
            raise ValueError(f"beta must be from 0 to below 1, got {self.beta!r}")


class Feedback:
    """The residuals, and perhaps velocities, of one model on one rank.

    Args:
        parameters: all parameters that may keep something.
        transactional: keep two buffers, so that a step can be undone.
        correction: momentum correction, if any.
        preconditioned: velocities are kept for a preconditioner.
        ranks: whose gradients' sum comes in; 0 on a rank whose gradients go into another's sum, and that keeps nothing.
    """

    def __init__(
        self,
        parameters: Iterable[Parameter],
        transactional: bool = False,
        correction: Correction | None = None,
        preconditioned: bool = False,
        ranks: int = 1,
    ) -> None:
        self.ranks = ranks
        self.parameters = {parameter.name: parameter for parameter in parameters}
        self.transactional, self.correction, self.preconditioned = transactional, correction, preconditioned
        self._residuals = ParameterBuffers(self.parameters, transactional, "residual")
        self._velocities = ParameterBuffers(self.parameters, transactional, "velocity")

    def memory(self, key: str, spans: Sequence[Span], numel: int, device: torch.device) -> Memory:
        """Return the memory of the flat gradient ``key``, whose parameters lie at ``spans``."""
        spans = tuple(spans)
        residual, velocity = self._residuals.at(key, spans, numel, device), None
        if self.correction is not None:
            kept = self._velocities.at(key, spans, numel, device)
            velocity = Velocity(kept.committed, kept.working, self.correction.beta, self.correction.masking)
        return Memory(residual.committed, residual.working, velocity, workspace=residual.workspace)

    def velocity_buffer(self, key: str, spans: Sequence[Span], numel: int, device: torch.device) -> FlatBuffer:
        """Return the velocity of the flat gradient ``key``, which the step under way is going to write."""
        return self._velocities.at(key, tuple(spans), numel, device)

    def restore_to_residual(self, key: str, rejected: SparseGrad) -> None:
        """Add entries that this rank sent, or dropped for others, back into its residual; sums saturate there."""
        if key not in self._residuals.flat:  # nothing was taken out of it either
            return
        residual = self._residuals.flat[key].working
        indices, values = rejected.indices, rejected.values
        listed = indices is not None and indices.dim() == 1 and values.dtype == torch.float32
        if indices is not None and listed and cpu.usable(residual, indices, values):
            from sparsync.kernels.balanced.cpu import put_back

            put_back(residual, indices, values)
            return
        rejected.add_to(residual)
        top = torch.finfo(residual.dtype).max
        if rejected.indices is None:
            residual.clamp_(-top, top)
        else:
            touched = rejected.indices.view(-1)
            residual.index_copy_(0, touched, residual.index_select(0, touched).clamp_(-top, top))

    def working(self, key: str) -> Tensor | None:
        """Return the residual of the flat gradient ``key`` as the step under way leaves it, if there is one."""
        return self._residuals.flat[key].working if key in self._residuals.flat else None

    def commit(self) -> None:
        """Keep what the last step wrote."""
        for buffer in [*self._residuals.flat.values(), *self._velocities.flat.values()]:
            buffer.commit()

    def rollback(self) -> None:
        """Forget what the last step wrote."""
        assert self.transactional
        for buffer in [*self._residuals.flat.values(), *self._velocities.flat.values()]:
            buffer.rollback()

    def rescale(self, ratios: Mapping[str, float], velocity: bool = False) -> None:
        """Multiply the committed residual, and perhaps velocity, of each parameter named in ``ratios``."""
        self._residuals.rescale(ratios)
        if velocity:
            self._velocities.rescale(ratios)

    def follow(self, last: Mapping[str, float], rates: Mapping[str, float]) -> dict[str, float]:
        """Divide the residuals by each change of the learning rate; a rate of 0 leaves them alone.

        Args:
            last: what it returned before: the rates that the residuals are in.
            rates: by parameter name, from now on.
        """
        now = {name: rate for name, rate in rates.items() if rate}
        self.rescale({name: last[name] / now[name] for name in now if last.get(name, now[name]) != now[name]})
        return {**last, **now}

    def residual(self, name: str, newest: bool = False) -> Tensor | None:
        """Return the residual of a parameter in logical order and shape, or ``None`` if it never had one.

        ``newest``: with what the last step did to it, though it may yet be undone.
        """
        return self._residuals.get(name, newest)

    def velocity(self, name: str, newest: bool = False) -> Tensor | None:
        """Return the velocity likewise."""
        return self._velocities.get(name, newest)

    def scale_velocities(self, ratio: Tensor) -> None:
        """Multiply the velocities as the last step left them; ``ratio``: a 0-d tensor."""
        for buffer in self._velocities.flat.values():
            buffer.working.mul_(ratio)

    def scale_residuals(self, ratio: Tensor, but: frozenset[str]) -> None:
        """Multiply the residuals likewise; ``but``: not those of these parameters, which have buffers of their own."""
        for buffer in self._residuals.flat.values():
            if buffer.spans[0].name not in but:
                buffer.working.mul_(ratio)

    def load_velocities(self, velocities: Mapping[str, Tensor]) -> None:
        """Replace the velocities of these parameters alone."""
        self._velocities.check(velocities)
        self._velocities.load_state_dict({**self._velocities.state_dict(), **velocities})

    def state_dict(self) -> dict[str, dict[str, Tensor]]:
        """Return copies of what is committed, by kind and parameter name, in logical order."""
        return {"residuals": self._residuals.state_dict(), "velocities": self._velocities.state_dict()}

    def check_state(
        self, residuals: Mapping[str, Tensor], velocities: Mapping[str, Tensor], corrected: bool = False
    ) -> None:
        """Refuse what ``load_state_dict`` cannot take.

        Args:
            corrected: other ranks have velocities, though this one may have none.
        """
        if (velocities or corrected) and self.correction is None and not self.preconditioned:
            raise ValueError(
                "the checkpoint holds velocities: it was made with momentum='correct', or preconditioned, so load it "
                "with that"
            )
        self._residuals.check(residuals)
        self._velocities.check(velocities)

    def check_finite(self, residuals: Mapping[str, Tensor], velocities: Mapping[str, Tensor]) -> None:
        """Refuse what would not be finite as it is kept."""
        for kind, state in (("residual", residuals), ("velocity", velocities)):
            for name, tensor in state.items():
                if not tensor.to(accumulation_dtype(self.parameters[name].dtype)).isfinite().all():
                    raise ValueError(f"the checkpoint's {kind} for {name!r} does not fit: it is not finite here")

    def load_state_dict(self, residuals: Mapping[str, Tensor], velocities: Mapping[str, Tensor]) -> None:
        """Replace all that is kept; what is not named starts from zero."""
        self.check_state(residuals, velocities)
        self._residuals.load_state_dict(residuals)
        self._velocities.load_state_dict(velocities)


class ParameterBuffers:
    """One tensor per parameter, in flat buffers that can be regrouped."""

    def __init__(self, parameters: Mapping[str, Parameter], transactional: bool, kind: str) -> None:
        self.parameters, self.transactional, self.kind = parameters, transactional, kind
        self.flat: dict[str, FlatBuffer] = {}
        self._location: dict[str, tuple[FlatBuffer, Span]] = {}
        self._loaded: dict[str, Tensor] = {}  # loaded, and not asked for yet: flat, in memory order

    def at(self, key: str, spans: tuple[Span, ...], numel: int, device: torch.device) -> FlatBuffer:
        """Return the buffer of the flat gradient ``key``, which the step under way is going to write."""
        if key not in self.flat or self.flat[key].left or self.flat[key].spans != spans:
            self._arrange(key, spans, numel, device)
        buffer = self.flat[key]
        buffer.written = True
        return buffer

    def rescale(self, ratios: Mapping[str, float]) -> None:
        if len({*ratios.values()}) == 1 and ratios.keys() >= self._location.keys():  # all at once
            for buffer in self.flat.values():
                _scale(buffer.committed, next(iter(ratios.values())))
            ratios = {name: ratio for name, ratio in ratios.items() if name not in self._location}
        for name, ratio in ratios.items():
            if name in self._location:
                _scale(self._view(name), ratio)
            elif name in self._loaded:
                _scale(self._loaded[name], ratio)

    def get(self, name: str, newest: bool = False) -> Tensor | None:
        parameter = self.parameters[name]
        flat = self._view(name, newest) if name in self._location else self._loaded.get(name)
        return None if flat is None else flat.as_strided(parameter.shape, parameter.stride)

    def state_dict(self) -> dict[str, Tensor]:
        kept = {name: self.get(name) for name in self.parameters}
        return {name: tensor.detach().clone().contiguous() for name, tensor in kept.items() if tensor is not None}

    def check(self, state: Mapping[str, Tensor]) -> None:
        """Refuse what belongs to another model."""
        for name, tensor in state.items():
            if name not in self.parameters:
                raise ValueError(f"the checkpoint holds a {self.kind} for {name!r}, which this model does not have")
            if tuple(tensor.shape) != self.parameters[name].shape:
                raise ValueError(
                    f"the checkpoint's {self.kind} for {name!r} has shape {tuple(tensor.shape)}, "
                    f"the model's parameter {self.parameters[name].shape}"
                )

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self.flat.clear()
        self._location.clear()
        self._loaded = {}
        for name, tensor in state.items():
            parameter = self.parameters[name]
            flat = torch.empty(parameter.numel, dtype=accumulation_dtype(parameter.dtype), device=tensor.device)
            flat.as_strided(parameter.shape, parameter.stride).copy_(tensor.detach())
            self._loaded[name] = flat

    def _view(self, name: str, newest: bool = False) -> Tensor:
        buffer, span = self._location[name]
        flat = buffer.working if newest and buffer.written else buffer.committed
        return flat[span.start : span.stop]

    def _arrange(self, key: str, spans: tuple[Span, ...], numel: int, device: torch.device) -> None:
        """Make the buffer ``key`` and move in what its parameters kept elsewhere."""
        dtype = accumulation_dtype(self.parameters[spans[0].name].dtype)
        flat = torch.zeros(numel, dtype=dtype, device=device)
        buffers = [flat, torch.zeros_like(flat)] if self.transactional else [flat]
        buffer = FlatBuffer(spans, buffers)
        for span in spans:
            place = flat[span.start : span.stop]
            if span.name in self._location:
                place.copy_(self._view(span.name))
                self._location[span.name][0].left = True
            elif span.name in self._loaded:
                loaded = self._loaded.pop(span.name)
                place.copy_(loaded)
                if loaded.is_cuda:  # made on another stream, which may use its memory again only after this
                    loaded.record_stream(torch.cuda.current_stream(loaded.device))
        for span in spans:
            self._location[span.name] = (buffer, span)
        self.flat[key] = buffer
        lived_in = {id(home) for home, _ in self._location.values()}
        self.flat = {key: buffer for key, buffer in self.flat.items() if id(buffer) in lived_in}


def _scale(kept: Tensor, ratio: float) -> None:
    """Multiply in place; what grows saturates, as the ratio does: 0 times infinity would not be a number."""
    top = torch.finfo(kept.dtype).max
    kept.mul_(min(ratio, top))
    if ratio > 1:
        kept.clamp_(-top, top)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the residual's dtype: fp32 for fp16 and bf16 gradients, which would lose small additions."""
    return torch.float64 if dtype == torch.float64 else torch.float32
