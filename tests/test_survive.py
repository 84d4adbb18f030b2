"""The example whose workers go on: one is killed, and another joins. And the log of the long test of survivors."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.failures import survival_log
from tests.failures.survival_log import SurvivalLog

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


def test_the_log_of_the_long_run_is_written_when_all_is_well(tmp_path: Path) -> None:
    log = SurvivalLog(tmp_path / "survive.txt")
    assert log.part
    survival_log.add_changes(log.part)
    library = logging.getLogger("sparsync")
    try:
        library.warning("lost: %s of %d", "rank 2", 4)
        library.warning("exchange 7: a rank was not heard from")
        log.say("the counts")
        assert not (tmp_path / "survive.txt").exists()
        log.end()
    finally:
        library.handlers.pop().close()
    head, _, said = (tmp_path / "survive.txt").read_text().rpartition("\n\n")
    assert re.search(r"^environment  \d{4}-\d\d-\d\d, commit \w+", head, re.MULTILINE)
    assert f"command      {survival_log.VARIABLE}=results/survive.txt python -m pytest " in head
    assert said == "sparsync: lost: rank 2 of 4\nthe counts\n"
    assert [path.name for path in tmp_path.iterdir()] == ["survive.txt"]
