"""What can happen to a rank at a step of the protocol."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pkgutil import resolve_name
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from tests.matrix.steps import Step

RAISED = "injected fault"
PAUSE = 0.3  # seconds: longer than ranks wait in silence
SPOILT = 2  # the entry of a gradient that is not finite
BIT = 20  # of a word: of a float, its mantissa's


def strike(fault: str, result: Any, arguments: tuple[Any, ...], word: int) -> None:
    """Let a fault happen, in the middle of a call.

    Args:
        result: of the call, if it was made.
        arguments: of the call.
        word: of what was received, which a flipped bit is in.
    """
    if fault == "raise":
        raise RuntimeError(RAISED)
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if fault == "delay":
        time.sleep(PAUSE)
    if fault == "order":  # this rank has made an exchange that the others know nothing of
        stage = arguments[0]
        for channel in {stage.channel, stage.between, getattr(stage, "inside", None)} - {None}:
            channel.sequence += 1
    if fault == "config":
        result |= {"seed": 1}
    if fault in ("nan", "inf"):
        result.view(-1)[SPOILT] = float(fault)
    if fault == "flip":
        received: Tensor = arguments[1] if result is None else result
        words = received.view(torch.int32).view(-1)
        words[word % len(words)] ^= 1 << BIT


class Injection:
    """Makes a fault strike at one call of a step, and remembers whether it did.

    Attributes:
        now: number of the training step that is under way.
    """

    def __init__(self, step: Step, fault: str, after: bool, last: bool, word: int) -> None:
        self.step, self.fault, self.after, self.last, self.word = step, fault, after, last, word
        self.now, self.struck = -1, False
        self._calls: dict[int, int] = {}

    @contextmanager
    def armed(self) -> Iterator[None]:
        """Let it happen to this process."""
        with patch(self.step.target, self._around(resolve_name(self.step.target))):
            yield

    def _around(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def called(*arguments: Any, **options: Any) -> Any:
            hit, result = self._is_due(), None
            if hit and not self.after:
                self.struck = True
                strike(self.fault, None, arguments, self.word)
            result = call(*arguments, **options)
            if hit and self.after:
                self.struck = True
                strike(self.fault, result, arguments, self.word)
            return result

        return called

    def _is_due(self) -> bool:
        """Count a call; the last one of a step has the number that it had in the step before."""
        number = self._calls[self.now] = self._calls.get(self.now, 0) + 1
        due = self._calls.get(self.now - 1, 0) if self.last else 1
        return self.now == self.step.when and number == due and not self.struck
