"""How a flat gradient is cut into segments, and how many entries each segment may send."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from sparsync.value_range import largest_value

SCOPES = ("layer", "bucket", "global")


@dataclass(frozen=True)
class Parameter:
    """A parameter as its gradient lies in memory; a complex one is described by its real view.

    ``as_strided(shape, stride)`` of the flat gradient gives it in logical order, whatever its memory format.
    """

    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    numel: int
    dtype: torch.dtype

    @classmethod
    def of(cls, name: str, tensor: Tensor) -> Parameter:
        real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        shape, stride = tuple(real.shape), tuple(real.stride())
        if not _dense_in_memory(shape, stride):  # such a gradient is made contiguous
            stride = tuple(torch.empty(shape, dtype=torch.float32, device="meta").stride())
        return cls(name, shape, stride, real.numel(), real.dtype)


def _dense_in_memory(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Return whether a tensor fills its memory without gaps or overlaps, in some order of its dimensions."""
    expected = 1
    for step, size in sorted((step, size) for step, size in zip(stride, shape, strict=True) if size != 1):
        if step != expected:
            return False
        expected *= size
    return True


MATRIX = 32  # sizes of the last two dimensions from which on a tensor of more is taken for a stack of matrices
WORTH = 4  # a tensor is sketched if that is so many times smaller than itself


