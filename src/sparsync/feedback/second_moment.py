"""How large the mean gradient has been, entry by entry: the second moment that all workers share.

It is made from sums over all workers and the shared seed alone, so it is the same on every rank, bit for bit. Of a
matrix only the rows' and the columns' sums of squares are known (as in Adafactor, Shazeer and Stern, 2018), and these
only by random signs: a worker sends G z and w G, whose sum over the workers is that of the mean gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sparsync.kernels.second_moment import MomentVectors, begin_step, update
from sparsync.kernels.sketch import Sketched
from sparsync.layout import Matrices, Parameter
from sparsync.number_checks import is_number

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
        number = is_number(self.beta) and 0 <= self.beta < 1
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

    Attributes:
        gather_shards: gives, of all ranks that hold a part of the same tensors (FSDP), what each of them has: one
            number; ``None`` where tensors are whole. The norm that gradients are clipped at is that of all parts.
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
        self.dense = frozenset(p.name for p in parameters if p.numel and p.name in dense_names)
        place = 0
        for parameter in (p for p in parameters if p.numel):
            shape = None if parameter.name in dense_names else preconditioning.matrices(parameter)
            tensor = Sketched(len(self.tensors), parameter.numel, shape, place)
            self.tensors[parameter.name] = tensor
            place += tensor.size
        dense = [self.tensors[name].number for name in self.dense]
        limit = preconditioning.limit_for(workers)
        self.vectors = vectors = MomentVectors(
            list(self.tensors.values()), dense, preconditioning.floor, limit, preconditioning.rise, preconditioning.sgd,
            device,
        )  # fmt: skip
        self.sums, self.squares, self.means = vectors.sums, vectors.squares, vectors.means
        self.powers1, self.powers2, self.steps = vectors.powers1, vectors.powers2, vectors.steps
        self.norms, self.max_norm, self.tables = vectors.norms, vectors.max_norm, vectors.tables
        self.norm, self.clip, self.good = vectors.summary.unbind()
        self.gather_shards: Callable[[Tensor], Tensor] | None = None
        # Of a matrix's sum of squares, both rows and columns are it.
        weights = [
            torch.full((t.size,), 1.0 if t.matrices is None else 0.5, dtype=torch.float32, device="cpu")
            for t in self.tensors.values()
        ]
        self._weights = torch.cat([*weights, torch.zeros(0, dtype=torch.float32, device="cpu")]).to(device)
        # Of the norm at which is clipped: what ``max_norm`` is of it here.
        self._part = torch.ones((), dtype=torch.float32, device=device)
        self.draws = 0  # steps that signs were drawn for; one that is undone does not count
        self._known: tuple[Any, Any, float] = None, None, 0.0
        self._saved: list[Tensor] | None = None
        self._indices: dict[tuple[int, ...], Tensor] = {}

    # ---- a step ---------------------------------------------------------------------------------------------------

    def begin_step(
        self, rules: Mapping[str, AdamRule], density: float, last: Mapping[str, float] | None = None
    ) -> Tensor:
        """Begin a step; returns its signs.

        Args:
            rules: by parameter name; who has none is left alone. The same object again has not changed.
            density: share of the entries that is going to be sent.
            last: learning rates that residuals are in, likewise. These become smaller with the rate: what waits longest
                would otherwise be the largest at the end of a training. A rate that grows, or is 0, leaves them alone.
        """
        if self._known[0] is not rules or self._known[1] is not last or self._known[2] != density:
            self._send_hyper(rules, density, last or {})
            self._known = rules, last, density
        self.draws += 1
        begin_step(self.vectors, self.seed, self.draws)
        return self.vectors.signs

    def _send_hyper(self, rules: Mapping[str, AdamRule], density: float, last: Mapping[str, float]) -> None:
        """Bring the optimizer's hyperparameters to the device, without waiting for it."""
        beta_for, rows = self.preconditioning.beta_for, []
        betas = {own: beta_for(own, density) for own in {rule.betas[0] for rule in rules.values()}}
        for name in self.tensors:
            rule = rules.get(name)
            if rule is None:
                rows.append((0.0, 1.0, 1.0, 1.0, 0.0, 1.0))
                continue
            first = rule.betas[0] if name in self.dense else betas[rule.betas[0]]
            ratio = min(1.0, rule.rate / last[name]) if rule.rate and last.get(name) else 1.0
            rows.append((rule.rate, first, rule.betas[1], rule.eps, 1.0, ratio))
        self.tables.shrinks = any(row[-1] < 1 for row in rows)
        hyper = torch.tensor(rows, dtype=torch.float32, device="cpu").t().contiguous()
        self.vectors.hyper.copy_(hyper.pin_memory() if self.device.type == "cuda" else hyper, non_blocking=True)

    def update(self, loss_scale: float) -> None:
        """Take this step's gradient into the moments, and make its tables; a step that is not finite changes nothing.

        ``sums`` holds the mean over the workers of all sketches, and of the gradients that travel dense.
        """
        if self.gather_shards is not None:
            self._cut_max_norm(self.gather_shards)
        update(self.vectors, loss_scale)

    def _cut_max_norm(self, gather_shards: Callable[[Tensor], Tensor]) -> None:
        """Make ``max_norm`` the part of it that this rank's shards have of the mean gradient's norm in this step."""
        own = (self.sums.square() * self._weights).sum().view(1)
        total = gather_shards(own).sum()  # added in the order of ranks, so that all replicas have the same bits
        part = (own[0] / total).sqrt()
        part = torch.where(part.isfinite() & (part > 0), part, self._part)
        self.max_norm.copy_(self.max_norm / self._part * part)
        self._part.copy_(part)

    def scale(self, ratio: Tensor) -> None:
        """Make the moments those of gradients ``ratio`` times as large."""
        self.squares.mul_(ratio * ratio)
        self.means.mul_(ratio)

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
            places = [torch.arange(t.place, t.place + t.size, dtype=torch.int64, device=self.device) for t in tensors]
            self._indices[key] = torch.cat(places)
        return self._indices[key]

    # ---- what is kept ---------------------------------------------------------------------------------------------

    @property
    def _kept(self) -> list[Tensor]:
        return [self.squares, self.means, self.powers1, self.powers2, self.steps, self.max_norm, self._part]

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
        draws = torch.tensor(self.draws, dtype=torch.int64, device="cpu")
        return {**state, "": {"max_norm": self.max_norm / self._part, "draws": draws}}

    def check_state(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Refuse what ``load_state_dict`` cannot take."""
        for name in state:
            if name and name not in self.tensors:
                raise ValueError(f"the checkpoint holds moments for {name!r}, which this model does not have")
        for name in ("", *(name for name in state if name)):
            size = self.tensors[name].size if name else 0
            sizes: dict[str, tuple[int, ...]] = (
                {"squares": (size,), "numbers": (3,)} if name else {"max_norm": (), "draws": ()}
            )
            if name in self.dense:
                sizes["mean"] = (size,)
            bag = state.get(name, {})
            if any(key not in bag or tuple(bag[key].shape) != shape for key, shape in sizes.items()):
                what = f"moments for {name!r}" if name else "moments"
                raise ValueError(f"the checkpoint's {what} are of another shape, or of another kind")
            for key in sizes:
                above, finite = key == "mean" or bool((bag[key] >= 0).all()), bool(bag[key].isfinite().all())
                if not above or not (finite or key == "max_norm"):
                    raise ValueError(
                        f"the checkpoint's moments for {name!r} are damaged: {key} is below 0 or not finite"
                    )

    def load_state_dict(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Replace all moments; what is not named starts from zero."""
        self.check_state(state)
        for name, tensor in self.tensors.items():
            bag, own = state.get(name), self.squares[tensor.place : tensor.place + tensor.size]
            own.copy_(bag["squares"]) if bag else own.zero_()
            numbers = (self.steps, self.powers1, self.powers2)
            for kept, value in zip(numbers, bag["numbers"] if bag else (0, 1, 1), strict=True):
                kept[tensor.number] = value
            if name in self.dense:
                mean = self.means[tensor.place : tensor.place + tensor.size]
                mean.copy_(bag["mean"]) if bag else mean.zero_()
        self.max_norm.copy_(state[""]["max_norm"])
        self._part.fill_(1)
        self.draws = int(state[""]["draws"])
