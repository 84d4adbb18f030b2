"""What an exchange of virtual workers is made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sparsync.collectives import Reduced
from sparsync.compressors import Context
from sparsync.compressors.random import key_of
from sparsync.config.nodes import Groups
from sparsync.engine.bucketing import Unit
from sparsync.engine.traffic import SketchUnit
from sparsync.feedback import accumulation_dtype
from sparsync.layout import Layout, Span
from sparsync.sparse import SparseGrad
from sparsync.workspace import Workspace


@dataclass
class VirtualUnit:
    """A unit of the exchange: its gradients, one row a worker, and their mean.

    Args:
        grads: the rows, one by one: tensors that stay, as kernels know them.
        sums: what is exchanged, by sender: the rows, or the sum of each node's.
        workspaces: of each worker's compressor.
        counted: the layout whose messages were counted last.
    """

    unit: Unit
    rows: Tensor
    grads: tuple[Tensor, ...]
    mean: Tensor
    workspaces: list[Workspace]
    sums: Sequence[Tensor]
    counted: Layout | None = None

    @classmethod
    def of(cls, unit: Unit, workers: int, nodes: Groups = ()) -> VirtualUnit:
        """Return the unit for so many workers; ``nodes``: the ranks of each, if there are any."""
        rows = torch.zeros(workers, *unit.grad.shape, dtype=unit.grad.dtype, device=unit.grad.device)
        grads, room = rows.unbind(), rows.new_zeros(len(nodes), *unit.grad.shape, dtype=accumulation_dtype(rows.dtype))
        sums = room.unbind() if nodes else grads
        return cls(unit, rows, grads, unit.grad, [Workspace() for _ in range(workers)], sums)

    def sum_nodes(self, nodes: Groups) -> None:
        """Sum the gradients of each node, in rank order."""
        for total, group in zip(self.sums, nodes, strict=False):
            total.copy_(self.grads[group[0]])
            for rank in group[1:]:
                total.add_(self.grads[rank])


@dataclass
class VirtualSketch:
    """A unit of sketches, and what it is made from.

    Args:
        spans: of what is sketched, in every worker's flat gradient ``grads``.
        dense: gradients that travel dense in front of the sketches, one row a worker ...
        mean: ... and the updates that they become.
    """

    virtual: VirtualUnit
    spans: Sequence[Span]
    grads: Sequence[Tensor]
    dense: Tensor
    mean: Tensor

    @classmethod
    def of(
        cls, sketch: SketchUnit, grads: Sequence[Tensor], dtype: torch.dtype, workers: int, nodes: Groups = ()
    ) -> VirtualSketch:
        """Return the sketch for so many workers; ``dtype``: of its parameters."""
        numel, device = sum(span.numel for span in sketch.dense), sketch.unit.grad.device
        dense = torch.zeros(workers, numel, dtype=dtype, device=device)
        return cls(VirtualUnit.of(sketch.unit, workers, nodes), sketch.sketched, grads, dense, dense[0].clone())


@dataclass
class UnitOutcome:
    """What every worker sent of a unit and was given, and words for the host: flags, where, count and overflow."""

    sents: list[SparseGrad]
    results: list[Reduced]
    words: Tensor  # (4, workers)


class Keys:
    """What random kinds draw from, one key a worker, in a place of the device that a graph reads again and again.

    Args:
        seed: shared by all workers.
        shared: all of them draw the same.
    """

    def __init__(self, seed: int, workers: int, shared: bool, device: torch.device) -> None:
        self._context = Context(seed=seed, shared=shared)
        self._here = torch.zeros(workers, dtype=torch.int64, pin_memory=device.type == "cuda", device="cpu")
        self._there = torch.zeros(workers, dtype=torch.int64, device=device)
        self.of = self._there.unbind()  # by rank

    def turn(self, step: int) -> None:
        """Put the keys of a step in place, without waiting: before the next turn the host must have waited for it."""
        contexts = (replace(self._context, step=step, rank=rank) for rank in range(len(self.of)))
        self._here.copy_(torch.tensor([key_of(context) for context in contexts], dtype=torch.int64, device="cpu"))
        self._there.copy_(self._here, non_blocking=True)


@dataclass
class Tally:
    """Sums over all steps.

    Args:
        steps: that were made.
        bytes: one worker put on the network (mean over the workers), by the collective's ``traffic``. The messages that
            it goes by, of balanced sums every worker's in both rounds, are encoded now and then, and their true size is
            compared.
        entries: sent by all workers.
        possible: entries they could have sent.
        bad_steps: steps in which a gradient was not finite.
    """

    steps: int = 0
    bytes: float = 0.0
    entries: int = 0
    possible: int = 0
    bad_steps: int = 0

    @property
    def density(self) -> float:
        """Share of the entries that was sent."""
        return self.entries / self.possible if self.possible else 0.0
