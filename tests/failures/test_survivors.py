"""With ``on_loss="continue"`` the survivors of a lost rank go on, and another one joins them."""

from __future__ import annotations

import gc
import os
import random
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import HashStore, PrefixStore  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel

import sparsync
from sparsync import Change
from sparsync.collectives.comm.membership import Generation, Membership
from tests.crew import Crew
from tests.failures import survival_log
from tests.failures.ddp_training import SIZES, SMALL_BUCKETS, Chain, local_gradients, loss_of
from tests.failures.survival_log import SurvivalLog
from tests.failures.survivors import (
    DEADLINE,
    RATE,
    TOPK,
    Reference,
    Run,
    case_among_kills,
    case_held,
    case_never_finishes,
    case_training,
    case_waits_to_join,
    freeze,
)
from tests.world import World

DIED = "died with exit code 9"
ADAM: dict[str, Any] = {"precondition": True, "dense_below": 1024, "dense_1d": True}


def start(crew: Crew, workers: int, **arguments: Any) -> list[int]:
    return [crew.start(case_training, rank, workers, **arguments) for rank in range(workers)]


STAGES = {  # steps that may be committed when rank 1 dies there in step 3
    "forward": {3},
    "backward": {3},
    "first exchange": {3},
    "last exchange": {3, 4},
    "optimizer": {4},
    "after": {4},
}


def test_survivors_of_a_kill_at_any_stage_go_on_with_equal_replicas() -> None:
    with ExitStack() as stack:
        crews = {stage: stack.enter_context(Crew()) for stage in STAGES}
        for stage, crew in crews.items():
            start(crew, 3, steps=7, faults={1: [(stage, 3, "die")]})
        for stage, crew in crews.items():
            first, victim, last = crew.results()
            assert victim == DIED
            changes = first["changes"]
            assert [(c.lost, c.joined, c.old_workers, c.workers) for c in changes] == [((1,), (), 3, 2)]
            assert changes[0].steps in STAGES[stage], stage
            assert (first["rank"], last["rank"], first["lost"], first["steps"]) == (0, 1, 1, 7)
            expected = Reference(range(3))
            assert_said(changes[0], expected, [changes[0].steps])
            expected.follow(changes)
            expected.assert_same(first)
            expected.assert_same(last)


def assert_said(change: Change, expected: Reference, ages: list[int]) -> None:
    """Compare what is said of what is lost with what the reference keeps, before the change: the estimate is made of
    what those keep who are left, and not far from what is lost."""
    expected.until(change.steps)
    norms = [float(torch.cat([own.flatten() for own in expected.kept[m].values()]).norm()) for m in expected.members]
    left = [norm for rank, norm in enumerate(norms) if rank not in change.lost]
    assert change.lost_norm == pytest.approx(sum(left) / len(left), rel=1e-5)
    assert change.lost_steps == tuple(ages)
    assert all(norms[rank] == pytest.approx(change.lost_norm, rel=0.5) for rank in change.lost)


@pytest.mark.slow
def test_what_is_lost_is_said_with_its_age_and_about_its_norm() -> None:
    """A process that has joined dies: what it had kept is no older than that. Then rank 1 dies, which was there from
    the beginning."""
    with Crew() as crew:
        start(crew, 2, steps=120, faults={1: [("backward", 110, "die")]}, pause=0.02)
        crew.wait_for("steps of 0")
        crew.start(case_training, 0, 1, steps=120, faults={2: [("forward", 100, "die")]})
        found, *died = crew.results()
        assert died == [DIED, DIED]
        joined, second, third = found["changes"]
        assert (joined.joined, joined.lost_steps, joined.lost_norm) == ((2,), (), 0)
        assert (second.lost, second.steps, third.lost, third.steps) == ((2,), 100, (1,), 110)
        expected = Reference(range(2))
        expected.follow([joined])
        assert_said(second, expected, [100 - joined.steps])
        expected.follow([second])
        assert_said(third, expected, [110])
        assert (found["lost"], found["lost_steps"]) == (2, 110)
        assert found["lost_norm"] == pytest.approx(second.lost_norm + third.lost_norm)


