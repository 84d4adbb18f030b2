"""CUDA graphs without a GPU: what is launched on the CPU, kernels of Triton's interpreter included, is noted and done
when it is played, on the same tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from sparsync.engine import replay
from sparsync.kernels.launcher import Launcher


class CpuRecording(TorchDispatchMode):
    """Stands for ``Recording``: nothing that is launched within it runs before it is played."""

    under_way: CpuRecording | None = None

    def __init__(self) -> None:
        super().__init__()
        self._parts: list[Callable[[], Any]] = []

    def __enter__(self) -> Any:
        CpuRecording.under_way = self
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        CpuRecording.under_way = None
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        changed = func._schema.is_mutable
        assert func not in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.is_nonzero.default), (
            "a graph cannot wait for the host"
        )
        if changed:
            self._parts.append(lambda: func(*args, **kwargs))
            return args[0] if func._schema.returns else None
        out = func(*args, **kwargs)
        if isinstance(out, torch.Tensor) and not func.is_view:  # of what is there now: it is made again
            self._parts.append(lambda: out.copy_(func(*args, **kwargs)))
        return out

    def add(self, call: Callable[[], Any]) -> None:
        self._parts.append(call)

    def play(self) -> None:
        assert CpuRecording.under_way is None
        for part in self._parts:
            part()


@contextmanager
def recorded_on_the_cpu() -> Iterator[None]:
    """Record and replay on the CPU."""
    launch = Launcher.__call__

    def noted(self: Launcher, kernel: Any, grid: Any, *args: Any, **meta: Any) -> None:
        under_way = CpuRecording.under_way
        if under_way is None:
            launch(self, kernel, grid, *args, **meta)
        else:
            under_way.add(lambda: launch(self, kernel, grid, *args, **meta))

    with (
        patch.object(Launcher, "__call__", noted),
        patch.object(replay, "Recording", CpuRecording),
        patch.object(replay, "can_record", lambda device: CpuRecording.under_way is None),
    ):
        yield
