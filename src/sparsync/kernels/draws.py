"""DGC's random sample: the same entries on every device, from (seed, step, segment); the tables its kernels read."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from math import ceil
from typing import TypeVar

import torch
from torch import Tensor

from sparsync.kernels.search import DIGIT, MAGNITUDE, Search
from sparsync.layout import Segment, run_table

WORD = 0xFFFFFFFF
STRIDE = 0x9E3779B9
FACTORS = (0x85EBCA6B, 0xC2B2AE35)
SHARE, ROUNDS = 0.8, 10  # a threshold that too few reach is multiplied by the former, so often
PIECE = 4096  # entries of the sample that a program reads
DIGITS = -(-MAGNITUDE // DIGIT)  # of a magnitude

T = TypeVar("T", int, Tensor)
# (segment) -> (entries to draw, rank of the threshold among them, least count that is accepted); none are drawn where
# all is sent
Plan = Callable[[Segment], tuple[int, int, int]]


def scramble(x: T) -> T:
    """32 bits that look random, one to one with those of ``x``."""
    x = ((x ^ (x >> 16)) * FACTORS[0]) & WORD
    x = ((x ^ (x >> 13)) * FACTORS[1]) & WORD
    return x ^ (x >> 16)


def seed_of(seed: int, name: str) -> int:
    """The part of a segment's key that no step changes."""
    return zlib.crc32(f"{seed} {name}".encode())


def positions(base: int, step: int, numel: int, wanted: int, device: torch.device) -> Tensor:
    """``wanted`` random positions below ``numel``, or each once if all are wanted; ``base`` is from ``seed_of``."""
    number = torch.arange(wanted, device=device)
    if wanted == numel:
        return number
    key = scramble((base + step * STRIDE) & WORD)
    one = scramble((number * STRIDE + key) & WORD)
    two = scramble((one + key + 1) & WORD)
    return (one << 30 | two >> 2) % numel


class Sample:
    """Tables of the sample for the kernels, and buffers for its entries and what is found in them.

    Args:
        search: of the same gradient.
        plan: how many entries to draw from a segment, and what for.
        seed: shared by all ranks.
    """

    def __init__(self, search: Search, plan: Plan, seed: int) -> None:
        self.search, self.seed = search, seed
        space, device = search.space, search.space.device
        pieces: list[tuple[int, ...]] = []
        rows: list[tuple[int, ...]] = []
        owners: list[int] = []
        sizes: list[int] = []
        ends, shifts = [], []
        first = runs_before = 0
        for i, segment in enumerate(space.layout.segments):
            wanted, rank, least = plan(segment)
            parts = ceil(wanted / PIECE)
            pieces.append((rank, wanted, len(owners), parts, PIECE, first, 0, 0, 0))
            owners += [i] * parts
            sizes += [min(PIECE, wanted - PIECE * j) for j in range(parts)]
            first += wanted
            runs = segment.runs()
            starts, stops, _ = run_table(runs, torch.device("cpu"))
            rows.append((seed_of(seed, segment.name), runs_before, len(runs), least))
            ends.append(stops)
            shifts.append(starts - stops + torch.tensor([stop - start for start, stop in runs]))
            runs_before += len(runs)
        most = max(len(segment.runs()) for segment in space.layout.segments)
        self.halvings = most.bit_length() if most > 1 else 0  # steps of the search for a position's run
        self.count = len(owners)
        self.pieces = torch.tensor(pieces, dtype=torch.int64, device=device).flatten()
        self.rows = torch.tensor(rows, dtype=torch.int64, device=device).flatten()
        self.ends, self.shifts = torch.cat(ends).to(device), torch.cat(shifts).to(device)
        self.owners = torch.tensor(owners, dtype=torch.int64, device=device)
        self.sizes = torch.tensor(sizes, dtype=torch.int32, device=device)
        self.drawn = torch.zeros(first, device=device)
        segments = len(pieces)
        self.ranges = torch.zeros((DIGITS + 1) * segments * 5, dtype=torch.int64, device=device)
        self.sums = torch.zeros(DIGITS * segments << DIGIT, dtype=torch.int32, device=device)
        self.rungs = torch.zeros(segments * 32, dtype=torch.int32, device=device)
