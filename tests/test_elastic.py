"""The elastic example under torchrun itself: workers are killed, and others go on."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch

from tests.world import run_forked

ROOT = Path(__file__).parents[1]
PROGRAM = ROOT / "examples/elastic/train.py"
LIMIT = 400.0  # seconds


def start(folder: Path, workers: int, steps: int, restarts: int = 0) -> subprocess.Popen[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={workers}"]
    program = [f"--max-restarts={restarts}", str(PROGRAM), "--folder", str(folder), "--every=10", f"--steps={steps}"]
    one_thread = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [*launcher, *program], env=one_thread, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT
    )


def newest(folder: Path) -> int:
    """Return the step of the newest checkpoint."""
    return max((int(path.name.removeprefix("step-")) for path in folder.glob("step-*")), default=0)


def kill(launcher: subprocess.Popen[str], folder: Path, rank: int, restart: int, step: int) -> None:
    """Kill a worker of this start once the training has checkpoints up to a step."""
    until = time.monotonic() + LIMIT
    while newest(folder) < step:
        assert launcher.poll() is None, launcher.communicate()[1]
        assert time.monotonic() < until
        time.sleep(0.01)
    wanted = {"RANK": str(rank), "TORCHELASTIC_RESTART_COUNT": str(restart)}
    for worker in psutil.Process(launcher.pid).children():
        if wanted.items() <= worker.environ().items():
            worker.send_signal(signal.SIGKILL)
            return
    raise AssertionError(f"there is no worker {wanted}")


def run_here(folder: Path, workers: int, steps: int) -> str:
    """Run the example on processes that have imported torch already; return what rank 0 prints."""
    arguments = ["train.py", "--folder", str(folder), "--every=10", f"--steps={steps}"]
    said, *others = run_forked(f"import sys\nsys.argv = {arguments}\n{PROGRAM.read_text()}", workers)
    assert not any(others)
    return said


def test_fewer_or_more_workers_go_on_from_the_newest_whole_checkpoint(tmp_path: Path) -> None:
    assert run_here(tmp_path, 2, 20).startswith("2 workers, start 0, from step 0\n")
    (tmp_path / "unfinished").mkdir()  # by workers that died meanwhile
    (tmp_path / "unfinished" / "model.pt").write_text("half of it")
    assert run_here(tmp_path, 3, 30).startswith("3 workers, start 0, from step 20\n")
    assert run_here(tmp_path, 1, 45).startswith("1 workers, start 0, from step 30\n")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000040", "step-00000045"]


@pytest.mark.slow
def test_a_training_survives_the_death_of_any_worker_and_goes_on_with_more(tmp_path: Path) -> None:
    launcher = start(tmp_path, workers=2, steps=160, restarts=2)
    try:
        kill(launcher, tmp_path, rank=1, restart=0, step=20)
        reached = newest(tmp_path)
        kill(launcher, tmp_path, rank=0, restart=1, step=reached + 30)
        said, errors = launcher.communicate(timeout=LIMIT)
    finally:
        launcher.kill()  # and its workers with it
    assert launcher.returncode == 0, errors
    starts = re.findall(r"^2 workers, start (\d), from step (\d+)$", said, re.MULTILINE)
    assert [number for number, _ in starts] == ["0", "1", "2"]
    assert starts[0][1] == "0"
    assert reached <= int(starts[1][1]) <= reached + 20  # the last checkpoint before the kill, or one beside it
    assert int(starts[2][1]) >= reached + 30
    assert "the residual" not in errors.replace("behind a residual", "")  # nobody warns of one that is lost
    assert float(re.findall(r"step 160: accuracy ([\d.]+)%", said)[0]) > 80
    assert not list(tmp_path.glob("unfinished"))

    more = start(tmp_path, workers=3, steps=170)
    said, errors = more.communicate(timeout=LIMIT)
    assert more.returncode == 0, errors
    assert "3 workers, start 0, from step 160\n" in said
    assert newest(tmp_path) == 170
    saved = torch.load(tmp_path / "step-00000170" / "model.pt", weights_only=True)
    assert all(bool(tensor.isfinite().all()) for tensor in saved["model"].values())
