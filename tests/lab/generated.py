"""Generated images, and the command line that trains on them: ``python -m tests.lab.generated papers run ...``."""

from __future__ import annotations

import sys
from contextlib import redirect_stdout
from pathlib import Path

import torch

from sparsync_lab.data import Images


def images(channels: int, side: int, count: int = 64) -> Images:
    """Noise with a bright spot whose place is the label."""
    random = torch.Generator().manual_seed(0)
    y = torch.arange(count) % 10
    x = 0.3 * torch.randn(count, channels, side, side, generator=random)
    for i, label in enumerate(y.tolist()):
        x[i, :, 2 * label : 2 * label + 3, 3:9] += 2
    return Images(x, y, x[:20], y[:20], 10)


def run(arguments: list[str]) -> int:
    """A command in a process of its own, with these images for all that it reads; its exit code."""
    from sparsync_lab.cli import app, parallel_jobs
    from sparsync_lab.papers import tasks

    made = {"mnist": images(1, 28), "cifar10": images(3, 32)}
    tasks.load_images = lambda kind, folder: ("generated", made[kind])
    parallel_jobs.COMMAND = (sys.executable, "-m", "tests.lab.generated")
    torch.set_num_threads(1)
    return app.run(arguments)


def run_forked(arguments: list[str], path: Path) -> None:
    """The same in a process that was forked; what it prints goes to a file."""
    with path.open("w") as file, redirect_stdout(file):
        code = run(arguments)
    sys.exit(code)


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
