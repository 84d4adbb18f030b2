"""Which ranks share a node, as ``per_node=`` says."""

from __future__ import annotations

import os
from collections.abc import Sequence

Groups = tuple[tuple[int, ...], ...]  # the ranks of each node, in ascending order; empty: every rank is a node
PerNode = int | str | Sequence[Sequence[int]]
LOCAL = "local"
VARIABLE = "LOCAL_WORLD_SIZE"


def check_per_node(per_node: PerNode) -> PerNode:
    """Return ``per_node`` with tuples for lists; refuse what cannot say which ranks share a node."""
    if isinstance(per_node, str):
        if per_node != LOCAL:
            raise ValueError(
                f"per_node must be a number of ranks, {LOCAL!r} or the ranks of each node, got {per_node!r}"
            )
        return per_node
    if isinstance(per_node, int):
        if isinstance(per_node, bool) or per_node < 1:
            raise ValueError(f"per_node must be 1 or more ranks, got {per_node!r}")
        return per_node
    try:
        groups = sorted(tuple(sorted(group)) for group in per_node)
        ranks = sorted(rank for group in groups for rank in group)
        whole = all(groups) and ranks == list(range(len(ranks))) and bool(ranks)
    except TypeError:
        whole = False
    if not whole:
        raise ValueError(f"per_node must hold every rank from 0 on once, in lists that are not empty, got {per_node!r}")
    return tuple(groups)


def groups_of(per_node: PerNode, said: Sequence[str]) -> Groups:
    """Return the ranks of each node; nothing where every rank is a node.

    Args:
        per_node: as ``check_per_node`` returns it.
        said: what each rank's environment says of the ranks on its node: ``local_size()``.
    """
    size = len(said)
    if isinstance(per_node, str):
        groups = _local_groups(said) if size > 1 else ((0,),)
    elif isinstance(per_node, int):
        check_nodes_fit(per_node, size)
        groups = tuple(tuple(range(start, min(start + per_node, size))) for start in range(0, size, per_node))
    else:
        groups = tuple(map(tuple, per_node))
        held = sum(map(len, groups))
        if held != size:
            raise ValueError(
                f"per_node holds {held} ranks, and {size} train this model; their numbers are 0 to {size - 1}"
            )
    return () if len(groups) == size else groups


def check_nodes_fit(per_node: int, ranks: int) -> None:
    """Refuse nodes of so many ranks that not all of them would be full; one rank alone is none."""
    if ranks > 1 and ranks % per_node:
        raise ValueError(
            f"per_node={per_node} does not divide {ranks} ranks; for nodes of different sizes give the ranks of each"
        )


def local_size() -> str:
    """Return what the launcher says of the number of ranks on this node."""
    return os.environ.get(VARIABLE, "")


def nodes_text(groups: Groups) -> str:
    """Return the ranks of each node in words; nothing where every rank is a node."""
    return " | ".join(" ".join(map(str, group)) for group in groups)


def _local_groups(said: Sequence[str]) -> Groups:
    """Return the nodes of a launcher that numbers ranks node by node, as torchrun does."""
    groups, start = list[tuple[int, ...]](), 0
    while start < len(said):
        size = int(said[start]) if said[start].isdecimal() else 0
        group = tuple(range(start, start + size))
        if not size or [said[rank] for rank in group if rank < len(said)] != [said[start]] * size:
            listing = ", ".join(f"rank {rank}: {text or 'nothing'}" for rank, text in enumerate(said))
            raise ValueError(
                f"per_node={LOCAL!r} goes by {VARIABLE}, which torchrun sets; it gives no nodes of ranks next to each "
                f"other ({listing}); give the ranks of each node"
            )
        groups.append(group)
        start += size
    return tuple(groups)
