"""How large the mean gradient has been, entry by entry: the second moment that all workers share.

It is made from sums over all workers and the shared seed alone, so it is the same on every rank, bit for bit. Of a
matrix only the rows' and the columns' sums of squares are known (as in Adafactor, Shazeer and Stern, 2018), and these
only by random signs: a worker sends G z and w G, whose sum over the workers is that of the mean gradient.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sparsync.kernels.precondition import Tables
from sparsync.kernels.sketch import Sketched, draw_signs
from sparsync.layout import Matrices, Parameter

SECOND_MOMENTS = ("sketch", "exact")
LEAST_BETA, FEW = 0.5, 0.01  # momentum that is enough where no more than this share of the entries is sent


@dataclass(frozen=True)
class Preconditioning:
    """Preconditioned feedback: what enters the residual is the update that the optimizer would make.

    Args:
        beta: momentum of the velocity; ``"own"``: the optimizer's, ``"auto"``: less of it the fewer entries are sent,
            since what waits in the residual is averaged there.
        second_moment: ``"sketch"``: of rows and columns, from random signs; ``"exact"``: of every entry, for which the
            whole gradient is sent beside the entries: to compare with.
        floor: least second moment of a row or column, as a share of the mean's; in the first steps it is more.
        limit: largest update of one worker, over the learning rate and the root of the number of workers: its gradient
            is that much noisier than the mean, whose second moment it is divided by.
        rise: the second moment of a matrix remembers little at first: in step t its beta is at most 1 - t^-rise, and
            the optimizer's own from then on. In the first steps gradients grow, and one that remembers how small they
            were gives updates that are too large.
        sgd: the optimizer is SGD: the second moment evens out rows and columns of a tensor alone, whose update as a
            whole has the size that SGD's has.
    """

    beta: float | str = "auto"
    second_moment: str = "sketch"
    floor: float = 0.01
    limit: float = 2.5
    rise: float = 0.6
    sgd: bool = False

    def __post_init__(self) -> None:
        number = isinstance(self.beta, int | float) and 0 <= self.beta < 1
        if not number and self.beta not in ("auto", "own"):
            raise ValueError(f"beta must be from 0 to below 1, 'auto' or 'own', got {self.beta!r}")
        if self.second_moment not in SECOND_MOMENTS:
            raise ValueError(f"second_moment must be one of {', '.join(SECOND_MOMENTS)}, got {self.second_moment!r}")

    def beta_for(self, own: float, density: float) -> float:
        """Return the velocity's momentum for an optimizer's own, at a density: 0.5 up to 1 %, and its own at 1."""
        if self.beta == "own":
            return own
        if self.beta == "auto":
            part = max(0.0, 1 + math.log(density) / math.log(1 / FEW))
            return min(own, LEAST_BETA) + max(0.0, own - LEAST_BETA) * part
        return float(self.beta)

    def limit_for(self, workers: int) -> float:
        """Return the largest magnitude of a worker's update over its rate; none where nothing is estimated."""
        return self.limit * math.sqrt(workers) if self.second_moment == "sketch" else math.inf

    def matrices(self, parameter: Parameter) -> Matrices | None:
        """Return what of a parameter is sketched; ``None``: its second moment is that of every entry."""
        return Matrices.of(parameter) if self.second_moment == "sketch" else None


@dataclass(frozen=True)
class AdamRule:
    """What an optimizer says of one parameter."""

    rate: float
    betas: tuple[float, float]
    eps: float


