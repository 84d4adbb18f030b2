"""Sparsync on FSDP2 (``fully_shard``): the only module that knows it.

FSDP sums gradients dense over the ranks that share one copy of the model, and gives every rank its shard of the sum.
Ranks of the other copies that hold the same shard then exchange that sparsely: what HSDP does by an all-reduce.

FSDP's all-reduce hook brings a group's shards, flat and padded, while backward runs; we copy them into a bucket of our
own, whose exchange begins at once, and leave zeros. When backward ends, so do the exchanges, and results are added to
``.grad``, where FSDP has put the zeros meanwhile: so gradients that are there already and casts are its own.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Variable
from torch.distributed.device_mesh import DeviceMesh
from torch.futures import Future
from torch.nn import Module

from sparsync.collectives import Channel
from sparsync.config import ExchangePlan
from sparsync.errors import SparsyncError, StepFailed
from sparsync.hosts.checks.fsdp import check_model, check_plan, group_of
from sparsync.hosts.first_replica import copy_first_replica
from sparsync.hosts.handle import Handle
from sparsync.local_shard import local_shard

log = logging.getLogger("sparsync")

UNFINISHED = "the last backward did not finish: what it has sent was never applied; go on from a checkpoint"
ACCUMULATE = "call optimizer.zero_grad() after each step, and accumulate under set_requires_gradient_sync(False)"


class ShardBucket:
    """The shards of one group of parameters (one call of ``fully_shard``), and the bucket they travel in.

    Args:
        group: FSDP's own object.
    """

    def __init__(self, group: Any) -> None:
        self.group, self._places, start = group, list[tuple[int, int]](), 0
        sharded = [one for one in group.fsdp_params if one.sharded_param.requires_grad]
        self.parameters: list[Tensor] = [one.sharded_param for one in sharded]
        shards = [local_shard(parameter) for parameter in self.parameters]
        for one, shard in zip(sharded, shards, strict=True):
            self._places.append((start, shard.numel()))
            start += one.padded_sharded_param_size.numel()
        self._padded = start
        self.buffer = torch.cat([torch.zeros_like(shard).view(-1) for shard in shards])
        self._parts = torch.split(self.buffer, [shard.numel() for shard in shards])
        self.future: Future[Tensor] | None = None

    def take(self, flat: Tensor) -> None:
        """Copy the gradients that FSDP brings into the bucket.

        Args:
            flat: those of all parameters that had one, each padded to the size of the largest shard.
        """
        if flat.numel() != self._padded:
            raise SparsyncError(
                f"{flat.numel()} entries of gradients came where {self._padded} were due: a parameter that is trained "
                "got no gradient, or other parameters are trained than at attach(); use all of them in every step, "
                "freeze what is unused (requires_grad_(False)) before attach(), or let FSDP make zeros of it: "
                "set_reduce_scatter_unused_params(True), from torch 2.13 on"
            )
        if not self.group.all_reduce_grads:
            raise SparsyncError(
                "set_requires_all_reduce(False) would leave the replicas with different gradients: accumulate under "
                "set_requires_gradient_sync(False)"
            )
        torch._foreach_copy_(list(self._parts), [flat[start : start + numel] for start, numel in self._places])
        if getattr(self.group, "force_sum_reduction_for_comms", False):  # FSDP would divide the sum after us
            self.buffer.div_(self.group.gradient_divide_factor or self.group.mesh_info.shard_mesh_size)

    def shows_update(self) -> bool:
        """Return whether a gradient is there that was not zeroed."""
        return any(p.grad is not None and bool(local_shard(p.grad).any()) for p in self.parameters)

    def give(self, replace: bool, bad: bool) -> None:
        """Give the result to the parameters' gradients.

        Args:
            replace: in the place of what is there.
            bad: the step is undone, and all gradients show NaN.
        """
        grads = [local_shard(p.grad) for p in self.parameters if p.grad is not None]
        results = [part.view(grad.shape) for part, grad in zip(self._parts, grads, strict=True)]
        if bad:
            self.buffer.fill_(torch.nan)
        (torch._foreach_copy_ if replace else torch._foreach_add_)(grads, results)


class ShardedExchange:
    """Takes gradients from FSDP's hooks, and gives results back when backward ends.

    Args:
        handle: of the ranks that hold this shard, one in each copy of the model.
        shards: the ranks that share a copy.
    """

    def __init__(self, handle: Handle, buckets: Sequence[ShardBucket], shards: Channel) -> None:
        self.handle, self.buckets, self.shards = handle, buckets, shards
        self._came: list[ShardBucket] = []
        self._error: Exception | None = None
        self._stream: torch.cuda.Stream | None = None

    def take(self, bucket: ShardBucket, flat: Tensor) -> None:
        """Begin to exchange a group's shards: FSDP's all-reduce hook."""
        if self.handle.detached:  # as HSDP does
            dist.all_reduce(flat.div_(dist.get_world_size(self.handle.group)), group=self.handle.group)
            return
        if not self._came:
            Variable._execution_engine.queue_callback(self._end)  # type: ignore[no-untyped-call]
            self._stream = torch.cuda.current_stream() if flat.is_cuda else None
        self._came.append(bucket)
        try:
            if self._error is None:
                if self.handle.update_waits and bucket.shows_update():
                    raise SparsyncError(f"backward adds to an update that waits for optimizer.step(): {ACCUMULATE}")
                bucket.take(flat)
                index, last = len(self._came) - 1, len(self._came) == len(self.buckets)
                bucket.future = self.handle.push(index, bucket.buffer, bucket.parameters, last)
        except Exception as error:  # raised when backward ends, so that the other shards' FSDP does not hang in it
            self._fail(error)
        flat.zero_()

    def check_start(self) -> None:
        """Raise, before a forward pass, what ended an earlier step; backward may run a forward pass again."""
        if self._came and torch._C._current_graph_task_id() == -1:  # type: ignore[attr-defined]
            self._came = []
            self.handle.fail(StepFailed(UNFINISHED))
        self.handle.check_start()

    def _fail(self, error: Exception) -> None:
        self._error = self._error or error
        self.handle.fail(error)

    def _end(self) -> None:
        """Wait for the results and give them to the gradients; raise, on all ranks, what went wrong on any."""
        came, error = self._came, self._error
        self._came, self._error = [], None
        try:
            if error is None:
                if len(came) < len(self.buckets):
                    missing = next(b for b in self.buckets if b not in came)
                    raise SparsyncError(
                        f"{len(self.buckets) - len(came)} of {len(self.buckets)} groups of parameters got no gradient, "
                        f"{missing.group._module_fqn!r} among them: use all of them in every step, or freeze what is "
                        "unused (requires_grad_(False)) before attach()"
                    )
                for bucket in came:
                    assert bucket.future is not None
                    bucket.future.wait()
        except Exception as failure:
            self.handle.fail(failure)
            error = failure
        bad = self._share(error)
        if self._stream is not None:  # on which FSDP has made the gradients
            torch.cuda.current_stream().wait_stream(self._stream)
        for bucket in came:
            bucket.give(self.handle.plan.precondition, bad)

    def _share(self, error: Exception | None) -> bool:
        """Tell the other shards what became of the step here, and raise what has failed on any of them; return whether
        all of it is undone, as a gradient of any of them was not finite."""
        if error is not None:
            kind = type(error) if isinstance(error, SparsyncError) else SparsyncError
            ranks = ", ".join(map(str, dist.get_process_group_ranks(self.handle.group)))
            named = kind(f"shard {self.shards.rank}, whose replicas are ranks {ranks}: {error}")
            raise self.shards.monitor.broadcast_error(named) from error
        bad = torch.tensor([float(self.handle.bad_step)], dtype=torch.float32, device="cpu")
        if self.shards.backend == "gloo":  # others raise what the backend's own time limit says
            try:
                self.shards.all_reduce(bad)
            except SparsyncError as told:
                self.handle.fail(told)
                raise
        undone = self.handle.plan.transactional and bool(bad)
        if undone:
            self.handle.bad_step = True
        return undone


def attach_fsdp(model: Module, replicate: Any, plan: ExchangePlan) -> Handle:
    """Exchange the gradients of an FSDP2 model sparsely between its replicas from now on; see ``attach``.

    Args:
        replicate: the ranks that hold the same shard: a mesh of one dimension, or a process group.
    """
    check_plan(plan)
    groups = check_model(model, replicate)
    attached = vars(model).get("_sparsync")
    if attached is not None and not attached.handle.detached:
        raise SparsyncError("this model is attached already; call detach() on its handle first")
    for part in groups.values():
        part.reshard()
    buckets = [ShardBucket(group) for group in groups]
    mesh: DeviceMesh = buckets[0].parameters[0].device_mesh  # type: ignore[attr-defined]
    group = group_of(replicate)
    ranks = ", ".join(map(str, dist.get_process_group_ranks(group)))
    own = f"this rank has {mesh.get_local_rank() + 1} of {mesh.size()}, FSDP sums dense inside"
    handle = Handle(model, plan, group, shards=f"{own}; workers and bytes are those of its replicas, ranks {ranks}")
    shards = Channel(mesh.get_group(), plan.wire, plan.deadline, buckets[0].buffer.device)
    handle.on_detach(shards.close)
    try:
        if plan.transactional and shards.backend not in ("gloo", "none"):
            raise ValueError(f"transactional=True needs Gloo between shards, got {shards.backend}")
        reducer = handle.start()
        channel, preconditioner = reducer.channel, reducer.worker.preconditioner
        if preconditioner is not None and shards.size > 1:
            preconditioner.moment.gather_shards = shards.all_gather
        channel.assert_consistent("shard", f"shard {mesh.get_local_rank()} of {mesh.size()}")
        copy_first_replica(model, channel)
        shards.assert_consistent("configuration", plan.configuration(frozenset()))
    except Exception as error:
        shards.monitor.broadcast_error(SparsyncError(f"shard {mesh.get_local_rank()}: {error}"))
        handle.abandon()
        raise
    exchange = ShardedExchange(handle, buckets, shards)
    for bucket, part in zip(buckets, groups.values(), strict=True):
        part.set_all_reduce_hook(partial(exchange.take, bucket))
    vars(model)["_sparsync"] = exchange
    handle.on_detach(model.register_forward_pre_hook(lambda *_: exchange.check_start(), prepend=True).remove)
    log.log(logging.INFO if channel.rank == 0 else logging.DEBUG, "%s", handle.describe())
    return handle
