"""Ranks in nodes: whatever goes wrong on a leader, or on a rank that is led, ends all of them alike."""

from __future__ import annotations

import gc
import logging
import math
import os
import time
from contextlib import suppress
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import sparsync
from sparsync import TopK
from tests.failures.checked_training import assert_same_on_all_ranks, inputs, mlp, train
from tests.failures.ddp_training import (
    ALL_SPARSE,
    SIZES,
    SMALL_BUCKETS,
    Chain,
    MassBalance,
    assert_same_tensors,
    bad_gradient,
    digest,
    logged,
    loss_of,
    training,
)
from tests.failures.reducers import error_of
from tests.world import World

UNEQUAL = [[0, 2], [1]]


def case_bad(rank: int, size: int, culprit: int, scaled: bool) -> Any:
    """One rank's gradient is not finite in step 2; return what was logged, and what is left."""
    model, scaler = Chain(SIZES), torch.amp.GradScaler("cpu", init_scale=2.0**10) if scaled else None
    options = {"scaler": scaler} if scaler else {}
    with training(model, TopK(0.05), SMALL_BUCKETS, per_node=2, **options) as run, logged(logging.DEBUG) as messages:
        for step in range(5):
            weights, before = digest(model.parameters()), run.residuals()
            with bad_gradient(model, "layer2.weight", math.nan, (rank, step) == (culprit, 2)):
                if scaler or step != 2:
                    run.step(lambda m, step=step: loss_of(m, rank, step), scaler)
                else:
                    loss_of(run.ddp, rank, step).backward()
                    assert model.get_parameter("layer2.weight").grad.isnan().any()
                    run.optimizer.zero_grad()
            if step == 2:
                assert digest(model.parameters()) == weights
                after = run.residuals()
                assert all(kept.isfinite().all() for kept in after.values())
                if scaler:
                    assert_same_tensors(before, after)
        skipped = run.handle.stats().total.skipped
        return digest(model.parameters()), skipped, [text for text in messages if "was not finite on" in text]


@pytest.mark.parametrize("culprit", [2, 3])
@pytest.mark.parametrize("scaled", [False, True])
def test_law_5_a_bad_gradient_is_named_on_every_rank_and_undone(worlds, culprit, scaled):
    answers = worlds[4].run(case_bad, culprit=culprit, scaled=scaled)
    said = [f"step 2: the gradient of layer2.weight was not finite on rank {culprit}"]
    assert [text for _, _, text in answers] == [said] * 4
    assert {skipped for _, skipped, _ in answers} == {int(scaled)}
    assert len({weights for weights, _, _ in answers}) == 1


def case_lost(rank: int, size: int, victim: int, stall: float, deadline: float) -> Any:
    """After two good steps one rank ends at once, or sleeps."""
    ddp = DistributedDataParallel(mlp(), bucket_cap_mb=0.001)
    handle = sparsync.attach(ddp, "topk", density=0.02, per_node=2, transactional=True, deadline=deadline)
    batches = inputs(rank, 8, 40)
    train(ddp, handle, batches[:2])
    before = handle.state_dict()["residuals"]
    loss = ddp(batches[2]).square().mean()
    dist.barrier()
    if rank == victim:
        if not stall:
            os._exit(9)
        time.sleep(stall)
    began = time.monotonic()
    failed, _ = error_of(loss.backward)
    took, answer = time.monotonic() - began, error_of(handle.check)
    assert_same_tensors(before, handle.state_dict()["residuals"])
    handle.detach()
    return failed, took, answer


@pytest.mark.parametrize(
    ("victim", "stall", "deadline"),
    [
        (2, 0.0, 60.0),
        pytest.param(3, 0.0, 60.0, marks=pytest.mark.slow),
        pytest.param(1, 4.0, 3.0, marks=pytest.mark.slow),
    ],
    ids=["leader", "led", "stalled"],
)
def test_law_4_a_lost_rank_is_named_by_all_others(victim, stall, deadline):
    answers = World.once(4, case_lost, victim=victim, stall=stall, deadline=deadline)
    told = set()
    for rank, (finished, answer) in enumerate(answers):
        if rank == victim and not stall:
            assert (finished, answer) == (False, "died with exit code 9")
            continue
        assert finished, answer
        failed, took, (kind, text) = answer
        assert (failed, kind) == ("RuntimeError", "PeerLost")
        assert took < 30
        assert f"ranks not heard from: {victim}" in text
        told.add(text)
    assert len(told) == 1


class Breaks(TopK):
    """A compressor that fails on one rank."""

    def compress(self, grad: Any, memory: Any, layout: Any, ctx: Any, state: Any) -> Any:
        if ctx.rank == 2 and ctx.step == 1:
            raise RuntimeError("out of order")
        return super().compress(grad, memory, layout, ctx, state)


