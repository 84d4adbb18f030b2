"""Second moments from sums over all workers, in plain PyTorch: the specification of the kernels."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from sparsync.kernels.precondition.reference import Tables
from sparsync.kernels.sketch.reference import Sketched
from sparsync.sparse import give_norm
from sparsync.workspace import Workspace

LARGEST = 2.0**46  # of a mean gradient's sums, without loss scale: their squares, added up, are finite
HYPER = ("rate", "first", "second", "eps", "known", "kept")


class Group(NamedTuple):
    """The rows or the columns of one matrix, or the entries of a tensor: neighbours in the flat vectors."""

    tensor: int  # its number
    place: int
    size: int
    pair: int  # the group that it makes entries with; itself, where entries have second moments of their own


class MomentVectors:
    """What is known of the mean gradients' sizes, in tensors that stay where they are.

    Args:
        tensors: of the model, in its order; their sketches lie one after another.
        dense: numbers of those that travel dense, whose first moments are kept, too.
        floor: least second moment of a row or column, as a share of the mean's.
        limit: of the tables.
        rise: in step t, beta2 is at most 1 - t^-rise, of tensors that ``rises`` names.
        sgd: updates have the size of gradients: second moments even out the rows and columns of a tensor alone.

    Attributes:
        sums: the mean over the workers of all sketches, and of the gradients that travel dense.
        signs: of this step's sketches.
        squares, means: second and first vectors.
        powers1, powers2, steps: of each tensor, products of its betas, and how often it moved.
        norms: of each tensor's mean gradient.
        summary: that of all, by what it is clipped, and whether all is finite (1) or not (0).
        rises, plain, numels: of each tensor, whether it is a matrix, or travels dense, and how many entries it has.
        hyper: rows as in ``HYPER``: of each tensor its learning rate, betas, eps, whether it is trained, and what of
            its residual is kept.
    """

    def __init__(
        self,
        tensors: Sequence[Sketched],
        dense: Collection[int],
        floor: float,
        limit: float,
        rise: float,
        sgd: bool,
        device: torch.device,
    ) -> None:
        self.groups, self.device, self.workspace = groups_of(tensors), device, Workspace()
        self.floor, self.rise, self.sgd = floor, rise, sgd
        self.rises = torch.tensor([tensor.matrices is not None for tensor in tensors], dtype=torch.bool, device=device)
        self.plain = torch.tensor([tensor.number in dense for tensor in tensors], dtype=torch.bool, device=device)
        self.numels = torch.tensor([tensor.numel for tensor in tensors], dtype=torch.int64, device=device)
        count, size = len(tensors), sum(tensor.size for tensor in tensors)
        self.sums, self.signs, self.squares, sizes = (
            torch.zeros(size, dtype=torch.float32, device=device) for _ in range(4)
        )
        self.means = torch.zeros(size if dense else 0, dtype=torch.float32, device=device)
        doubles = torch.ones(count, device=device, dtype=torch.float64)
        self.powers1, self.powers2, self.steps = doubles, doubles.clone(), torch.zeros_like(doubles)
        self.norms = torch.zeros(count, dtype=torch.float32, device=device)
        self.summary = torch.ones(3, dtype=torch.float32, device=device)
        self.max_norm = torch.full((), math.inf, dtype=torch.float32, device=device)
        self.hyper = torch.zeros(len(HYPER), count, dtype=torch.float32, device=device)
        rates, eps, betas, shares = (torch.zeros(count, dtype=torch.float32, device=device) for _ in range(4))
        self.tables = Tables(sizes, rates, eps, betas, shares, self.hyper[-1], limit)


def groups_of(tensors: Sequence[Sketched]) -> list[Group]:
    """Return the groups of all tensors, in the order of the flat vectors."""
    groups: list[Group] = []
    for tensor in tensors:
        shape, at, first = tensor.matrices, tensor.place, len(groups)
        if shape is None:
            groups.append(Group(tensor.number, at, tensor.numel, first))
            continue
        for i in range(2 * shape.stack):
            size = shape.rows if i < shape.stack else shape.cols
            groups.append(Group(tensor.number, at, size, first + (i + shape.stack) % (2 * shape.stack)))
            at += size
    return groups


class GroupIndex:
    """The groups as tensors: what they are of, and of every entry of the flat vectors its group and tensor."""

    def __init__(self, vectors: MomentVectors) -> None:
        groups, device = vectors.groups, vectors.device
        self.tensor = torch.tensor([group.tensor for group in groups], dtype=torch.int64, device=device)
        self.groups_of = torch.bincount(self.tensor, minlength=vectors.norms.numel())
        self.lengths = torch.tensor([group.size for group in groups], dtype=torch.int64, device=device)
        self.pairs = torch.tensor([group.pair for group in groups], dtype=torch.int64, device=device)
        self.exact = torch.tensor(
            [float(group.pair == i) for i, group in enumerate(groups)], dtype=torch.float32, device=device
        )
        self.group = torch.repeat_interleave(self.lengths)
        self.owner = self.tensor[self.group]


def index_of(vectors: MomentVectors) -> GroupIndex:
    """Return the groups as tensors, which stay."""
    return vectors.workspace.get(GroupIndex, None, lambda: GroupIndex(vectors))


def update(vectors: MomentVectors, loss_scale: float) -> None:
    """Take this step's gradient into the moments, and make its tables; a step that is not finite changes nothing, and
    what is beyond ``LARGEST`` is taken as that.

    Args:
        loss_scale: of the gradients; moments have none.
    """
    index, tables, sums = index_of(vectors), vectors.tables, vectors.sums
    rate, first, second, eps, known, _ = vectors.hyper
    good = torch.isfinite(sums).all()
    sums.mul_(1 / loss_scale).clamp_(-LARGEST, LARGEST).masked_fill_(~good, 0)
    squares = sums * sums
    # A group's sum of squares is that of its matrix, of rows and of columns alike.
    energy = _sums(squares, index.lengths)
    energy *= 0.5 + 0.5 * index.exact
    vectors.norms.copy_(_sums(energy, index.groups_of).sqrt_())
    norm = vectors.norms.square().sum().sqrt()
    clip = (vectors.max_norm / (norm + 1e-6)).clamp_(max=1.0)
    vectors.summary.copy_(torch.stack([norm, clip, good.float()]))
    squares *= clip * clip
    active = good & (vectors.norms > 0) & (known > 0)
    risen = 1 - (vectors.steps + 1).pow_(-vectors.rise)
    second = torch.where(vectors.rises, torch.minimum(second, risen.float()), second)
    vectors.powers1.mul_(torch.where(active, first.double(), 1.0))
    vectors.powers2.mul_(torch.where(active, second.double(), 1.0))
    vectors.steps += active
    vectors.squares.lerp_(squares, torch.where(active, 1 - second, 0.0)[index.owner])
    # Where nothing has come in yet everything is 0, and divided by what is not.
    now = vectors.squares / (1 - vectors.powers2).float().clamp_(min=1e-30)[index.owner]
    total = _sums(now, index.lengths).clamp_(min=1e-37)
    # A single draw of signs may cancel a row by chance: the first steps know its size less well than the mean's.
    least = (0.5 / vectors.steps.square().clamp(min=0.5)).clamp_(min=vectors.floor).float()
    least = least[index.tensor] * total / index.lengths * (1 - index.exact)
    now = torch.maximum(now, least[index.group])
    whole = ((total + total[index.pairs]) / 2).sqrt() / total  # each side has the root of the matrix's sum
    now *= torch.where(index.exact > 0, 1.0, whole)[index.group]
    torch.sqrt(now, out=tables.sizes)
    if vectors.sgd:
        size = _tensor_sizes(vectors, total)
        rate, eps = rate * size, eps * size
    else:
        rate = rate / (1 - vectors.powers1).clamp_(min=1e-300)
    tables.rates.copy_(torch.where(active, rate, 0.0))
    tables.eps.copy_(eps)
    tables.betas.copy_(torch.where(good & (vectors.norms > 0), first, 1.0))  # who has no gradient rests
    tables.shares.copy_(torch.where(good, (1 - first) * clip / loss_scale, 0.0))
    if vectors.means.numel():
        vectors.means.lerp_(sums * clip, torch.where(active, 1 - first, 0.0)[index.owner])


def _tensor_sizes(vectors: MomentVectors, total: Tensor) -> Tensor:
    """Return the root mean square of every tensor's second moment, which SGD's rate is multiplied by; 1 for tensors
    that travel dense, whose rule is plain. ``total``: of every group its sum."""
    index = index_of(vectors)
    energy = _sums(total * (0.5 + 0.5 * index.exact), index.groups_of)
    return torch.where(vectors.plain, 1.0, (energy / vectors.numels).sqrt_().clamp_(min=1e-20))


def write_dense(
    vectors: MomentVectors, tensors: Sequence[Sketched], out: Tensor, scale: float, shown: Tensor
) -> Tensor:
    """Write what the optimizer's own rule makes of gradients that travel dense, times what gives it their norm; NaN in
    a step that is not finite.

    Args:
        tensors: that fill ``out``, one after another.
        scale: the norm is that many times theirs.
        shown: by tensor, the norm of what was written.

    Returns:
        By what the updates were multiplied.
    """
    tables, numbers = vectors.tables, [tensor.number for tensor in tensors]
    for tensor in tensors:
        place, number = slice(tensor.place, tensor.place + tensor.size), tensor.number
        update = vectors.means[place] * tables.rates[number]
        if not vectors.sgd:
            update /= tables.sizes[place] + tables.eps[number]
        out[tensor.start : tensor.start + tensor.numel] = torch.where(vectors.summary[2] > 0, update, torch.nan)
    factor = give_norm(out, vectors.norms[numbers], scale)
    parts = [out[tensor.start : tensor.start + tensor.numel] for tensor in tensors]
    norms = torch._foreach_norm(parts, 2, dtype=torch.promote_types(out.dtype, torch.float32))
    shown[numbers] = torch.stack(norms).float()
    return factor


def _sums(values: Tensor, lengths: Tensor) -> Tensor:
    """Return the sums of parts of these lengths; they are not checked, for which the host would have to wait."""
    return torch.segment_reduce(values, "sum", lengths=lengths, unsafe=True)
