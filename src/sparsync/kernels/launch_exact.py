"""The exact kernels, launched in order."""

from __future__ import annotations

from torch import Tensor

from sparsync.kernels import launch
from sparsync.kernels.memory import Memory
from sparsync.kernels.search import Digits, Search, search_of
from sparsync.kernels.workspace import BLOCK, CHUNK, CODECS, SCALED, Workspace, on_device_of
from sparsync.kernels.workspace_gaussian import GaussianSpace
from sparsync.layout import Layout
from sparsync.sparse import SparseGrad

PROGRAMS = 1056  # at most: eight for each multiprocessor of a large device; they loop
TALLIES = 264  # the same for ``tally``, of which two fit: its histogram takes many registers
REGISTERS = 128


def largest(
    grad: Tensor,
    memory: Memory,
    layout: Layout,
    state: dict[str, dict[str, Tensor]],
    codec: str,
    scales: Tensor | None = None,
) -> SparseGrad:
    """``TopK``: the pass, the limit among its candidates, and those that reach it.

    Args:
        codec: how values travel: fp32, fp16, bf16, sign or levels.
        scales: of every segment, what its gradient is multiplied by.
    """
    from sparsync.kernels import exact

    with on_device_of(grad):
        space, search = begin(grad, memory, layout, state, scales)
        space.launch(
            exact.judge, (len(layout.segments),),
            space.counts, space.found, space.segments, space.state, space.histogram, space.choice, search.ranges,
            search.fallbacks, space.peaks, space.shares, search.index_bits, num_warps=4,
        )  # fmt: skip
        return end(memory, space, search, codec)


def begin(
    grad: Tensor, memory: Memory, layout: Layout, state: dict[str, dict[str, Tensor]], scales: Tensor | None
) -> tuple[Workspace, Search]:
    """The pass, and where the search begins."""
    space = launch.workspace_of(memory, layout, grad.device)
    search = search_of(memory, space)
    if space.adopt(state):
        search.forget_floors()
    launch.collect(grad, memory, space, scales, False)
    return space, search


def end(memory: Memory, space: Workspace, search: Search, codec: str) -> SparseGrad:
    """The limits within the ranges that were found, and what reaches them."""
    from sparsync.kernels import exact

    segments = len(space.layout.segments)
    narrow(memory.after, space, search)
    space.launch(
        exact.settle, (segments,),
        memory.after, space.places, space.segments, space.samples, space.spans, space.state, space.histogram,
        space.choice, search.ranges, search.sums, space.flags, search.rounds, segments, space.span_count,
        space.candidates, BLOCK=CHUNK, num_warps=4,
    )  # fmt: skip
    for action in (0, 1, 2) if codec in SCALED else (2,):
        send(memory, space, search, codec, action)
    return space.sent()


def narrow(after: Tensor, space: Workspace | GaussianSpace, search: Digits) -> None:
    """The ranges, digit by digit down to the limit."""
    from sparsync.kernels import exact

    segments, strips = len(space.layout.segments), space.strip_count
    for step in range(search.rounds):
        space.launch(
            exact.tally, (min(TALLIES, max(space.regions, strips)),),
            after, space.places, space.values, space.found, space.owners, space.segments, space.strips,
            search.ranges, search.sums, step, search.index_bits, search.highest, space.regions, strips, segments,
            BLOCK=BLOCK, BLOCKS=space.blocks, PIECE=BLOCK, PLACED=True, num_warps=8, maxnreg=REGISTERS,
        )  # fmt: skip


def send(memory: Memory, space: Workspace | GaussianSpace, search: Digits, codec: str, action: int) -> None:
    """Of what reaches its limit: the peak (0), its shares (1), or all of it taken out (2)."""
    from sparsync.kernels import exact

    speed, strips = memory.velocity, space.strip_count
    masking = speed is not None and speed.masking
    space.launch(
        exact.send, (min(PROGRAMS, max(space.regions * space.chunks, strips)),),
        memory.after, speed.after if speed and masking else memory.after, space.places, space.values, space.found,
        space.owners, space.segments, space.strips, search.ranges, space.choice, space.peaks, space.shares,
        space.out_places, space.out_values, space.total, search.rounds, search.index_bits, search.highest,
        space.regions, space.chunks, strips, len(space.layout.segments),
        BLOCK=BLOCK, BLOCKS=space.blocks, PIECE=CHUNK, ACTION=action, CODEC=CODECS[codec], MASKING=masking,
        num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
