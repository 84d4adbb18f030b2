"""How indices travel: index codecs. All are lossless, and take a size that the shape alone fixes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from sparsync.layout import locate, run_table
from sparsync.sparse import SparseGrad
from sparsync.wire.bits import clear_from, gather, mark, ones, pack_bits, spread, unpack_bits, words_for
from sparsync.wire.shape import Shape


class IndexCodec(Protocol):
    """How indices travel."""

    @property
    def name(self) -> str: ...

    def words(self, shape: Shape) -> int:
        """Words that the indices of a message take."""
        ...

    def arrange(self, sent: SparseGrad) -> SparseGrad:
        """Return the same entries in the order in which they travel."""
        ...

    def pack(self, sent: SparseGrad, shape: Shape) -> Tensor:
        """Return the indices of an arranged ``sent`` as words."""
        ...

    def unpack(self, words: Tensor, count: Tensor, shape: Shape) -> Tensor:
        """Return the indices from their words, as int64; 0 from ``count`` on."""
        ...


@dataclass(frozen=True)
class Int:
    """An integer each: one word while the gradient has fewer than 2**31 entries, two above."""

    name: str = "int"

    def words(self, shape: Shape) -> int:
        return shape.capacity if shape.numel < 2**31 else 2 * shape.capacity

    def arrange(self, sent: SparseGrad) -> SparseGrad:
        return sent

    def pack(self, sent: SparseGrad, shape: Shape) -> Tensor:
        assert sent.indices is not None
        return (sent.indices.to(torch.int32) if shape.numel < 2**31 else sent.indices).view(torch.int32)

    def unpack(self, words: Tensor, count: Tensor, shape: Shape) -> Tensor:
        indices = words.to(torch.int64) if shape.numel < 2**31 else words.clone().view(torch.int64)  # for alignment
        return clear_from(count, indices)


@dataclass(frozen=True)
class EliasFano:
    """Sorted indices in at most ``2 + ceil(log2(numel / capacity))`` bits each, whatever they are.

    Each index is cut in two. The low bits stand one beside another. The high parts never fall, so the i-th of them is
    told by one set bit at place ``high + i`` of a row of ``capacity + highest`` bits. Entries that are not real set no
    bit.
    """

    name: str = "ef"

    def words(self, shape: Shape) -> int:
        low, high = ef_words(shape.numel, shape.capacity)
        return low + high

    def arrange(self, sent: SparseGrad) -> SparseGrad:
        assert sent.indices is not None
        # Most compressors sort already. Looking is far cheaper than sorting, but on a GPU it would wait for the host.
        if sent.indices.device.type == "cpu" and _ascending(sent.indices, sent.count):
            return sent
        real = torch.arange(sent.indices.shape[-1], device=sent.indices.device) < sent.count.unsqueeze(-1)
        keys = torch.where(real, sent.indices, sent.numel)  # what is not real stays last
        order = keys.sort(stable=True).indices
        return replace(sent, indices=sent.indices.gather(-1, order), values=sent.values.gather(-1, order))

    def pack(self, sent: SparseGrad, shape: Shape) -> Tensor:
        assert sent.indices is not None
        width = ef_width(shape.numel, shape.capacity)
        _, high_words = ef_words(shape.numel, shape.capacity)
        place = (sent.indices >> width).add_(torch.arange(shape.capacity, device=sent.indices.device))
        high = pack_bits(mark(place, sent.count, 32 * high_words))
        return torch.cat([pack_bits(spread(sent.indices, width)), high], -1) if width else high

    def unpack(self, words: Tensor, count: Tensor, shape: Shape) -> Tensor:
        width = ef_width(shape.numel, shape.capacity)
        low_words, _ = ef_words(shape.numel, shape.capacity)
        number = torch.arange(shape.capacity, device=words.device)
        indices = ones(unpack_bits(words[..., low_words:]), shape.capacity).sub_(number)
        indices <<= width
        if width:
            indices |= gather(unpack_bits(words[..., :low_words])[..., : shape.capacity * width], width)
        return clear_from(count, indices)


@dataclass(frozen=True)
class Block:
    """Only where each segment's block of neighbours starts, counted along the segment: two words a segment."""

    name: str = "block"

    def words(self, shape: Shape) -> int:
        return 2 * shape.segments

    def arrange(self, sent: SparseGrad) -> SparseGrad:
        return sent

    def pack(self, sent: SparseGrad, shape: Shape) -> Tensor:
        assert sent.indices is not None
        first, _, _ = _slot_table(shape, sent.indices.device)
        starts, ends, sizes = run_table(shape.runs, sent.indices.device)
        place = sent.indices[first]
        run = torch.bucketize(place, starts, right=True) - 1
        return (place - starts[run] + (ends - sizes)[run]).view(torch.int32)

    def unpack(self, words: Tensor, count: Tensor, shape: Shape) -> Tensor:
        first, offset, length = _slot_table(shape, words.device)
        number = torch.arange(shape.capacity, device=words.device)
        segment = torch.bucketize(number, first, right=True) - 1
        start = words.clone().view(torch.int64) - offset  # cloned: a view needs alignment
        position = offset[segment] + (start[segment] + number - first[segment]) % length[segment]
        return torch.where(number < count, locate(position, shape.runs), 0)


def _slot_table(shape: Shape, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Return, of every segment: its first entry in a message, and where it starts and how long it is along all runs."""
    sizes = [sum(stop - start for start, stop in runs) for _, runs in shape.slots]
    room = [capacity for capacity, _ in shape.slots]
    table = torch.tensor([[0, *room[:-1]], [0, *sizes[:-1]], sizes], device=device)
    return table[0].cumsum(0), table[1].cumsum(0), table[2]


def _ascending(indices: Tensor, count: Tensor) -> bool:
    """Whether, on the host, the indices of what is real never fall."""
    rows = zip(indices.view(count.numel(), -1).numpy(), count.view(-1).tolist(), strict=True)
    return all(bool((row[1:n] >= row[: max(0, n - 1)]).all()) for row, n in rows)


def ef_width(numel: int, capacity: int) -> int:
    """Return how many bits of an index are low: floor(log2(numel / capacity)), which takes the fewest bits in all.

    At most 32, so that an index's low bits lie in two words.
    """
    return min(32, max(0, (numel // max(1, capacity)).bit_length() - 1))


def ef_words(numel: int, capacity: int) -> tuple[int, int]:
    """Words of the low bits and of the high parts."""
    if not capacity:
        return 0, 0
    width = ef_width(numel, capacity)
    return words_for(capacity * width), words_for(capacity + (numel - 1 >> width))


INDEX_CODECS: dict[str, IndexCodec] = {"int": Int(), "ef": EliasFano(), "block": Block()}
