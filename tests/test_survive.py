"""The example whose workers go on: one is killed, and another joins."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LIMIT = 400.0  # seconds


@pytest.mark.slow
def test_the_others_go_on_and_another_one_joins() -> None:
    program = [sys.executable, str(ROOT / "examples/survive/train.py"), "--workers=3", "--kills=1", "--steps=300"]
    done = subprocess.run(
        program, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=LIMIT
    )
    assert done.returncode == 0, done.stderr
    (killed,) = re.findall(r"^killing process \d+ at step (\d+)$", done.stdout, re.MULTILINE)
    changes = re.findall(r"^(\d) workers from step (\d+) on$", done.stdout, re.MULTILINE)
    assert [workers for workers, _ in changes] in (["2", "3"], ["3"]), (
        done.stdout
    )  # it may come before they have agreed
    assert int(killed) <= int(changes[0][1]) <= int(killed) + 20  # nothing is made again
    ((accuracy, lost),) = re.findall(r"^3 workers, step 300: accuracy ([\d.]+)%, (\d) lost$", done.stdout, re.MULTILINE)
    assert float(accuracy) > 80
    assert lost == "1"
