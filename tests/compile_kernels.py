"""Compile every kernel for a GPU, without one: Triton's interpreter runs code that its compiler refuses.

As a plugin of pytest it notes with which types the interpreter's tests launch kernels; as a program it compiles each of
these for a device of compute capability 9.0, down to machine code.

    TRITON_INTERPRET=1 python -m pytest -p tests.compile_kernels --launches runs/launches tests/test_kernel_topk.py
    python -m tests.compile_kernels runs/launches
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch

CAPABILITY, WARP = 90, 32


def pytest_addoption(parser: Any) -> None:
    parser.addoption("--launches", default="runs/launches", help="folder for what was launched, and with which types")


def pytest_configure(config: Any) -> None:
    from triton.runtime.interpreter import GridExecutor

    config.launches = {}
    launch = GridExecutor.__call__

    def noted(self: Any, *args: Any, **kwargs: Any) -> Any:
        options = {name: _kind(value) for name, value in kwargs.items()}
        config.launches[json.dumps([self.fn.__module__, self.fn.__name__, [*map(_kind, args)], options])] = None
        return launch(self, *args, **kwargs)

    GridExecutor.__call__ = noted


def pytest_unconfigure(config: Any) -> None:
    folder = Path(config.getoption("--launches"))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{os.getpid()}.jsonl").write_text("".join(f"{line}\n" for line in config.launches))


def _kind(argument: Any) -> Any:
    """Return what Triton compiles for: a tensor's dtype; whether an integer is 1, a multiple of 16 or wide; a value."""
    if isinstance(argument, torch.Tensor):
        return {"dtype": str(argument.dtype).removeprefix("torch.")}
    if isinstance(argument, int) and not isinstance(argument, bool) and argument not in (0, 1):
        wide = 2**40 if abs(argument) >= 2**31 else 0
        return {"int": wide + (16 if argument % 16 == 0 else 17), "value": argument if argument < 10_000 else None}
    return {"value": argument}


def _argument(kind: dict[str, Any], constant: bool) -> Any:
    if "dtype" in kind:
        return getattr(torch, kind["dtype"])
    return kind["value"] if constant or "int" not in kind else kind["int"]


class NoGpu:
    """As much of a driver as compiling asks for."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", CAPABILITY, WARP)


def main(folder: Path) -> int:
    from triton.runtime import driver

    driver.set_active(NoGpu())
    lines = sorted({line for path in folder.glob("*.jsonl") for line in path.read_text().splitlines()})
    known, failed, begun = set[str](), 0, time.monotonic()
    for line in lines:
        module, name, args, options = json.loads(line)
        kernel = getattr(importlib.import_module(module), name)
        constant = [parameter.is_constexpr for parameter in kernel.params]
        given = [_argument(kind, own) for kind, own in zip(args, constant, strict=False)]
        named = {key: _argument(kind, True) for key, kind in options.items()}
        form = f"{module}.{name}({', '.join(map(str, given))}, {named})"
        if form in known:
            continue
        known.add(form)
        try:
            kernel.warmup(*given, grid=(1,), **named)
        except Exception as error:  # whatever the compiler says
            failed += 1
            print(f"FAILED {form}\n{error}\n", flush=True)
    kernels, seconds = len({form.partition("(")[0] for form in known}), time.monotonic() - begun
    print(f"{kernels} kernels in {len(known)} forms: {len(known) - failed} compiled, {failed} failed, {seconds:.0f} s")
    return 1 if failed or not known else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
