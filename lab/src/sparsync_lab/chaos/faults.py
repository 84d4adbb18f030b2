"""What ends a life, brought about on the rank that it happens to."""

from __future__ import annotations

import os
import signal
from typing import Any

import sparsync
from sparsync_lab.chaos.schedule import Fault

RAISED = "injected"  # what the library's own failure says


class Injected(Exception):
    """An error that a fault has raised in the user's own code."""


class FaultInjector:
    """Brings a fault about when its step and its point are reached; on other ranks it does nothing."""

    def __init__(self, fault: Fault, rank: int) -> None:
        self.fault, self.mine = fault, fault.rank == rank and fault.kind != "restart"
        self.happened = False

    def reach(self, point: str, step: int, sync: sparsync.Handle | None, name: str = "") -> None:
        """Say which point of which step this rank has reached; ``name``: of the parameter, in backward."""
        fault = self.fault
        if not self.mine or step < fault.step:
            return
        inside = fault.kind in ("raise in compress", "raise in exchange")
        if inside and point == "forward" and sync is not None:
            self.mine, self.happened = False, True
            self._break(sync)
        elif not inside and point == fault.point and (point != "backward" or name.startswith(fault.layer)):
            self.mine, self.happened = False, True
            self._happen()

    def _happen(self) -> None:
        kind = self.fault.kind
        if kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif kind.startswith("stop"):
            os.kill(os.getpid(), signal.SIGSTOP)
        else:
            raise Injected(kind)

    def _break(self, sync: sparsync.Handle) -> None:
        """Let the library fail from within, as where memory runs out."""
        reducer: Any = sync._running()

        def no_room(*_: Any, **__: Any) -> Any:
            raise MemoryError(RAISED)

        if self.fault.kind == "raise in compress":
            reducer.worker.feedback.memory = no_room
        else:
            reducer.stage.reduce = no_room
