"""What the ranks of a training do together: an error that the user can put right is raised on all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch.distributed as dist

T = TypeVar("T")


def gather(value: T) -> list[T]:
    """Return the value of every rank, on every rank."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def on_all_ranks(act: Callable[[], T]) -> list[T]:
    """Call ``act`` on every rank; return what each of them returned."""
    result, said = None, None
    try:
        result = act()
    except (ValueError, OSError) as error:
        said = str(error)
    answers = gather((result, said))
    for _, told in answers:
        if told is not None:
            raise ValueError(told)
    return [cast(T, answer) for answer, _ in answers]


def on_rank_0(act: Callable[[], T]) -> T:
    """Call ``act`` on rank 0; return on every rank what it returned."""
    return cast(T, on_all_ranks(act if dist.get_rank() == 0 else lambda: None)[0])
