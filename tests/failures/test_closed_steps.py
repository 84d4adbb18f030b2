"""When a step fails for some ranks, all survivors know which step is the committed one, and are at it or behind."""

from __future__ import annotations

import gc
import os
import time
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import sparsync
from sparsync.engine.bucketing import Bucket
from sparsync.engine.step_vote import describe
from tests.failures.checked_training import bits, inputs, mlp, square
from tests.failures.ddp_training import ALL_SPARSE
from tests.failures.reducers import error_of, make_reducer, push_all
from tests.world import World


def outcome_of(ddp: DistributedDataParallel, handle: sparsync.Handle, batches: list[Tensor]) -> dict[str, Any]:
    """Train until a step fails; return the error, the steps applied and those that a checkpoint speaks of."""
    optimizer, applied, kept = torch.optim.SGD(ddp.parameters(), 0.05), 0, {}
    for batch in batches:
        kept = {name: residual.clone() for name, residual in handle.state_dict()["residuals"].items()}
        optimizer.zero_grad()
        raised, _ = error_of(square(ddp(batch)).backward)
        if raised != "none":
            break
        optimizer.step()
        applied += 1
    answer, state = error_of(handle.check), handle.state_dict()
    undone = all(torch.equal(residual, state["residuals"][name]) for name, residual in kept.items())
    return {"error": answer, "applied": applied, "step": state["step"], "undone": undone}


def case_dies_on_the_way(rank: int, size: int, victim: int, late: bool) -> dict[str, Any]:
    """The victim dies in step 2: with the sum in hand that it should hand on, or before it has sent anything."""
    ddp = DistributedDataParallel(mlp())
    options = {"density": 0.05, "transactional": True, "deadline": 60, **ALL_SPARSE}
    handle = sparsync.attach(ddp, "topk", collective="gtopk", **options)
    channel = handle._running().channel
    if rank == victim:
        send, receive, steps = channel.send, channel.receive, [0]

        def dying_send(message: Tensor, to: int) -> None:
            if late and handle._running().step == 3 and to > rank:
                os._exit(9)
            send(message, to)

        def dying_receive(out: Tensor, source: int) -> Tensor:
            steps[0] += 1
            if not late and handle._running().step == 3:
                os._exit(9)
            return receive(out, source)

        channel.send, channel.receive = dying_send, dying_receive  # type: ignore
    found = outcome_of(ddp, handle, inputs(rank, 8, 40, steps=5))
    handle.detach()
    del ddp
    gc.collect()
    return found


def test_the_committed_step_and_who_is_behind_are_named() -> None:
    outcomes = World.once(4, case_dies_on_the_way, victim=2, late=True)
    assert outcomes[2] == (False, "died with exit code 9")
    (_, first), (_, second), _, (_, third) = outcomes
    assert first["error"] == second["error"] == third["error"], outcomes
    kind, text = first["error"]
    assert kind == "PeerLost"
    assert "ranks not heard from: 2" in text
    assert text.endswith("steps committed: 3, by ranks 0 and 1; behind: rank 3 with 2")
    for found, steps in ((first, 3), (second, 3), (third, 2)):
        assert (found["applied"], found["step"], found["undone"]) == (steps, steps, True)


def test_where_nobody_completed_a_step_all_are_at_the_one_before() -> None:
    outcomes = World.once(4, case_dies_on_the_way, victim=2, late=False)
    assert outcomes[2] == (False, "died with exit code 9")
    survivors = [found for rank, (_, found) in enumerate(outcomes) if rank != 2]
    assert len({found["error"] for found in survivors}) == 1
    assert survivors[0]["error"][1].endswith("ranks not heard from: 2")
    for found in survivors:
        assert (found["applied"], found["step"], found["undone"]) == (2, 2, True)


