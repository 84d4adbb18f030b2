"""States for ``torch.distributed.checkpoint``, which takes a plain tensor for the same on every rank and saves that of
rank 0: here every tensor is a row of one that all ranks share."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from sparsync.config.nodes import Groups
from sparsync.engine.checkpoint import heirs_of, share_of
from sparsync.errors import SparsyncError

KEPT = ("residuals", "velocities")  # as large as the model: of these a rank reads its own rows alone


def to_rows(state: Mapping[str, Any], group: dist.ProcessGroup | None, device: torch.device) -> dict[str, Any]:
    """Return a rank's state with every tensor as its row of a ``DTensor`` of all ranks; plain values are the same on
    all, but for the rank, which the row tells, and the step, which is a row of its own.

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

    plain = {key: value for key, value in state.items() if key != "rank"} | {"step": torch.tensor(state["step"])}
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
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata
    from torch.distributed.checkpoint.state_dict_loader import load
    from torch.distributed.tensor import Shard, empty

    reader = FileSystemReader(checkpoint) if isinstance(checkpoint, str | os.PathLike) else checkpoint
    mesh = _mesh(keepers, device) if keepers is not None or not nodes else None
    metadata, room = reader.read_metadata(), dict[str, Any]()
    for name, path in (metadata.planner_data or {}).items():
        if path[0] == key:
            saved = metadata.state_dict_metadata[name]
            value: Tensor | None = None
            if isinstance(saved, TensorStorageMetadata):
                dtype = saved.properties.dtype
                if path[1] in KEPT and mesh is None:
                    continue
                if path[1] in KEPT:
                    value = empty(saved.size, dtype=dtype, device_mesh=mesh, placements=[Shard(0)])
                else:
                    value = torch.empty(saved.size, dtype=dtype)
            _put(room, path[1:], value)
    if not room:
        raise ValueError(f"the checkpoint holds nothing under {key!r}; save {{{key!r}: sync.sharded_state_dict()}}")
    load({key: room}, storage_reader=reader, process_group=group)

    for kind in (*KEPT, "compressor", "rates"):  # of which empty ones are not saved
        room.setdefault(kind, {})
    steps, rank, workers = room["step"].tolist(), dist.get_rank(group), dist.get_world_size(group)
    heirs = heirs_of(workers, nodes)
    if len(set(steps)) > 1:
        raise ValueError(f"the ranks were saved at different steps: {', '.join(map(str, steps))}")
    room["step"] = steps[0]
    per_rank = -(-len(steps) // len(heirs))  # as Shard(0) cuts rows
    first = min(heirs.index(rank) * per_rank, len(steps)) if rank in heirs else len(steps)
    own = [_row(room, i, first) | {"rank": i} for i in range(first, min(first + per_rank, len(steps)))]
    return share_of(own, own[0] if own else _row(room, 0, None), rank, workers, nodes)


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


def _put(tree: dict[str, Any], path: Sequence[str], value: Any) -> None:
    for key in path[:-1]:
        tree = tree.setdefault(key, {})
    tree[path[-1]] = value


def _mesh(group: dist.ProcessGroup | None, device: torch.device) -> Any:
    from torch.distributed.device_mesh import DeviceMesh

    if group is None:
        raise SparsyncError("a distributed checkpoint needs torch.distributed; save state_dict() instead")
    return DeviceMesh.from_group(group, device.type)