def case_loaded(store: Any) -> int:
    """Return from which step on a rank keeps something, as it says, when it had joined and has loaded a state."""
    run = Run()
    run.step()
    run.sync.survival._since = 1
    run.sync.load_state_dict(run.sync.state_dict())
    since: int = run.sync.survival._since
    run.end()
    return since


def test_what_a_checkpoint_holds_is_as_old_as_the_training() -> None:
    with Crew() as crew:
        for rank in range(2):
            crew.start(case_loaded, rank, 2)
        assert crew.results() == [0, 0]


METHODS: dict[str, dict[str, Any]] = {
    "allgather": {},
    "balanced": {"collective": "balanced"},
    "gtopk": {"collective": "gtopk"},
    "shared": {"compressor": "random", "collective": "shared"},
    "dense": {"compressor": "none", "density": None},
}


def came_in(found: dict[str, Any], changes: list[Any], workers: int) -> list[Tensor]:
    """Return what all workers' gradients come to, divided by how many there were, in double precision."""
    total = [torch.zeros_like(p, dtype=torch.float64) for p in Chain(SIZES).parameters()]
    for step, weights in enumerate(found["trajectory"]):
        if changes and step == changes[0].steps:
            workers = changes[0].workers
        model = Chain(SIZES)
        for p, own in zip(model.parameters(), weights, strict=True):
            p.data.copy_(torch.from_numpy(own))
        for rank in range(workers):
            grads = local_gradients(model, lambda m, rank=rank, step=step: loss_of(m, rank, step)).values()
            for sum_, grad in zip(total, grads, strict=True):
                sum_ += grad.double() / workers
    return total


def test_a_survivor_that_is_behind_takes_weights_and_keeps_its_residual_and_a_frozen_rank_stays_out() -> None:
    """Rank 1 freezes when it has completed step 3, whose result rank 2 never gets: rank 0 alone has applied it. Rank 1
    wakes up when all is over: applied and kept, with what it had kept, is all that came in."""
    with ExitStack() as stack:
        crews = {name: stack.enter_context(Crew()) for name in METHODS}
        for name, crew in crews.items():
            faults = {1: [("after", 3, "freeze")], 2: [("result", 3, "lose")]}
            start(crew, 3, steps=7, faults=faults, **METHODS[name])
        for name, crew in crews.items():
            first, last = crew.result(0), crew.result(2)
            crew.signal(1, signal.SIGCONT)
            frozen = crew.result(1)
            assert "went on without this one at step 4" in frozen["excluded"], frozen
            assert not frozen["changes"]
            (change,) = first["changes"]
            assert (change.steps, change.lost, change.workers) == (4, (1,), 2), name
            for own, other in zip(first["weights"], last["weights"], strict=True):
                assert (own == other).all(), name
            assert (first["steps"], last["steps"]) == (7, 7)
            expected = came_in(first, first["changes"], 3)
            names = [n for n, _ in Chain(SIZES).named_parameters()]
            began, ended = first["trajectory"][0], first["weights"]
            for place, n in enumerate(names):
                applied = (torch.from_numpy(began[place]).double() - torch.from_numpy(ended[place]).double()) / RATE
                for found in (first, last, frozen):
                    if n in found["residuals"]:
                        applied += torch.from_numpy(found["residuals"][n]).double() / (3 if found is frozen else 2)
                torch.testing.assert_close(applied, expected[place], rtol=1e-4, atol=1e-4, msg=f"{name}: {n}")


@pytest.mark.slow
def test_another_rank_joins_with_weights_and_an_empty_residual() -> None:
    """Rank 1 dies, and another process comes while rank 0 goes on alone; then that dies, too. One that would train
    something else is kept out."""
    with Crew() as crew:
        start(crew, 2, steps=120, faults={1: [("backward", 3, "die")], 0: [("forward", 100, "die")]}, pause=0.02)
        crew.wait_for("steps of 0")
        crew.start(case_training, 0, 1, steps=120)
        other = crew.start(case_training, 0, 1, steps=120, seed=1)
        with pytest.raises(AssertionError, match="Mismatch: this process cannot join the others"):
            crew.result(other)
        *died, found = (crew.result(member) for member in range(3))
        assert died == [DIED, DIED]
        joined, last = found["changes"]
        assert (joined.old_rank, joined.rank, joined.workers, joined.joined) == (None, 1, 2, (0, 1))
        assert (last.old_rank, last.rank, last.workers, last.lost, last.steps) == (1, 0, 1, (0,), 100)
        expected = Reference(range(2))
        expected.follow([Change(0, 1, 0, 2, (1,), (), 3), replace(joined, joined=(1,)), last])
        expected.assert_same(found)


