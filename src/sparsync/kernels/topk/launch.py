"""The kernels of exact top-k, launched in order; and what they need beside the candidates."""

from __future__ import annotations

import torch
from torch import Tensor

from sparsync.kernels.candidates.launch import CHUNK, CandidateLists, EntryLists, State, candidates_of, collect, count
from sparsync.kernels.codecs import CODEC_NUMBERS, SCALED
from sparsync.kernels.device import on_device_of
from sparsync.kernels.memory import Memory
from sparsync.kernels.strips import BLOCK, RangeRow
from sparsync.layout import Layout
from sparsync.sparse import SparseGrad

PROGRAMS = 1056  # at most: eight for each multiprocessor of a large device; they loop
DIGIT_PROGRAMS = 264  # the same for ``count_digits``, of which two fit: its histogram takes many registers
REGISTERS = 128
DIGIT = 11  # bits
MAGNITUDE = 31
INFINITE = 0x7F800000  # a threshold that nothing reaches
ENTRIES = 2**31  # a gradient must have fewer: they are counted in 32 bits


class RadixRanges:
    """The ranges that limits are looked for in, and the sums of keys' digits there, for every round and segment.

    Args:
        layout: of the flat gradient.
        device: where it is.
        fallbacks: how often a segment was searched for in the residual so far, one int64 on the device.
    """

    def __init__(self, layout: Layout, device: torch.device, fallbacks: Tensor | None = None) -> None:
        segments = len(layout.segments)
        self.index_bits = (layout.numel - 1).bit_length()
        self.highest = (1 << self.index_bits) - 1
        self.rounds = -(-(MAGNITUDE + self.index_bits) // DIGIT)
        words = (self.rounds + 1) * segments * len(RangeRow._fields)
        self.ranges = torch.zeros(words, dtype=torch.int64, device=device)
        self.sums = torch.zeros(self.rounds * segments << DIGIT, dtype=torch.int32, device=device)
        self.fallbacks = fallbacks if fallbacks is not None else torch.zeros((), dtype=torch.int64, device=device)


class TopKSearch(RadixRanges):
    """The same for candidates, and what their carried thresholds must be.

    Args:
        space: the candidates.
        fallbacks: as there.
    """

    def __init__(self, space: CandidateLists, fallbacks: Tensor | None = None) -> None:
        super().__init__(space.layout, space.device, fallbacks)
        self.space, device = space, space.device
        sparse = [segment.k < segment.numel for segment in space.layout.segments]
        self._wanted = torch.tensor([segment.k for segment in space.layout.segments], dtype=torch.int64, device=device)
        self._sparse = torch.tensor(sparse, dtype=torch.bool, device=device)

    def forget_thresholds(self) -> None:
        """Raise thresholds that are not known, or were made for another k, above everything: the fallback finds one.

        Where all is sent there is no threshold, nor one left of sparser days.
        """
        thresholds, made_for = self.space.state.unbind(1)[:2]
        thresholds.masked_fill_(~self._sparse, 0)
        thresholds.masked_fill_(self._sparse & ((made_for != self._wanted) | (thresholds == 0)), INFINITE)


def search_of(memory: Memory, space: CandidateLists) -> TopKSearch:
    """Return the search that lives beside this memory's candidates."""

    def make() -> TopKSearch:
        last = memory.workspace.find(TopKSearch)
        return TopKSearch(space, None if last is None else last.fallbacks)

    return memory.workspace.get(TopKSearch, id(space), make)


def select(
    grad: Tensor, memory: Memory, layout: Layout, state: State, codec: str, scales: Tensor | None = None
) -> SparseGrad:
    """Send the k largest entries of every segment: the pass, the limit among its candidates, and those that reach it.

    Args:
        codec: how values travel: fp32, fp16, bf16, sign or levels.
        scales: of every segment, what its gradient is multiplied by.
    """
    from sparsync.kernels.topk.triton import begin_search

    with on_device_of(grad):
        space, search = begin(grad, memory, layout, state, scales)
        space.launch(
            begin_search, (len(layout.segments),),
            space.counts, space.found, space.segments, space.state, space.histogram, space.choice, search.ranges,
            search.fallbacks, space.peaks, space.shares, search.index_bits, num_warps=4,
        )  # fmt: skip
        return end(memory, space, search, codec)


def begin(
    grad: Tensor, memory: Memory, layout: Layout, state: State, scales: Tensor | None
) -> tuple[CandidateLists, TopKSearch]:
    """Launch the pass; return its candidates, and the search among them that is to begin."""
    space = candidates_of(memory, layout, grad.device)
    search = search_of(memory, space)
    if space.adopt(state):
        search.forget_thresholds()
    collect(grad, memory, space, scales, False)
    count(space)
    return space, search


def end(memory: Memory, space: CandidateLists, search: TopKSearch, codec: str) -> SparseGrad:
    """Find the limits within the ranges that are known, and take out what reaches them."""
    from sparsync.kernels.topk.triton import set_limits

    segments = len(space.layout.segments)
    radix_select(memory.after, space, search)
    space.launch(
        set_limits, (segments,),
        memory.after, space.indices, space.segments, space.samples, space.spans, space.state, space.histogram,
        space.choice, search.ranges, search.sums, space.flags, search.rounds, segments, space.span_count,
        space.entries, BLOCK=CHUNK, num_warps=4,
    )  # fmt: skip
    take_out(memory, space, search, codec)
    return space.sent


def radix_select(after: Tensor, space: EntryLists, search: RadixRanges) -> None:
    """Narrow the ranges, digit by digit down to the limits."""
    from sparsync.kernels.topk.radix_select_triton import count_digits

    segments, strips = len(space.layout.segments), space.strip_count
    for step in range(search.rounds):
        space.launch(
            count_digits, (min(DIGIT_PROGRAMS, max(space.regions, strips)),),
            after, space.indices, space.values, space.found, space.owners, space.segments, space.strips,
            search.ranges, search.sums, step, search.index_bits, search.highest, space.regions, strips, segments,
            BLOCK=BLOCK, BLOCKS=space.blocks, PIECE=BLOCK, INDEXED=True, num_warps=8, maxnreg=REGISTERS,
        )  # fmt: skip


def take_out(memory: Memory, space: EntryLists, search: RadixRanges, codec: str) -> None:
    """Take what reaches its limit out of the residual; first, where values have a scale, find what that is made of."""
    from sparsync.kernels.topk.take_triton import PEAK, SHARE, TAKE, take_largest

    velocity, strips = memory.velocity, space.strip_count
    masking = velocity is not None and velocity.masking
    actions = (PEAK, SHARE, TAKE) if codec in SCALED else (TAKE,)
    for action in actions:
        space.launch(
            take_largest, (min(PROGRAMS, max(space.regions * space.chunks, strips)),),
            memory.after, velocity.after if velocity and masking else memory.after, space.indices, space.values,
            space.found, space.owners, space.segments, space.strips, search.ranges, space.choice, space.peaks,
            space.shares, space.out_indices, space.out_values, space.total, search.rounds, search.index_bits,
            search.highest, space.regions, space.chunks, strips, len(space.layout.segments),
            BLOCK=BLOCK, BLOCKS=space.blocks, PIECE=CHUNK, ACTION=action.value, CODEC=CODEC_NUMBERS[codec],
            HALF=space.layout.dtype == torch.float16, MASKING=masking, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
