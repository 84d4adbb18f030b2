"""Generated images, and the command line that trains on them: ``python -m tests.generated papers run ...``."""

from __future__ import annotations

import sys

import torch

from sparsync.experiments.data import Images


def images(channels: int, side: int, count: int = 64) -> Images:
    """Noise with a bright spot whose place is the label."""
    random = torch.Generator().manual_seed(0)
    y = torch.arange(count) % 10
    x = 0.3 * torch.randn(count, channels, side, side, generator=random)
    for i, label in enumerate(y.tolist()):
        x[i, :, 2 * label : 2 * label + 3, 3:9] += 2
    return Images(x, y, x[:20], y[:20], 10)


if __name__ == "__main__":
    from sparsync.cli import app, jobs
    from sparsync.experiments.papers import tasks

    made = {"mnist": images(1, 28), "cifar10": images(3, 32)}
    tasks.load_images = lambda kind, folder: ("generated", made[kind])
    jobs.COMMAND = (sys.executable, "-m", "tests.generated")
    torch.set_num_threads(1)
    sys.exit(app.run(sys.argv[1:]))