@pytest.mark.parametrize(
    "stages",
    [
        pytest.param(["_make_group"], id="group"),
        pytest.param(["_build_buckets", "_tell"], id="later", marks=pytest.mark.slow),
    ],
)
def test_two_are_lost_in_a_row_and_one_while_the_others_go_on(stages: list[str]) -> None:
    """Rank 1 dies; at a stage of going on so does rank 2, and rank 0 dies later."""
    with ExitStack() as stack:
        crews = {stage: stack.enter_context(Crew()) for stage in stages}
        for stage, crew in crews.items():
            faults = {1: [("backward", 3, "die")], 2: [(stage, 0, "die")], 0: [("backward", 8, "die")]}
            start(crew, 4, steps=12, faults=faults, deadline=10.0)
        for crew in crews.values():
            *died, last = crew.results()
            assert died == 3 * [DIED]
            assert (last["steps"], last["workers"], last["rank"], last["lost"]) == (12, 1, 0, 3)
            expected = Reference(range(4))
            expected.follow(last["changes"])
            expected.assert_same(last)


def case_planned(rank: int, size: int, at: int, steps: int) -> list[Any]:
    """Rank 1 leaves as planned, between two steps."""
    model, fewer = Chain(SIZES), dist.new_group([0, 2])
    # Which never rebuilds its buckets: where the results of a bucket are rounded depends on what it holds.
    ddp = DistributedDataParallel(model, find_unused_parameters=True, **SMALL_BUCKETS)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    sync = sparsync.attach(ddp, optimizer=optimizer, transactional=True, **{**TOPK, **ADAM})
    for step in range(steps):
        if step == at:
            if rank == 1:
                break
            ddp._update_process_group(fewer)
            sync.set_process_group(fewer)
        optimizer.zero_grad()
        loss_of(ddp, dist.get_rank(None if step < at else fewer), step).backward()
        optimizer.step()
    weights = [p.detach().clone().numpy() for p in model.parameters()]
    sync.abandon()
    dist.barrier()
    del ddp
    gc.collect()
    return weights


@pytest.mark.slow
def test_preconditioned_survivors_are_where_they_would_be_had_the_rank_left_as_planned() -> None:
    """Killed in backward, all undo step 3; or rank 2 is behind, and step 3 counts."""
    faults = [{1: [("backward", 3, "die")]}, {1: [("after", 3, "die")], 2: [("result", 3, "lose")]}]
    with ExitStack() as stack:
        crews = [stack.enter_context(Crew()) for _ in faults]
        for crew, fault in zip(crews, faults, strict=True):
            start(crew, 3, steps=7, faults=fault, adam=True, **ADAM)
        for crew, at in zip(crews, (3, 4), strict=True):
            first, _, last = crew.results()
            planned = World.once(3, case_planned, at=at, steps=7)
            assert planned[0][0], planned
            assert [change.steps for change in first["changes"]] == [at]
            for own, other, expected in zip(first["weights"], last["weights"], planned[0][1], strict=True):
                assert (own == other).all()
                assert (own == expected).all()


@pytest.mark.slow
def test_a_survivor_that_is_behind_learns_how_the_others_clip() -> None:
    """Where gradients are clipped is learned when the optimizer steps, as rank 2 does not in step 3."""
    with Crew() as crew:
        start(
            crew, 3, steps=6, faults={1: [("after", 3, "die")], 2: [("result", 3, "lose")]}, adam=True, cut=0.05, **ADAM
        )
        first, _, last = crew.results()
        assert [change.steps for change in first["changes"]] == [4]
        for own, other in zip(first["weights"], last["weights"], strict=True):
            assert (own == other).all()


