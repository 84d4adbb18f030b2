"""Bits in 32-bit words, all along the last dimension: by numpy on the host, where torch has nothing for it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor


def words_for(bits: int) -> int:
    """Whole 32-bit words that hold ``bits``."""
    return -(-bits // 32)


def on_host(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu"


def pack_bits(bits: Tensor) -> Tensor:
    """Bits, uint8 or boolean, as 32-bit words, lowest first; zeros fill the last word."""
    missing = -bits.shape[-1] % 32
    if not bits.numel():
        return bits.new_zeros(bits.shape, dtype=torch.int32)
    if missing:
        bits = torch.nn.functional.pad(bits, (0, missing))
    if on_host(bits):
        return torch.from_numpy(np.packbits(bits.numpy(), axis=-1, bitorder="little")).view(torch.int32)
    lane = torch.arange(32, dtype=torch.int32, device=bits.device)
    return (bits.view(*bits.shape[:-1], -1, 32).to(torch.int32) << lane).sum(-1, dtype=torch.int32)


def unpack_bits(words: Tensor) -> Tensor:
    """Return the bits of 32-bit words as booleans, lowest first."""
    if on_host(words):
        bits = np.unpackbits(words.contiguous().numpy().view(np.uint8), axis=-1, bitorder="little")
        return torch.from_numpy(bits).view(torch.bool)
    lane = 1 << torch.arange(32, dtype=torch.int32, device=words.device)
    return (words.unsqueeze(-1) & lane).flatten(-2) != 0


def clear_from(count: Tensor, entries: Tensor) -> Tensor:
    """Return ``entries``, of which those from ``count`` on become 0."""
    if not on_host(entries):
        number = torch.arange(entries.shape[-1], dtype=torch.int64, device=entries.device)
        return entries.masked_fill_(number >= count.unsqueeze(-1), 0)
    for row, n in zip(entries.view(count.numel(), -1).numpy(), count.view(-1).tolist(), strict=True):
        row[n:] = 0
    return entries


def mark(places: Tensor, count: Tensor, size: int) -> Tensor:
    """Return ``size`` bits, of which those at the first ``count`` places are set."""
    shape = places.shape[:-1]
    if on_host(places):
        bits = np.zeros((count.numel(), size), np.uint8)
        for row, own, n in zip(bits, places.view(len(bits), -1).numpy(), count.view(-1).tolist(), strict=True):
            row[own[:n]] = 1
        return torch.from_numpy(bits).view(*shape, size)
    real = torch.arange(places.shape[-1], dtype=torch.int64, device=places.device) < count.unsqueeze(-1)
    marks = torch.zeros(*shape, size + 1, dtype=torch.uint8, device=places.device)
    return marks.scatter_(-1, torch.where(real, places, size), 1)[..., :-1]  # the last is thrown away


def ones(bits: Tensor, size: int) -> Tensor:
    """Return where the first ``size`` set bits are, as int64; -1 where there are fewer. Nothing waits for a device."""
    if not size:
        return bits.new_zeros(*bits.shape[:-1], 0, dtype=torch.int64)
    rows = bits.view(-1, bits.shape[-1])
    if on_host(bits):
        places = np.full((len(rows), size), -1)
        for row, own in zip(rows.numpy(), places, strict=True):
            found = np.flatnonzero(row)[:size]
            own[: len(found)] = found
        return torch.from_numpy(places).view(*bits.shape[:-1], size)
    found_ = [torch.nonzero_static(row, size=size, fill_value=-1).view(-1) for row in rows]
    return torch.stack(found_).view(*bits.shape[:-1], size)


def spread(numbers: Tensor, width: int) -> Tensor:
    """Return the lowest ``width`` bits of each number, one number after another."""
    if on_host(numbers):
        kind = _smallest(width)
        own = numbers.numpy().astype(kind)
        bits = np.empty((*own.shape, width), np.uint8)
        for bit in range(width):
            np.bitwise_and(own >> kind(bit), kind(1), out=bits[..., bit], casting="unsafe")
        return torch.from_numpy(bits).flatten(-2)
    place = torch.arange(width, dtype=torch.int32, device=numbers.device)
    return (numbers.to(torch.int32).unsqueeze(-1) >> place & 1).to(torch.uint8).flatten(-2)


def gather(bits: Tensor, width: int) -> Tensor:
    """Numbers of ``width`` bits each, as int64: the inverse of ``spread``."""
    columns = bits.view(*bits.shape[:-1], bits.shape[-1] // width, width)
    if on_host(bits):
        kind, own = _smallest(width), columns.numpy().view(np.uint8)
        numbers = own[..., 0].astype(kind)
        for bit in range(1, width):
            numbers |= own[..., bit].astype(kind) << kind(bit)
        return torch.from_numpy(numbers.astype(np.int64))
    return (columns.to(torch.int64) << torch.arange(width, dtype=torch.int64, device=bits.device)).sum(-1)


def _smallest(width: int) -> type[np.unsignedinteger[Any]]:
    """Return a type for numbers of so many bits, 32 at most."""
    return np.uint8 if width <= 8 else np.uint16 if width <= 16 else np.uint32
