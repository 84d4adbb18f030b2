"""Hierarchical exchange with real processes: nodes of 2 x 2 and 2 x 3 ranks, and of unequal size."""

from __future__ import annotations

import gc
import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import sparsync
from sparsync import TopK
from sparsync.collectives import Channel
from sparsync.config import resolve
from sparsync.config.nodes import check_per_node, groups_of
from sparsync.engine.hierarchy import Nodes
from sparsync.engine.reducer import Reducer
from sparsync.layout import Parameter
from tests.failures.checked_training import inputs, mlp, train
from tests.failures.ddp_training import (
    ALL_SPARSE,
    SIZES,
    SMALL_BUCKETS,
    Chain,
    digest,
    gathered,
    local_gradients,
    loss_of,
    training,
)
from tests.failures.reducers import error_of, push_all
from tests.test_virtual import METHODS, STEPS, advance, assert_equal, case_real, team_of

UNEQUAL = [[0, 2], [1]]  # not next to each other, either
LAYOUTS = {"2x2": (4, 2), "2x3": (6, 3), "2+1": (3, UNEQUAL)}
WAYS: dict[str, dict[str, Any]] = {
    "allgather": {"compressor": "threshold", "density": 0.05},
    "signs": {"compressor": "topk", "density": 0.05, "values": "sign", "indices": "ef", "scope": "global"},
    "gtopk": {"compressor": "topk", "collective": "gtopk", "density": 0.05, "transactional": True},
    "signs in gtopk": {"compressor": "topk", "collective": "gtopk", "density": 0.05, "values": "sign", "indices": "ef"},
    "balanced": {"compressor": "topk", "collective": "balanced", "density": 0.05, "scope": "global"},
    "shared": {"compressor": "random", "collective": "shared", "density": 0.05},
    "none": {"compressor": "none"},
}


def case_laws(
    rank: int, size: int, per_node: Any, options: dict[str, Any], dtype: torch.dtype, device: str = "cpu"
) -> Any:
    """Train with laws 1 and 2 checked at every step; return what this rank keeps, and what it sent."""
    ddp = DistributedDataParallel(mlp(dtype).to(device), bucket_cap_mb=0.001)
    handle = sparsync.attach(ddp, per_node=per_node, deadline=20, **options)
    train(ddp, handle, [x.to(device) for x in inputs(rank, 8, 40, dtype=dtype)])
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
    ids=lambda value: str(value).removeprefix("torch."),
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


def case_half(rank: int, size: int, scope: str) -> None:
    """What a leader keeps of half-precision gradients is their sum in fp32, without any rounding."""
    model = Chain(SIZES).to(torch.bfloat16)
    data = torch.Generator().manual_seed(rank)
    x = torch.randn(4, SIZES[0], generator=data).to(torch.bfloat16)
    with training(model, TopK(0.01), SMALL_BUCKETS, per_node=2, scope=scope, **ALL_SPARSE) as run:
        came = local_gradients(model, lambda m: m(x).square().sum())
        run.ddp(x).square().sum().backward()
        kept, node = run.residuals(), slice(rank - rank % 2, rank - rank % 2 + 2)
        for name, p in model.named_parameters():
            total = torch.stack(gathered(came[name])[node]).float().sum(0)
            unsent = p.grad == 0
            if rank % 2 == 0:
                assert torch.equal(kept[name][unsent], total[unsent])
                assert not torch.equal(total, total.bfloat16().float())


@pytest.mark.parametrize("scope", ["layer", "global"])
def test_half_precision_is_summed_in_fp32(worlds, scope):
    worlds[4].run(case_half, scope=scope)


def case_missing(rank: int, size: int) -> None:
    """In the second step no bucket brings ``b``, of which nothing is large enough to be sent."""
    shapes = {"a": torch.zeros(40, 10), "b": torch.zeros(30, 10)}
    plan = resolve(compressor=TopK(0.01), scope="global", per_node=2, **ALL_SPARSE)
    channel = Channel(dist.group.WORLD, plan.wire, 20.0)
    parameters = [Parameter.of(name, tensor) for name, tensor in shapes.items()]
    reducer = Reducer(parameters, plan, channel, stage=Nodes(channel, ((0, 1), (2, 3))))
    large, small = ("a", torch.arange(400.0)), ("b", torch.full((300,), 2.0**-10))
    for buckets in ([large, small], [large]):
        push_all(reducer, buckets)
        kept = reducer.residual("b")
        assert (kept is None) == (rank % 2 == 1)
        if kept is not None:
            assert torch.equal(kept, torch.full((30, 10), 2.0**-9))
    reducer.close()


def test_a_parameter_that_no_bucket_brings_counts_as_zero(worlds):
    worlds[4].run(case_missing)


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


