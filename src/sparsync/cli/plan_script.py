"""``sparsync plan --measure --script train.py``: a plan for the model that a user's own script trains.

The script runs as it is, up to its first steps. Its ``DistributedDataParallel`` exchanges nothing meanwhile, so that
what lies between two forward passes is what one worker computes.
"""

from __future__ import annotations

import runpy
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from sparsync.errors import SparsyncError

WARM_UP, TIMED = 3, 8  # steps
Report = Callable[[DistributedDataParallel, float], None]


class Measured(BaseException):
    """Ends the script: all is known; no ``except Exception`` of its own holds it up."""


def _keep(state: object, bucket: Any) -> Future[Tensor]:
    """Exchange nothing."""
    done: Future[Tensor] = Future(devices=[bucket.buffer().device] if bucket.buffer().is_cuda else None)
    done.set_result(bucket.buffer())
    return done


_keep.__annotations__ = {}  # which DDP would compare with types, and these are text


class PassWatch:
    """Times the steps of a DDP model and reports once."""

    def __init__(self, report: Report) -> None:
        self.report, self.starts = report, list[float]()

    def __call__(self, ddp: Any, *_: Any) -> None:
        if not (ddp.training and ddp.require_backward_grad_sync):
            return
        device = next(ddp.parameters()).device
        if device.type == "cuda":
            import torch

            torch.cuda.synchronize(device)
        self.starts.append(time.perf_counter())
        if len(self.starts) > WARM_UP + TIMED:
            periods = [b - a for a, b in zip(self.starts[WARM_UP:-1], self.starts[WARM_UP + 1 :], strict=True)]
            self.report(ddp, statistics.median(periods))
            raise Measured


def run_script(script: Path, arguments: Sequence[str], report: Report) -> None:
    """Run a script until its first DDP model has made a few steps, and report what one takes without exchange.

    Args:
        arguments: of the script.
        report: is given the model and the seconds; on every rank.
    """
    if not script.is_file():
        raise ValueError(f"script must be a Python file, got {str(script)!r}")
    made = DistributedDataParallel.__init__
    watched = list[DistributedDataParallel]()

    def watch(self: DistributedDataParallel, *given: Any, **named: Any) -> None:
        made(self, *given, **named)
        if not watched:
            watched.append(self)
            self.register_comm_hook(None, _keep)
            self.register_forward_pre_hook(PassWatch(report))

    old, sys.argv = sys.argv, [str(script), *arguments]
    sys.path.insert(0, str(script.resolve().parent))  # as Python does for a script
    DistributedDataParallel.__init__ = watch  # type: ignore[method-assign]
    try:
        with suppress(Measured):
            runpy.run_path(str(script), run_name="__main__")
            steps = f"made no more than {WARM_UP + TIMED} steps" if watched else "made no DistributedDataParallel model"
            raise ValueError(f"{script} {steps}: there is nothing to measure")
    except SparsyncError as error:
        if _keep.__qualname__ not in str(error):
            raise
        raise ValueError(f"{script} calls sparsync.attach, and is measured as it is without: leave that out") from None
    finally:
        DistributedDataParallel.__init__ = made  # type: ignore[method-assign]
        sys.argv = old
        sys.path.pop(0)
        if dist.is_initialized():
            dist.destroy_process_group()