@pytest.mark.parametrize("why", ["rolled back", pytest.param("not finite", marks=pytest.mark.slow)])
def test_a_step_that_was_skipped_before_a_loss_is_undone_on_all_survivors(why: str) -> None:
    """Rank 1 dies as it skips step 3; rank 2 has got the result, or it has not, so that it takes rank 0's word."""
    faults = [("skip", 3, "die")], [("result", 3, "lose")]
    with ExitStack() as stack:
        crews = [stack.enter_context(Crew()) for _ in range(2)]
        for crew, behind in zip(crews, (False, True), strict=True):
            start(crew, 3, steps=7, faults={1: faults[0], 2: faults[1] if behind else []}, skipped={3: why})
        for crew in crews:
            first, died, last = crew.results()
            assert died == DIED
            assert [(change.lost, change.steps) for change in first["changes"]] == [((1,), 4)]
            expected = Reference(range(3), skipped=[3])
            expected.follow(first["changes"])
            expected.assert_same(first)
            expected.assert_same(last)


def test_the_end_waits_for_a_rank_until_the_deadline() -> None:
    """Rank 1 lives, as its heart says, and never calls ``finish``."""
    with Crew() as crew:
        for rank in range(3):
            crew.start(case_never_finishes, rank, 3, absent=1, deadline=4.0)
        for text, seconds in (crew.result(0), crew.result(2)):
            assert text == "the end of the training: no answer within 4 s; ranks not heard from: 1"
            assert 4 <= seconds < 20


def test_a_process_that_waits_to_join_gives_up() -> None:
    """The others live, and do not come to the end of a step for long: they go on without it later, at once. Or they die
    when they have let in two, who have weights from nobody, and must not wait for each other."""
    deadline = 8.0
    with Crew() as held, Crew() as left:
        for crew in (held, left):
            for rank in range(2):
                crew.start(case_held, rank, 2, dies=crew is left, deadline=deadline)
        for crew, coming in ((held, 1), (left, 2)):
            for rank in range(2):
                crew.wait_for(f"{rank} is held")
            for number in range(3, 3 + coming):
                crew.start(case_waits_to_join, 0, 1, deadline=deadline)
                crew.wait_for(f"sparsync survivors/2/here/{number}")
        left.store.set("go on", "")
        text, seconds = held.result(2)
        assert "this process was not let in within 16 s" in text
        assert 2 * deadline <= seconds < 4 * deadline
        held.store.set("go on", "")
        for found in (held.result(0), held.result(1)):
            assert (found["steps"], found["workers"], found["changes"]) == (4, 2, [])
        assert [left.result(member) for member in range(2)] == [DIED] * 2
        for text, _ in (left.result(2), left.result(3)):
            assert "there is nobody left to join" in text


def test_buffers_are_sent_within_the_deadline() -> None:
    """Before the forward pass of step 2: rank 0, from which buffers are sent, dies or freezes; rank 1 of 5, which may
    hand them on to others, dies; another process joins, which rank 0 alone notices, and whose buffers nobody gets."""
    ends = {(3, 0): "die", (3, 0, 0): "freeze", (5, 1): "die"}
    with ExitStack() as stack:
        crews = {key: stack.enter_context(Crew()) for key in ends}
        for (workers, victim, *_), crew in crews.items():
            action = ends[workers, victim, *_]
            start(crew, workers, steps=5, faults={victim: [("forward", 2, action)]}, normed=True, deadline=8.0)
        with Crew() as crew:
            start(crew, 3, steps=60, pause=0.05, normed=True)
            crew.wait_for("steps of 0")
            crew.start(case_training, 0, 1, steps=60, normed=True, buffers=1e6)
            found = crew.results()
            assert all((buffer < 10**3).all() for own in found for buffer in own["buffers"])
            assert [(own["steps"], own["workers"], own["joined"]) for own in found[:3]] == [(60, 4, 1)] * 3
        for (workers, victim, *_), crew in crews.items():
            left = [crew.result(member) for member in range(workers) if member != victim]
            assert [(own["steps"], own["workers"]) for own in left] == [(5, workers - 1)] * (workers - 1)
            for own in left[1:]:
                for mine, other in zip(own["weights"], left[0]["weights"], strict=True):
                    assert (mine == other).all()


