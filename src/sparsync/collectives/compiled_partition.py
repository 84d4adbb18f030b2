"""The work of ``Balanced`` between its messages, on the host, by loops that numba compiles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sparsync.collectives.base import FiniteFlag, Mean, MeanOf
from sparsync.collectives.partition import HostPartition
from sparsync.errors import Damaged
from sparsync.kernels.balanced import cpu as loops
from sparsync.sparse import SparseGrad


class CompiledPartition(HostPartition):
    """The same by loops that numba compiles, for fp32 and fewer than 2**31 entries."""

    def place(self, rows: Tensor, owner: int | Tensor) -> Tensor:
        if isinstance(owner, int) and rows.dim() == 1:
            return loops.places(rows, owner, self.workers)
        return super().place(rows, owner)

    def _deal(self, sent: SparseGrad) -> tuple[SparseGrad, SparseGrad]:
        assert sent.indices is not None
        rows, values, count, stays = loops.deal(sent.indices, sent.values, self.workers, self.room)
        parts = replace(sent, indices=rows, values=values, count=count, numel=self.rows)
        left = torch.tensor(len(stays), dtype=torch.int64, device="cpu")
        kept = replace(sent, indices=sent.indices[stays], values=sent.values[stays], count=left)
        return parts, kept

    def _nonzero(self, sums: Tensor) -> tuple[Tensor, Tensor]:
        return loops.nonzero(sums)

    def _reach(self, sums: Tensor, rows: Tensor) -> Tensor:
        return loops.largest(sums, self.kept)

    def _left(self, sums: Tensor, chosen: Tensor, sent: Tensor) -> Tensor:
        return loops.leave(sums.clone(), chosen, sent)

    def mean(self, parts: SparseGrad, owners: Tensor, divisor: int) -> Mean:
        return MeanOfOwners(parts, owners, self, divisor)


@dataclass
class MeanOfOwners(Mean):
    """The mean from all owners' parts, written in one pass where a loop can."""

    parts: SparseGrad
    owners: Tensor
    partition: CompiledPartition
    divisor: int

    def write(self, out: Tensor, flag: FiniteFlag | None = None) -> None:
        if out.dtype != torch.float32 or not out.is_contiguous():
            MeanOf([self.partition.placed(self.parts, self.owners)], self.divisor).write(out, flag)
        elif not self.write_parts([(0, out)], flag):
            raise Damaged("a message was not read: it has an index outside its gradient")

    def write_parts(self, parts: Sequence[tuple[int, Tensor]], flag: FiniteFlag | None = None) -> bool:
        own = self.parts
        if not all(out.dtype == torch.float32 and out.is_contiguous() for _, out in parts):
            return False
        assert own.indices is not None
        if not loops.write(own.indices, own.values, own.count, self.divisor, parts):
            return False
        if flag is not None:
            flag.check_finite(own.values)
        return True
