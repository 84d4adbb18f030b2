"""Whole vectors that are summed in parts, on their device, in buffers that stay: nothing waits for the host."""

from __future__ import annotations

import torch
from torch import Tensor

from sparsync.kernels.device import on_device_of
from sparsync.kernels.launcher import Launcher
from sparsync.kernels.message.header import HEADER

BLOCK = 1024  # entries


def part_of(numel: int, workers: int) -> int:
    """Return how many of some entries a rank sums: an even number, as two of bf16 make a word."""
    return -(-numel // (2 * workers)) * 2


class PartBuffers:
    """A message for each rank, room for one from each, and the sums of this rank's part.

    Args:
        numel: entries of the vector.
        full: of the first so many, sums travel as fp32.
        workers: ranks.
        half: values travel as bf16, two in a word, and so do the sums of the other entries.
        divisor: of the sums; the number of ranks.
    """

    def __init__(
        self, numel: int, full: int, workers: int, half: bool, device: torch.device, divisor: int | None = None
    ) -> None:
        self.workers, self.half, self.launch = workers, half, Launcher()
        self.divisor = float(divisor or workers)
        parts = part_of(full, workers), part_of(numel - full, workers)
        self.pieces, self.entries = (full, numel, *parts), sum(parts)
        self.words = HEADER + (self.entries // 2 if half else self.entries)
        self.rows = torch.zeros(workers, self.words, dtype=torch.int32, device=device)
        self.received = torch.zeros_like(self.rows)
        self.own = self.rows.new_zeros(parts[0] + (parts[1] // 2 if half else parts[1]))
        self.gathered: Tensor | None = None  # made by the channel
        self._halves: dict[int, tuple[Tensor, Tensor]] = {}
        self._headers = {id(rows): rows[:, :HEADER] for rows in (self.rows, self.received)}

    def pack(self, whole: Tensor, header: Tensor) -> Tensor:
        """Return messages that hold the header and each rank's part of a vector."""
        from sparsync.kernels.by_parts import triton as kernels

        with on_device_of(whole):
            self.launch(
                kernels.pack, (-(-self.entries // BLOCK), self.workers),
                whole, header, *self._both(self.rows), *self.pieces, self.words, BLOCK=BLOCK, HALF=self.half,
            )  # fmt: skip
        return self.rows

    def headers_of(self, rows: Tensor) -> Tensor:
        """Return the headers of ``rows`` or ``received``: the same object each time."""
        return self._headers[id(rows)]

    def add(self, rows: Tensor) -> Tensor:
        """Return the sums of this rank's part, in the order of the ranks, as they travel."""
        from sparsync.kernels.by_parts import triton as kernels

        with on_device_of(rows):
            self.launch(
                kernels.add, (-(-self.entries // BLOCK),),
                *self._both(rows), *self._both(self.own), *self.pieces, self.workers, self.words,
                BLOCK=BLOCK, HALF=self.half,
            )  # fmt: skip
        return self.own

    def write_mean(self, sums: Tensor, out: Tensor, overflow: Tensor | None) -> None:
        """Write the sums of all parts, divided once; ``overflow`` becomes 1 if that is not finite."""
        from sparsync.kernels.by_parts import triton as kernels

        with on_device_of(out):
            self.launch(
                kernels.write_mean, (-(-out.numel() // BLOCK),),
                *self._both(sums), out, out if overflow is None else overflow, *self.pieces, self.own.numel(),
                self.divisor, BLOCK=BLOCK, HALF=self.half, CHECK=overflow is not None,
            )  # fmt: skip

    def _both(self, words: Tensor) -> tuple[Tensor, Tensor]:
        """Return words, and their halves: the same object each time, as kernels know it."""
        known = self._halves.get(id(words))
        if known is None:
            known = self._halves[id(words)] = words, words.view(torch.int16)
        return known


class RestBuffer:
    """What bf16 cuts off a flat gradient, until it is known whether its step counts.

    Args:
        grad: fp32, the same memory from step to step.
    """

    def __init__(self, grad: Tensor) -> None:
        self.grad, self.rest, self.launch = grad, torch.zeros_like(grad), Launcher()
        self.grid = (-(-grad.numel() // BLOCK),)

    def round(self, before: Tensor) -> None:
        """Add what was kept to the gradient, and round it, in its place; a gradient of 0 sends nothing."""
        from sparsync.kernels.by_parts import triton as kernels

        with on_device_of(self.grad):
            self.launch(kernels.cut_off, self.grid, self.grad, before, self.rest, self.grad.numel(), BLOCK=BLOCK)

    def keep(self, good: Tensor, before: Tensor, after: Tensor) -> None:
        """Keep what was cut off where ``good`` is above 0; else what was kept before stays."""
        from sparsync.kernels.by_parts import triton as kernels

        with on_device_of(self.grad):
            self.launch(
                kernels.keep_rest, self.grid, good, self.rest, before, after, self.grad.numel(), BLOCK=BLOCK
            )  # fmt: skip
