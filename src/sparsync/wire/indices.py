"""How indices travel: index codecs. All are lossless, and take a size that the shape alone fixes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from sparsync.layout import run_table
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
        number = torch.arange(sent.indices.shape[-1], dtype=torch.int64, device=sent.indices.device)
        real = number < sent.count.unsqueeze(-1)
        keys = torch.where(real, sent.indices, sent.numel)  # what is not real stays last
        order = keys.sort(stable=True).indices
        return replace(sent, indices=sent.indices.gather(-1, order), values=sent.values.gather(-1, order))

    def pack(self, sent: SparseGrad, shape: Shape) -> Tensor:
        assert sent.indices is not None
        width = ef_width(shape.numel, shape.capacity)
        _, high_words = ef_words(shape.numel, shape.capacity)
        number = torch.arange(shape.capacity, dtype=torch.int64, device=sent.indices.device)
        place = (sent.indices >> width).add_(number)
        high = pack_bits(mark(place, sent.count, 32 * high_words))
        return torch.cat([pack_bits(spread(sent.indices, width)), high], -1) if width else high

    def unpack(self, words: Tensor, count: Tensor, shape: Shape) -> Tensor:
        width = ef_width(shape.numel, shape.capacity)
        low_words, _ = ef_words(shape.numel, shape.capacity)
        number = torch.arange(shape.capacity, dtype=torch.int64, device=words.device)
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
        known = _block_tables(shape, sent.indices.device)
        place = sent.indices[known.first]
        run = torch.bucketize(place, known.starts, right=True) - 1
        return (place - known.shift[run]).view(torch.int32)

    def unpack(self, words: Tensor, count: Tensor, shape: Shape) -> Tensor:
        known = _block_tables(shape, words.device)
        start = (words.clone().view(torch.int64) - known.offset) % known.length  # cloned: a view needs alignment
        position = known.within + start[known.segment]
        length = known.length[known.segment]
        position -= torch.where(position >= length, length, 0)  # a block is no longer than its segment: it wraps once
        position += known.offset[known.segment]
        run = known.segment  # where each has one run
        if known.ends.numel() > known.length.numel():
            run = torch.bucketize(position, known.ends, right=True)
        return torch.where(known.number < count, position + known.shift[run], 0)


class BlockTables(NamedTuple):
    """What a message of blocks is read by: of every segment its first entry in a message, and where it starts and how
    long it is along all runs; of every run where it starts and what turns places along runs into indices; and of every
    entry its number, its segment and its place in the segment's block."""

    first: Tensor
    offset: Tensor
    length: Tensor
    starts: Tensor
    ends: Tensor
    shift: Tensor
    number: Tensor
    segment: Tensor
    within: Tensor


@lru_cache(maxsize=16)
def _block_tables(shape: Shape, device: torch.device) -> BlockTables:
    """Return the tables of a shape. They are made on the host and copied whole, so that any stream may read them."""
    sizes = torch.tensor(
        [sum(stop - start for start, stop in runs) for _, runs in shape.slots], dtype=torch.int64, device="cpu"
    )
    room = torch.tensor([capacity for capacity, _ in shape.slots], dtype=torch.int64, device="cpu")
    first, number = room.cumsum(0) - room, torch.arange(shape.capacity, dtype=torch.int64, device="cpu")
    starts, ends, lengths = run_table(shape.runs, torch.device("cpu"))
    segment = torch.bucketize(number, first, right=True) - 1
    made = (first, sizes.cumsum(0) - sizes, sizes, starts, ends, starts - (ends - lengths), number, segment)
    return BlockTables(*(table.to(device) for table in (*made, number - first[segment])))


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
