"""What tests of the network lab need."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from sparsync_lab.network.namespace import check_requirements


def _why_not() -> str:
    try:
        check_requirements()
    except ValueError as error:
        return str(error)
    return ""


WHY_NOT = _why_not()
needs_namespaces = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)


def read_rows(path: Path) -> list[dict[str, str]]:
    """Return the rows of a CSV file."""
    with path.open(newline="") as file:
        return list(csv.DictReader(file))
