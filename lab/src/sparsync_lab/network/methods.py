"""Ways to exchange the gradients of one DDP model, one at a time: plain DDP's own hooks, and the library's methods."""

# No `from __future__ import annotations` here: DDP compares the hook's annotations with types, not with text.

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.futures import Future

from sparsync.config import ExchangePlan, resolve
from sparsync.engine.auto import AutoSwitch
from sparsync.engine.budget import largest_density, within_budget
from sparsync.engine.traffic import bytes_per_step
from sparsync.hosts.ddp import hook as sparse_hook
from sparsync.hosts.handle import Handle
from sparsync.layout import SCOPES
from sparsync.schedule import Constant, as_schedule
from sparsync_lab.training.methods import DENSE, check_options, method_options
from sparsync_lab.training.settings import dense_bytes

POWER_SGD = "powersgd"  # torch's
LOCAL = "local"  # nothing is exchanged: what a step takes by itself


def local_hook(state: Any, bucket: GradBucket) -> Future[Tensor]:
    """Leave a bucket as it is."""
    done: Future[Tensor] = Future()
    done.set_result(bucket.buffer())
    return done


class OrderedPowerSGD:
    """What torch's PowerSGD keeps (factors of rank 4, after two dense steps), bucket after bucket: it begins later sums
    of a bucket as earlier ones end, and over Gloo ranks would mix up those of several buckets."""

    def __init__(self) -> None:
        self.own = PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2)
        self.last: Future[Tensor] | None = None


def power_sgd_hook(state: OrderedPowerSGD, bucket: GradBucket) -> Future[Tensor]:
    """Exchange a bucket by PowerSGD once the one before it is done."""
    if state.last is not None:
        state.last.wait()
    state.last = powerSGD_hook(state.own, bucket)
    return state.last


# DDP's hooks, and how many bytes they send for an entry where DDP without them sends 4; 0 if that is not known.
HOOKS: dict[str, tuple[Callable[[Any, GradBucket], Future[Tensor]], int]] = {
    DENSE: (default_hooks.allreduce_hook, 4),
    "bf16": (default_hooks.bf16_compress_hook, 2),
    "fp16": (default_hooks.fp16_compress_hook, 2),
    POWER_SGD: (power_sgd_hook, 0),
    LOCAL: (local_hook, 0),
}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=1e-3, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
}
SETTLED = 2**31  # a step after which densities do not change any more
STATE = 20  # bytes an entry that a sparse method keeps, about: residual, velocity, messages


@dataclass(frozen=True)
class NetworkMethod:
    """A way to exchange gradients, by name.

    Args:
        name: ``"dense"``, ``"bf16"`` or ``"fp16"`` (DDP's own hooks); a recipe; a compressor; or a compressor with its
            collective and its scope, as in ``"topk+gtopk@bucket"``.
        density: share of the entries to send, of compressors.
        optimizer: whose momentum a recipe corrects, or whose updates it preconditions.
    """

    name: str
    density: float = 0.001
    optimizer: str = "sgd"

    def __post_init__(self) -> None:
        if self.optimizer not in OPTIMIZERS:
            raise ValueError(f"optimizer must be one of {', '.join(OPTIMIZERS)}, got {self.optimizer!r}")
        if not 0 < self.density <= 1:
            raise ValueError(f"density must be above 0 and at most 1, got {self.density:g}")
        if self.name not in HOOKS:
            check_options(self.options)

    @property
    def options(self) -> dict[str, Any]:
        """Return the options of ``attach``, all but the optimizer."""
        name, at, scope = self.name.partition("@")
        if at and scope not in SCOPES:
            raise ValueError(f"the scope of {self.name!r} must be one of {', '.join(SCOPES)}")
        found = method_options(name, scope=scope or None)
        assert found is not None  # as it is not "dense"
        return found if "recipe" in found else {**found, "density": self.density}

    @property
    def label(self) -> str:
        """Return what it is called in tables."""
        return self.name

    @property
    def own_density(self) -> float | None:
        """Return the density that it has of its own; ``None`` where that is a recipe's or DDP's."""
        return None if self.name in HOOKS or "recipe" in self.options else self.density

    def plan(self, module: nn.Module, workers: int) -> ExchangePlan | None:
        """Return how the library exchanges the gradients of a model; ``None`` for DDP's own hooks."""
        if self.name in HOOKS:
            return None
        options = self.options
        if "recipe" in options:
            options["optimizer"] = OPTIMIZERS[self.optimizer](module.parameters())
        return mean_plan(resolve(**options), module, workers)


