"""Which entries are sent: the protocol of compressors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Protocol

import torch
from torch import Tensor

from sparsync.kernels import KernelPath, Memory, choose_path
from sparsync.kernels.accumulate import Rounding
from sparsync.kernels.accumulate.parts import AddedParts
from sparsync.layout import Layout
from sparsync.number_checks import is_number
from sparsync.sparse import NONFINITE, SparseGrad
from sparsync.workspace import Workspace

# Small tensors by segment name and by what they are: checkpointed, rolled back, one bag per worker.
State = dict[str, dict[str, Tensor]]


@dataclass(frozen=True)
class Context:
    """What a compressor may know of the moment.

    Args:
        step: number of the step, the same on every rank.
        rank: of this worker.
        seed: shared by all ranks.
        rounding: values -> values as they travel, or ``None`` when they travel unchanged.
        values: the name of that.
        shared: all ranks send the same entries.
        whole: the chosen entries travel whatever they hold, zeros included.
        clip: largest norm that this rank's gradient may have in a segment.
        unused: parameters whose gradient is all zero on this rank and that must not be sent from: if no rank uses
            them, DDP throws their result away.
        workspace: lives as long as the layout; a compressor may keep buffers there.
        added: the gradient was added to the residual in parts, as this says; ``None``: it is going to be.
        key: what random kinds draw from, a 0-d int64 tensor on the gradient's device that is another one in each step;
            ``None``, as in every process of its own: what seed, rank and step say.
    """

    step: int = 0
    rank: int = 0
    seed: int = 0
    rounding: Rounding | None = None
    shared: bool = False
    whole: bool = False
    clip: float | None = None
    unused: frozenset[str] = frozenset()
    values: str = "fp32"
    workspace: Workspace = field(default_factory=Workspace)
    key: Tensor | None = None
    added: AddedParts | None = None


class Compressor(Protocol):
    """Frozen configuration; state lives beside it. A class that names it as its base has its defaults.

    ``dense``: every entry is sent, so nothing is kept when values travel unchanged and no indices travel.
    ``random``: entries are drawn, and every rank draws the same when ``ctx.shared`` asks for it.
    ``block``: when ``ctx.whole``, the k entries of every segment are neighbours, wrapping round at its end.
    ``graph_safe``: on a GPU, compressing neither waits for the host nor depends on the step's number (but by
    ``ctx.key``), so that a CUDA graph may replay it.
    ``fuses_precondition``: it makes the update that ``memory.update`` describes in the pass that adds it to the
    residual; for others the update is made before.

    A class that is derived from another and defines ``compress`` anew has to set ``graph_safe`` anew, too.
    """

    dense: bool = False
    random: bool = False
    block: bool = False
    graph_safe: bool = False
    fuses_precondition: bool = False

    @property
    def density(self) -> float: ...

    def capacity(self, k: int, numel: int) -> int:
        """Return how many entries a segment of ``numel`` that wants ``k`` may send."""
        ...

    def init(self, layout: Layout) -> State:
        """Return fresh state for the segments of ``layout``."""
        ...

    def accepts(self, bag: Mapping[str, Tensor]) -> bool:
        """Return whether it can go on from what a checkpoint holds of a segment, of the types and shapes that ``init``
        gives: a file may hold any numbers."""
        return True

    def begin(self, grad: Tensor, memory: Memory, layout: Layout, ctx: Context, state: State) -> AddedParts | None:
        """Return what adds a gradient like ``grad`` to the residual in parts, as they come, before ``compress`` is
        called; ``None``: only ``compress`` adds it."""
        return None

    def compress(self, grad: Tensor, memory: Memory | None, layout: Layout, ctx: Context, state: State) -> SparseGrad:
        """Add ``grad`` into the residual, take out what is sent, return it; update ``state`` in place."""
        ...

    def rescale(self, state: State, ratio: float) -> None:
        """Follow gradients and residuals, which were all multiplied by ``ratio``."""
        ...


def vouches(method: object, flag: str, *defined: str) -> bool:
    """Return whether ``flag`` is set for methods of a compressor, or of a collective, as they are ``defined``: a class
    that defines one of them anew has to set it anew."""
    return bool(getattr(method, flag)) and _set_last(type(method).__mro__, flag, defined)


@cache
def _set_last(kinds: tuple[type, ...], flag: str, defined: tuple[str, ...]) -> bool:
    first = [next((i for i, kind in enumerate(kinds) if name in vars(kind)), -1) for name in (flag, *defined)]
    return all(at < 0 or first[0] <= at for at in first)


def path_of(grad: Tensor, memory: Memory | None, ctx: Context, limit: int) -> KernelPath:
    """Return ``choose_path(grad, memory, limit)``: chosen once, and again only when something else is asked for."""
    kept = None if memory is None else (memory.after.dtype, memory.velocity is None)
    made_for = (limit, kept, grad.numel(), grad.dtype, grad.device, grad.is_contiguous())
    return ctx.workspace.get(KernelPath, made_for, lambda: choose_path(grad, memory, limit))


def check_density(density: float) -> None:
    """Raise ``ValueError`` unless ``density`` is a share."""
    if not (is_number(density) and 0 < density <= 1):
        raise ValueError(f"density must be above 0 and at most 1, got {density!r}")


def flag(bad: int, layout: Layout, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return flags, and the parameter's number, of a gradient that is not finite at index ``bad`` (-1: nowhere)."""
    where = next((i for i, span in enumerate(layout.spans) if span.start <= bad < span.stop), -1)
    words = torch.tensor([NONFINITE if bad >= 0 else 0, where], dtype=torch.int32, device=device)
    return words[0], words[1]
