"""Methods by name: ours, and those that other packages offer through entry points.

A package joins with, in its ``pyproject.toml``::

    [project.entry-points."sparsync.compressors"]
    mine = "my_package:MyCompressor"
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import cache
from importlib.metadata import entry_points
from typing import Any

from sparsync.collectives import AllGather, Balanced, Collective, DenseAllReduce, GTopK, SharedIndexAllReduce
from sparsync.compressors import (
    DGCK,
    BlockRandomK,
    Compressor,
    GaussianK,
    NoCompression,
    RandomK,
    ThresholdK,
    TopK,
    TrimmedK,
)

COMPRESSORS: Mapping[str, Any] = {
    "none": NoCompression,
    "topk": TopK,
    "threshold": ThresholdK,
    "gaussian": GaussianK,
    "dgc": DGCK,
    "trimmed": TrimmedK,
    "random": RandomK,
    "block": BlockRandomK,
}
COLLECTIVES: Mapping[str, Any] = {
    "dense": DenseAllReduce,
    "allgather": AllGather,
    "shared": SharedIndexAllReduce,
    "gtopk": GTopK,
    "balanced": Balanced,
}


def compressors() -> dict[str, Any]:
    """Return every compressor by name, other packages' included."""
    return _with_plugins(COMPRESSORS, "sparsync.compressors")


def collectives() -> dict[str, Any]:
    """Return every collective by name, other packages' included."""
    return _with_plugins(COLLECTIVES, "sparsync.collectives")


def make_compressor(method: str | Compressor) -> Compressor:
    """Return a compressor from its name, with its defaults, or the object itself."""
    made: Compressor = _make(method, compressors(), "compressor", "compress")
    return made


def make_collective(method: str | Collective | None, compressor: Compressor) -> Collective:
    """Return a collective from its name or the object itself; ``None`` chooses the one that suits the compressor."""
    if method is None:
        return DenseAllReduce() if compressor.dense else AllGather()
    made: Collective = _make(method, collectives(), "collective", "reduce")
    return made


def _make(method: Any, known: Mapping[str, Any], kind: str, duty: str) -> Any:
    if isinstance(method, str):
        if method not in known:
            raise ValueError(f"unknown {kind} {method!r}; known are {', '.join(sorted(known))}")
        factory = known[method]
        return (factory.load() if hasattr(factory, "load") else factory)()
    if isinstance(method, type) or not hasattr(method, duty):
        got = method if isinstance(method, type) else type(method).__name__  # whose repr may be long: an optimizer's
        raise ValueError(f"{kind} must be a name or an object with a method {duty}(), got {got}")
    return method


def _with_plugins(ours: Mapping[str, Any], group: str) -> dict[str, Any]:
    return _plugins(group, tuple(sys.path)) | dict(ours)


@cache
def _plugins(group: str, path: tuple[str, ...]) -> dict[str, Any]:
    """Return what other packages on ``path`` offer; kept, as all that is installed is looked through for it."""
    return {point.name: point for point in entry_points(group=group)}
