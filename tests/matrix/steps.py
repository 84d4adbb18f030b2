"""The steps of the protocol: the calls that a rank makes between ``attach`` and the end of a training step, in order.

A step is where a fault strikes: before its call, or after it. The table is the one place that knows them; that each is
really called is seen in every cell, as a fault that never struck is a failed cell.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass

GOOD = 2  # steps before the one in which faults strike: DDP regroups its buckets after the first
ALL = ("allgather", "global", "shared", "gtopk", "balanced", "dense", "sketches", "nodes")
DEFERRABLE = ("allgather", "global", "balanced", "dense", "sketches")
WITHOUT_SKETCHES = tuple(name for name in ALL if name != "sketches")  # these have an exchange of all that travels dense
FLAT = tuple(name for name in ALL if name != "nodes")
GATHERED = (
    "allgather",
    "global",
    "gtopk",
    "sketches",
    "nodes",
)  # entries go in one message to all, or to a pair's other
PLAIN = ("allgather", "shared", "gtopk", "balanced", "nodes")  # plain PyTorch takes out what is sent
IN_PARTS = ("global",) if importlib.util.find_spec("numba") else ()  # gradients are added as buckets bring them
ENGINE, COLLECTIVES, WIRE, FEEDBACK = (f"sparsync.{room}" for room in ("engine", "collectives", "wire", "feedback"))
STORE, CHANNEL = f"{COLLECTIVES}.comm.store_monitor.StoreMonitor", f"{COLLECTIVES}.comm.channel.Channel"


@dataclass(frozen=True)
class Step:
    """A call of the library.

    Args:
        target: what is called, as ``unittest.mock.patch`` names it.
        collectives: that make it.
        when: the number of the training step in which a fault strikes there.
        once: it is called once in a step.
        exchanges: it gives back what other ranks have sent, or leaves that in its argument.
        leads: of the ranks of a node, its leader alone calls it.
        deferred: what is called instead where the device decides; ``None``: nothing.
    """

    name: str
    target: str
    collectives: tuple[str, ...] = ALL
    when: int = GOOD
    once: bool = False
    exchanges: bool = False
    leads: bool = False
    deferred: str | None = ""

    @property
    def deferred_target(self) -> str | None:
        return self.target if self.deferred == "" else self.deferred


COMPARE = Step("compare layouts", f"{STORE}.assert_consistent", when=0)
WRITE = Step("write mean", f"{ENGINE}.completion.finish_unit")
ENTRIES, PARTS = f"{WIRE}.device.DeviceMessage.pack", f"{WIRE}.device_parts.ScatterMessages.pack_parts"
HEADER = f"{COLLECTIVES}.comm.header_checks.DeviceChecks.header"
LATER = f"{ENGINE}.completion.Deferred"
STEPS = [
    Step("options", "tests.matrix.training.options_of", when=-1, once=True),
    Step("attach", f"{STORE}.first_to_say", when=-1, once=True),
    COMPARE,
    Step("gradient", "tests.matrix.training.gradient"),
    Step("begin step", f"{ENGINE}.worker.WorkerState.begin_step", once=True),
    Step("take bucket", f"{ENGINE}.bucket_mapper.BucketMapper.add"),
    Step("add part", "sparsync.kernels.accumulate.parts.AddedParts.add", IN_PARTS, deferred=None),
    Step("sketch", f"{ENGINE}.step_order.sketch_unit", ("sketches",)),
    Step("sum in node", f"{ENGINE}.hierarchy.Nodes.sum", ("nodes",)),
    Step("compress", f"{ENGINE}.unit_exchange.compress_unit", leads=True),
    Step("fill message", "sparsync.compressors.selecting.SparseGrad", PLAIN, leads=True, deferred=None),
    Step("count energy", "torch.dot", PLAIN, leads=True, deferred=None),  # the last call is of an exchange
    Step("exchange", f"{ENGINE}.hierarchy.Flat.reduce", FLAT),
    Step("exchange", f"{ENGINE}.hierarchy.Nodes.reduce", ("nodes",)),
    Step("encode", f"{WIRE}.message.Wire.encode", GATHERED, leads=True, deferred=ENTRIES),
    Step("encode", f"{WIRE}.message.Wire.encode", ("balanced",), deferred=PARTS),
    Step("header", f"{WIRE}.message.Wire.header", deferred=HEADER),
    Step("all_to_all", f"{CHANNEL}.all_to_all", ("balanced", "sketches"), exchanges=True),
    Step("all_gather", f"{CHANNEL}.all_gather", exchanges=True),
    Step("all_reduce", f"{CHANNEL}.all_reduce", WITHOUT_SKETCHES, exchanges=True, leads=True),
    Step("send", f"{CHANNEL}.send", ("gtopk",)),
    Step("receive", f"{CHANNEL}.receive", ("gtopk",), exchanges=True),
    Step("sum_at_first", f"{CHANNEL}.sum_at_first", ("nodes",), exchanges=True),
    Step("broadcast", f"{CHANNEL}.broadcast", ("nodes",), exchanges=True),
    Step("verify", f"{CHANNEL}.verify"),
    WRITE,
    Step("finish", f"{ENGINE}.completion.Immediate.finish", deferred=f"{LATER}.finish"),
    Step("precondition", f"{FEEDBACK}.preconditioner.Preconditioner.update", ("sketches",), once=True),
    Step("write back", f"{ENGINE}.unit_exchange.UnitExchange.write_back"),
    Step("write dense", f"{FEEDBACK}.preconditioner.Preconditioner.write_dense", ("sketches",), once=True),
    Step("close step", f"{ENGINE}.completion.Immediate.close_step", once=True, deferred=f"{LATER}.close_step"),
    Step("alarm", f"{STORE}.broadcast_error", once=True),
    Step("vote", f"{STORE}.leave_vote", once=True),
    Step("commit", f"{ENGINE}.worker.WorkerState.commit", when=GOOD + 1, once=True),
]
AFTER_AN_ERROR = ("alarm", "vote")  # what comes of one rank's error: the fault strikes it, or another rank
