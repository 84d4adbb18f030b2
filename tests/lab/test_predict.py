"""The planner as the lab calibrates it: from steps on free links to steps on any."""

from __future__ import annotations

import pytest

from sparsync_lab.network.methods import LOCAL
from sparsync_lab.network.predict import COMPARED, FREE, CalibratedCosts, Calibration, FreeStep, model_of
from sparsync_lab.network.shaping import Rate
from sparsync_lab.network.steps import StepCell

FREE_STEPS = {
    LOCAL: FreeStep(0.010),
    "dense fp32": FreeStep(0.060),
    "dense bf16": FreeStep(0.050),
    "default": FreeStep(0.080, 0.030),
    "balanced": FreeStep(0.120, 0.040),
}


@pytest.mark.parametrize(("workers", "optimizer"), [(2, "sgd"), (8, "sgd"), (4, "adamw")])
def test_predictions_for_free_links_are_what_was_measured_there(workers: int, optimizer: str) -> None:
    """A little of dense hides behind what DDP takes by itself."""
    known = Calibration(model_of("gpt"), workers, optimizer, FREE_STEPS)
    predicted = known.predict(StepCell(FREE, "gpt", 0.0))
    for name in COMPARED:
        assert predicted[name] == pytest.approx(FREE_STEPS[name].whole, rel=0.06), name


def test_dense_steps_on_slow_links_take_as_long_as_their_bytes() -> None:
    known = Calibration(model_of("8000000"), 4, "sgd", FREE_STEPS)
    rate = Rate.parse("100Mbit")
    fast, slow = (known.predict(StepCell(one, "8000000", 0.0)) for one in (FREE, rate))
    sent = 2 * 3 / 4 * 4 * 8e6 * 8 / (rate.bits * 1448 / 1514)  # seconds of a ring's bytes, with headers
    assert slow["dense fp32"] == pytest.approx(0.010 + sent, rel=0.01)
    assert fast["dense fp32"] < 0.1 < slow["default"] < slow["dense bf16"] / 10
    costs = CalibratedCosts(known.model, 4, FREE_STEPS, "sgd")
    assert costs.network(FREE).link.seconds_per_byte == pytest.approx(0.050 / (1.5 * 4 * 8e6), rel=0.01)
