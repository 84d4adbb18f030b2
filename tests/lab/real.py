"""The real data sets, where $SPARSYNC_DATA has them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sparsync_lab.data.files import FOLDER_VARIABLE, find_file

FOLDER = Path(os.environ.get(FOLDER_VARIABLE, ""))


def needs(within: str, *names: str) -> pytest.MarkDecorator:
    """Skips a test unless all these files of a data set are there."""
    there = FOLDER_VARIABLE in os.environ and all(find_file(FOLDER, within, name) for name in names)
    return pytest.mark.skipif(not there, reason=f"${FOLDER_VARIABLE} names no folder with {within}")
