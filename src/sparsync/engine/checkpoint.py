"""Checkpoints of what is kept: tensors and plain types only, so that ``torch.load(weights_only=True)`` reads them.

A state knows how many steps made it, in which training and with which options, and what it has to hold. States that are
loaded together must agree in all of it: those in one list are compared here, and what each rank has loaded from a file
of its own is compared before the first exchange (``Origin``).
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from sparsync.config import ExchangePlan
from sparsync.config.nodes import Groups, nodes_text
from sparsync.config.recipes import AUTO
from sparsync.engine.state_form import SCHEMA, check_form
from sparsync.engine.worker import WorkerState
from sparsync.layout import Layout, Span

log = logging.getLogger("sparsync")

KEPT = ("residuals", "velocities")  # as large as the model
TENSORS = ("residuals", "velocities", "compressor", "moments")  # keys under which a state holds tensors
ALIKE = {
    "step": "steps",
    "training": "trainings",
    "options": "options",
    "workers": "numbers of workers",
    "nodes": "nodes",
}


class Origin:
    """What a training goes on from, which must be the same on every rank.

    Args:
        training: a name that all ranks share, and no other training has.
    """

    def __init__(self, training: str) -> None:
        self.training = training
        self._lines = ["step 0", f"training {training}"]

    def resume(self, state: Mapping[str, Any]) -> None:
        """Go on from a state that was loaded."""
        about = {key: state[key] for key in ("step", "training", "options")}
        about["moments"] = _digest(state.get("moments"))
        self._lines = [f"{key} {value}" for key, value in about.items()]

    def take(self) -> list[str]:
        """Return a text for the ranks to compare, line by line; nothing where they have done so."""
        lines, self._lines = self._lines, []
        return lines


def state_dict(worker: WorkerState, workers: int, step: int, training: str, nodes: Groups = ()) -> dict[str, Any]:
    """Return what a worker keeps, after so many steps of this training; the last of them is committed.

    Args:
        nodes: the ranks of each, if there are any: the first rank of each keeps what is left of the sum of its node's
            gradients, and the states of the others hold none.
    """
    state = {
        "schema": SCHEMA,
        "rank": worker.rank,
        "workers": workers,
        "step": step,
        "training": training,
        "nodes": nodes_text(nodes),
        "options": digest_of(worker.plan),
        **worker.feedback.state_dict(),
        "method": _method_of(worker.plan),
        "corrected": worker.plan.correction is not None,
        "compressor": {n: {key: t.clone() for key, t in bag.items()} for n, bag in worker.compressor_state.items()},
        "loss_scale": worker.loss_scale,
        "rates": dict(worker.rates),
        "highest_rates": dict(worker.highest_rates),
        **({"moments": worker.preconditioner.state_dict()} if worker.preconditioner else {}),
    }
    return _whole(state)


def load_state_dict(
    worker: WorkerState,
    workers: int,
    state: Mapping[str, Any] | Sequence[Mapping[str, Any]],
    origin: Origin | None = None,
    nodes: Groups = (),
) -> int:
    """Load a worker's state, or its share of the states of all ranks of an earlier run, in their order.

    With another number of workers, or other nodes, the mean over the workers is kept: every old residual goes to one
    new worker, or leader of a node, in turn, and is scaled by new/old workers. A state that is refused changes nothing.

    Args:
        origin: is told what was loaded, if other ranks have loaded theirs elsewhere.
        nodes: the ranks of each, if there are any.

    Returns:
        The step to go on from.
    """
    mine = check_state(worker, workers, state, nodes)
    first = next((one for one in ([state] if isinstance(state, Mapping) else state) if one["compressor"]), None)
    if first is not None and worker.rank == 0 and not _understood(worker, first):
        own, made = _method_of(worker.plan), first["method"]
        made += " with other options" * (made == own)
        log.warning("the checkpoint's thresholds are of %s, and begin anew; residuals go on", made)
    if worker.preconditioner is not None:
        worker.preconditioner.load_state_dict(mine["moments"])
    loss_scale, highest = mine.get("loss_scale"), mine.get("highest_rates", mine["rates"])
    kept = {key: mine[key] for key in ("residuals", "velocities", "compressor", "rates")}
    worker.load(**kept, loss_scale=loss_scale, highest_rates=highest)
    if origin is not None:
        origin.resume(mine)
    step: int = mine["step"]
    return step


def check_state(
    worker: WorkerState, workers: int, state: Mapping[str, Any] | Sequence[Mapping[str, Any]], nodes: Groups = ()
) -> dict[str, Any]:
    """Return the state that a worker would go on from, as ``load_state_dict`` does; refuse what it cannot, whatever it
    is, before anything is changed."""
    if not isinstance(state, Mapping | list | tuple):
        raise ValueError(f"a state is a dictionary, or a list of those of all ranks, not {type(state).__name__}")
    states = [state] if isinstance(state, Mapping) else list(state)
    if not states:
        raise ValueError("no state to load: the list is empty")
    for one in states:
        check_form(one)
    old = states[0]["workers"]
    if isinstance(state, Mapping):
        if (state["rank"], old) != (worker.rank, workers):
            raise ValueError(
                f"this is the state of rank {state['rank']} of {old}, and here is rank {worker.rank} of {workers}; "
                "with another number of workers, pass the states of all old ranks as a list"
            )
        made, here = state.get("nodes", ""), nodes_text(nodes)
        if made != here:
            raise ValueError(
                f"this state was made {_in_nodes(made)}, and it is to be loaded {_in_nodes(here)}; "
                "pass the states of all old ranks as a list"
            )
        own = states
    else:
        if len(states) != old or [one["rank"] for one in states] != list(range(old)):
            raise ValueError(f"the list must hold the states of ranks 0 to {old - 1}, in order")
        _check_alike(states)
        own = _own_share(states, worker.rank, workers, nodes)
    first = next((one for one in own if one["compressor"]), states[0])  # who was led had no thresholds, the first had
    if ("moments" in first) != (worker.preconditioner is not None):
        made = "with" if "moments" in first else "without"
        raise ValueError(f"the checkpoint was made {made} preconditioned feedback; load it {made} precondition=True")
    for one in states:
        worker.feedback.check_state(one["residuals"], one["velocities"], bool(first.get("corrected")))
        _check_tensors(one)
    known = _understood(worker, first)
    if worker.preconditioner is not None:
        worker.preconditioner.check_state(first["moments"])
    every = {kind: {name: kept for one in states for name, kept in one[kind].items()} for kind in KEPT}
    mine = share_of(own, first, worker.rank, workers, nodes, every)
    if not known:
        mine["compressor"] = {}  # of which this one would understand nothing
    worker.feedback.check_finite(mine["residuals"], mine["velocities"])
    return mine


def _own_share(states: Sequence[Mapping[str, Any]], rank: int, workers: int, nodes: Groups) -> list[Mapping[str, Any]]:
    """Return the states that a rank goes on for: its own, or its share of those of other workers or nodes."""
    if (len(states), states[0].get("nodes", "")) == (workers, nodes_text(nodes)):
        return [states[rank]]
    heirs = heirs_of(workers, nodes)
    return list(states[heirs.index(rank) :: len(heirs)]) if rank in heirs else []


def heirs_of(workers: int, nodes: Groups) -> Sequence[int]:
    """Return the ranks that keep something: all, or the first of each node."""
    return [group[0] for group in nodes] or range(workers)


def share_of(
    own: Sequence[Mapping[str, Any]],
    like: Mapping[str, Any],
    rank: int,
    workers: int,
    nodes: Groups = (),
    every: Mapping[str, Mapping[str, Tensor]] | None = None,
) -> dict[str, Any]:
    """Return the state of a worker that goes on for others: the sum of what they kept, so scaled that the mean over all
    workers is what it was.

    Args:
        own: states of the old workers, none of which anybody else goes on for.
        like: has all that is the same on every worker, and their old number.
        nodes: the ranks of each, if there are any.
        every: something of each shape that any of the old workers kept, by kind and name: all new ones have the same
            names, so that all refuse what one does, and a distributed checkpoint has every row.
    """
    kept: dict[str, dict[str, Any]] = {kind: {} for kind in KEPT}
    for one in own:
        ratio = workers / like["workers"]
        if "moments" not in like:  # a rank that had joined was in the loss scale of before
            ratio *= (like.get("loss_scale") or 1.0) / (one.get("loss_scale") or 1.0)
        for kind, sums in kept.items():
            for name, tensor in one[kind].items():
                share = tensor if ratio == 1 else tensor * ratio
                sums[name] = sums[name] + share if name in sums else share
    about = {"rank": rank, "workers": workers, "nodes": nodes_text(nodes)}
    if rank not in heirs_of(workers, nodes):  # nor does it choose entries
        about["compressor"] = {}
    else:
        for kind, tensors in (every or {}).items():
            for name, tensor in tensors.items():
                kept[kind].setdefault(name, torch.zeros(tensor.shape, dtype=tensor.dtype, device="cpu"))
    return _whole({**like, **kept, **about})


def _in_nodes(text: str) -> str:
    return f"on nodes of ranks {text}" if text else "without nodes"


def _whole(state: dict[str, Any]) -> dict[str, Any]:
    """Return a state that knows which tensors it has to hold."""
    return {**state, "holds": "\n".join(name for name, _ in _tensors(state))}


def _method_of(plan: ExchangePlan) -> str:
    """Return whose state compressors' states are; with ``"auto"`` of those among which it changes."""
    return AUTO if plan.recipe == AUTO else type(plan.compressor).__qualname__