class SecondMoment:
    """Second moments of all tensors of a model, in flat vectors; first moments of those that travel dense.

    Args:
        parameters: of the model, in its order.
        dense_names: those that travel dense, whose mean gradient every rank knows.
        device: of all of them.
        seed: shared by all ranks.
        workers: how many there are.
    """

    def __init__(
        self,
        parameters: Sequence[Parameter],
        dense_names: frozenset[str],
        preconditioning: Preconditioning,
        device: torch.device,
        seed: int,
        workers: int,
    ) -> None:
        self.preconditioning, self.device, self.seed = preconditioning, device, seed
        self.tensors: dict[str, Sketched] = {}
        self.dense: list[str] = []
        groups: list[tuple[int, int]] = []  # of rows or columns of one matrix, or entries: the tensor, and how many
        place = 0
        for parameter in (p for p in parameters if p.numel):
            shape = None if parameter.name in dense_names else preconditioning.matrices(parameter)
            tensor = Sketched(len(self.tensors), parameter.numel, shape, place)
            self.tensors[parameter.name] = tensor
            place += tensor.size
            if parameter.name in dense_names:
                self.dense.append(parameter.name)
            if shape is None:
                groups.append((tensor.number, tensor.size))
            else:
                groups += [(tensor.number, shape.rows)] * shape.stack + [(tensor.number, shape.cols)] * shape.stack
        count = len(self.tensors)
        zeros, doubles = torch.zeros(place, device=device), torch.ones(count, device=device, dtype=torch.float64)
        self.sums, self.squares, self.means = zeros, zeros.clone(), zeros.clone() if self.dense else zeros[:0]
        self.powers1, self.powers2, self.steps = doubles, doubles.clone(), torch.zeros_like(doubles)
        self.norms = torch.zeros(count, device=device)
        self.max_norm = torch.full((), math.inf, device=device)
        self.good = torch.ones((), device=device, dtype=torch.bool)
        owners = torch.tensor([number for number, _ in groups], device=device)
        self._tensor = owners
        self._groups_of = torch.bincount(owners, minlength=count)
        self._matrix = torch.tensor([t.matrices is not None for t in self.tensors.values()], device=device)
        self._lengths = torch.tensor([length for _, length in groups], device=device)
        self._group = torch.repeat_interleave(self._lengths)
        self._owner = owners[self._group]
        self._pairs, self._entries = self._find_pairs()
        self._numels = torch.tensor([tensor.numel for tensor in self.tensors.values()], device=device)
        self._plain = torch.tensor([name in self.dense for name in self.tensors], device=device)
        rates, eps, betas, shares = (torch.zeros(count, device=device) for _ in range(4))
        self.tables = Tables(zeros.clone(), rates, eps, betas, shares, preconditioning.limit_for(workers))
        self._known: tuple[list[AdamRule], float] = [], 0.0
        self._hyper = torch.zeros(5, count, device=device)
        self.draws = 0  # steps that signs were drawn for; one that is undone does not count
        self._saved: list[Tensor] | None = None
        self._numbers: dict[tuple[str, ...], Tensor] = {}
        self._indices: dict[tuple[int, ...], Tensor] = {}

    def _find_pairs(self) -> tuple[Tensor, Tensor]:
        """Return of every group the one that it makes entries with, and 1 for groups of entries themselves."""
        pairs, entries, at = [], [], 0
        for tensor in self.tensors.values():
            stack = tensor.matrices.stack if tensor.matrices else 0
            pairs += [at + stack + i for i in range(stack)] + [at + i for i in range(stack)] or [at]
            entries += [0.0] * (2 * stack) or [1.0]
            at += 2 * stack or 1
        return torch.tensor(pairs, device=self.device), torch.tensor(entries, device=self.device)

    # ---- a step ---------------------------------------------------------------------------------------------------

    def begin_step(self, rules: Mapping[str, AdamRule], density: float) -> Tensor:
        """Begin a step; returns its signs.

        Args:
            rules: by parameter name; who has none is left alone.
            density: share of the entries that is going to be sent.
        """
        own = [rules.get(name, AdamRule(0.0, (1.0, 1.0), 1.0)) for name in self.tensors]
        if (own, density) != self._known:
            beta_for = self.preconditioning.beta_for
            first = [
                rule.betas[0] if name in self.dense or name not in rules else beta_for(rule.betas[0], density)
                for name, rule in zip(self.tensors, own, strict=True)
            ]
            rows = [[r.rate for r in own], first, [r.betas[1] for r in own], [r.eps for r in own]]
            hyper = torch.tensor([*rows, [float(name in rules) for name in self.tensors]])
            self._hyper.copy_(hyper.pin_memory() if self.device.type == "cuda" else hyper, non_blocking=True)
            self._known = own, density
        self.sums.zero_()
        self.draws += 1
        return draw_signs(self.sums.numel(), self.seed, self.draws, self.device)

    def update(self, loss_scale: float) -> None:
        """Take this step's gradient into the moments, and make its tables; a step that is not finite changes nothing.

        ``sums`` holds the mean over the workers of all sketches, and of the gradients that travel dense.
        """
        rate, first, second, eps, known = self._hyper
        sums, tables = self.sums, self.tables
        self.good = torch.isfinite(sums).all()
        sums.mul_(1 / loss_scale).masked_fill_(~self.good, 0)
        squares = sums * sums
        # A group's sum of squares is that of its matrix, of rows and of columns alike.
        energy = _sums(squares, self._lengths)
        energy *= 0.5 + 0.5 * self._entries
        self.norms = _sums(energy, self._groups_of).sqrt_()
        clip = self.clip
        squares *= clip * clip
        active = self.good & (self.norms > 0) & (known > 0)
        risen = 1 - (self.steps + 1).pow_(-self.preconditioning.rise)
        second = torch.where(self._matrix, torch.minimum(second, risen.float()), second)
        self.powers1.mul_(torch.where(active, first.double(), 1.0))
        self.powers2.mul_(torch.where(active, second.double(), 1.0))
        self.steps += active
        self.squares.lerp_(squares, torch.where(active, 1 - second, 0.0)[self._owner])
        # Where nothing has come in yet everything is 0, and divided by what is not.
        now = self.squares / (1 - self.powers2).float().clamp_(min=1e-30)[self._owner]
        total = _sums(now, self._lengths).clamp_(min=1e-37)
        # A single draw of signs may cancel a row by chance: the first steps know its size less well than the mean's.
        least = (0.5 / self.steps.square().clamp(min=0.5)).clamp_(min=self.preconditioning.floor).float()
        least = least[self._tensor] * total / self._lengths * (1 - self._entries)
        now = torch.maximum(now, least[self._group])
        whole = ((total + total[self._pairs]) / 2).sqrt() / total  # each side has the root of the matrix's sum
        now *= torch.where(self._entries > 0, 1.0, whole)[self._group]
        torch.sqrt(now, out=tables.sizes)
        if self.preconditioning.sgd:
            size = self._tensor_sizes(total)
            rate, eps = rate * size, eps * size
        else:
            rate = rate / (1 - self.powers1).clamp_(min=1e-300)
        tables.rates.copy_(torch.where(active, rate, 0.0))
        tables.eps.copy_(eps)
        tables.betas.copy_(torch.where(self.good & (self.norms > 0), first, 1.0))  # who has no gradient rests
        tables.shares.copy_(torch.where(self.good, (1 - first) * clip / loss_scale, 0.0))
        self._update_means(active, first, clip)

    def _tensor_sizes(self, total: Tensor) -> Tensor:
        """Return the root mean square of every tensor's second moment, which SGD's rate is multiplied by; 1 for tensors
        that travel dense, whose rule is plain. ``total``: of every group its sum."""
        energy = _sums(total * (0.5 + 0.5 * self._entries), self._groups_of)
        return torch.where(self._plain, 1.0, (energy / self._numels).sqrt_().clamp_(min=1e-20))

    def _update_means(self, active: Tensor, first: Tensor, clip: Tensor) -> None:
        """Take the gradients that travel dense into their first moments."""
        if self.means.numel():
            self.means.lerp_(self.sums * clip, torch.where(active, 1 - first, 0.0)[self._owner])

    @property
    def clip(self) -> Tensor:
        """What the mean gradient is multiplied by, so that its norm is not above the largest."""
        return (self.max_norm / (self.norm + 1e-6)).clamp_(max=1.0)

    def scale(self, ratio: Tensor) -> None:
        """Make the moments those of gradients ``ratio`` times as large."""
        self.squares.mul_(ratio * ratio)
        self.means.mul_(ratio)

    @property
    def norm(self) -> Tensor:
        """The mean gradient's norm, before it is clipped; that of matrices is estimated."""
        return self.norms.square().sum().sqrt()

    def norm_of(self, names: Sequence[str]) -> Tensor:
        """Return that of some tensors."""
        key = tuple(names)
        if key not in self._numbers:
            self._numbers[key] = torch.tensor([self.tensors[name].number for name in names], device=self.device)
        return self.norms.index_select(0, self._numbers[key]).square().sum().sqrt()

    def sizes_of(self, name: str) -> Tensor:
        """Return the second moment of every entry of a tensor as it is kept, flat, without bias correction."""
        tensor = self.tensors[name]
        own, shape = self.squares[tensor.place : tensor.place + tensor.size], tensor.matrices
        if shape is None:
            return own.clone()
        cut = shape.stack * shape.rows
        rows, cols = own[:cut].view(-1, shape.rows, 1), own[cut:].view(-1, 1, shape.cols)
        totals = [side.sum((1, 2), keepdim=True).clamp_(min=1e-37) for side in (rows, cols)]
        return ((rows / totals[0]) * (cols / totals[1]) * (totals[0] + totals[1]) / 2).flatten()

    def load(self, name: str, squares: Tensor | None, mean: Tensor, steps: float, powers: tuple[float, float]) -> None:
        """Go on from an optimizer's moments of one tensor, flat, in the order of its memory.

        Args:
            squares: the second moment, if it has one.
            powers: products of the momenta of velocity and second moment.
        """
        tensor = self.tensors[name]
        own, shape = self.squares[tensor.place : tensor.place + tensor.size], tensor.matrices
        if name in self.dense:
            self.means[tensor.place : tensor.place + tensor.size].copy_(mean)
        if squares is None:
            return
        if shape is None:
            own.copy_(squares)
        else:
            matrices = squares.to(own.device, own.dtype).view(shape.stack, shape.rows, shape.cols)
            own.copy_(torch.cat([matrices.sum(2).flatten(), matrices.sum(1).flatten()]))
        self.steps[tensor.number] = steps
        self.powers1[tensor.number], self.powers2[tensor.number] = powers

    def index_of(self, tensors: Sequence[Sketched]) -> Tensor:
        """Return where in the flat vectors the sketches of ``tensors`` are, or their entries, one after another."""
        key = tuple(tensor.number for tensor in tensors)
        if key not in self._indices:
            places = [torch.arange(t.place, t.place + t.size, device=self.device) for t in tensors]
            self._indices[key] = torch.cat(places)
        return self._indices[key]

    def dense_updates(self, names: Sequence[str]) -> Tensor:
        """Return what the optimizer's own rule makes of gradients that travel dense, flat, one after another; NaN in a
        bad step."""
        index, tables = self.index_of([self.tensors[name] for name in names]), self.tables
        owner = self._owner[index]
        update = self.means[index] * tables.rates[owner]
        if not self.preconditioning.sgd:
            update /= tables.sizes[index] + tables.eps[owner]
        return torch.where(self.good, update, torch.nan)

    # ---- what is kept ---------------------------------------------------------------------------------------------

    @property
    def _kept(self) -> list[Tensor]:
        return [self.squares, self.means, self.powers1, self.powers2, self.steps, self.max_norm]

    def save(self) -> None:
        """Remember the moments, so that the step that begins can be undone."""
        if self._saved is None:
            self._saved = [tensor.clone() for tensor in self._kept]
        for copy, tensor in zip(self._saved, self._kept, strict=True):
            copy.copy_(tensor)

    def undo(self) -> None:
        """Make the moments what they were when they were last saved."""
        assert self._saved is not None
        for copy, tensor in zip(self._saved, self._kept, strict=True):
            tensor.copy_(copy)
        self.draws -= 1

    def state_dict(self) -> dict[str, dict[str, Tensor]]:
        """Return copies of the moments by parameter name."""
        state = {}
        for name, tensor in self.tensors.items():
            place = slice(tensor.place, tensor.place + tensor.size)
            numbers = torch.stack([kept[tensor.number] for kept in (self.steps, self.powers1, self.powers2)])
            state[name] = {"squares": self.squares[place].clone(), "numbers": numbers}
            if name in self.dense:
                state[name]["mean"] = self.means[place].clone()
        return {**state, "": {"max_norm": self.max_norm.clone(), "draws": torch.tensor(self.draws)}}

    def load_state_dict(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Replace all moments; what is not named starts from zero."""
        for name in state:
            if name and name not in self.tensors:
                raise ValueError(f"the checkpoint holds moments for {name!r}, which this model does not have")
        for name, tensor in self.tensors.items():
            bag, own = state.get(name), self.squares[tensor.place : tensor.place + tensor.size]
            if bag is not None and bag["squares"].shape != own.shape:
                raise ValueError(f"the checkpoint's moments for {name!r} are of another shape, or of another kind")
            own.copy_(bag["squares"]) if bag else own.zero_()
            numbers = (self.steps, self.powers1, self.powers2)
            for kept, value in zip(numbers, bag["numbers"] if bag else (0, 1, 1), strict=True):
                kept[tensor.number] = value
            if name in self.dense:
                mean = self.means[tensor.place : tensor.place + tensor.size]
                mean.copy_(bag["mean"]) if bag else mean.zero_()
        self.max_norm.copy_(state[""]["max_norm"])
        self.draws = int(state[""]["draws"])


def _sums(values: Tensor, lengths: Tensor) -> Tensor:
    """Return the sums of parts of these lengths; they are not checked, for which the host would have to wait."""
    return torch.segment_reduce(values, "sum", lengths=lengths, unsafe=True)
