"""Names, schedules and learning rates: what `attach` takes beside a method."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import sparsync
from sparsync.collectives import Channel
from sparsync.config import resolve
from sparsync.config.registry import compressors, make_compressor
from sparsync.engine.bucketing import Bucket
from sparsync.hosts.states.sharded import to_rows
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


def test_another_name_in_hosts_is_no_framework():
    assert not hasattr(sparsync.hosts, "horovod")


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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        *(
            ({name: value}, rf"{name} must be True or False, got {value!r}")
            for name in ("masking", "precondition", "transactional", "dense_1d", "follow_lr", "debug")
            for value in ("no", 1)
        ),
        ({"density": "0.01"}, "density must be above 0 and at most 1, got '0.01'"),
        ({"density": True}, "density must be above 0 and at most 1, got True"),
        ({"density": lambda step: None}, "density must be above 0 and at most 1, got None at step 0"),
        *(({"clip": value}, f"clip must be a norm above 0, got {value!r}") for value in ("1.0", True, 0)),
        *(({"dense_below": value}, "dense_below must be 0 or more entries") for value in ("1k", -1, 2.5, True)),
        *(
            ({"beta": value, "momentum": "correct"}, "beta must be from 0 to below 1")
            for value in ("0.5", "auto", True)
        ),
        *(({"beta": value, "precondition": True}, "beta must be from 0 to below 1") for value in ("0.5", True)),
        *(({"deadline": value}, "deadline must be above 0 seconds") for value in ("10s", True)),
        *(({"seed": value}, "seed must be a whole number, got") for value in ("a", 0.5, True)),
        *(({"scaler": value}, "scaler must be the GradScaler that is used, got") for value in (True, "cpu")),
        *(({"on_change": value}, r"on_change= needs on_loss='continue'") for value in (print, 3)),
        ({"states": [torch.optim.SGD]}, r"states= needs on_loss='continue'"),
        ({"on_change": 3, "on_loss": "continue"}, "on_change must be callable, with a Change, got 3"),
        ({"states": [1], "on_loss": "continue"}, r"states must have state_dict\(\) and load_state_dict\(\), got 1"),
    ],
)
def test_an_option_of_another_kind_is_refused_by_name(options, message):
    """Before the model is looked at, which here is no DDP."""
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with pytest.raises(ValueError, match=f"^{message}"):
        sparsync.attach(model, "topk", optimizer=optimizer, **options)


def test_a_handle_that_no_bucket_came_to_has_no_figures_and_moments_are_on_one_device():
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3, device="meta"))
    handle, _ = sparsync.comm_hook(model, optimizer=torch.optim.AdamW(model.parameters()), precondition=True)
    with pytest.raises(sparsync.SparsyncError, match="no bucket has come yet"):
        handle.stats()
    with pytest.raises(ValueError, match="precondition=True needs all parameters on one device"):
        handle.start()


def test_a_bucket_of_another_model_ends_a_step_that_is_under_way():
    model, other = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)
    handle, _ = sparsync.comm_hook(model, "topk", momentum="keep")
    strange = (0, torch.zeros(9), [other.weight], True)
    handle.push(*strange)  # its future says so: nobody waits for anything
    handle.push(0, torch.zeros(9), [model.weight], False)
    with pytest.raises(sparsync.SparsyncError, match="belongs to another model"):
        handle.push(*strange)
    handle.detach()


def test_rows_of_a_checkpoint_need_a_process_group():
    with pytest.raises(sparsync.SparsyncError, match=r"a distributed checkpoint needs torch\.distributed"):
        to_rows({"nodes": ""}, None, torch.device("cpu"))


def test_schedules_out_of_range_are_refused():
    for wrong in ({"epochs": -1, "steps_per_epoch": 5}, {"epochs": 1, "steps_per_epoch": 0}):
        with pytest.raises(ValueError, match="epochs must be 0 or more and steps_per_epoch 1 or more"):
            sparsync.ExponentialWarmup(0.01, **wrong)
    for most in (0.005, 1.5):
        with pytest.raises(ValueError, match=f"most must be at least the density and at most 1, got {most}"):
            sparsync.FrontLoaded(0.01, steps=10, most=most)


def test_numbers_of_numpy_are_numbers():
    """And a schedule's error comes when its step does."""
    plan = resolve(compressor="topk", density=np.float32(0.25), clip=np.float64(1.0), dense_below=np.int64(10))
    assert (plan.density(0), plan.clip, plan.dense_below) == (0.25, 1.0, 10)
    late = resolve(compressor="topk", density=lambda step: 0.1 if step < 3 else "0.1").density
    assert late(2) == 0.1
    with pytest.raises(ValueError, match=r"density must be above 0 and at most 1, got '0\.1' at step 3"):
        late(3)
