"""Find the files of data sets and verify their checksums."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path

FOLDER_VARIABLE = "SPARSYNC_DATA"


def data_folder(folder: Path | None, title: str, source: str) -> Path:
    """Return the folder to look in: ``folder``, or ``$SPARSYNC_DATA``.

    Args:
        title: of the data set.
        source: the sentence that says where it comes from.
    """
    if folder is None:
        given = os.environ.get(FOLDER_VARIABLE)
        if not given:
            raise ValueError(f"where is {title}? Give --data-dir or set ${FOLDER_VARIABLE}; {source}")
        folder = Path(given)
    if not folder.is_dir():
        raise ValueError(f"the data folder {folder} does not exist or is no folder; {source}")
    return folder


def candidate_paths(folder: Path, within: str, name: str) -> list[Path]:
    """Return where a file may lie: in the set's own subfolder, or in the folder itself."""
    return [folder / within / name, folder / name]


def find_file(folder: Path, within: str, name: str) -> Path | None:
    """Return the path of the file, if it exists."""
    return next((place for place in candidate_paths(folder, within, name) if place.is_file()), None)


def verified_files(folder: Path, within: str, checksums: Mapping[str, str], source: str) -> list[Path]:
    """Return the paths of the files; raise if one is missing or its checksum differs.

    Args:
        within: the set's subfolder of ``folder``; files may lie in ``folder`` itself, too.
        checksums: by file name: MD5 (32 digits) or SHA-256 (64).
        source: the sentence that says where they come from.
    """
    found = []
    for name, expected in checksums.items():
        path = find_file(folder, within, name)
        if path is None:
            looked = " and ".join(dict.fromkeys(str(place) for place in candidate_paths(folder, within, name)))
            raise ValueError(f"{name} is missing: looked for {looked}; {source}")
        kind = "MD5" if len(expected) == 32 else "SHA-256"
        with path.open("rb") as file:
            actual = hashlib.file_digest(file, kind.lower().replace("-", "")).hexdigest()
        if actual != expected:
            raise ValueError(f"{path} is not the original: its {kind} sum is {actual}, not {expected}; {source}")
        found.append(path)
    return found
