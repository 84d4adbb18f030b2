"""Whole vectors that are summed in parts, on their device, in buffers that stay: nothing waits for the host."""

from __future__ import annotations

import torch
from torch import Tensor

from sparsync.kernels.device import on_device_of
from sparsync.kernels.launcher import Launcher
from sparsync.kernels.message.header import HEADER

BLOCK = 1024  # entries


class PartBuffers:
    """A message for each rank, room for one from each, and the sums of this rank's part.

    Args:
        part: entries of a part, an even number.
        workers: ranks, each of which has one.
        half: values travel as bf16, two in a word.
    """

    def __init__(self, part: int, workers: int, half: bool, device: torch.device) -> None:
        self.part, self.workers, self.half, self.launch = part, workers, half, Launcher()
        self.words = part // 2 if half else part
        self.rows = torch.zeros(workers, HEADER + self.words, dtype=torch.int32, device=device)
        self.received, self.own = torch.zeros_like(self.rows), self.rows.new_zeros(self.words)
        self.gathered: Tensor | None = None  # made by the channel
        self._values: dict[int, tuple[Tensor, Tensor]] = {}

    def pack(self, whole: Tensor, header: Tensor) -> Tensor:
        """Return messages that hold the header and each rank's part of a vector."""
        from sparsync.kernels.by_parts import triton as kernels

        with on_device_of(whole):
            self.launch(
                kernels.pack, (-(-self.part // BLOCK), self.workers),
                whole, header, self.rows, self._as_values(self.rows), whole.numel(), self.part, HEADER + self.words,
                BLOCK=BLOCK, HALF=self.half,
            )  # fmt: skip
        return self.rows

    def add(self, rows: Tensor) -> Tensor:
        """Return the sums of this rank's part, in the order of the ranks, as they travel."""
        from sparsync.kernels.by_parts import triton as kernels

        with on_device_of(rows):
            self.launch(
                kernels.add, (-(-self.part // BLOCK),),
                self._as_values(rows), self._as_values(self.own), self.part, self.workers, HEADER + self.words,
                BLOCK=BLOCK, HALF=self.half,
            )  # fmt: skip
        return self.own

    def write_mean(self, sums: Tensor, out: Tensor, overflow: Tensor | None) -> None:
        """Write the sums of all parts, divided by the number of ranks; ``overflow`` becomes 1 if that is not finite."""
        from sparsync.kernels.by_parts import triton as kernels

        with on_device_of(out):
            self.launch(
                kernels.write_mean, (-(-out.numel() // BLOCK),),
                self._as_values(sums), out, out if overflow is None else overflow, out.numel(), float(self.workers),
                BLOCK=BLOCK, HALF=self.half, CHECK=overflow is not None,
            )  # fmt: skip

    def _as_values(self, words: Tensor) -> Tensor:
        """Return words as the values that they are: the same object each time, as kernels know it."""
        known = self._values.get(id(words))
        if known is None:
            known = self._values[id(words)] = words, words.view(torch.int16 if self.half else torch.float32)
        return known[1]
