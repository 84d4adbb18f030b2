"""The form of an outer loop's state: what it must hold before anything of it is loaded. A file may be torn, or
anybody's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Size, Tensor

SCHEMA = 1
State = Mapping[str, Any]
Shapes = Mapping[str, Size]
FINITE = ("shared", "momentum", "sent")  # own weights, and a mean, need not be


def check_states(states: Sequence[Any], fragments: Sequence[Shapes], buffers: Shapes) -> None:
    """Refuse, with a ``ValueError``, states of ranks that cannot be loaded together, or not here; where there are none,
    every fragment's exchange does.

    Args:
        fragments: shapes of each one's parameters, by name.
        buffers: shapes of the model's.
    """
    for one in states:
        schema = one.get("schema") if isinstance(one, Mapping) else type(one).__name__
        if schema != SCHEMA:
            raise ValueError(f"this is not an outer loop's state of schema {SCHEMA}: it says {schema!r:.200}")
        if type(one.get("steps")) is not int or not isinstance(one.get("fragments"), list | tuple):
            raise ValueError("the outer loop's state is not whole: it lacks 'steps' or 'fragments'")
        if len(one["fragments"]) != len(fragments):
            raise ValueError("this state was made with another fragments=, or of another model")
        for number, (part, shapes) in enumerate(zip(one["fragments"], fragments, strict=True)):
            _check_part(part, shapes, f"fragment {number}")
        _check_buffers(one.get("buffers", {}), buffers)
    if len({one["steps"] for one in states}) > 1:
        listing = ", ".join(f"rank {rank}: {one['steps']}" for rank, one in enumerate(states))
        raise ValueError(f"the states are of different steps, and cannot be loaded together ({listing})")


def _check_part(part: Any, shapes: Shapes, where: str) -> None:
    needed = ("own", "shared", "momentum", "due", "exchange")
    if not isinstance(part, Mapping) or any(key not in part for key in needed) or ("mean" in part) != ("sent" in part):
        raise ValueError(f"the outer loop's state is not whole: {where} lacks something")
    for kind in ("own", "shared", "momentum", "mean", "sent"):
        named = part.get(kind, {})
        empty = kind not in ("own", "shared") and not named  # no momentum yet, or nothing on its way
        if not empty and (not _by_name(named) or {name: t.shape for name, t in named.items()} != dict(shapes)):
            raise ValueError(f"this state was made with another fragments=, or of another model: {kind!r} of {where}")
        if kind in FINITE and not all(bool(t.isfinite().all()) for t in named.values()):
            raise ValueError(f"the outer loop's state is damaged: {kind!r} of {where} is not finite")
    if type(part["due"]) is not int or ("moments" in part and not _is_tensor(part["moments"])):
        raise ValueError(f"the outer loop's state is damaged: 'due' or 'moments' of {where} is something else")


def _check_buffers(saved: Any, buffers: Shapes) -> None:
    fits = isinstance(saved, Mapping) and all(
        _is_tensor(saved[name]) and saved[name].shape == shape for name, shape in buffers.items() if name in saved
    )
    if not fits:
        raise ValueError("this state was made of another model: its buffers are of other shapes")


def _by_name(named: Any) -> bool:
    return isinstance(named, Mapping) and all(_is_tensor(t) and t.is_floating_point() for t in named.values())


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor) and value.layout == torch.strided and not value.is_meta
