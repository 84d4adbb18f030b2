"""How well ``ThresholdK`` keeps to k on the gradients of a real training."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sparsync.compressors import Context, ThresholdK
from sparsync.feedback.momentum import TakenMomentum
from sparsync.kernels import Memory
from sparsync.kernels.threshold.reference import LOWEST, bits_of, estimate
from sparsync.layout import Layout, Span
from sparsync.sparse import SparseGrad
from sparsync_lab.bench.workloads import Workload, make_optimizer
from sparsync_lab.models import CATALOGUE

MODELS = ("lenet5", "resnet20", "lstm-ptb", "gpt")
SETTLING = 20  # steps that are not judged
TOLERANCE = 0.1  # of k
ENERGY = 0.99  # of exact top-k's
SHARE = 0.99  # of the steps
WARM_UP = 10  # steps until the learning rate is whole
DROP = 10  # the learning rate is divided by this in the middle of the run


@dataclass(frozen=True)
class FollowBench:
    """A training whose gradients are sent by ``ThresholdK``.

    Args:
        model: one of ``MODELS``.
        steps: of the optimizer.
        density: share of the entries to send, in (0, 1].
        device: ``"cpu"`` or ``"cuda"``.
        feedback: train with what is sent, the optimizer's momentum moved; otherwise with the whole gradient.
        rate: learning rate; ``None``: the published one.
        seed: of first weights and batches.
    """

    model: str
    steps: int = 300
    density: float = 0.001
    device: str = "cpu"
    feedback: bool = True
    rate: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.model not in MODELS:
            raise ValueError(f"model must be one of {', '.join(MODELS)}, got {self.model!r}")
        if self.steps <= SETTLING:
            raise ValueError(f"steps must be above {SETTLING}, the steps that are not judged, got {self.steps}")
        if not 0 < self.density <= 1:
            raise ValueError(f"density must be above 0 and at most 1, got {self.density:g}")
        if self.device not in ("cpu", "cuda"):
            raise ValueError(f"device must be cpu or cuda, got {self.device!r}")
        if self.device == "cuda" and not torch.cuda.is_available():
            raise ValueError("device cuda was asked for, and torch sees none")
        if self.rate is not None and not 0 < self.rate < math.inf:
            raise ValueError(f"rate must be above 0, got {self.rate:g}")


@dataclass(frozen=True)
class FollowStep:
    """What one step sent.

    Args:
        step: from 1.
        rate: learning rate.
        candidates: entries at or above the floor.
        energy: of what was sent, over that of the k largest entries of the same sum of gradient and residual.
    """

    step: int
    loss: float
    rate: float
    k: int
    count: int
    candidates: int
    energy: float

    @property
    def ratio(self) -> float:
        return self.count / self.k


@dataclass(frozen=True)
class FollowSummary:
    """Statistics of all steps but the first few.

    Args:
        steps: how many.
        within: share of them whose count was within a tenth of k.
        fewest, most: counts, over k.
        enough: share of them that sent 99 % of exact top-k's energy.
        mean_energy, energy, least_energy: mean, median and least of the energy sent, over exact top-k's.
    """

    steps: int
    within: float
    fewest: float
    most: float
    enough: float
    mean_energy: float
    energy: float
    least_energy: float

    @property
    def met(self) -> bool:
        """Return whether enough steps kept to k, and enough sent the energy they should."""
        return self.within >= SHARE and self.enough >= SHARE


def follow(
    bench: FollowBench, workload: Workload, on_step: Callable[[int], None] = lambda new: None
) -> list[FollowStep]:
    """Train one worker, and look at what ``ThresholdK`` with error feedback sends of every gradient.

    Args:
        taught: the model and its batches.
        on_step: called with 1 after every step.
    """
    spec = CATALOGUE[bench.model]
    rate = spec.rate if bench.rate is None else bench.rate
    optimizer = make_optimizer(bench.model, workload.model, rate)
    if bench.feedback:
        TakenMomentum(optimizer)
    parameters = list(workload.model.parameters())
    compared = _ThresholdBesideTopK(
        sum(parameter.numel() for parameter in parameters), bench.density, parameters[0].device
    )
    steps: list[FollowStep] = []
    for number in range(1, bench.steps + 1):
        now = rate * min(1.0, number / WARM_UP) if number <= bench.steps // 2 else rate / DROP
        for group in optimizer.param_groups:
            group["lr"] = now
        optimizer.zero_grad()
        loss = workload.loss()
        loss.backward()  # type: ignore[no-untyped-call]
        if spec.clip is not None:
            torch.nn.utils.clip_grad_norm_(parameters, spec.clip)
        grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
        flat = torch.cat([grad.reshape(-1) for grad in grads])
        if not bool(torch.isfinite(flat).all()):
            raise ValueError(f"the training of {spec.title} diverged at step {number}; try a rate below {rate:g}")
        sent, count, candidates, energy = compared.step(flat, number)
        if bench.feedback:
            parts = torch.split(sent.densify(), [grad.numel() for grad in grads])
            for grad, part in zip(grads, parts, strict=True):
                grad.copy_(part.view_as(grad))
        optimizer.step()
        steps.append(FollowStep(number, loss.item(), now, compared.k, count, candidates, energy))
        on_step(1)
    return steps


def summarize_steps(steps: Sequence[FollowStep]) -> FollowSummary:
    counted = [step for step in steps if step.step > SETTLING]
    ratios, energies = [step.ratio for step in counted], [step.energy for step in counted]
    return FollowSummary(
        len(counted),
        sum(abs(ratio - 1) <= TOLERANCE + 1e-9 for ratio in ratios) / len(counted),
        min(ratios),
        max(ratios),
        sum(energy >= ENERGY for energy in energies) / len(counted),
        statistics.fmean(energies),
        statistics.median(energies),
        min(energies),
    )


class _ThresholdBesideTopK:
    """``ThresholdK`` and its residual over one flat gradient, with exact top-k beside it."""

    def __init__(self, numel: int, density: float, device: torch.device) -> None:
        self.compressor = ThresholdK(density)
        spans = [Span("gradient", 0, numel)]
        capacity = self.compressor.capacity
        self.layout = Layout.cut(spans, numel=numel, scope="global", density=density, capacity=capacity, name="all")
        self.state = self.compressor.init(self.layout)
        residual = torch.zeros(numel, device=device)
        self.memory = Memory(residual, residual)

    @property
    def k(self) -> int:
        return self.layout.k

    def step(self, grad: Tensor, number: int) -> tuple[SparseGrad, int, int, float]:
        """Return what is sent, its count, the number of candidates, and the energy sent over exact top-k's."""
        u = self.memory.before + grad
        floor, made_for = (int(self.state["all"][name]) for name in ("floor", "k"))
        if made_for != self.k:  # not known yet: the compressor takes a sample
            floor = estimate(u, [(0, u.numel())], self.k)
        candidates = int((bits_of(u) >= max(LOWEST, floor)).sum())
        best = torch.topk(u.abs(), self.k, sorted=False).values.double().square().sum()
        sent = self.compressor.compress(grad, self.memory, self.layout, Context(number), self.state)
        got = sent.values.double().square().sum()  # what is not real is 0
        return sent, int(sent.count), candidates, (got / best).item() if best > 0 else 1.0
