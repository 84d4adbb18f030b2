"""Whole trainings on real processes, past DDP's bucket rebuild."""

from __future__ import annotations

import gc
import os
import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import sparsync
from sparsync.wire import HEADER
from tests.methods import COLLECTIVES, EVERYWHERE, PAIRS_AND_WORLDS, WORLD_IDS, make
from tests.models import local_gradients, loss_of, net, weights
from tests.world import World

STEPS = 4
SMALL_BUCKETS = 0.01  # MB: a handful of buckets


def everywhere(tensor: torch.Tensor) -> list[torch.Tensor]:
    rows = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, tensor.contiguous())
    return rows


def case_train(rank: int, size: int, name: str, collective: str, values: str, scope: str, density: float) -> None:
    """Replicas stay equal bit for bit, and what came in is what was applied plus what is kept."""
    ddp = DistributedDataParallel(net(), bucket_cap_mb=SMALL_BUCKETS)
    handle = sparsync.attach(
        ddp,
        make(name, density),
        collective=COLLECTIVES[collective],
        values=values,
        scope=scope,
        dense_below=100,
        debug=size == 3,
    )
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    came_in = {n: torch.zeros_like(p, dtype=torch.float64) for n, p in ddp.module.named_parameters()}
    size_of = {n: torch.zeros_like(t) for n, t in came_in.items()}
    applied = {n: torch.zeros_like(t) for n, t in came_in.items()}
    buckets = set()
    for step in range(STEPS):
        for n, grad in local_gradients(ddp, rank, step).items():
            came_in[n] += grad.double()
            size_of[n] += grad.double().abs()
        optimizer.zero_grad()
        loss_of(ddp, rank, step).backward()
        for n, p in ddp.module.named_parameters():
            applied[n] += p.grad.double()
        buckets.add(len([e for e in handle.stats().timeline if e.unit.startswith("bucket")]))
        optimizer.step()
        rows = everywhere(weights(ddp.module))
        assert all(torch.equal(row, rows[0]) for row in rows)
    if scope != "global":
        assert len(buckets) == 2, "DDP did not rebuild its buckets"
    for n in came_in:
        kept = handle.residual(n)
        mine = came_in[n] - (torch.zeros_like(came_in[n]) if kept is None else kept.double())
        mean = sum(everywhere(mine)) / size
        coarse = 2**-7 if values == "bf16" and collective in ("dense", "shared") else 2**-20
        assert torch.allclose(applied[n], mean, rtol=0, atol=coarse * sum(everywhere(size_of[n])).max().item()), n
    handle.detach()
    del ddp
    gc.collect()


def runs_of(name: str, collective: str, codecs: tuple[str, ...], size: int) -> tuple[list[Any], list[Any]]:
    """Return value codecs and scopes for ``make test``, and further ones for ``make test-full``.

    Pairwise: what goes its own way meets every scope, every codec and every world; the others meet every scope, and
    codecs take turns. Who begins takes turns, too.
    """
    scopes, others, quick = ("layer", "bucket", "global"), codecs[1:] or codecs, 1
    turn = WORLD_IDS.index(f"{name}-{collective}-{size}")
    if size == 2:
        runs = [("fp32", scope) for scope in scopes]
    elif size != 3:
        runs = [("fp32", scopes[size % 3]), (others[size % len(others)], scopes[(size + 1) % 3])]
    elif (name, collective) in EVERYWHERE:
        runs, quick = [(values, scopes[i % 3]) for i, values in enumerate(codecs)], 3
    else:
        chosen = (codecs[0], others[turn % len(others)], others[(turn + 1) % len(others)])
        runs = [(values, scopes[(turn + i) % 3]) for i, values in enumerate(chosen)]
    first = turn % len(runs)
    runs = runs[first:] + runs[:first]
    return runs[:quick], runs[quick:]


over_worlds = pytest.mark.parametrize(("name", "collective", "codecs", "size"), PAIRS_AND_WORLDS, ids=WORLD_IDS)


@over_worlds
def test_laws_1_and_2_hold_in_training(worlds, size, name, collective, codecs):
    for values, scope in runs_of(name, collective, codecs, size)[0]:
        worlds[size].run(case_train, name=name, collective=collective, values=values, scope=scope, density=0.02)


@pytest.mark.slow
@over_worlds
def test_laws_1_and_2_hold_in_training_with_further_codecs_and_scopes(worlds, size, name, collective, codecs):
    for values, scope in runs_of(name, collective, codecs, size)[1]:
        worlds[size].run(case_train, name=name, collective=collective, values=values, scope=scope, density=0.02)


def train_plain(rank: int, model: torch.nn.Module) -> torch.Tensor:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        optimizer.step()
    return weights(model)


