"""States for ``torch.distributed.checkpoint``, which takes a plain tensor for the same on every rank and saves that of
rank 0: here every tensor is a row of one that all ranks share."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from sparsync.config.nodes import Groups
from sparsync.engine.checkpoint import KEPT, heirs_of, share_of
from sparsync.errors import SparsyncError


def to_rows(state: Mapping[str, Any], group: dist.ProcessGroup | None, device: torch.device) -> dict[str, Any]:
    """Return a rank's state with every tensor as its row of a ``DTensor`` of all ranks; plain values are the same on
    all, but for the rank, which the row tells, and step and loss scale, which are rows of their own.

    Args:
        group: of the ranks that keep something, and have a row; ``None`` on a rank of a node that another one leads.
    """
    from torch.distributed.tensor import DTensor, Shard

    mesh = _mesh(group, device) if group is not None or not state["nodes"] else None

    def row(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: row(inner) for key, inner in value.items()}
        if isinstance(value, Tensor):
            assert mesh is not None
            return DTensor.from_local(value.unsqueeze(0).to(device), mesh, [Shard(0)], run_check=False)
        return value

    plain = {key: value for key, value in state.items() if key != "rank"}
    plain["step"] = torch.tensor(state["step"], dtype=torch.int64, device="cpu")
    if state["loss_scale"] is not None:
        plain["loss_scale"] = torch.tensor(state["loss_scale"], dtype=torch.float64, device="cpu")
    if mesh is None:  # the leader's row has what is the same on all ranks
        return {key: value for key, value in plain.items() if not isinstance(value, Tensor | Mapping)}
    return row(plain)  # type: ignore[no-any-return]


def read_rows(
    checkpoint: Any,
    key: str,
    group: dist.ProcessGroup | None,
    device: torch.device,
    keepers: dist.ProcessGroup | None,
    nodes: Groups = (),
) -> dict[str, Any]:
    """Read what ``to_rows`` made, on any number of ranks; returns this rank's state.

    Args:
        checkpoint: the folder, or a ``StorageReader``.
        key: under which it was saved.
        group: of all ranks.
        keepers: of those that keep something, if this rank is one.
        nodes: the ranks of each, if there are any.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict_loader import load

    try:
        reader = reader_of(checkpoint)
        room = make_room(reader, key, device, keepers, nodes)
        load({key: room}, storage_reader=reader, process_group=group)
    except (ValueError, SparsyncError):
        raise
    except (CheckpointException, Exception) as error:  # the first is none of the second
        raise ValueError(f"the checkpoint {checkpoint} cannot be loaded: {type(error).__name__}: {error}") from error
    return own_state(room, group, nodes)


def reader_of(checkpoint: Any) -> Any:
    """Return what reads a checkpoint: a folder's reader, or the ``StorageReader`` itself."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    return FileSystemReader(checkpoint) if isinstance(checkpoint, str | os.PathLike) else checkpoint


def make_room(
    reader: Any, key: str | None, device: torch.device, keepers: dist.ProcessGroup | None, nodes: Groups = ()
) -> dict[str, Any]:
    """Return a state to be filled from a checkpoint, with as many rows as that has; the arguments are ``read_rows``'s.

    Args:
        key: ``None`` where the checkpoint has one such state.
    """
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata
    from torch.distributed.tensor import Shard, empty

    mesh = _mesh(keepers, device) if keepers is not None or not nodes else None
    metadata, room = reader.read_metadata(), dict[str, Any]()
    if key is None:
        key = _only_key(metadata.planner_data or {})
    for name, path in (metadata.planner_data or {}).items():
        if path[0] == key:
            saved = metadata.state_dict_metadata[name]
            value: Tensor | None = None
            if isinstance(saved, TensorStorageMetadata):
                dtype = saved.properties.dtype
                if path[1] in KEPT and mesh is None:
                    continue
                if path[1] in KEPT:  # of these a rank reads its own rows alone
                    value = empty(saved.size, dtype=dtype, device_mesh=mesh, placements=[Shard(0)])
                else:
                    value = torch.empty(saved.size, dtype=dtype, device="cpu")
            _put(room, path[1:], value)
    if not room:
        raise ValueError(f"the checkpoint holds nothing under {key!r}; save {{{key!r}: sync.stateful()}}")
    return room


def own_state(room: dict[str, Any], group: dist.ProcessGroup | None, nodes: Groups = ()) -> dict[str, Any]:
    """Return this rank's state, or its share of others', from a room that was filled."""
    for kind in (*KEPT, "compressor", "rates", "highest_rates"):  # of which empty ones are not saved
        room.setdefault(kind, {})
    step = room.get("step")
    if not isinstance(step, Tensor) or step.dim() != 1 or step.dtype != torch.int64 or not step.numel():
        raise ValueError("the checkpoint is not whole: it does not say at which step every rank was saved")
    if not _has_rows(room, len(step)) or type(room.get("workers")) is not int or room["workers"] < 1:
        raise ValueError(f"the checkpoint is not whole: not everything in it is of {len(step)} ranks")
    steps, rank, workers = step.tolist(), dist.get_rank(group), dist.get_world_size(group)
    heirs = heirs_of(workers, nodes)
    if len(set(steps)) > 1:
        raise ValueError(f"the ranks were saved at different steps: {', '.join(map(str, steps))}")
    room["step"] = steps[0]
    per_rank = -(-len(steps) // len(heirs))  # as Shard(0) cuts rows
    first = min(heirs.index(rank) * per_rank, len(steps)) if rank in heirs else len(steps)
    own = [_state(room, i, first) for i in range(first, min(first + per_rank, len(steps)))]
    every = {kind: {name: _shape_of(rows) for name, rows in room[kind].items()} for kind in KEPT}
    return share_of(own, own[0] if own else _state(room, 0, None), rank, workers, nodes, every)


class StatefulRows:
    """What ``torch.distributed.checkpoint`` calls ``Stateful``: the states of all ranks' handles, a row each.

    Args:
        save: returns this rank's rows.
        load: takes this rank's state.
        make_room: returns the room for rows of a checkpoint; ``None``: this one saves.
        own_state: returns this rank's state from a room that was filled.
    """

    def __init__(
        self,
        save: Callable[[], dict[str, Any]],
        load: Callable[[Mapping[str, Any]], None],
        make_room: Callable[[], dict[str, Any]] | None,
        own_state: Callable[[dict[str, Any]], dict[str, Any]],
    ) -> None:
        self._save, self._load, self._make_room, self._own_state = save, load, make_room, own_state

    def state_dict(self) -> dict[str, Any]:
        """Return rows to save or, of a checkpoint, room for its rows."""
        return self._save() if self._make_room is None else self._make_room()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from the room that ``state_dict`` returned, and that was filled since."""
        if self._make_room is None:
            raise ValueError(
                "how many ranks saved a checkpoint has to be known before it is read: dcp.load({..., 'sync': "
                "sync.stateful(checkpoint)}, checkpoint_id=checkpoint)"
            )
        self._load(self._own_state(state))