def test_virtual_workers_in_nodes_of_unequal_size_are_processes(worlds):
    options = METHODS["topk"] | {"per_node": UNEQUAL}
    answers = worlds[3].run(case_real, kind="net", options=options)
    answers = [one | {"density": (answers[0]["density"] + answers[1]["density"]) / 2} for one in answers]
    assert_equal(advance(team_of("net", 3, options), "net", 0, STEPS), answers)


def test_virtual_workers_in_larger_nodes_are_processes_within_rounding(worlds):
    options = METHODS["topk"] | {"per_node": 3, "density": 1.0}
    answers = worlds[6].run(case_real, kind="net", options=options, steps=4)
    team = advance(team_of("net", 6, options), "net", 0, 4)
    for name, tensor in answers[4]["model"].items():
        torch.testing.assert_close(team.model.state_dict()[name], tensor, rtol=1e-4, atol=1e-6)


def case_clipped(rank: int, size: int, clip: float) -> None:
    """The sum of a node's gradients may be as large as its ranks' clipped ones together."""
    model = Chain(SIZES)
    with training(model, TopK(1.0), SMALL_BUCKETS, per_node=UNEQUAL, clip=clip, **ALL_SPARSE) as run:
        came = local_gradients(model, lambda m: loss_of(m, rank, 0))
        loss_of(run.ddp, rank, 0).backward()
        for name, p in model.named_parameters():
            rows, mean = gathered(came[name]), torch.zeros_like(p)
            for group in UNEQUAL:
                total, most = sum(rows[one] for one in group), clip * len(group)
                mean += total * min(1.0, most / total.norm().item()) / size
            torch.testing.assert_close(p.grad, mean)
            assert mean.norm() <= clip * (1 + 1e-5)


def test_a_machines_mean_gradient_is_clipped(worlds):
    worlds[3].run(case_clipped, clip=0.1)


def case_state(rank: int, size: int) -> None:
    """AdamW's velocities go to the leaders, who sum two ranks' gradients, and come back as they were."""
    model = Chain(SIZES)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loss_of(model, 0, 0).backward()
    optimizer.step()
    before = [optimizer.state[p]["exp_avg"].clone() for p in model.parameters()]
    ddp = DistributedDataParallel(model)
    handle = sparsync.attach(ddp, "topk", optimizer=optimizer, precondition=True, beta="own", per_node=2)
    saved = [state["exp_avg"] for state in optimizer.state_dict()["state"].values()]
    handle.detach()
    del ddp
    gc.collect()
    after = [optimizer.state[p]["exp_avg"] for p in model.parameters()]
    for old, new, own in zip(before, after, saved, strict=True):
        torch.testing.assert_close(new, old)
        if rank in (0, 2):
            torch.testing.assert_close(own, old)


def test_adamws_state_is_taken_over_and_handed_back(worlds):
    worlds[4].run(case_state)


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
    with pytest.raises(ValueError, match=r"per_node=8 does not divide 5 ranks"):
        groups_of(8, [""] * 5)
    assert groups_of(5, [""] * 5) == ((0, 1, 2, 3, 4),)
    assert groups_of(8, [""]) == groups_of("local", [""]) == ()  # one worker alone


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


def case_local_of_some(rank: int, size: int) -> str:
    group = dist.new_group([0, 1])
    if rank == 2:
        return ""
    ddp = DistributedDataParallel(mlp(), process_group=group)
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    try:
        return error_of(sparsync.attach, ddp, "topk", per_node="local", deadline=10)[1]
    finally:
        del os.environ["LOCAL_WORLD_SIZE"], ddp
        gc.collect()


def test_nodes_of_the_launcher_are_not_those_of_some_ranks(worlds):
    """What it says is of all ranks that it has started."""
    *own, other = worlds[3].run(case_local_of_some)
    assert all(text.startswith("per_node='local' is for models whose process group has all ranks") for text in own)
    assert not other


def case_disagree(rank: int, size: int) -> tuple[str, str]:
    ddp = DistributedDataParallel(mlp())
    answer = error_of(sparsync.attach, ddp, "topk", per_node=1 + rank % 2, deadline=10)
    del ddp
    gc.collect()
    return answer


def test_ranks_that_disagree_about_nodes_are_told(worlds):
    text = "the configuration differs on ranks 1 and 3: rank 0 has per_node=1, rank 1 has per_node=2"
    assert worlds[4].run(case_disagree) == [("Mismatch", text)] * 4


def test_a_collective_that_divides_by_itself_is_refused():
    from examples.every_other import EveryOther

    with pytest.raises(ValueError, match=r"per_node= needs a collective that divides by channel.divisor"):
        resolve(compressor=TopK(0.1), collective=EveryOther(), per_node=2)
