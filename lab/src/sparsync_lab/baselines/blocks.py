"""Matrices in blocks of 64 x 64, the largest entries of each, and the bytes that these take."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

SIDE = 64


@dataclass(frozen=True)
class BlockGroup:
    """All blocks of one shape, of whatever tensors.

    Args:
        shape: of a block.
        places: of its entries in the flat gradient, block by block.
    """

    shape: tuple[int, int]
    places: Tensor

    @property
    def area(self) -> int:
        return self.shape[0] * self.shape[1]

    @property
    def count(self) -> int:
        return self.places.numel() // self.area

    def of(self, rows: Tensor) -> Tensor:
        """Return the blocks of every worker, ``(P, count, area)``, from flat gradients ``(P, n)``."""
        return rows.index_select(1, self.places).view(len(rows), self.count, self.area)

    def put(self, blocks: Tensor, flat: Tensor) -> None:
        """Put ``(count, area)`` back into a flat tensor ``(n,)``."""
        flat.index_copy_(0, self.places, blocks.reshape(-1))


def block_side(length: int, most: int = SIDE) -> int:
    """Return the largest divisor of a length that is at most 64."""
    return max(side for side in range(1, min(length, most) + 1) if length % side == 0)


def groups_of(shapes: Sequence[torch.Size], device: torch.device) -> list[BlockGroup]:
    """Cut tensors, which lie one after another, into blocks; a tensor of several dimensions is a matrix of its first
    dimension x the rest, one of a single dimension is a matrix of one row."""
    found: dict[tuple[int, int], list[Tensor]] = {}
    start = 0
    for shape in shapes:
        numel = math.prod(shape)
        rows = shape[0] if len(shape) > 1 else 1
        height, width = block_side(rows), block_side(numel // rows)
        here = torch.arange(start, start + numel, device=device)
        blocks = here.view(rows // height, height, numel // rows // width, width).transpose(1, 2)
        found.setdefault((height, width), []).append(blocks.reshape(-1))
        start += numel
    return [BlockGroup(shape, torch.cat(places)) for shape, places in found.items()]


def index_bits(k: int, area: int) -> int:
    """Return the bits of an index: Elias-Fano, as ours are coded, or plain where that is less; none if all are sent."""
    return 0 if k == area else min(math.ceil(math.log2(area)), 2 + math.ceil(math.log2(area / k)))


def entries_at(share: float, group: BlockGroup) -> int:
    """Return how many entries of a block are sent: a share of them, at least one."""
    return max(1, int(share * group.area))


def message_bytes(groups: Sequence[BlockGroup], share: float, value_bits: int, block_bits: int = 0) -> int:
    """Return the bytes of a worker's message.

    Args:
        share: of the entries of a block that are sent.
        value_bits: of every value.
        block_bits: beside them, of every block.
    """
    bits = 0
    for group in groups:
        k = entries_at(share, group)
        bits += group.count * (k * (value_bits + index_bits(k, group.area)) + block_bits)
    return -(-bits // 8)


def share_within(groups: Sequence[BlockGroup], allowed: float, value_bits: int, block_bits: int = 0) -> float:
    """Return the largest share of the entries whose message is within so many bytes."""
    most = max(group.area for group in groups)
    fitting = [k for k in range(1, most + 1) if message_bytes(groups, k / most, value_bits, block_bits) <= allowed]
    if not fitting:
        least = message_bytes(groups, 1 / most, value_bits, block_bits)
        raise ValueError(f"budget must allow messages of {least:,} bytes, an entry of every block, got {allowed:,.0f}")
    return max(fitting) / most


def largest(blocks: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the ``k`` entries of largest magnitude of every block, and their places in it."""
    places = blocks.abs().topk(k, sorted=False).indices
    return blocks.gather(-1, places), places


def mean_of(values: Tensor, places: Tensor, area: int) -> Tensor:
    """Return the mean over the workers of what each sent, ``(count, area)``, from ``(P, count, k)``."""
    workers, count = values.shape[:2]
    total = values.new_zeros(count, area)
    by_block = (tensor.transpose(0, 1).reshape(count, -1) for tensor in (places, values))
    total.scatter_add_(1, *by_block)
    return total.div_(workers)