@dataclass(frozen=True)
class Matrices:
    """A tensor as matrices, in the order of its memory: one of its first dimension by all others (as convolutions
    are), or a stack of them where the last two dimensions are large (as those of experts)."""

    stack: int
    rows: int
    cols: int

    @classmethod
    def of(cls, parameter: Parameter) -> Matrices | None:
        """Return a parameter's matrices; ``None`` if row and column sums would not be much smaller than itself."""
        dims = sorted(zip(parameter.stride, parameter.shape, strict=True), reverse=True)
        sizes = [size for _, size in dims if size != 1]
        if len(sizes) < 2 or not parameter.numel:
            return None
        stacked = len(sizes) > 2 and min(sizes[-2:]) >= MATRIX
        stack = math.prod(sizes[:-2]) if stacked else 1
        rows = sizes[-2] if stacked else sizes[0]
        made = cls(stack, rows, parameter.numel // (stack * rows))
        return made if WORTH * made.sums <= parameter.numel else None

    @property
    def sums(self) -> int:
        """How many rows and columns there are."""
        return self.stack * (self.rows + self.cols)


@dataclass(frozen=True)
class Span:
    """One parameter's place in a flat gradient."""

    name: str
    start: int
    numel: int

    @property
    def stop(self) -> int:
        return self.start + self.numel


@dataclass(frozen=True)
class Segment:
    """Spans that share one budget: ``k`` entries wanted, ``capacity`` entries at most."""

    name: str
    spans: tuple[Span, ...]
    k: int
    capacity: int

    @property
    def numel(self) -> int:
        return sum(span.numel for span in self.spans)

    def runs(self, unused: frozenset[str] = frozenset()) -> list[tuple[int, int]]:
        """Return the segment as contiguous ``(start, stop)`` ranges, without the parameters named in ``unused``."""
        return _join(span for span in self.spans if span.name not in unused)


@dataclass(frozen=True)
class Layout:
    """A flat gradient of ``numel`` entries and its segments; entries outside every segment are not ours to send.

    ``id`` numbers the exchange unit (the bucket), and travels in each message. ``dtype`` is the gradient's, which its
    mean is written in.
    """

    id: int
    numel: int
    segments: tuple[Segment, ...]
    dtype: torch.dtype = torch.float32
    _tables: dict[torch.device, tuple[Tensor, Tensor]] = field(default_factory=dict, compare=False, repr=False)
    _budgets: dict[torch.device, Tensor] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def cut(
        cls,
        spans: Sequence[Span],
        *,
        numel: int,
        scope: str,
        density: float,
        capacity: Callable[[int, int], int] = lambda k, n: k,
        id: int = 0,
        name: str = "",
        dtype: torch.dtype = torch.float32,
    ) -> Layout:
        """Cut ``spans`` by ``scope``: one segment per parameter (``layer``), or one in all (``bucket``, ``global``).

        ``capacity(k, n)`` tells how many entries a segment of ``n`` that wants ``k`` may send.
        """
        groups = [(span.name, (span,)) for span in spans] if scope == "layer" else [(name, tuple(spans))]
        segments = []
        for label, group in groups:
            n = sum(span.numel for span in group)
            if n:
                k = entries_for(density, n)
                segments.append(Segment(label, group, k, min(n, max(k, capacity(k, n)))))
        return cls(id, numel, tuple(segments), dtype)

    @cached_property
    def k(self) -> int:
        return sum(segment.k for segment in self.segments)

    @cached_property
    def capacity(self) -> int:
        return sum(segment.capacity for segment in self.segments)

    @cached_property
    def most(self) -> float:
        """The largest magnitude of what one worker may send of an entry."""
        return largest_value(self.dtype)

    @cached_property
    def slots(self) -> tuple[tuple[int, tuple[tuple[int, int], ...]], ...]:
        """Of every segment, how many entries it may send and its ``(start, stop)`` ranges."""
        return tuple((segment.capacity, tuple(segment.runs())) for segment in self.segments)

    @cached_property
    def runs(self) -> list[tuple[int, int]]:
        """All segments as contiguous ``(start, stop)`` ranges."""
        return _join(self.spans)

    @cached_property
    def sendable(self) -> int:
        """How many entries belong to a segment."""
        return sum(segment.numel for segment in self.segments)

    @cached_property
    def spans(self) -> tuple[Span, ...]:
        return tuple(span for segment in self.segments for span in segment.spans)

    @cached_property
    def digest(self) -> int:
        """31 bits that differ when the cut differs; travels in each message."""
        text = repr((self.id, self.numel, self.segments))
        return zlib.crc32(text.encode()) & 0x7FFFFFFF

    def segment_of(self, indices: Tensor) -> Tensor:
        """Return the number of the segment each index lies in."""
        if len(self.segments) == 1:
            return indices.new_zeros(()).expand_as(indices)
        starts, owners = self.span_table(indices.device)
        return owners[torch.bucketize(indices, starts, right=True) - 1]

    def span_table(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return where all spans start, in ascending order, and their segments' numbers; made once."""
        if device not in self._tables:
            spans = sorted((span.start, i) for i, segment in enumerate(self.segments) for span in segment.spans)
            starts = torch.tensor([start for start, _ in spans], dtype=torch.int64, device=device)
            owners = torch.tensor([owner for _, owner in spans], dtype=torch.int64, device=device)
            self._tables[device] = (starts, owners)
        return self._tables[device]

    def budgets(self, device: torch.device) -> Tensor:
        """Return ``k`` of every segment, made once."""
        if device not in self._budgets:
            self._budgets[device] = torch.tensor(
                [segment.k for segment in self.segments], dtype=torch.int64, device=device
            )
        return self._budgets[device]


def _join(spans: Iterable[Span]) -> list[tuple[int, int]]:
    """Return ``(start, stop)`` ranges; spans that touch are one."""
    runs: list[tuple[int, int]] = []
    for span in spans:
        if runs and runs[-1][1] == span.start:
            runs[-1] = (runs[-1][0], span.stop)
        else:
            runs.append((span.start, span.stop))
    return runs


def entries_for(density: float, numel: int) -> int:
    """k = max(1, round(density · n)), at most n."""
    return min(numel, max(1, round(density * numel)))


def locate(positions: Tensor, runs: Sequence[tuple[int, int]]) -> Tensor:
    """Return flat indices of positions counted along ``runs``, as if these were one."""
    if len(runs) < 2:
        return positions + (runs[0][0] if runs else 0)
    starts, ends, sizes = run_table(runs, positions.device)
    run = torch.bucketize(positions, ends, right=True)
    return positions - (ends - sizes)[run] + starts[run]


def run_table(runs: Sequence[tuple[int, int]], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Return, of each run: where it starts in the flat gradient, where it ends counted along the runs, and its size."""
    table = [[start for start, _ in runs], [stop - start for start, stop in runs]]
    starts, sizes = torch.tensor(table, dtype=torch.int64, device=device)
    return starts, sizes.cumsum(0), sizes
