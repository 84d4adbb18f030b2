"""Costs of a device in a file: measured once, then read."""

from __future__ import annotations

import json
import logging
import os
import platform
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from sparsync.config import ExchangePlan
from sparsync.kernels import cpu
from sparsync.planner.costs import LocalCost, MethodCost, cost_key
from sparsync.planner.measure_costs import measure_cast, measure_method
from sparsync.version import __version__

log = logging.getLogger("sparsync")

CAST = "cast to bf16"


class StoredCosts:
    """Costs of one device, from a file; what is not in it yet is measured and added.

    Args:
        device: that is measured.
        file: JSON, costs by device and method; that of this user's cache folder by default.
        fresh: measure again what is in the file already.
    """

    def __init__(self, device: torch.device, file: Path | None = None, fresh: bool = False) -> None:
        self.device, self.file, self.name = device, file or cache_folder() / "costs.json", device_name(device)
        self.blocking = device.type == "cpu"
        self._known = {} if fresh else costs_in(read(self.file), self.name)

    def of(self, plan: ExchangePlan) -> MethodCost:
        key = cost_key(plan)
        return self._known[key] if key in self._known else self._keep(key, measure_method(plan, self.device))

    def cast(self) -> LocalCost:
        known = self._known.get(CAST) or self._keep(CAST, MethodCost(finish=measure_cast(self.device)))
        return known.finish

    def _keep(self, key: str, cost: MethodCost) -> MethodCost:
        """Keep a cost, in the file as well if that can be written."""
        self._known[key] = cost
        content = read(self.file)  # others may have written since
        content.setdefault(self.name, {})[key] = [list(part) for part in cost]
        try:
            write_whole(self.file, json.dumps(content, indent=1, sort_keys=True) + "\n")
        except OSError as error:
            log.debug("costs were not kept in %s: %s", self.file, error)
        return cost


class ForeignCosts:
    """Costs that were measured on another machine.

    Args:
        file: as ``StoredCosts`` writes it.
        name: words that the name of the device holds; not needed if there is only one in the file.
    """

    def __init__(self, file: Path, name: str = "") -> None:
        if not file.is_file():
            raise ValueError(f"costs must be a file that was measured elsewhere, and there is none at {file}")
        content = read(file)
        found = [known for known in content if name.lower() in known.lower()]
        if len(found) != 1:
            wanted = f"one device, or one whose name holds {name!r}" if name else "one device"
            raise ValueError(f"costs must be a file that has the costs of {wanted}; {file} has {len(found)}")
        self.file, self.name = file, found[0]
        self.blocking = self.name.startswith("cpu")
        self._known = costs_in(content, self.name)

    def of(self, plan: ExchangePlan) -> MethodCost:
        return self._find(cost_key(plan))

    def cast(self) -> LocalCost:
        return self._find(CAST).finish

    def _find(self, key: str) -> MethodCost:
        if key not in self._known:
            raise ValueError(f"{self.file} has no costs of {key!r} for {self.name}")
        return self._known[key]


def costs_in(content: Mapping[str, Any], name: str) -> dict[str, MethodCost]:
    """Return the costs of a device in a file's content."""
    known = content.get(name, {})
    return {key: MethodCost(*(LocalCost(*part) for part in parts)) for key, parts in known.items()}


def read(file: Path) -> dict[str, Any]:
    """Return what a file of costs holds; nothing if it is not there, or is damaged."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def measured_device(name: torch.device | str) -> torch.device:
    """Return the device of this name; refuse one that cannot be measured here."""
    there = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    kind, _, number = str(name).partition(":")
    if kind not in there or (number and not (number.isdecimal() and kind == "cuda")):
        raise ValueError(f"device must be {' or '.join(there)} here, got {str(name)!r}")
    return torch.device(name if number or kind == "cpu" else f"cuda:{torch.cuda.current_device()}")


def device_name(device: torch.device) -> str:
    """Return what measured costs hold for: the device, and the versions of all that works on it."""
    if device.type == "cuda":
        about = torch.cuda.get_device_name(device)
    else:
        compiled = "numba" if cpu.available() else "no numba"
        about = f"{platform.machine()} {_processor()}, {torch.get_num_threads()} threads, {compiled}"
    return f"{device.type} {about}, torch {torch.__version__}, sparsync {__version__}"


def _processor() -> str:
    """Return the processor's name, where Linux tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


def cache_folder(environment: Mapping[str, str] = os.environ) -> Path:
    """Return the folder in which this user's programs keep what they can make again."""
    named = environment.get("XDG_CACHE_HOME")
    return (Path(named) if named else Path.home() / ".cache") / "sparsync"


def write_whole(path: Path, text: str) -> None:
    """Write a file so that who reads it meanwhile sees the old or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, encoding="utf-8", delete=False) as file:
        file.write(text)
    os.replace(file.name, path)
