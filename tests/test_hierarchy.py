"""Hierarchical exchange with real processes: nodes of 2 x 2 and 2 x 3 ranks, and of unequal size."""

from __future__ import annotations

import gc
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
from sparsync.config import resolve
from sparsync.config.nodes import check_per_node, groups_of
from tests.failures.checked_training import assert_same_on_all_ranks, inputs, mlp, train
from tests.failures.ddp_training import (
    SIZES,
    SMALL_BUCKETS,
    Chain,
    assert_same_tensors,
    bad_gradient,
    digest,
    gathered,
    local_gradients,
    logged,
    loss_of,
    training,
)
from tests.failures.reducers import error_of
from tests.test_virtual import METHODS, STEPS, advance, assert_equal, case_real, team_of
from tests.world import World

UNEQUAL = [[0, 2], [1]]  # not next to each other, either
LAYOUTS = {"2x2": (4, 2), "2x3": (6, 3), "2+1": (3, UNEQUAL)}
WAYS: dict[str, dict[str, Any]] = {
    "allgather": {"compressor": "threshold", "density": 0.05},
    "signs": {"compressor": "topk", "density": 0.05, "values": "sign", "indices": "ef", "scope": "global"},
    "gtopk": {"compressor": "topk", "collective": "gtopk", "density": 0.05, "transactional": True},
    "balanced": {"compressor": "topk", "collective": "balanced", "density": 0.05, "scope": "global"},
    "shared": {"compressor": "random", "collective": "shared", "density": 0.05},
    "none": {"compressor": "none"},
}


def case_laws(rank: int, size: int, per_node: Any, options: dict[str, Any], dtype: torch.dtype) -> Any:
    """Train with laws 1 and 2 checked at every step; return what this rank keeps, and what it sent."""
    ddp = DistributedDataParallel(mlp(dtype), bucket_cap_mb=0.001)
    handle = sparsync.attach(ddp, per_node=per_node, deadline=20, **options)
    train(ddp, handle, inputs(rank, 8, 40, dtype=dtype))
    answer = {*handle.state_dict()["residuals"]}, handle.stats().total.traffic, handle.describe()
    handle.detach()
    del ddp
    gc.collect()
    return answer


@pytest.mark.parametrize(
    ("layout", "way", "dtype"),
    [
        *[("2x2", way, torch.float32) for way in WAYS],
        ("2x2", "allgather", torch.bfloat16),
        ("2x3", "allgather", torch.float16),
        ("2x3", "balanced", torch.float32),
        ("2+1", "allgather", torch.float32),
        ("2+1", "gtopk", torch.float64),
    ],
)
def test_laws_1_and_2_hold_and_leaders_keep_all(worlds, layout, way, dtype):
    size, per_node = LAYOUTS[layout]
    answers = worlds[size].run(case_laws, per_node=per_node, options=WAYS[way], dtype=dtype)
    for group in groups_of(check_per_node(per_node), [""] * size):
        for rank in group:
            kept, traffic, text = answers[rank]
            leads = rank == group[0]
            assert bool(kept) == (leads and way != "none")
            assert (traffic > 0) == leads
            assert f"rank {rank} {'leads' if leads else f'is led by rank {group[0]} on'} ranks" in text
            assert "2 of" in text


def case_all_entries(rank: int, size: int, per_node: Any, options: dict[str, Any]) -> None:
    """At density 1 the result is the mean of all ranks' gradients, within rounding."""
    model = Chain(SIZES)
    with training(model, options.pop("compressor"), SMALL_BUCKETS, per_node=per_node, **options) as run:
        for step in range(2):
            came = local_gradients(model, lambda m, step=step: loss_of(m, rank, step))
            run.step(lambda m, step=step: loss_of(m, rank, step))
            for name, p in model.named_parameters():
                assert p.grad is not None
                rows = torch.stack(gathered(came[name])).double()
                bound = 4 * size * torch.finfo(p.dtype).eps * rows.abs().sum(0)
                assert ((p.grad.double() - rows.mean(0)).abs() <= bound).all(), name
        assert not any(kept.any() for kept in run.residuals().values())