class AttachedMethod:
    """A method on a DDP model whose hook is ``exchange``.

    Args:
        module: the bare model.
        workers: P.
    """

    def __init__(self, method: NetworkMethod, module: nn.Module, workers: int) -> None:
        self.method, self._hook = method, HOOKS.get(method.name)
        self.handle: Handle | None = None
        self._dense = dense_bytes(sum(p.numel() for p in module.parameters()), workers)
        self._state = OrderedPowerSGD() if method.name == POWER_SGD else None
        self._stepped: torch.optim.Optimizer | None = None
        plan = method.plan(module, workers)
        if plan is not None:
            self.handle = Handle(module, plan)
            # An update that was preconditioned and is never applied would wait to be; other steps change nothing here.
            self._stepped = plan.optimizer if plan.precondition else None

    @property
    def auto(self) -> AutoSwitch | None:
        """What decides, if the method is 'auto'."""
        return None if self.handle is None else self.handle._auto

    def before_step(self) -> None:
        """Do what ``attach`` does before a forward pass."""
        if self.handle is not None and self.handle.is_attached():
            self.handle.check_start()

    def exchange(self, bucket: GradBucket) -> Future[Tensor]:
        if self._hook is not None:
            return self._hook[0](self._state, bucket)
        return sparse_hook(self.handle, bucket)

    def after_step(self) -> tuple[float, tuple[float, float, float]]:
        """Return the bytes that a worker sent in the last step by the library's own count, and the seconds of
        compressing, exchanging and decoding."""
        if self._hook is not None:
            return self._dense * self._hook[1] / 4, (0.0, 0.0, 0.0)
        assert self.handle is not None
        self.handle.check()
        if self._stepped is not None:
            self._stepped.step()
        last = self.handle.stats().step
        return last.traffic, (last.compress_s, last.exchange_s, last.decode_s)

    def close(self) -> None:
        if self.handle is not None:
            self.handle.detach()


class HookSwitch:
    """The state of a DDP model's one hook: the method that exchanges now."""

    current: AttachedMethod


def switched_hook(state: HookSwitch, bucket: GradBucket) -> Future[Tensor]:
    """Exchange a bucket by the method that is chosen now: DDP takes one hook for life."""
    return state.current.exchange(bucket)


def mean_plan(plan: ExchangePlan, module: nn.Module, workers: int) -> ExchangePlan:
    """Return a plan that sends in every step what the plan sends on average over a training, if it has a budget: the
    first steps of such a training send several times as much as the rest."""
    tensors = dict(module.named_parameters())
    plan = within_budget(plan, tensors, workers)
    if plan.spending is None or plan.compressor.dense:
        return replace(plan, budget=None)  # which is found already
    cost, mean = bytes_per_step(plan, tensors, workers), plan.spending.mean
    last, first = sorted(plan.spending.densities)
    density = largest_density(lambda density: cost(density) / mean, last, first) if first > last else last
    return plan_at(plan, density)


def plan_at(plan: ExchangePlan, density: float) -> ExchangePlan:
    """Return a plan that sends this share of the entries in every step, and is as it is otherwise."""
    return replace(plan, density=as_schedule(Constant(density)), budget=None, spending=None)


def groups_that_fit(
    methods: Sequence[NetworkMethod], entries: int, workers: int, available: int
) -> list[list[NetworkMethod]]:
    """Return the methods in groups that may be kept at once in so many bytes of memory, each of one at least."""
    room = max(1, (available // workers - 16 * entries) // (STATE * entries))
    groups: list[list[NetworkMethod]] = [[]]
    for method in methods:
        kept = sum(other.name not in HOOKS for other in groups[-1])
        if method.name not in HOOKS and kept >= room:
            groups.append([])
        groups[-1].append(method)
    return groups
