"""``sparsync info``."""

from __future__ import annotations

import platform
import sys
from importlib.metadata import PackageNotFoundError, version

import torch
import torch.distributed as dist

from sparsync.config import registry
from sparsync.config.recipes import RECIPES
from sparsync.kernels import cpu
from sparsync.version import __version__

FRAMEWORKS = ("transformers", "accelerate", "lightning", "pytorch-lightning", "ray")


def info() -> int:
    """Print versions, devices, backends and the methods that can be named in attach()."""
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    backends = {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available(), "mpi": dist.is_mpi_available()}
    rows = {
        "sparsync": __version__,
        "torch": torch.__version__,
        "python": sys.version.split()[0],
        "frameworks": ", ".join(filter(None, map(_installed, FRAMEWORKS))) or "none",
        "system": f"{platform.system()} {platform.machine()}",
        "CPU pass": "compiled by numba" if cpu.available() else "plain PyTorch (pip install 'sparsync[fast]')",
        "GPUs": ", ".join(gpus) or "none",
        "backends": ", ".join(name for name, there in backends.items() if there) or "none",
        "recipes": ", ".join(RECIPES),
        "compressors": ", ".join(sorted(registry.compressors())),
        "collectives": ", ".join(sorted(registry.collectives())),
    }
    for name, value in rows.items():
        print(f"{name:<12}{value}")
    return 0


def _installed(package: str) -> str | None:
    try:
        return f"{package} {version(package)}"
    except PackageNotFoundError:
        return None
