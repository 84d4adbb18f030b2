"""``sparsync info``."""

from __future__ import annotations

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

import sparsync
from sparsync import registry
from sparsync.experiments.environment import environment
from sparsync.kernels import compiled


def info() -> None:
    """Versions, devices, backends and the methods that can be named in attach()."""
    table = Table(show_header=False, box=None)
    for key, value in environment().items():
        if key not in ("date", "load"):
            table.add_row(key, value or "-")
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    backends = {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available(), "mpi": dist.is_mpi_available()}
    table.add_row(
        "CPU pass", "compiled by numba" if compiled.loops() else "plain PyTorch (pip install 'sparsync[fast]')"
    )
    table.add_row("GPUs", ", ".join(gpus) or "none")
    table.add_row("backends", ", ".join(name for name, there in backends.items() if there) or "none")
    table.add_row("recipes", ", ".join(sparsync.RECIPES))
    table.add_row("compressors", ", ".join(sorted(registry.compressors())))
    table.add_row("collectives", ", ".join(sorted(registry.collectives())))
    Console().print(table)