def case_fails(rank: int, size: int, where: str) -> tuple[tuple[str, str], float]:
    model = Chain(SIZES)
    compressor = Breaks(0.05) if where == "leader" else TopK(0.05)
    with training(model, compressor, SMALL_BUCKETS, check=False, per_node=2, deadline=20) as run:
        run.step(lambda m: loss_of(m, rank, 0))
        reducer = run.handle._running()
        if where == "led" and rank == 3:
            reducer.buckets._plan_of = lambda bucket: 1 / 0  # type: ignore[method-assign,assignment,return-value]
        if where == "another exchange" and rank == 3:
            reducer.stage.inside.sequence += 1  # type: ignore[attr-defined]
        began = time.monotonic()
        with suppress(RuntimeError):
            loss_of(run.ddp, rank, 1).backward()
        return error_of(run.handle.check), time.monotonic() - began


@pytest.mark.parametrize(
    ("where", "kind", "text"),
    [
        ("leader", "PeerFailed", "rank 2: failed to compress bucket 0: RuntimeError: out of order"),
        ("led", "SparsyncError", "rank 3: ZeroDivisionError: division by zero"),
        ("another exchange", "Mismatch", "their sequence differs (rank 2: "),
    ],
    ids=["leader", "led", "exchange"],
)
def test_law_4_what_fails_on_one_rank_ends_all_with_the_same_words(where, kind, text):
    answers = World.once(4, case_fails, where=where)
    assert all(finished for finished, _ in answers), answers
    assert len({answer for _, (answer, _) in answers}) == 1, answers
    for _, ((raised, said), seconds) in answers:
        assert raised == kind
        assert text in said
        assert seconds < 15


def case_save(rank: int, size: int, per_node: Any, optimizer: str, folder: str) -> Any:
    run = Resumable(per_node, optimizer)
    run.train(rank, 0, 3)
    state = run.handle.state_dict()
    run.save(folder)
    run.train(rank, 3, 5)
    return state, run.close()


def case_load(rank: int, size: int, per_node: Any, optimizer: str, folder: str, states: Any, sharded: bool) -> Any:
    run = Resumable(per_node, optimizer)
    refused = error_of(run.handle.load_state_dict, states[rank]) if rank < len(states) else ("", "")
    run.load(folder, None if sharded else states)
    state = run.handle.state_dict()
    run.train(rank, 3, 5)
    return refused, state, run.close()


class Resumable:
    """A training that can be saved, also by ``torch.distributed.checkpoint``."""

    def __init__(self, per_node: Any, optimizer: str) -> None:
        self.model = Chain(SIZES)
        self.ddp = DistributedDataParallel(self.model, **SMALL_BUCKETS)
        kinds: dict[str, Any] = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}
        self.optimizer = kinds[optimizer](self.model.parameters(), lr=0.01)
        options = {"momentum": "correct"} if optimizer == "sgd" else {"precondition": True}
        self.handle = sparsync.attach(
            self.ddp, "threshold", density=0.05, per_node=per_node, optimizer=self.optimizer, **options
        )

    def train(self, rank: int, first: int, last: int) -> None:
        for step in range(first, last):
            self.optimizer.zero_grad()
            loss_of(self.ddp, rank, step).backward()
            self.optimizer.step()

    def save(self, folder: str) -> None:
        import torch.distributed.checkpoint as dcp

        dcp.save({"model": self.model.state_dict(), "sync": self.handle.sharded_state_dict()}, checkpoint_id=folder)

    def load(self, folder: str, states: Any) -> None:
        import torch.distributed.checkpoint as dcp

        weights = self.model.state_dict()
        dcp.load({"model": weights}, checkpoint_id=folder)
        self.model.load_state_dict(weights)
        if states is None:
            self.handle.load_sharded(folder, "sync")
        else:
            self.handle.load_state_dict(states)

    def close(self) -> str:
        assert_same_on_all_ranks([*self.model.parameters()])
        self.handle.detach()
        moments = [one["exp_avg"] for one in self.optimizer.state.values() if "exp_avg" in one]
        assert_same_on_all_ranks(moments)  # handed back as means
        del self.ddp
        gc.collect()
        return digest(self.model.parameters())


