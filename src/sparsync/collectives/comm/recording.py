"""What is given to a GPU, recorded once and played again: CUDA graphs and, between them, calls of the backend.

A kernel takes the host ten microseconds and more of Python; a graph of twenty of them takes as long as one. A call of
the backend is no part of a graph: it is made again, as it was.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch


def can_record(device: torch.device) -> bool:
    """Return whether what is launched there now could be recorded: on a GPU, unless somebody else captures it."""
    free = device.type == "cuda" and not torch.cuda.is_current_stream_capturing()
    return free and os.environ.get("CUDA_LAUNCH_BLOCKING", "0") == "0"  # which waits after every launch


class Recording:
    """What is launched within ``with recording:``, on the stream that is current; none of it runs before it is played.
    What is allocated meanwhile stays as long as the recording does."""

    def __init__(self) -> None:
        self._pool: Any = None  # of the first graph; the others take theirs from it
        self._parts = list[Callable[[], Any]]()
        self._graph: torch.cuda.CUDAGraph | None = None  # that is being captured

    def __enter__(self) -> None:
        graph = torch.cuda.CUDAGraph()
        # Other threads go on: NCCL's looks at its events, and must not break this off.
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        self._graph = graph

    def __exit__(self, kind: object, *_: object) -> None:
        graph, self._graph = self._graph, None
        if graph is not None:
            self._parts.append(graph.replay)
            with suppress(*[RuntimeError] if kind else []):  # which says no more than the error that is there already
                graph.capture_end()  # type: ignore[no-untyped-call]
                self._pool = self._pool or graph.pool()  # type: ignore[no-untyped-call]

    def add(self, call: Callable[[], Any]) -> None:
        """Let ``call`` be made after all that was launched so far, and before what follows."""
        self.__exit__(None)
        self._parts.append(call)
        self.__enter__()

    def play(self) -> None:
        """Do all that was recorded, on the stream that is current."""
        for part in self._parts:
            part()
