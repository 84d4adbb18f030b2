"""What the exchanges cost and brought, per step and in total."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field


@dataclass(eq=False)
class ExchangeRecord:
    """One exchange of one unit, with the moments (seconds of ``time.perf_counter``) it went through.

    ``ahead``: seconds in which parts of it were added to the residual before the last one came.
    """

    unit: str
    arrived: float = field(default_factory=time.perf_counter)
    compressed: float = 0.0
    started: float = 0.0
    exchanged: float = 0.0
    decoded: float = 0.0
    ahead: float = 0.0
    bytes: int = 0
    traffic: float = 0.0
    entries: int = 0
    numel: int = 0
    energy_sent: float = 0.0
    energy: float = 0.0


@dataclass
class Totals:
    """Sums over exchanges.

    Args:
        steps: steps counted.
        bytes: handed to ``torch.distributed`` by this rank.
        traffic: bytes a worker puts on the network for that, as the collectives' ``traffic`` has it.
        entries: gradient entries this rank sent.
        numel: entries it could have sent: all, compressed or not.
        compress_s, exchange_s, decode_s: seconds; exchanges run beside backward, so these do not add up to step time.
        skipped: steps that were undone.
        lost_ranks, joined_ranks: ranks that were lost while the others went on, with all that their residuals held; and
            that have joined them.
        lost_steps, lost_norm: from how many steps gradients may be that were lost so, at most, and about their norm:
            the sum of each lost rank's, which is taken for the mean of what the others kept then.
        energy_sent, energy: squared norm of what was sent, and of gradient plus residual. Tensors that travel dense
            without a residual are not counted here.
    """

    steps: int = 0
    bytes: int = 0
    traffic: float = 0.0
    entries: int = 0
    numel: int = 0
    compress_s: float = 0.0
    exchange_s: float = 0.0
    decode_s: float = 0.0
    energy_sent: float = 0.0
    energy: float = 0.0
    skipped: int = 0
    lost_ranks: int = 0
    joined_ranks: int = 0
    lost_steps: int = 0
    lost_norm: float = 0.0

    @property
    def density(self) -> float:
        """Share of all entries that was sent, those of tensors that travel dense included."""
        return self.entries / self.numel if self.numel else 0.0

    @property
    def energy_share(self) -> float:
        """Share of the energy of gradient plus residual that was sent; nan where a fused pass did not measure it."""
        if not self.energy:
            return 1.0 if self.entries >= self.numel else math.nan
        return self.energy_sent / self.energy

    def add(self, record: ExchangeRecord) -> None:
        self.bytes += record.bytes
        self.traffic += record.traffic
        self.compress_s += record.ahead + record.compressed - record.arrived
        self.exchange_s += record.exchanged - record.started
        self.decode_s += record.decoded - record.exchanged
        self.energy_sent += record.energy_sent
        self.energy += record.energy

    def count_entries(self, record: ExchangeRecord) -> None:
        self.entries += record.entries
        self.numel += record.numel


@dataclass
class Stats:
    """``step``: the last step alone; ``total``: all steps; ``timeline``: the last step's exchanges one by one."""

    step: Totals = field(default_factory=Totals)
    total: Totals = field(default_factory=Totals)
    timeline: list[ExchangeRecord] = field(default_factory=list, repr=False)

    def as_dict(self, prefix: str = "sparsync/") -> dict[str, float]:
        """Return the last step's figures as plain numbers by name, for a logger; what is not known is left out.

        Args:
            prefix: of every name.
        """
        step, total = self.step, self.total
        figures = {
            "bytes": float(step.bytes),
            "traffic": step.traffic,
            "entries": float(step.entries),
            "density": step.density,
            "energy_share": step.energy_share,
            "compress_ms": 1e3 * step.compress_s,
            "exchange_ms": 1e3 * step.exchange_s,
            "decode_ms": 1e3 * step.decode_s,
            "total_steps": float(total.steps),
            "total_traffic": total.traffic,
            "total_density": total.density,
            "total_skipped": float(total.skipped),
            "total_lost_ranks": float(total.lost_ranks),
        }
        return {prefix + name: figure for name, figure in figures.items() if math.isfinite(figure)}

    def begin(self) -> None:
        self.step, self.timeline = Totals(steps=1), []
        self.total.steps += 1

    def add(self, record: ExchangeRecord) -> None:
        self.timeline.append(record)
        self.step.add(record)
        self.step.count_entries(record)  # if they are known yet
        self.total.add(record)

    def count_entries(self, record: ExchangeRecord, entries: int, numel: int) -> None:
        """Count the entries that an exchange sent, which may be known only after it was added."""
        record.entries, record.numel = entries, numel
        self.total.count_entries(record)
        if record in self.timeline:
            self.step.count_entries(record)
