"""The steps of the protocol: the calls that a rank makes between ``attach`` and the end of a training step, in order.

A step is where a fault strikes: before its call, or after it. The table is the one place that knows them; that each is
really called is seen in every cell, as a fault that never struck is a failed cell.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass

GOOD = 2  # steps before the one in which faults strike: DDP regroups its buckets after the first
SPARSE = ("allgather", "global", "gtopk", "balanced", "nodes")
DENSE = ("shared", "dense", "sketches")  # no message of entries, a header beside values; sketches: both
ALL = (*SPARSE, *DENSE)
DEFERRABLE = ("allgather", "global", "balanced", "dense", "sketches")


@dataclass(frozen=True)
class Step:
    """A call of the library.

    Args:
        target: what is called, as ``unittest.mock.patch`` names it.
        collectives: that make it.
        when: the number of the training step in which a fault strikes there.
        often: it is called more than once in a step.
        exchanges: it gives back what other ranks have sent.
        leads: of the ranks of a node, its leader alone calls it.
        deferred: what is called instead where the device decides; none, where nothing is.
    """

    name: str
    target: str
    collectives: tuple[str, ...] = ALL
    when: int = GOOD
    often: bool = True
    exchanges: bool = False
    leads: bool = False
    deferred: str | None = ""

    @property
    def deferred_target(self) -> str | None:
        return self.target if self.deferred == "" else self.deferred


CHANNEL = "sparsync.collectives.comm.channel.Channel"
TRAINING = "tests.matrix.training"
WIRE = "sparsync.wire"
COMPLETION = "sparsync.engine.completion"
STEPS = [
    Step("options", f"{TRAINING}.options_of", when=-1, often=False),
    Step("attach", "sparsync.collectives.comm.store_monitor.StoreMonitor.first_to_say", when=-1, often=False),
    Step("compare layouts", "sparsync.collectives.comm.store_monitor.StoreMonitor.assert_consistent", when=0),
    Step("gradient", f"{TRAINING}.gradient"),
    Step("begin step", "sparsync.engine.worker.WorkerState.begin_step", often=False),
    Step("take bucket", "sparsync.engine.bucketing.BucketMapper.add"),
    Step("add part", "sparsync.engine.reducer.Reducer.add_part", ("global",) if importlib.util.find_spec("numba") else (), deferred=None),
    Step("sketch", "sparsync.engine.step_order.sketch_unit", ("sketches",)),
    Step("sum in node", "sparsync.engine.hierarchy.Nodes.sum", ("nodes",)),
    Step("compress", "sparsync.engine.reducer.compress_unit", leads=True),
    Step("exchange", "sparsync.engine.hierarchy.Flat.reduce", tuple(name for name in ALL if name != "nodes")),
    Step("exchange", "sparsync.engine.hierarchy.Nodes.reduce", ("nodes",)),
    Step("encode", f"{WIRE}.message.Wire.encode", ("balanced",), deferred=f"{WIRE}.device_parts.ScatterMessages.pack_parts"),
    Step("encode", f"{WIRE}.message.Wire.encode", ("allgather", "global", "gtopk", "nodes", "sketches"), leads=True, deferred=f"{WIRE}.device.DeviceMessage.pack"),
    Step("header", f"{WIRE}.message.Wire.header", deferred="sparsync.collectives.comm.header_checks.DeviceChecks.header"),
    Step("all_to_all", f"{CHANNEL}.all_to_all", ("balanced", "sketches"), exchanges=True),
    Step("all_gather", f"{CHANNEL}.all_gather", exchanges=True),
    Step("all_reduce", f"{CHANNEL}.all_reduce", ("allgather", "global", "gtopk", "balanced", "nodes", "shared", "dense"), exchanges=True, leads=True),  # fmt: skip
    Step("send", f"{CHANNEL}.send", ("gtopk",)),
    Step("receive", f"{CHANNEL}.receive", ("gtopk",), exchanges=True),
    Step("sum_at_first", f"{CHANNEL}.sum_at_first", ("nodes",)),
    Step("broadcast", f"{CHANNEL}.broadcast", ("nodes",)),
    Step("verify", f"{CHANNEL}.verify"),
    Step("write mean", f"{COMPLETION}.finish_unit"),
    Step("finish", f"{COMPLETION}.Immediate.finish", deferred=f"{COMPLETION}.Deferred.finish"),
    Step("precondition", "sparsync.feedback.preconditioner.Preconditioner.update", ("sketches",), often=False),
    Step("write back", "sparsync.engine.reducer.Reducer.write_back"),
    Step("write dense", "sparsync.feedback.preconditioner.Preconditioner.write_dense", ("sketches",), often=False),
    Step("close step", f"{COMPLETION}.Immediate.close_step", often=False, deferred=f"{COMPLETION}.Deferred.close_step"),
    Step("vote", "sparsync.collectives.comm.store_monitor.StoreMonitor.leave_vote", often=False),
    Step("commit", "sparsync.engine.worker.WorkerState.commit", when=GOOD + 1, often=False),
]
STEP_BEFORE_VOTES = next(step for step in STEPS if step.name == "write mean")  # where it fails, so that ranks vote
