"""What choosing, coding and summing entries takes on a device, counted in entries, bytes and rounds."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from sparsync.collectives import Traffic
from sparsync.config import ExchangePlan


class LocalCost(NamedTuple):
    """Seconds that a unit takes, apart from the network.

    Args:
        fixed: whatever its size.
        per_entry: of the gradient.
        per_byte: that passes through the busiest worker.
        per_round: of the exchange.
    """

    fixed: float = 0.0
    per_entry: float = 0.0
    per_byte: float = 0.0
    per_round: float = 0.0

    def seconds(self, numel: int, traffic: Traffic) -> float:
        """Return what a unit of ``numel`` entries takes whose exchange has this traffic."""
        return sum(cost * count for cost, count in zip(self, features(numel, traffic), strict=True))


def features(numel: int, traffic: Traffic) -> tuple[float, float, float, float]:
    """Return what the parts of a ``LocalCost`` are counted in."""
    return 1.0, float(numel), sum(transfer.bytes for transfer in traffic.transfers), float(traffic.rounds)


class MethodCost(NamedTuple):
    """What a method takes.

    Args:
        select: adding to the residual and choosing entries.
        finish: coding, decoding, summing and writing back.
    """

    select: LocalCost = LocalCost()
    finish: LocalCost = LocalCost()


class CostBook(Protocol):
    """Knows what methods take on a device.

    Attributes:
        name: of the device, in words.
        blocking: choosing entries keeps backward waiting.
    """

    name: str
    blocking: bool

    def of(self, plan: ExchangePlan) -> MethodCost:
        """Return what the units of a plan take whose entries are compressed."""
        ...

    def cast(self) -> LocalCost:
        """Return what DDP's own bf16 hook takes: a cast and one back."""
        ...


class FixedCosts:
    """The same costs for every method; by default none."""

    name, blocking = "", True

    def __init__(self, cost: MethodCost | None = None) -> None:
        self.cost = cost or MethodCost()

    def of(self, plan: ExchangePlan) -> MethodCost:
        return self.cost

    def cast(self) -> LocalCost:
        return LocalCost()


def cost_key(plan: ExchangePlan) -> str:
    """Return what of a plan its costs depend on."""
    parts = [type(plan.compressor).__name__, type(plan.collective).__name__, plan.values, plan.indices]
    parts += ["correction"] * (plan.correction is not None) + ["preconditioned"] * plan.precondition
    return " ".join(parts)