def case_own_exchange(store: Any) -> dict[str, Any]:
    """Rank 0 freezes before an exchange of the user's own."""
    run, first = Run(deadline=6.0), dist.get_rank() == 0
    while run.sync.steps < 4:
        with run.sync.surviving():
            if first and run.sync.steps == 2:
                freeze()
            dist.all_reduce(torch.ones(()))
            run.optimizer.zero_grad()
            loss_of(run.ddp, dist.get_rank(), run.sync.steps).backward()
            run.optimizer.step()
    return run.end()


@pytest.mark.slow
def test_a_loss_in_an_exchange_of_the_user_is_one_too() -> None:
    with Crew() as crew:
        for rank in range(3):
            crew.start(case_own_exchange, rank, 3)
        for member in (1, 2):
            found = crew.result(member)
            assert (found["steps"], found["workers"]) == (4, 2)


def test_an_error_that_is_no_loss_ends_all() -> None:
    with Crew() as crew:
        start(crew, 2, steps=5, faults={1: [("result", 2, "raise")]})
        for member in range(2):
            with pytest.raises(AssertionError, match="rank 1: bucket 3: MemoryError: no room"):
                crew.result(member)


@pytest.mark.slow
def test_a_killed_rank_is_not_waited_for_until_the_deadline() -> None:
    with Crew() as crew:
        start(crew, 2, steps=5, faults={0: [("backward", 2, "die")]}, deadline=200.0)
        began = time.monotonic()
        died, last = crew.results()
        assert died == DIED
        assert (last["steps"], last["workers"]) == (5, 1)
        assert time.monotonic() - began < 60


def test_a_process_that_was_killed_while_it_waited_to_join_holds_nobody_up() -> None:
    store = HashStore()
    first, killed, fresh = (Membership(store, deadline=6.0) for _ in range(3))
    first.enter(first.begin([first.number]))
    killed._store.ask(lambda s: s.set(f"2/here/{killed.number}", "[null, false]"), 1.0)
    killed.close()
    until = time.monotonic() + 2
    while time.monotonic() < until:
        assert not first.somebody_waits()
        time.sleep(0.1)
    assert first.agree(1).members == (first.number,)
    assert fresh.find_training()
    with ThreadPoolExecutor() as pool:
        joined = pool.submit(fresh.join)
        while not first.somebody_waits():
            time.sleep(0.1)
        assert first.agree(1).members == joined.result().members == (first.number, fresh.number)
    first.close()
    fresh.close()


def test_a_store_holds_one_training_and_only_its_like_may_join_until_it_is_over() -> None:
    store = HashStore()
    with ExitStack() as stack:
        members = [Membership(store, deadline=2.0, fingerprint=text) for text in ("one", "one", "one", "another")]
        for member in members:
            stack.callback(member.close)
        first, second, late, other = members
        begun, also_begun = (one.begin([one.number]) for one in (first, second))
        first.enter(begun)
        with pytest.raises(sparsync.Mismatch, match="another training has begun in this store at the same time"):
            second.enter(also_begun)
        with pytest.raises(sparsync.Mismatch, match="cannot join the others: its options, model or version differ"):
            other.find_training()
        assert late.find_training()
        assert first.finish()
        with pytest.raises(sparsync.PeerLost, match="the training is over"):
            late.join()