def refuse_plain_state(caller: str) -> None:
    """Refuse to give ``torch.distributed.checkpoint`` a rank's state as it is: it would keep rank 0's for all.

    Args:
        caller: name of the module that asks.
    """
    if caller.startswith("torch.distributed.checkpoint"):
        raise ValueError(
            "torch.distributed.checkpoint would save rank 0's residuals for all ranks: give it sync.stateful(), and "
            "sync.stateful(checkpoint) to load"
        )


def _only_key(paths: Mapping[str, Sequence[str]]) -> str:
    """Return the key under which a checkpoint has a state of ours."""
    keys = sorted({path[0] for path in paths.values() if path[1:] == ("holds",)})
    if len(keys) != 1:
        found = f"{len(keys)} of them ({', '.join(keys)})" if keys else "none"
        raise ValueError(f"the checkpoint must hold one state of sync.stateful(), or key= say which; it has {found}")
    return str(keys[0])


def _state(room: Mapping[str, Any], number: int, first: int | None) -> dict[str, Any]:
    """Return the state of the rank that saved row ``number``."""
    state: dict[str, Any] = _row(room, number, first) | {"rank": number}
    if isinstance(state.get("loss_scale"), Tensor):
        state["loss_scale"] = state["loss_scale"].item()
    return state


def _row(value: Any, number: int, first: int | None, kept: bool = False) -> Any:
    """Return row ``number`` of all tensors; ``first``: the number of the first row of ``KEPT`` that is held here."""
    if isinstance(value, Mapping):
        inner = {key: _row(part, number, first, kept or key in KEPT) for key, part in value.items()}
        return {key: part for key, part in inner.items() if part is not None or not kept}
    if not isinstance(value, Tensor):
        return value
    if kept:
        return None if first is None else value.to_local()[number - first]  # type: ignore[attr-defined]
    return value[number]


def _has_rows(value: Any, rows: int) -> bool:
    """Return whether all tensors have so many rows."""
    if isinstance(value, Mapping):
        return all(_has_rows(part, rows) for part in value.values())
    return not isinstance(value, Tensor) or (value.dim() > 0 and len(value) == rows)


def _shape_of(rows: Tensor) -> Tensor:
    """Return a tensor without memory that has the shape of a row."""
    return torch.empty(rows.shape[1:], dtype=rows.dtype, device="meta")


def _put(tree: dict[str, Any], path: Sequence[str], value: Any) -> None:
    for key in path[:-1]:
        tree = tree.setdefault(key, {})
    tree[path[-1]] = value


def _mesh(group: dist.ProcessGroup | None, device: torch.device) -> Any:
    from torch.distributed.device_mesh import DeviceMesh

    if group is None:
        raise SparsyncError("a distributed checkpoint needs torch.distributed; save state_dict() instead")
    return DeviceMesh.from_group(group, device.type)