def case_dense(rank: int, size: int, name: str, collective: str | None, scope: str, dtype: torch.dtype) -> None:
    plain = DistributedDataParallel(net().to(dtype), bucket_cap_mb=SMALL_BUCKETS)
    ours = DistributedDataParallel(net().to(dtype), bucket_cap_mb=SMALL_BUCKETS)
    handle = sparsync.attach(ours, make(name, 1.0), collective=collective, scope=scope)
    expected, got = train_plain(rank, plain), train_plain(rank, ours)
    if name == "none" or size <= 2:
        assert torch.equal(expected, got)
    else:
        assert torch.allclose(expected, got, rtol=1e-4, atol=1e-6)
    handle.detach()
    del plain, ours
    gc.collect()


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_law_3_density_1_is_plain_ddp(worlds, size):
    worlds[size].run(case_dense, name="none", collective=None, scope="layer", dtype=torch.float32)
    worlds[size].run(case_dense, name="none", collective=None, scope="layer", dtype=torch.bfloat16)
    for scope in ("layer", "bucket", "global") if size == 2 else ("layer",):
        worlds[size].run(case_dense, name="topk", collective="allgather", scope=scope, dtype=torch.float32)
    worlds[size].run(case_dense, name="threshold", collective="dense", scope="layer", dtype=torch.float32)


def case_until_killed(
    rank: int, size: int, folder: str, name: str, scope: str, stop: int, resume: bool
) -> torch.Tensor:
    """Train to step 10, checkpointing before step 5; with ``stop`` the process dies there as if killed."""
    path = Path(folder) / f"{name}-{scope}-{rank}.pt"
    ddp = DistributedDataParallel(net(), bucket_cap_mb=SMALL_BUCKETS)
    handle = sparsync.attach(ddp, make(name, 0.02), scope=scope, dense_below=100)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9)
    start = 0
    if resume:
        saved = torch.load(path, weights_only=True)
        ddp.module.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        handle.load_state_dict(saved["sparsync"])
        start = saved["step"]
    for step in range(start, 10):
        if step == 5 and not resume:
            state = {"model": ddp.module.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(state | {"sparsync": handle.state_dict(), "step": step}, path)
        if step == stop:
            dist.barrier()
            os._exit(9)
        optimizer.zero_grad()
        loss_of(ddp, rank, step).backward()
        optimizer.step()
    final = weights(ddp.module)
    handle.detach()
    del ddp
    gc.collect()
    return final


@pytest.mark.each_value
@pytest.mark.parametrize("scope", ["layer", "global"])
@pytest.mark.parametrize("name", ["topk", "threshold"])
def test_kill_and_resume_gives_the_same_weights(worlds, tmp_path, name, scope):
    arguments = {"folder": str(tmp_path), "name": name, "scope": scope}
    straight = worlds[3].run(case_until_killed, stop=-1, resume=False, **arguments)
    died = World.once(3, case_until_killed, stop=7, resume=False, **arguments)
    assert [answer for answer in died if answer == (False, "died with exit code 9")] == died
    resumed = worlds[3].run(case_until_killed, stop=-1, resume=True, **arguments)
    assert all(torch.equal(a, b) for a, b in zip(straight, resumed, strict=True))


class Slow(torch.autograd.Function):
    """Identity whose backward takes a while, as a large layer's would."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        time.sleep(0.3)
        return grad


class TwoBuckets(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(20, 64), torch.nn.Linear(64, 5)

    def forward(self, x):
        return self.second(Slow.apply(self.first(x)))


def case_overlap(rank: int, size: int) -> None:
    """The first bucket's exchange is over before the second's gradient exists."""
    torch.manual_seed(0)
    ddp = DistributedDataParallel(TwoBuckets(), bucket_cap_mb=0.001)
    handle = sparsync.attach(ddp, "topk", density=0.1, dense_below=0, dense_1d=False)
    for step in range(3):
        loss_of(ddp, rank, step).backward()
    first, *_, last = handle.stats().timeline
    assert first.unit == "bucket 0"
    assert last.unit != "bucket 0"
    assert first.arrived <= first.compressed <= first.started <= first.exchanged <= first.decoded
    assert first.exchanged < last.arrived
    # The last rank is late: the others' exchange lasts, their backward goes on beside it.
    if rank == size - 1:
        time.sleep(1)
    loss_of(ddp, rank, 3).backward()
    first, *_, last = handle.stats().timeline
    assert rank == size - 1 or first.started < last.arrived < first.exchanged
    handle.detach()
    del ddp
    gc.collect()


def test_an_exchange_starts_before_backward_ends(worlds):
    worlds[2].run(case_overlap)


def case_stats(rank: int, size: int) -> None:
    ddp = DistributedDataParallel(net())
    handle = sparsync.attach(ddp, "topk", density=0.05)
    loss_of(ddp, rank, 0).backward()
    loss_of(ddp, rank, 1).backward()
    step, total = handle.stats().step, handle.stats().total
    assert (step.steps, total.steps) == (1, 2)
    numel = sum(p.numel() for p in ddp.parameters())
    assert step.numel == numel
    assert 0.05 < step.density < 0.2  # 5 % of the matrices, and all of the small tensors
    assert 0 < step.energy_share < 1
    assert step.bytes < 0.2 * 4 * numel
    sparse, small = handle.stats().timeline
    assert sparse.traffic == (size - 1) * sparse.bytes
    assert small.traffic == (size - 1) * (4 * HEADER + 2 / size * (small.bytes - 4 * HEADER))
    assert min(step.compress_s, step.exchange_s, step.decode_s) > 0
    text = handle.describe()
    assert "TopK" in text
    assert re.search(r"kernels +pytorch for 2 units", text)
    assert "AllGather" in text
    handle.detach()
    assert not handle.is_attached()
    del ddp
    gc.collect()


def test_stats_and_describe(worlds):
    worlds[3].run(case_stats)