def digest_of(plan: ExchangePlan) -> str:
    """Return a text that differs when options do."""
    return hashlib.sha256(plan.configuration(frozenset()).encode()).hexdigest()[:16]


def _check_alike(states: Sequence[Mapping[str, Any]]) -> None:
    """Refuse states that were not saved together."""
    for key, many in ALIKE.items():
        said = [one.get(key, "") for one in states]
        if len({*said}) > 1:
            listing = ", ".join(f"rank {rank}: {value}" for rank, value in enumerate(said))
            raise ValueError(f"the states are of different {many}, and cannot be loaded together ({listing})")


def _understood(worker: WorkerState, state: Mapping[str, Any]) -> bool:
    """Return whether a compressor's state is that of this compressor, with options that go with it; refuse one that was
    made with the very same options and is in another form: it is damaged."""
    if state.get("method", _method_of(worker.plan)) != _method_of(worker.plan):
        return False
    misfit = _misfit(worker, state["compressor"])
    if misfit and state["options"] == digest_of(worker.plan):
        raise ValueError(misfit)
    return not misfit


def _misfit(worker: WorkerState, state: Mapping[str, Mapping[str, Tensor]]) -> str:
    """Return what state lacks that this compressor is going to look up, or has in another form, or in numbers that it
    cannot go on from; a size that goes with the segment's may be any."""
    layouts = [Layout.cut([Span("any", 0, n)], numel=n, scope="layer", density=1.0) for n in (1, 2)]
    small, large = (worker.plan.compressor.init(layout) for layout in layouts)
    for kind, expected in small.items():
        for name, bag in state.items():
            for key, like in expected.items():
                found, fixed = bag.get(key), like.shape == large[kind][key].shape
                fits = found is not None and (found.dtype, found.dim()) == (like.dtype, like.dim())
                if found is None or not fits or (fixed and found.shape != like.shape):
                    return f"the checkpoint's {key!r} of {name!r} is not that of this compressor"
            if not worker.plan.compressor.accepts(bag):
                return f"the checkpoint's numbers of {name!r} are none that this compressor makes"
    return ""


def _check_tensors(state: Mapping[str, Any]) -> None:
    """Refuse a state that has lost tensors, or whose tensors have lost their values."""
    tensors = dict(_tensors(state))
    lost = [name for name in state["holds"].splitlines() if name not in tensors]
    if lost:
        raise ValueError(f"the state of rank {state['rank']} is not whole: {lost[0]} is missing")
    for name, tensor in tensors.items():
        kept = name.startswith(("residuals", "velocities"))
        if tensor.isnan().any() or (kept and not tensor.isfinite().all()):
            raise ValueError(f"the state of rank {state['rank']} is damaged: {name} is not finite")


def _tensors(state: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Yield all tensors of a state with their names."""
    for kind in TENSORS:
        for name, value in state.get(kind, {}).items():
            if isinstance(value, Tensor):
                yield f"{kind}: {name}", value
            else:
                yield from ((f"{kind}: {name}, {key}", tensor) for key, tensor in value.items())


def _digest(moments: Mapping[str, Mapping[str, Tensor]] | None) -> str:
    """Return a text that differs when any bit of the moments does: they are the same on every rank."""
    digest = hashlib.sha256()
    for _, tensor in _tensors({"moments": moments or {}}):
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]
