"""Where a number was measured: every result carries this."""

from __future__ import annotations

import datetime
import hashlib
import os
import platform
import subprocess
from pathlib import Path

import torch

import sparsync


def environment() -> dict[str, str]:
    """Machine, versions, commit, date, and how busy the machine is now (mean of runnable processes in a minute)."""
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
    """The commit of this package's own checkout, empty if it is not in one; where its files differ from that, ``+`` and
    the beginning of a checksum of them."""
    here = Path(__file__).parent

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=here, capture_output=True, text=True, check=True).stdout.strip()

    try:
        git("ls-files", "--error-unmatch", "../version.py")
        commit = git("rev-parse", "--short", "HEAD")
        return f"{commit}+{_checksum(here.parent)}" if git("status", "--porcelain", "--", "..") else commit
    except (OSError, subprocess.CalledProcessError):
        return ""


def _checksum(package: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(f"{path.relative_to(package).as_posix()}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:8]
