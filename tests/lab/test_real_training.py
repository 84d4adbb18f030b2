"""Real trainings on shaped links."""

from __future__ import annotations

from pathlib import Path

import pytest

from sparsync_lab.cli.app import run
from sparsync_lab.data.ptb import PTB
from sparsync_lab.network.real_training import RealSteps, RealTraining
from tests.lab.namespaces import needs_namespaces, read_rows
from tests.lab.real import needs


def test_a_step_is_that_of_the_second_half() -> None:
    steps = RealSteps("auto", [4.0] * 18 + [3.0, 2.0], [9.0] * 10 + [1.0] * 10)
    assert (steps.typical, steps.reached) == (1.0, 2.5)
    assert [row["step"] for row in steps.to_csv()] == [*range(1, 21)]
    for wrong in ({"steps": 3}, {"steps": 9, "batch": 0}, {"steps": 9, "device": "tpu"}):
        with pytest.raises(ValueError, match=r"a real training has|device must be"):
            RealTraining(**wrong)  # type: ignore[arg-type]


@needs("ptb", *PTB)
@needs_namespaces
@pytest.mark.slow
def test_all_methods_train_from_the_same_weights_on_the_same_words(tmp_path: Path) -> None:
    out, methods = tmp_path / "real.csv", ("dense", "bf16", "default", "powersgd")
    words = ["lab", "real", "--steps", "4", "--workers", "2", "--batch", "1", "--out", str(out)]
    assert run([*words, *(word for method in methods for word in ("--method", method))]) == 0
    rows = read_rows(out)
    assert [row["method"] for row in rows[::4]] == [*methods]
    assert len({row["loss"] for row in rows[::4]}) == 1  # of the first step
    assert all(float(row["emulated_ms"]) > float(row["compute_ms"]) for row in rows)
