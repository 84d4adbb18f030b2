"""The kernels of second moments, launched; and their buffers, which stay from step to step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from sparsync.kernels.device import on_device_of
from sparsync.kernels.launcher import Launcher
from sparsync.kernels.second_moment.reference import MomentVectors
from sparsync.kernels.sketch.reference import Sketched, sign_key
from sparsync.kernels.strips import table
from sparsync.workspace import Workspace

BLOCK = 1024  # entries of a strip
LANES = 128  # strips whose sums are added at once
TAKEN = ("second", "first", "correction", "least")


class MomentStrip(NamedTuple):
    """Entries of one group; whose strips, and those of the group it makes entries with, lie together."""

    place: int
    size: int
    tensor: int
    exact: int  # whether entries have second moments of their own
    length: int  # of the group
    first: int  # strip of the group
    strips: int
    pair_first: int
    pair_strips: int


class DenseStrip(NamedTuple):
    """Entries of one tensor that travels dense."""

    tensor: int
    place: int
    at: int  # in the flat gradient
    size: int
    first: int  # strip of the tensor
    strips: int


class MomentBuffers:
    """The flat vectors in strips, their sums, and what each tensor's moments take of a step, as in ``TAKEN``."""

    def __init__(self, vectors: MomentVectors) -> None:
        groups, device, self.launch = vectors.groups, vectors.device, Launcher()
        many = [-(-group.size // BLOCK) for group in groups]
        first = [sum(many[:i]) for i in range(len(groups))]
        strips = [
            MomentStrip(
                group.place + at, min(BLOCK, group.size - at), group.tensor, group.pair == i, group.size, first[i],
                many[i], first[group.pair], many[group.pair],
            )
            for i, group in enumerate(groups)
            for at in range(0, group.size, BLOCK)
        ]  # fmt: skip
        self.count, self.strips = len(strips), table(strips, device)
        self.parts, self.totals = (torch.zeros(self.count, dtype=torch.float32, device=device) for _ in range(2))
        self.tensors = vectors.norms.numel()
        self.taken = torch.zeros(len(TAKEN), self.tensors, dtype=torch.float32, device=device)


class DenseUpdateBuffers:
    """Tensors that travel dense in strips, the sums of squares of their updates, and by what these are multiplied."""

    def __init__(self, tensors: Sequence[Sketched], device: torch.device) -> None:
        self.tensors, self.launch = tensors, Launcher()
        strips = list(_dense_strips(tensors))
        self.count, self.strips = len(strips), table(strips, device)
        self.parts = torch.zeros(self.count, device=device, dtype=torch.float64)
        self.factor = torch.ones((), dtype=torch.float32, device=device)


def _dense_strips(tensors: Sequence[Sketched]) -> Iterator[DenseStrip]:
    first = 0
    for tensor in tensors:
        many = -(-tensor.numel // BLOCK)
        for at in range(0, tensor.numel, BLOCK):
            size = min(BLOCK, tensor.numel - at)
            yield DenseStrip(tensor.number, tensor.place + at, tensor.start + at, size, first, many)
        first += many


def begin_step(vectors: MomentVectors, seed: int, step: int) -> None:
    """Draw the step's signs, and clear the sums."""
    from sparsync.kernels.second_moment import triton as kernels

    space, size = _buffers(vectors), vectors.sums.numel()
    key = sign_key(seed, step)
    with on_device_of(vectors.sums):
        space.launch(
            kernels.begin_step, (-(-size // BLOCK),),
            vectors.sums, vectors.signs, size, key - (key >> 31 << 32), BLOCK=BLOCK,  # in 32 bits, with a sign
        )  # fmt: skip


def update(vectors: MomentVectors, loss_scale: float) -> None:
    """Do as ``reference.update``: nothing waits for the host."""
    from sparsync.kernels.second_moment import triton as kernels

    space, v, t = _buffers(vectors), vectors, vectors.tables
    share, strips, once = 1 / loss_scale, space.strips, (space.count,)
    with on_device_of(vectors.sums):
        space.launch(kernels.measure, once, v.sums, strips, space.parts, share, BLOCK=BLOCK)
        space.launch(
            kernels.decide, (space.tensors,),
            space.parts, strips, space.count, v.hyper, v.powers1, v.powers2, v.steps, v.norms, v.max_norm, v.summary,
            space.taken, t.rates, t.eps, t.betas, t.shares, v.rises, space.tensors, share, v.floor, v.rise,
            BLOCK=BLOCK, SGD=v.sgd, enable_fp_fusion=False,
        )  # fmt: skip
        space.launch(
            kernels.take_in, once,
            v.sums, v.squares, v.means if v.means.numel() else v.squares, strips, space.taken, v.summary, space.totals,
            space.tensors, share, BLOCK=BLOCK, MEANS=bool(v.means.numel()), enable_fp_fusion=False,
        )  # fmt: skip
        if v.sgd:
            space.launch(
                kernels.scale_rates, (space.tensors,),
                space.totals, strips, space.count, v.plain, v.numels, t.rates, t.eps, BLOCK=BLOCK,
            )  # fmt: skip
        space.launch(
            kernels.make_sizes, once,
            v.squares, t.sizes, strips, space.taken, space.totals, space.tensors,
            BLOCK=BLOCK, LANES=LANES, enable_fp_fusion=False,
        )  # fmt: skip


def write_dense(
    vectors: MomentVectors, tensors: Sequence[Sketched], out: Tensor, scale: float, shown: Tensor, workspace: Workspace
) -> Tensor:
    """Do as ``reference.write_dense``: nothing waits for the host."""
    from sparsync.kernels.second_moment import triton as kernels

    made_for, t = (id(tensors), out.device), vectors.tables
    space = workspace.get(DenseUpdateBuffers, made_for, lambda: DenseUpdateBuffers(tensors, out.device))
    own = (vectors.means, t.sizes, t.rates, t.eps, vectors.summary, space.strips, space.parts)
    with on_device_of(out):
        space.launch(kernels.measure_dense, (space.count,), *own, BLOCK=BLOCK, SGD=vectors.sgd, enable_fp_fusion=False)
        space.launch(
            kernels.write_dense, (space.count,),
            *own, vectors.norms, out, space.factor, shown, space.count, scale,
            BLOCK=BLOCK, LANES=LANES, SGD=vectors.sgd, enable_fp_fusion=False,
        )  # fmt: skip
    return space.factor


def _buffers(vectors: MomentVectors) -> MomentBuffers:
    return vectors.workspace.get(MomentBuffers, None, lambda: MomentBuffers(vectors))
