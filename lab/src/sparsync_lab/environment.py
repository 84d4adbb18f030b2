"""Machine, versions and commit: every result carries them."""

from __future__ import annotations

import datetime
import hashlib
import os
import platform
import subprocess
from collections.abc import Sequence
from pathlib import Path

import torch

import sparsync


def environment() -> dict[str, str]:
    """Return machine, versions, commit, date, and the load of the machine (mean of runnable processes in a minute)."""
    return {
        "device": _processor(),
        "cpus": str(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "sparsync": sparsync.__version__,
        "commit": _commit(),
        "load": f"{os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else "",
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or "unknown processor"


def _commit() -> str:
    """Return the commit of the checkout that both packages are in, empty if they are in none; where their files differ
    from it, ``+`` and the beginning of a checksum of them."""
    packages = [Path(sparsync.__file__).parent, Path(__file__).parent]

    def git(*words: str, folder: Path = packages[0]) -> str:
        return subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True, check=True).stdout.strip()

    try:
        for package in packages:
            git("ls-files", "--error-unmatch", "__init__.py", folder=package)
        commit = git("rev-parse", "--short", "HEAD")
        return f"{commit}+{_checksum(packages)}" if git("status", "--porcelain", "--", *map(str, packages)) else commit
    except (OSError, subprocess.CalledProcessError):
        return ""


def _checksum(packages: Sequence[Path]) -> str:
    digest = hashlib.sha256()
    for package in packages:
        for path in sorted(package.rglob("*.py")):
            digest.update(f"{path.relative_to(package).as_posix()}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:8]