def test_without_the_store_a_rank_speaks_for_itself_alone() -> None:
    outcomes = World.once(4, case_dies_on_the_way, victim=0, late=False)
    assert outcomes[0] == (False, "died with exit code 9")
    for _, found in outcomes[1:]:
        kind, text = found["error"]
        assert kind == "PeerLost"
        assert text.endswith("steps completed here: 2; those of other ranks not known, perhaps one more or less")
        assert (found["applied"], found["step"], found["undone"]) == (2, 2, True)


def case_fails_at_the_end(rank: int, size: int, pause: float) -> dict[str, Any]:
    """In step 1 rank 1 cannot write the result of the last exchange; the others come to step 2 after a pause."""
    ddp = DistributedDataParallel(mlp())
    handle = sparsync.attach(ddp, "topk", density=0.05, deadline=8, **ALL_SPARSE)
    completion = handle._running().completion
    finish = completion.finish

    def failing(*arguments: Any) -> None:
        if arguments[-1] == 1:
            raise MemoryError("no room")
        finish(*arguments)

    if rank == 1:
        completion.finish = failing  # type: ignore
    else:
        ddp.register_forward_pre_hook(lambda *_: time.sleep(pause * (handle._running().step == 2)))
    found = outcome_of(ddp, handle, inputs(rank, 8, 40, steps=4))
    torch.distributed.barrier()
    handle.detach()
    del ddp
    gc.collect()
    return found


def test_a_rank_that_fails_at_the_end_of_a_step_is_behind() -> None:
    outcomes = World.once(3, case_fails_at_the_end, pause=0.0)
    assert all(ok for ok, _ in outcomes), outcomes
    behind = "; steps committed: 2, by ranks 0 and 2; behind: rank 1 with 1"
    assert [found["error"] for _, found in outcomes] == [
        ("SparsyncError", f"rank 1: bucket 0: MemoryError: no room{behind}")
    ] * 3
    assert [(found["applied"], found["step"]) for _, found in outcomes] == [(2, 2), (1, 1), (2, 2)]


@pytest.mark.slow
def test_a_rank_that_comes_late_is_not_taken_for_one_that_is_behind() -> None:
    outcomes = World.once(3, case_fails_at_the_end, pause=7.0)
    assert all(ok for ok, _ in outcomes), outcomes
    early = outcomes[1][1]["error"][1]
    assert early.endswith("; steps of ranks 0 and 2 not known, perhaps one more")
    for rank in (0, 2):
        assert "steps committed: 2, by ranks" in outcomes[rank][1]["error"][1]
        assert outcomes[rank][1]["error"][1].endswith("behind: rank 1 with 1")


@pytest.mark.parametrize("transactional", [False, True])
def test_an_error_between_steps_undoes_nothing_that_was_completed(transactional: bool) -> None:
    reducer = make_reducer({"a": torch.zeros(200)}, alone=True, transactional=transactional)
    push_all(reducer, [("a", torch.randn(200))])
    before = bits([reducer.residual("a")])
    reducer.push(Bucket(3, torch.randn(200), ("a",), True))  # nobody expects it
    with pytest.raises(sparsync.Mismatch):
        reducer.check()
    assert "order of buckets differs" in error_of(reducer.push(Bucket(0, torch.randn(200), ("a",), True)).wait)[1]
    assert reducer.step == 1, "a step has begun after the error"
    state = reducer.state_dict()
    assert state["step"] == 1
    assert bits([state["residuals"]["a"]]) == bits([reducer.residual("a")]) == before


@pytest.mark.parametrize(
    ("votes", "lost", "says"),
    [
        ({0: 4, 1: 4}, {2}, ""),
        ({0: 4, 1: 5, 2: 4}, set(), "steps committed: 5, by rank 1; behind: rank 0 with 4, rank 2 with 4"),
        ({0: 4, 2: 4}, set(), "steps of rank 1 not known, perhaps one more"),
        ({2: 5, 0: 4}, {1}, "steps committed: 5, by rank 2; behind: rank 0 with 4"),
    ],
)
def test_what_votes_come_to(votes: dict[int, int], lost: set[int], says: str) -> None:
    assert describe(votes, 3, frozenset(lost)) == says
