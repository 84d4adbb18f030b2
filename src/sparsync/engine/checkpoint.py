"""Checkpoints of what is kept: tensors and plain types only, so that ``torch.load(weights_only=True)`` reads them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sparsync.engine.worker import WorkerState

SCHEMA = 1


def state_dict(worker: WorkerState, workers: int, step: int) -> dict[str, Any]:
    """Return what a worker keeps, after so many steps; the last of them is committed."""
    return {
        "schema": SCHEMA,
        "rank": worker.rank,
        "workers": workers,
        "step": step,
        **worker.feedback.state_dict(),
        "compressor": {n: {key: t.clone() for key, t in bag.items()} for n, bag in worker.compressor_state.items()},
        "loss_scale": worker.loss_scale,
        "rates": dict(worker.rates),
        **({"moments": worker.preconditioner.state_dict()} if worker.preconditioner else {}),
    }


def load_state_dict(worker: WorkerState, workers: int, state: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> int:
    """Load a worker's state, or its share of the states of all ranks of an earlier run, in their order.

    With another number of workers the mean over the workers is kept: every old residual goes to one new worker (rank
    modulo workers) and is scaled by new/old workers.

    Returns:
        The step to go on from.
    """
    states = [state] if isinstance(state, Mapping) else list(state)
    if not states:
        raise ValueError("no state to load: the list is empty")
    for one in states:
        if one.get("schema") != SCHEMA:
            raise ValueError(f"this is not a sparsync state of schema {SCHEMA}: it says {one.get('schema')!r}")
    old = states[0]["workers"]
    if isinstance(state, Mapping):
        if (state["rank"], old) != (worker.rank, workers):
            raise ValueError(
                f"this is the state of rank {state['rank']} of {old}, and here is rank {worker.rank} of {workers}; "
                "with another number of workers, pass the states of all old ranks as a list"
            )
        own = states
    else:
        if [one["rank"] for one in states] != list(range(old)):
            raise ValueError(f"the list must hold the states of ranks 0 to {old - 1}, in order")
        own = states[worker.rank :: workers]
    first = own[0] if own else states[0]
    if ("moments" in first) != (worker.preconditioner is not None):
        made = "with" if "moments" in first else "without"
        raise ValueError(f"the checkpoint was made {made} preconditioned feedback; load it {made} precondition=True")
    mine = share_of(own, first, worker.rank, workers)
    worker.load(**{key: mine[key] for key in ("residuals", "velocities", "compressor", "loss_scale", "rates")})
    if worker.preconditioner is not None:
        worker.preconditioner.load_state_dict(mine["moments"])
    step: int = mine["step"]
    return step


def share_of(own: Sequence[Mapping[str, Any]], like: Mapping[str, Any], rank: int, workers: int) -> dict[str, Any]:
    """Return the state of a worker that goes on for others: the sum of what they kept, so scaled that the mean over all
    workers is what it was.

    Args:
        own: states of the old workers, none of which anybody else goes on for.
        like: has all that is the same on every worker, and their old number.
    """
    kept: dict[str, dict[str, Any]] = {"residuals": {}, "velocities": {}}
    old = like["workers"]
    for one in own:
        for kind, sums in kept.items():
            for name, tensor in one[kind].items():
                share = tensor if old == workers else tensor * (workers / old)
                sums[name] = sums[name] + share if name in sums else share
    return {**like, **kept, "rank": rank, "workers": workers}
