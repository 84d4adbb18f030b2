"""The streams that exchanges run on, beside backward's."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


class SideStreams:
    """One stream for each GPU; elsewhere there are none.

    Memory that is used on them belongs to the caller's stream or to ours: the caller's waits for ours before a bucket
    is used again, as its future demands, and ours for the caller's before the next bucket is taken.
    """

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def use(self, device: torch.device, after_caller: bool = False) -> AbstractContextManager[Any]:
        """Make our stream current; ``after_caller``: it first waits for all that was queued on the caller's."""
        if device.type != "cuda":
            return nullcontext()
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        if after_caller:
            self._streams[device].wait_stream(torch.cuda.current_stream(device))
        return torch.cuda.stream(self._streams[device])  # type: ignore[no-untyped-call,no-any-return]

    def join(self) -> None:
        """Let the caller's streams wait for ours."""
        for device, stream in self._streams.items():
            torch.cuda.current_stream(device).wait_stream(stream)
