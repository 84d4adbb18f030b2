"""Trainings of the command line for tests: on processes of their own, ended in their middle, damaged afterwards."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sparsync_lab.cli.app import run
from tests.world import processes_of

ROOT = Path(__file__).parent.parent.parent
LIMIT = 240  # seconds, for a command that hangs; a machine may be busy
TRAIN = [sys.executable, "-m", "sparsync_lab", "train"]
SPARSE = ["--method", "topk", "--density", "0.02", "--momentum-mode", "keep", "--workers", "2"]
DENSE = ["--method", "dense", "--workers", "3"]


def train(*arguments: str | Path) -> None:
    """A training on worker processes, supervised by this one."""
    assert run(["train", *map(str, arguments)]) == 0


def refuse(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    """The one sentence that is said instead of training."""
    capsys.readouterr()
    assert run(["train", *map(str, arguments)]) == 2
    said = capsys.readouterr().err
    assert said.startswith("sparsync: ")
    assert len(said.strip().splitlines()) == 1
    return said


def common(folder: Path) -> dict[str, Any]:
    newest = max(folder.glob("checkpoint/step-*[0-9]"))
    loaded: dict[str, Any] = torch.load(newest / "model.pt", weights_only=True)["checkpoint"]
    return loaded


def weights(folder: Path) -> Tensor:
    return torch.cat([tensor.flatten() for tensor in common(folder)["model"].values()])


def metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def heed_ctrl_c() -> None:
    """Let Ctrl-C interrupt, which it does not where a shell started the tests in the background."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def end_in_the_middle(folder: Path, end: Callable[[int], None], *arguments: str) -> tuple[int, str]:
    """Start a training, call ``end`` with its process id after the first checkpoint; its exit code and stderr."""
    command = [*TRAIN, "--workers", "2", "--steps", "100000", "--out", str(folder), *arguments]
    scratch = tempfile.TemporaryDirectory()  # a process that is killed leaves its temporary files
    process = subprocess.Popen(
        command, cwd=ROOT, env=os.environ | {"TMPDIR": scratch.name}, stderr=subprocess.PIPE, text=True,
        start_new_session=True, preexec_fn=heed_ctrl_c,
    )  # fmt: skip
    try:
        until = time.monotonic() + LIMIT / 2
        while not list(folder.glob("checkpoint/step-*0")) and process.poll() is None and time.monotonic() < until:
            time.sleep(0.1)
        end(process.pid)
        _, errors = process.communicate(timeout=LIMIT / 2)
        until = time.monotonic() + 60
        while processes_of(process.pid) and time.monotonic() < until:
            time.sleep(0.1)
        assert processes_of(process.pid) == {}
        return process.returncode, errors
    finally:
        for pid in processes_of(process.pid):
            os.kill(pid, signal.SIGKILL)
        scratch.cleanup()


def cut_off(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip_a_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
