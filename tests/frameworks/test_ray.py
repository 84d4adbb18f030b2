"""Ray Train's own workers run the example: it is sparse, learns, and goes on from Ray's checkpoints.

Slow, all of it: Ray alone takes some 20 seconds to start and to give two workers.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.page_blocks import blocks_of

ray = pytest.importorskip("ray")
pytest.importorskip("ray.train")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
EXAMPLE = Path(__file__).parents[2] / "examples" / "ray" / "train.py"
MARGIN = 0.05  # of the loss over dense's, after 126 steps
DENSE_BYTES = 4 * (64 * 256 + 256 + 256 * 10 + 10)  # that a worker hands over in a step


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The example, and a Ray of three CPUs, which writes into a home of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(tmp_path_factory.mktemp("home")))
        patch.setenv("RAY_TRAIN_V2_ENABLED", "1")
        patch.setenv("OMP_NUM_THREADS", "1")
        ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
        spec = importlib.util.spec_from_file_location("ray_example", EXAMPLE)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)  # in no place from which a worker could import it: goes by value
        spec.loader.exec_module(module)
        yield module
        ray.shutdown()


@pytest.fixture(scope="module")
def whole(example: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The result of a training of two epochs."""
    return example.fit(tmp_path_factory.mktemp("whole"), epochs=2)


def after_one_epoch(whole: Any) -> str:
    """Return the folder of the checkpoint in the middle of the training."""
    return next(str(checkpoint.path) for checkpoint, metrics in whole.best_checkpoints if metrics["epoch"] == 0)


def saved(checkpoint: Any, name: str) -> Any:
    return torch.load(Path(checkpoint.path) / name, weights_only=True)


def same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    return torch.equal(one, other) if isinstance(one, Tensor) else bool(one == other)


def test_the_example_is_sparse_learns_and_goes_on_to_the_same_bits(whole: Any, example: Any, tmp_path: Path) -> None:
    dense = example.fit(tmp_path, epochs=2, sparse=False)
    assert whole.metrics["steps"] == 126
    assert whole.metrics["bytes"] < DENSE_BYTES / 10 * 126
    losses = whole.metrics["loss"], dense.metrics["loss"]
    assert losses[0] < losses[1] + MARGIN, losses

    resumed = example.fit(tmp_path, epochs=2, resume=after_one_epoch(whole))
    assert resumed.metrics["steps"] == 63
    assert same(saved(resumed.checkpoint, "model.pt")["model"], saved(whole.checkpoint, "model.pt")["model"])
    states = [saved(whole.checkpoint, f"sparsync-{rank}.pt") for rank in range(2)]
    assert not same(states[0]["residuals"], states[1]["residuals"])
    for rank, state in enumerate(states):
        again = saved(resumed.checkpoint, f"sparsync-{rank}.pt")
        assert same(again["residuals"], state["residuals"])
        assert same(again["velocities"], state["velocities"])


def test_another_number_of_workers_goes_on(whole: Any, example: Any, tmp_path: Path) -> None:
    before = next(metrics["loss"] for _, metrics in whole.best_checkpoints if metrics["epoch"] == 0)
    three = example.fit(tmp_path, epochs=2, workers=3, resume=after_one_epoch(whole))
    assert three.metrics["loss"] < before
    assert saved(three.checkpoint, "sparsync-2.pt")["workers"] == 3


def test_the_lines_of_its_page_run(example: Any) -> None:
    """One after another, in names of their own, which workers cannot import: functions go by value."""
    names: dict[str, Any] = {"__name__": "page"}
    for block in blocks_of("docs/frameworks/ray.md", "python"):
        exec(compile(block.code, "docs/frameworks/ray.md", "exec"), names)
    assert names["second"].metrics["steps"] == 2
    assert 0 < names["second"].metrics["sparsync/density"] < 0.5
    assert len(list(Path(names["second"].checkpoint.path).glob("sparsync-*.pt"))) == 3