@pytest.mark.parametrize(
    ("layout", "way"),
    [
        *[("2x2", way) for way in ("allgather", "gtopk", "balanced", "shared")],
        ("2x3", "allgather"),
        ("2+1", "balanced"),
    ],
)
def test_law_3_density_1_is_dense(worlds, layout, way):
    size, per_node = LAYOUTS[layout]
    worlds[size].run(case_all_entries, per_node=per_node, options=WAYS[way] | {"density": 1.0})


def test_in_a_single_node_everything_is_applied_at_once(worlds):
    worlds[3].run(case_all_entries, per_node=3, options={"compressor": TopK(0.01), "values": "sign"})


def case_alone(rank: int, size: int, per_node: Any) -> list[Any]:
    model = Chain(SIZES)
    with training(model, TopK(0.05), SMALL_BUCKETS, per_node=per_node) as run:
        for step in range(3):
            run.step(lambda m, step=step: loss_of(m, rank, step))
        return [digest(model.parameters()), digest(run.residuals().values()), run.handle.stats().total.bytes]


def test_nodes_of_one_rank_are_what_ranks_are(worlds):
    assert worlds[3].run(case_alone, per_node=[[2], [0], [1]]) == worlds[3].run(case_alone, per_node=1)


# ---- gradients that are not finite ----------------------------------------------------------------------------------


def case_bad(rank: int, size: int, culprit: int, scaled: bool) -> Any:
    """One rank's gradient is not finite in step 2; return what was logged, and what is left."""
    model, scaler = Chain(SIZES), torch.amp.GradScaler("cpu", init_scale=2.0**10) if scaled else None
    options = {"scaler": scaler} if scaler else {}
    with training(model, TopK(0.05), SMALL_BUCKETS, per_node=2, **options) as run, logged() as messages:
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
        return digest(model.parameters()), skipped, [text for text in messages if "not finite" in text]


@pytest.mark.parametrize("culprit", [2, 3])
@pytest.mark.parametrize("scaled", [False, True])
def test_law_5_a_bad_gradient_is_named_on_every_rank_and_undone(worlds, culprit, scaled):
    answers = worlds[4].run(case_bad, culprit=culprit, scaled=scaled)
    said = [f"step 2: the gradient of layer2.weight was not finite on rank {culprit}"]
    assert [text for _, _, text in answers] == [said] * 4
    assert {skipped for _, skipped, _ in answers} == {int(scaled)}
    assert len({weights for weights, _, _ in answers}) == 1


# ---- failures -------------------------------------------------------------------------------------------------------


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
    ("victim", "stall", "deadline"), [(2, 0.0, 60.0), (3, 0.0, 60.0), (1, 6.0, 4.0)], ids=["leader", "led", "stalled"]
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
        ("led", "SparsyncError", "rank 3: division by zero"),
        ("another exchange", "Mismatch", "their sequence differs (rank 2: "),
    ],
)
def test_law_4_what_fails_on_one_rank_ends_all_with_the_same_words(where, kind, text):
    answers = World.once(4, case_fails, where=where)
    assert all(finished for finished, _ in answers), answers
    assert len({answer for _, (answer, _) in answers}) == 1, answers
    for _, ((raised, said), seconds) in answers:
        assert raised == kind
        assert text in said
        assert seconds < 15


# ---- checkpoints ----------------------------------------------------------------------------------------------------


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


# ---- virtual workers, AdamW, budgets --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "name"), [("net", "topk"), ("net", "balanced"), ("net", "dgc"), ("net", "default"), ("gpt", "default")]
)
def test_virtual_workers_in_nodes_of_two_are_processes(worlds, kind, name):
    """Bit for bit; AdamW's preconditioned feedback, the GPT's, included."""
    options = METHODS[name] | {"per_node": 2, "clip": 0.5}
    answers = worlds[4].run(case_real, kind=kind, options=options)
    team = advance(team_of(kind, 4, options), kind, 0, STEPS)
    sent = (answers[0]["density"] + answers[2]["density"]) / 2
    for one in answers:
        one["density"] = sent
    assert_equal(team, answers)
    assert [bool(one["residuals"]) for one in answers] == [True, False, True, False]


