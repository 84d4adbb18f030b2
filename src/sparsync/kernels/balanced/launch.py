"""The largest of the sums that an owner has, chosen and rounded on the device, in buffers that stay."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from sparsync.kernels.codecs import CODEC_NUMBERS, SCALED
from sparsync.kernels.device import on_device_of
from sparsync.kernels.launcher import Launcher
from sparsync.kernels.strips import BLOCK, ChoiceRow, RangeRow, SegmentRow, table
from sparsync.kernels.topk.launch import DIGIT, DIGIT_PROGRAMS, MAGNITUDE, REGISTERS

SUMS = 1024  # of which one program takes care


class SegmentTable(NamedTuple):
    """Where segments start, by which an entry's is found, as ``wire/device.py`` makes it."""

    starts: Tensor
    owners: Tensor
    spans: int
    steps: int


class LargestSums:
    """A list of sums, and what becomes of it: the largest are made what travels, the others 0.

    Args:
        size: entries of the list.
        kept: how many go, at most.
        rows: the part's length.
        numel: the gradient's.
        workers: parts of the gradient; a single worker's sums are what it sent, and are not rounded again.
        values: how sums travel: fp32, fp16, bf16, sign or levels.
        segments: how many there are.
    """

    def __init__(
        self,
        size: int,
        kept: int,
        rows: int,
        numel: int,
        workers: int,
        values: str,
        segments: int,
        places: SegmentTable,
        device: torch.device,
    ) -> None:
        self.size, self.numel, self.workers, self.segments, self.launch = size, numel, workers, segments, Launcher()
        self.codec, self.places = CODEC_NUMBERS[values] if workers > 1 else 0, places
        self.scaled = workers > 1 and values in SCALED
        region = max(1, -(-size // (DIGIT_PROGRAMS * BLOCK))) * BLOCK
        self.regions = -(-size // region)
        self.index_bits = (rows - 1).bit_length()
        self.highest = (1 << self.index_bits) - 1
        width = MAGNITUDE + self.index_bits
        self.rounds = 0 if size <= kept else -(-width // DIGIT)  # where all fit, none is looked for

        def zeros(number: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(number, dtype=dtype, device=device)

        self.values, self.rows = zeros(self.regions * region, torch.float32), zeros(self.regions * region)
        self.count = torch.tensor(size, dtype=torch.int64, device=device)
        self._found = torch.full((self.regions,), region, dtype=torch.int32, device=device)
        self._owners = zeros(self.regions, torch.int64)
        self._table = table([SegmentRow(kept, kept, 0, self.regions, region, 0)], device)
        # The first range holds every key; 1: among candidates, which the list is.
        ranges = [RangeRow(0, width, kept, 1, kept), *self.rounds * [RangeRow(0, 0, 0, 1, 0)]]
        self._ranges, self._digits = table(ranges, device), zeros(max(1, self.rounds) << DIGIT)
        self._limit = zeros(1, torch.int64)
        self._peaks, self._shares = zeros(segments), zeros(segments, torch.int64)
        self._choice = zeros(segments * len(ChoiceRow._fields), torch.int64)

    def choose(self, rank: int, left_indices: Tensor, left_values: Tensor, failed: Tensor, number: Tensor) -> None:
        """Make the largest of the sums what travels, and note what is left of all, with its place in the gradient.

        Exchange ``number`` is ``failed`` where a sum lies outside of it.
        """
        from sparsync.kernels.balanced import triton as kernels
        from sparsync.kernels.topk.radix_select_triton import count_digits

        with on_device_of(self.values):
            for step in range(self.rounds):
                self.launch(
                    count_digits, (self.regions,),
                    self.values, self.rows, self.values, self._found, self._owners, self._table, self._table,
                    self._ranges, self._digits, step, self.index_bits, self.highest, self.regions, 0, 1,
                    BLOCK=BLOCK, BLOCKS=1, PIECE=BLOCK, INDEXED=True, num_warps=8, maxnreg=REGISTERS,
                )  # fmt: skip
            self.launch(
                kernels.set_limit, (1,),
                self._ranges, self._digits, self.rounds, self._limit, self._peaks, self._shares, self._choice,
                self.segments, BLOCK=1024, num_warps=8,
            )  # fmt: skip
            for action in (kernels.PEAK, kernels.SHARE, kernels.TAKE) if self.scaled else (kernels.TAKE,):
                self.launch(
                    kernels.act_on_sums, (-(-self.size // SUMS),),
                    self.values, self.rows, self.size, self._limit, self.index_bits, self.highest, self._peaks,
                    self._shares, self._choice, left_indices, left_values, self.places.starts, self.places.owners,
                    self.places.spans, rank, self.numel, failed, number,
                    BLOCK=SUMS, ACTION=action.value, CODEC=self.codec, STEPS=self.places.steps, PARTS=self.workers,
                    num_warps=4, enable_fp_fusion=False,
                )  # fmt: skip
