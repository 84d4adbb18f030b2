"""Checkpoints of what is kept: tensors and plain types only, so that ``torch.load(weights_only=True)`` reads them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sparsync.engine.reducer import Reducer

SCHEMA = 1


def state_dict(reducer: Reducer) -> dict[str, Any]:
    """This rank's state. The last step is committed first."""
    reducer.settle()
    return {
        "schema": SCHEMA,
        "rank": reducer.channel.rank,
        "workers": reducer.channel.size,
        "step": reducer.step,
        **reducer.feedback.state_dict(),
        "compressor": {name: {key: t.clone() for key, t in bag.items()} for name, bag in reducer.state.items()},
        "loss_scale": reducer.last_scale,
        "rates": dict(reducer.last_rates),
    }


def load_state_dict(reducer: Reducer, state: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
    """Load this rank's state, or its share of the states of all ranks of an earlier run, in their order.

    With another number of workers the mean over the workers is kept: every old residual goes to one new worker (rank
    modulo workers) and is scaled by new/old workers.
    """
    states = [state] if isinstance(state, Mapping) else list(state)
    if not states:
        raise ValueError("no state to load: the list is empty")
    for one in states:
        if one.get("schema") != SCHEMA:
            raise ValueError(f"this is not a sparsync state of schema {SCHEMA}: it says {one.get('schema')!r}")
    rank, size, old = reducer.channel.rank, reducer.channel.size, states[0]["workers"]
    if isinstance(state, Mapping):
        if (state["rank"], old) != (rank, size):
            raise ValueError(
                f"this is the state of rank {state['rank']} of {old}, and here is rank {rank} of {size}; "
                "with another number of workers, pass the states of all old ranks as a list"
            )
        own = states
    else:
        if [one["rank"] for one in states] != list(range(old)):
            raise ValueError(f"the list must hold the states of ranks 0 to {old - 1}, in order")
        own = states[rank::size]
    first = own[0] if own else states[0]
    kept: dict[str, dict[str, Any]] = {"residuals": {}, "velocities": {}}
    for one in own:
        for kind, sums in kept.items():
            for name, tensor in one[kind].items():
                share = tensor if old == size else tensor * (size / old)
                sums[name] = sums[name] + share if name in sums else share
    reducer.restore(
        kept["residuals"], kept["velocities"], first["step"], first["compressor"], first["loss_scale"], first["rates"]
    )