def test_virtual_workers_in_larger_nodes_are_processes_within_rounding(worlds):
    options = METHODS["topk"] | {"per_node": UNEQUAL, "scope": "global", "density": 0.2}
    answers = worlds[3].run(case_real, kind="gpt", options=options, steps=4)
    team = advance(team_of("gpt", 3, options), "gpt", 0, 4)
    for name, tensor in answers[1]["model"].items():
        torch.testing.assert_close(team.model.state_dict()[name], tensor, rtol=1e-4, atol=1e-5)


def case_budget(rank: int, size: int, per_node: Any) -> Any:
    ddp = DistributedDataParallel(Chain((64, 128, 128, 64)))
    handle = sparsync.attach(ddp, "topk", budget=1 / 20, per_node=per_node)
    for step in range(2):
        loss_of(ddp, rank, step).backward()
    plan, traffic = handle.plan, handle.stats().step.traffic
    handle.detach()
    del ddp
    gc.collect()
    return plan.spending.workers, plan.density_at(0), traffic


def test_a_budget_counts_what_goes_between_nodes(worlds):
    two, four = worlds[2].run(case_budget, per_node=1)[0], worlds[4].run(case_budget, per_node=2)
    assert four[0] == two
    assert [traffic for *_, traffic in four] == [two[2], 0, two[2], 0]


# ---- options --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("per_node", [0, -2, True, "auto", [], [[0], []], [[0, 1], [1, 2]], [[1, 2]], [0, 1], 2.5])
def test_nodes_that_are_none_are_refused(per_node):
    with pytest.raises(ValueError, match=r"^per_node must "):
        resolve(compressor="topk", per_node=per_node)


def test_nodes_must_hold_all_ranks_once():
    with pytest.raises(ValueError, match=r"per_node=4 does not divide 6 ranks"):
        groups_of(4, [""] * 6)
    with pytest.raises(ValueError, match=r"per_node holds 3 ranks, and 4 train this model"):
        groups_of(((0, 1), (2,)), [""] * 4)
    assert groups_of(check_per_node([[3, 1], [2, 0]]), [""] * 4) == ((0, 2), (1, 3))
    assert groups_of(1, [""] * 4) == groups_of(((0,), (1,)), [""] * 2) == ()
    assert groups_of(5, [""] * 5) == ((0, 1, 2, 3, 4),)


@pytest.mark.parametrize("said", [["2", "2", "2"], ["", "", ""], ["1", "2", ""], ["3", "2", "2"], ["x", "1", "1"]])
def test_a_launcher_that_says_no_nodes_is_refused(said):
    with pytest.raises(ValueError, match=r"per_node='local' goes by LOCAL_WORLD_SIZE"):
        groups_of("local", said)


def case_local(rank: int, size: int, said: list[str]) -> tuple[str, str]:
    ddp = DistributedDataParallel(mlp())
    os.environ["LOCAL_WORLD_SIZE"] = said[rank]
    try:
        handle = sparsync.attach(ddp, "topk", per_node="local", deadline=10)
        text = handle.describe()
        moved = error_of(handle.set_process_group, dist.group.WORLD)[1]
        handle.detach()
        return text, moved
    except ValueError as error:
        return "refused", str(error)
    finally:
        del os.environ["LOCAL_WORLD_SIZE"], ddp
        gc.collect()


def test_nodes_of_the_launcher(worlds):
    """Of unequal size; where one rank's environment makes no sense, all ranks refuse at once."""
    for rank, (text, moved) in enumerate(worlds[3].run(case_local, said=["1", "2", "2"])):
        assert "2 of 1 to 2 ranks, dense sums inside, one residual each" in text
        assert text.count(("rank 0 leads ranks 0", "rank 1 leads ranks 1, 2", "rank 2 is led by rank 1 on")[rank]) == 1
        assert moved.startswith("set_process_group() does not know per_node=")
    refused = worlds[3].run(case_local, said=["1", "2", ""])
    assert len({*refused}) == 1
    assert refused[0][0] == "refused"


def test_a_collective_that_divides_by_itself_is_refused():
    from examples.every_other import EveryOther

    with pytest.raises(ValueError, match=r"per_node= needs a collective that divides by channel.divisor"):
        resolve(compressor=TopK(0.1), collective=EveryOther(), per_node=2)
