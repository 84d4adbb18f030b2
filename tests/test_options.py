"""Names, schedules and learning rates: what `attach` takes beside a method."""

from __future__ import annotations

import pytest
import torch

import sparsync
from sparsync.collectives import Channel
from sparsync.config.registry import compressors, make_compressor
from sparsync.engine.bucketing import Bucket
from sparsync.layout import Parameter
from sparsync.wire import Wire
from tests.methods import Odd, reducer_of


def test_another_package_joins_through_an_entry_point(tmp_path, monkeypatch):
    """A real distribution's metadata on the path, as pip leaves it."""
    info = tmp_path / "other-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[sparsync.compressors]\nodd = tests.methods:Odd\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert "odd" in compressors()
    assert make_compressor("odd") == Odd()


@pytest.mark.parametrize("method", ["nothing", sparsync.TopK, 3])
def test_what_is_no_compressor_is_refused(method):
    with pytest.raises(ValueError, match="compressor"):
        make_compressor(method)


def test_warm_up_is_dgcs():
    schedule = sparsync.ExponentialWarmup(0.001, epochs=4, steps_per_epoch=10)
    densities = [schedule(step) for step in (0, 9, 10, 20, 30, 40, 1000)]
    expected = [0.001 ** (e / 5) for e in (1, 1, 2, 3, 4, 5)]
    assert densities == pytest.approx([*expected, 0.001])


def test_a_front_loaded_density_begins_high_and_ends_low():
    front = sparsync.FrontLoaded(0.01, steps=40)
    assert [front(step) for step in (0, 1, 2, 3, 4, 39, 1000)] == pytest.approx(
        [0.08, 0.04757, 0.02828, 0.01682, 0.01, 0.01, 0.01], rel=1e-3
    )
    assert [count for _, count in front.stages()] == [1, 1, 1, 1, 36]
    long = sparsync.FrontLoaded(0.01, steps=10_000)
    assert sum(map(long, range(10_000))) / 10_000 == pytest.approx(0.01 * 1.332, rel=1e-3)
    assert sum(density * count for density, count in long.stages()) == pytest.approx(sum(map(long, range(10_000))))
    assert sparsync.FrontLoaded(0.5, steps=10)(0) == 1.0
    assert {sparsync.FrontLoaded(0.01, steps=2)(step) for step in (4, 5)} == {0.01}
    for wrong in ({"steps": 0}, {"steps": 2.5}, *({"steps": 10, "factor": f} for f in (0.5, float("nan"), None))):
        with pytest.raises(ValueError, match=f"{list(wrong)[-1]} must be a (whole )?number, 1 or more"):
            sparsync.FrontLoaded(0.01, **wrong)


@pytest.mark.parametrize(("rate", "factor"), [(0.1, 1.0), (0.05, 2.0), (0.0, 1.0)])
def test_the_residual_follows_the_learning_rate(rate, factor):
    rates = {"a": 0.1}
    weight = torch.zeros(40, 50)
    reducer = reducer_of(
        [Parameter.of("a", weight)],
        sparsync.TopK(0.01),
        sparsync.AllGather(),
        Channel(None, Wire()),
        scope="layer",
        density=lambda step: 0.01,
        rates=lambda: rates,
    )
    reducer.push(Bucket(0, torch.randn(2000), ("a",), True)).wait()
    kept = reducer.residual("a").clone()
    rates["a"] = rate
    sent = reducer.push(Bucket(0, torch.zeros(2000), ("a",), True)).wait()
    assert torch.equal(sent.view(40, 50) + reducer.residual("a"), kept * factor)
    assert sent.any()