def mean_kept(states: list[Any], kind: str) -> dict[str, Tensor]:
    names = {name for state in states for name in state[kind]}
    return {n: sum(s[kind][n].double() for s in states if n in s[kind]) / len(states) for n in names}


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("sharded", [False, True])
def test_checkpoints_go_to_other_nodes_and_worlds(worlds, tmp_path, optimizer, sharded):
    """The same nodes go on with the same bits; others, or none, keep the mean."""
    saved = worlds[4].run(case_save, per_node=2, optimizer=optimizer, folder=str(tmp_path))
    states, last = [state for state, _ in saved], saved[0][1]
    assert [bool(state["residuals"]) for state in states] == [True, False, True, False]
    assert {state["nodes"] for state in states} == {"0 1 | 2 3"}
    for size, per_node in [(4, 2), (4, 1), (3, UNEQUAL)]:
        given = {"optimizer": optimizer, "folder": str(tmp_path), "states": states, "sharded": sharded}
        answers = worlds[size].run(case_load, per_node=per_node, **given)
        loaded = [state for _, state, _ in answers]
        for kind in ("residuals", "velocities"):
            old, new = mean_kept(states, kind), mean_kept(loaded, kind)
            assert old.keys() == new.keys() != set()
            for name in old:
                torch.testing.assert_close(new[name], old[name], rtol=1e-5, atol=1e-7)
        if (size, per_node) == (4, 2):
            for state, was in zip(loaded, states, strict=True):
                assert_same_tensors(state["residuals"], was["residuals"])
                assert [*state["compressor"]] == [*was["compressor"]]
            if optimizer == "sgd":  # AdamW's sketches are summed by bucket, and DDP's are others at first
                assert {digest for _, _, digest in answers} == {last}
        else:
            assert {refused for (refused, _), _, _ in answers} == {"ValueError"}
            assert not (loaded[2]["residuals"] and per_node == UNEQUAL)  # which rank 0 leads


def case_adamw(rank: int, size: int) -> Any:
    """A step of AdamW with an infinite gradient on a rank that is led is undone as a whole."""
    model, scaler = Chain(SIZES), torch.amp.GradScaler("cpu", init_scale=2.0**10)
    ddp = DistributedDataParallel(model, **SMALL_BUCKETS)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    handle = sparsync.attach(ddp, recipe="default", optimizer=optimizer, per_node=2, scaler=scaler, debug=True)
    with logged(logging.DEBUG) as messages:
        for step in range(5):
            weights, before = digest(model.parameters()), handle.state_dict()
            optimizer.zero_grad()
            with bad_gradient(model, "layer2.weight", math.inf, (rank, step) == (3, 2)):
                scaler.scale(loss_of(ddp, rank, step)).backward()
            scaler.step(optimizer)
            scaler.update()
            assert (digest(model.parameters()) == weights) == (step == 2)
            if step == 2:
                after = handle.state_dict()
                for kind in ("residuals", "velocities"):
                    assert_same_tensors(before[kind], after[kind])
    assert_same_on_all_ranks([*model.parameters()])
    handle.detach()
    del ddp
    gc.collect()
    return {text for text in messages if "was not finite on" in text}


def test_a_bad_step_of_adamw_is_undone(worlds):
    said = {"step 2: the gradient of layer2.weight was not finite on rank 3"}
    assert worlds[4].run(case_adamw) == [said] * 4


def case_unused(rank: int, size: int) -> None:
    """A layer is left out by a node's leader alone, by its whole node, and by all."""
    options = {"per_node": 2, **ALL_SPARSE}
    model, ddp_options = Chain((40, 40, 40, 40)), {"find_unused_parameters": True, **SMALL_BUCKETS}
    with training(model, TopK(0.05), ddp_options, **options) as run:
        balance = MassBalance(model)
        for step, leave in enumerate([(), (), (2,), (2, 3), (0, 1, 2, 3), ()]):
            before = run.residuals().get("layer1.weight")
            left = "layer1" if rank in leave else ""
            balance.step(run, lambda m, step=step, left=left: loss_of(m, rank, step, left))
            after = run.residuals().get("layer1.weight")
            if before is not None and after is not None:
                node = {rank, rank + 1}
                assert torch.equal(before, after) == (node <= {*leave})
        balance.assert_balanced(run)


def test_what_a_whole_node_did_not_use_is_not_sent_from(worlds):
    worlds[4].run(case_unused)


def case_subgroup(rank: int, size: int) -> str:
    """Nodes of a model whose process group leaves ranks out; it is attached twice, as torch names its groups."""
    four = dist.new_group([1, 2, 3, 4])
    if rank in (0, 5):
        return ""
    model = Chain(SIZES)
    for step in range(2):
        ddp = DistributedDataParallel(model, process_group=four)
        handle = sparsync.attach(ddp, TopK(0.05), per_node=2, deadline=20)
        loss_of(ddp, rank, step).backward()
        text = handle.describe()
        handle.detach()
        del ddp
        gc.collect()
    return text


def test_nodes_of_a_subgroup_go_by_its_own_ranks(worlds):
    texts = worlds[6].run(case_subgroup)
    assert "rank 2 leads ranks 2, 3" in texts[3]
    assert "rank 3 is led by rank 2 on ranks 2, 3" in texts[4]


def case_joined(rank: int, size: int, joined: str) -> None:
    model = Chain((40, 40, 40, 40))
    with training(model, TopK(0.05), SMALL_BUCKETS, per_node=2, joined=joined, **ALL_SPARSE) as run, run.ddp.join():
        for step in range(2 + rank % 3):
            run.step(lambda m, step=step: loss_of(m, rank, step))


@pytest.mark.parametrize("joined", ["drain", "freeze"])
def test_ranks_without_data_stay_in_their_nodes(worlds, joined):
    worlds[4].run(case_joined, joined=joined)