def case_refused(rank: int, size: int) -> None:
    model = Chain(SIZES)
    ddp, optimizer = DistributedDataParallel(model), torch.optim.SGD(model.parameters(), 0.1)
    for options, why in [
        ({"on_loss": "go on"}, "on_loss must be one of raise, continue"),
        ({"on_loss": "continue"}, "needs optimizer="),
        ({"optimizer": optimizer, "transactional": False}, "needs steps that can be undone"),
        ({"optimizer": optimizer, "per_node": 2}, "does not go with"),
        ({"optimizer": optimizer, "recipe": "auto"}, "does not go with"),
        ({"optimizer": optimizer, "scaler": torch.amp.GradScaler("cpu")}, "does not go with"),
    ]:
        with pytest.raises(ValueError, match=why):
            sparsync.attach(ddp, **{"on_loss": "continue", **options})
    with pytest.raises(ValueError, match=r"needs attach\(\)"):
        sparsync.comm_hook(model, on_loss="continue", optimizer=optimizer)
    own = DistributedDataParallel(model, process_group=dist.new_group([0, 1]))
    with pytest.raises(ValueError, match="default process group"):
        sparsync.attach(own, on_loss="continue", optimizer=optimizer)
    sync = sparsync.attach(ddp, optimizer=optimizer)
    with pytest.raises(sparsync.SparsyncError, match="this needs attach"):
        sync.surviving()
    sync.detach()
    sync = sparsync.attach(ddp, optimizer=optimizer, on_loss="continue")
    with pytest.raises(sparsync.SparsyncError, match=r"set_process_group\(\) does not go with"):
        sync.set_process_group(dist.group.WORLD)
    with pytest.raises(sparsync.SparsyncError, match=r"attached already; call detach\(\)"):
        sparsync.attach(ddp, optimizer=optimizer)
    with pytest.raises(ValueError, match="one model of a process"):
        sparsync.attach(DistributedDataParallel(model), optimizer=optimizer, on_loss="continue")
    sync.detach()
    start = sparsync.Handle.start

    def start_over_nccl(handle: sparsync.Handle) -> Any:  # which only GPUs have
        reducer = start(handle)
        reducer.channel.backend = "nccl"
        return reducer

    with patch.object(sparsync.Handle, "start", start_over_nccl), pytest.raises(ValueError, match="over Gloo alone"):
        sparsync.attach(ddp, optimizer=optimizer, on_loss="continue")
    del ddp, own
    gc.collect()


def case_copied(rank: int, size: int) -> tuple[list[float], list[float], bool]:
    """Return buffers of a copy of the model, and of the model itself, after a forward pass of each; both are given
    another value on every rank before."""
    run = Run(normed=True)
    copy = deepcopy(run.ddp)
    seen = []
    for ddp in (copy, run.ddp):
        ddp.module.norm.running_mean.fill_(rank + 1.0)
        ddp.eval()
        ddp(torch.zeros(4, SIZES[0]))
        seen.append(ddp.module.norm.running_mean[:2].tolist())
    run.sync.detach()
    mended = "_sync_module_buffers" not in vars(run.ddp)
    del copy, ddp, run
    gc.collect()
    return seen[0], seen[1], mended


def test_a_copy_of_a_model_that_goes_on_sends_its_buffers_as_ddp_does(worlds: dict[int, World]) -> None:
    assert worlds[3].run(case_copied) == [([1.0, 1.0], [1.0, 1.0], True)] * 3


def case_uneven(rank: int, size: int) -> list[int]:
    """Return how many batches the buffers have seen, after each step of this rank and at the end: the last rank makes
    four steps, the others run out of data after two."""
    run = Run(normed=True)
    tracked, seen = run.model.norm.num_batches_tracked, []
    with run.ddp.join():
        for _ in range(4 if rank == size - 1 else 2):
            run.step()
            seen.append(int(tracked))
    seen.append(int(tracked))
    run.sync.detach()
    del run
    gc.collect()
    return seen


def test_buffers_are_never_those_of_a_rank_without_data(worlds: dict[int, World]) -> None:
    assert worlds[3].run(case_uneven) == [[1, 2, 4], [1, 2, 4], [1, 2, 3, 4, 4]]


def test_what_cannot_go_on_is_refused(worlds: dict[int, World]) -> None:
    worlds[2].run(case_refused)


def follow(crew: Crew, expected: Reference, steps: int, log: SurvivalLog) -> int:
    """Let the reference go through all generations that anybody has trained in, comparing the weights after every step;
    return how many there were."""
    survivors, number, current, changes = PrefixStore("sparsync survivors", crew.store), 1, 1, 0

    def compare(made: int, weights: str) -> None:
        key = f"{current}/weights/{made}"
        if crew.store.check([key]):
            assert bytes(crew.store.get(key)).decode() == weights, f"step {made} of generation {current}"

    while survivors.check([f"{number + 1}/decision"]):
        number += 1
        decided = Generation.of(bytes(survivors.get(f"{number}/decision")).decode())
        before = {}
        for member in decided.members:
            key = f"{number}/went on/{member}"
            if crew.store.check([key]):
                before[member] = int(crew.store.get(key))
        if before:
            changes += 1
            expected.until(decided.steps, compare)
            expected.go_on(decided.members, before)
            current = number
            log.say(f"        step {decided.steps:4d}: generation {number}, processes {decided.members}")
    expected.until(steps, compare)
    return changes


