"""What atheris is given: every target takes bytes, and what came of it is written down."""

from __future__ import annotations

import csv
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from tests import test_hostile_messages
from tests.fuzz import __main__ as fuzz
from tests.fuzz.campaign import append, row_of
from tests.page_blocks import ROOT


def test_every_target_takes_bytes_and_make_runs_all_of_them() -> None:
    for target, name in fuzz.TARGETS.items():
        assert target == fuzz.CHECKPOINTS or callable(getattr(test_hostile_messages, name).hypothesis.fuzz_one_input)
    assert f"TARGETS ?= {' '.join(fuzz.TARGETS)}\n" in (ROOT / "Makefile").read_text()


def test_checkpoints_are_made_from_bytes_and_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that are drawn reach the readers; where nobody looks at their form, that is found."""
    with ExitStack() as stack:
        feed = fuzz.checkpoints(stack).hypothesis.fuzz_one_input
        drawn = torch.Generator().manual_seed(0)
        inputs = [bytes(torch.randint(256, (200,), generator=drawn).tolist()) for _ in range(60)]
        assert any(feed(some) is not None for some in inputs)
        monkeypatch.setattr("sparsync.engine.checkpoint.check_form", lambda state: None)
        with pytest.raises((AssertionError, KeyError, TypeError, AttributeError)):
            [feed(some) for some in inputs]


def test_what_came_of_a_target_is_a_row(tmp_path: Path) -> None:
    said, file = "#2 INITED\nDone 1234 runs in 61 second(s)\n", tmp_path / "fuzz.csv"
    append(file, row_of("peer", said, 0, 7))
    append(file, row_of("parts", "crash", 77, 9))
    good, bad = csv.DictReader(file.read_text().splitlines())
    assert [good[key] for key in ("target", "executions", "seconds", "corpus", "failed")] == [
        "peer", "1234", "61", "7", "False",
    ]  # fmt: skip
    assert (bad["target"], bad["executions"], bad["failed"]) == ("parts", "", "True")
    assert all(row[key] for row in (good, bad) for key in ("commit", "date", "device"))
