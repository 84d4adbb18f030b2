"""Seeded defects: each is planted into a copy of the source and must turn a named test red.

A room is a folder (or file) of the source: ``tests/mutants/wire.py`` lists the defects of ``src/sparsync/wire``, and
``tests/mutants/lab_models.py`` those of ``lab/src/sparsync_lab/models``. ``python -m tests.mutants`` runs them.
"""

from __future__ import annotations

import pkgutil
from dataclasses import dataclass
from importlib import import_module


@dataclass(frozen=True)
class Mutant:
    name: str
    file: str  # from the root of the repository
    good: str  # occurs exactly once in the file
    bad: str
    test: str  # a file, a test, or one case of a test
    interpreted: bool = False  # its test runs kernels in Triton's interpreter


def load_rooms() -> dict[str, list[Mutant]]:
    """Return the defects of every room."""
    names = sorted(module.name for module in pkgutil.iter_modules(__path__) if module.name != "__main__")
    return {name: import_module(f"{__name__}.{name}").MUTANTS for name in names}


def in_room(file: str, room: str) -> bool:
    """Return whether a file of the repository belongs to the source of a room."""
    lab = room.removeprefix("lab_")
    source = f"src/sparsync/{room}" if lab == room else f"lab/src/sparsync_lab/{lab}"
    return file == f"{source}.py" or file.startswith(f"{source}/")