def among_kills(
    steps: int, workers: int, events: int, seed: int, normed: bool = False, log: SurvivalLog | None = None
) -> dict[str, int]:
    """Kill and freeze processes at random points, between steps and while the others go on, and let others come, until
    so many steps are made; say what happens. Each event has its part of the first nine tenths of the steps, however
    fast the machine is: the others train slowly where one takes long."""
    rng, began, log = random.Random(seed), time.monotonic(), log or SurvivalLog()
    options: dict[str, Any] = {"steps": steps, "deadline": DEADLINE / 2, "normed": normed, "log": log.part}
    counts = {"steps": steps, "killed": 0, "frozen": 0, "started": 0, "last event": 0}
    made, happened, part = 0, 0, 0.9 * steps / events
    with Crew() as crew:

        def look() -> tuple[int, list[int], list[int]]:
            """Return how many steps are made, who lives, and who of these trains."""
            left = [member for member in lives if not crew.answered(member)]
            return int(crew.wait_for("steps")), left, [own for own in left if crew.store.check([f"{own} is in"])]

        crew.store.set("asked for", str(int(part)))
        lives = [crew.start(case_among_kills, rank, workers, **options, name=rank) for rank in range(workers)]
        crew.wait_for("steps")
        while happened < events and lives and made < 0.9 * steps:
            if rng.random() < 0.7:
                until, rest = (happened + rng.random()) * part, time.monotonic() + 20
                while int(crew.wait_for("steps")) < until and time.monotonic() < rest:
                    time.sleep(0.001)
                time.sleep(rng.uniform(0, 0.05))
            else:
                time.sleep(rng.uniform(0, 2))
            made, lives, inside = look()
            while len(inside) <= 1 and len(lives) == workers:  # wait for one of those that were started
                time.sleep(0.01)
                made, lives, inside = look()
            if len(inside) > 1 and (len(lives) == workers or rng.random() < 0.3):
                victim, event = rng.choice(inside), "frozen" if rng.random() < 0.2 else "killed"
                crew.signal(victim, signal.SIGSTOP if event == "frozen" else signal.SIGKILL)
                lives.remove(victim)
            else:
                victim, event = crew.start(case_among_kills, 0, 1, **options, name=len(crew.members)), "started"
                lives.append(victim)
            happened, counts[event], counts["last event"] = happened + 1, counts[event] + 1, made
            crew.store.set("asked for", str(int((happened + 1) * part)))
            log.say(f"{time.monotonic() - began:6.1f} s, step {made:4d}: process {victim} {event}")
        crew.store.set("asked for", str(steps))
        for process, _ in crew.members:
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGCONT)
        found = [answer for answer in crew.results() if isinstance(answer, dict) and "weights" in answer]
        assert found
        first = Generation.of(bytes(PrefixStore("sparsync survivors", crew.store).get("1/decision")).decode())
        expected = Reference(first.members, normed=normed)
        counts["changes"] = follow(crew, expected, steps, log)
        for own in found:
            expected.assert_same(own)
        most = {what: max(own[what] for own in found) for what in ("threads", "files")}
        log.say(f"{time.monotonic() - began:6.1f} s: weights and residuals of {len(found)} are those of the reference")
        return counts | {"at the end": len(found)} | most


@pytest.mark.slow
@pytest.mark.parametrize("normed", [False, True], ids=["plain", "batch norm"])
def test_kills_at_random_points_leave_equal_replicas_and_lose_nothing_else(normed: bool) -> None:
    counts = among_kills(80, 3, events=4, seed=0, normed=normed)
    assert counts["changes"] >= 1


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_kills_at_random_points_over_2000_steps() -> None:
    """With $SPARSYNC_SURVIVE_LOG, the log is written there."""
    file = os.environ.get(survival_log.VARIABLE)
    log = SurvivalLog(Path(file) if file else None)
    counts = among_kills(2000, 4, events=60, seed=1, log=log)
    log.say(str(counts))
    assert counts["changes"] >= 20
    assert counts["last event"] > 0.8 * 2000
    log.end()
