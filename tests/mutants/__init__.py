"""Seeded defects: each is planted into a copy of the source and must turn a named test red.

A room is a folder (or file) of the source: ``tests/mutants/wire.py`` lists the defects of ``src/sparsync/wire``, and
``tests/mutants/lab_models.py`` those of ``lab/src/sparsync_lab/models``. To them come the guards of a room's source,
each of which is switched off (``tests/mutants/guards.py``). ``python -m tests.mutants`` runs them.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Iterable
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


def written_by_room() -> dict[str, list[Mutant]]:
    """Return the defects that every room lists."""
    names = sorted({module.name for module in pkgutil.iter_modules(__path__)} - {"__main__", "guards"})
    return {name: import_module(f"{__name__}.{name}").MUTANTS for name in names}


def load_rooms() -> dict[str, list[Mutant]]:
    """Return the defects of every room: those that it lists, and the guards of its source, switched off."""
    from tests.mutants import guards

    rooms = {room: list(written) for room, written in written_by_room().items()}
    for mutant in guards.mutants():
        rooms[room_of(mutant.file, rooms)].append(mutant)
    return rooms


def named_tests() -> set[str]:
    """Return the tests that find the defects, without a look at the source."""
    from tests.mutants import guards

    written = {mutant.test for mutants in written_by_room().values() for mutant in mutants}
    return written | {row.test for row in guards.table()}


def room_of(file: str, rooms: Iterable[str]) -> str:
    """Return the room to whose source a file belongs."""
    (room,) = (room for room in rooms if in_room(file, room))
    return room


def in_room(file: str, room: str) -> bool:
    """Return whether a file of the repository belongs to the source of a room."""
    lab = room.removeprefix("lab_")
    source = f"src/sparsync/{room}" if lab == room else f"lab/src/sparsync_lab/{lab}"
    return file == f"{source}.py" or file.startswith(f"{source}/")
