"""Who owns an entry, and where an owner's entries lie, for Triton kernels.

The flat gradient is a table of rows of ``PARTS`` entries, of which each owner has one; an owner knows them by their
row.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sparsync.kernels import partition

MIXER, SHIFT = tl.constexpr(partition.MIXER), tl.constexpr(partition.SHIFT)


@triton.jit
def _turn(row, PARTS: tl.constexpr):
    """Return by how much the owners of a row are turned round."""
    mixed = row.to(tl.uint32) * tl.full([], MIXER, tl.uint32)
    return ((mixed >> SHIFT) % PARTS).to(tl.int32)


@triton.jit
def owner_of(index, row, PARTS: tl.constexpr):
    """Return the owners of entries, of which the rows are known."""
    return (index - row * PARTS + _turn(row, PARTS)) % PARTS


@triton.jit
def place_of(row, owner, PARTS: tl.constexpr):
    """Return where in the flat gradient an owner's entries lie; where there are no parts (0), as they are."""
    if PARTS == 0:
        return row
    else:
        return row * PARTS + (owner + PARTS - _turn(row, PARTS)) % PARTS
