"""``sparsync bench select``: its table and figure, and the plain PyTorch methods that it measures against."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
import torch

from sparsync_lab.bench import bench_methods as flat_methods
from sparsync_lab.bench import select as selectbench
from sparsync_lab.bench.baselines import BASELINES, SELECTIONS
from sparsync_lab.bench.model_shapes import MODELS, shape_spans
from sparsync_lab.bench.select import SelectBench, TimeBudget, measure
from sparsync_lab.cli.app import run
from tests.methods import KINDS, gradient

FLOORS = ["e += g", "e += g; g.zero_()", "e += g; m += g"]
METHODS = [
    "threshold", *(f"{name} (PyTorch)" for name in BASELINES), *flat_methods.OURS, "threshold, AdamW", "topk, AdamW"
]  # fmt: skip


@pytest.fixture
def brisk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer steps before timing than a real measurement takes."""
    monkeypatch.setattr(selectbench, "WARM_UP", 3)
    monkeypatch.setattr("sparsync_lab.bench.clock.FLUSH", 1 << 16)


def test_the_command_writes_its_columns_and_a_figure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "new" / "select.csv"
    monkeypatch.setenv("COLUMNS", "80")
    options = ["--device=cpu", "--size=2000", "--size=5000", "--density=0.01", "--dtype=fp32", "--rounds=3"]
    assert run(["bench", "select", *options, "--out", str(out)]) == 0
    assert "…" not in capsys.readouterr().out  # 80 columns are enough
    with out.open() as file:
        rows = list(csv.DictReader(file))
    assert [row["method"] for row in rows] == 2 * [*FLOORS, *METHODS]
    for key in ("p20_ms", "p50_ms", "p80_ms", "host_p50_ms", "floor_p50_ms", "ratio_to_floor", "pytorch_topk_to_this"):
        assert all(float(row[key]) > 0 for row in rows), key
    for key in ("device", "cpus", "torch", "sparsync", "date", "threads", "load", "rounds", "settling_steps"):
        assert all(row[key] for row in rows), key
    assert {"commit", "triton", "syncs", "allocations_5_steps"} <= set(rows[0])
    for row in rows:
        exact = row["method"].startswith(("topk", "trimmed"))
        assert (row["count_over_k"] == "1.0000") >= exact, row
        assert (row["energy_over_topk"] == "1.0000") >= exact, row
        assert float(row["ratio_to_floor"]) == pytest.approx(
            float(row["p50_ms"]) / float(row["floor_p50_ms"]), rel=0.05
        )
    assert out.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.usefixtures("brisk")
def test_one_after_another_as_interleaved(monkeypatch: pytest.MonkeyPatch) -> None:
    together, _ = measure(SelectBench(size=2000, density=0.01, rounds=4), TimeBudget(60))
    monkeypatch.setattr(selectbench, "ALONE_FROM", 1)
    alone, missed = measure(SelectBench(size=2000, density=0.01, rounds=4), TimeBudget(60))
    assert [row.method for row in alone] == [row.method for row in together]
    assert missed == []
    assert all(len(row.times) == len(row.floors) == 4 for row in [*together, *alone[3:]])
    assert {row.floor for row in together} == {row.floor for row in alone} == {FLOORS[0], FLOORS[2]}
    assert len(alone[0].times) == 4 * len(METHODS)  # before and after each


@pytest.mark.usefixtures("brisk")
def test_a_spent_budget_starts_nothing_new() -> None:
    budget = TimeBudget(1e-9)
    assert measure(SelectBench(size=2000), budget) == ([], METHODS)


@pytest.mark.usefixtures("brisk")
def test_half_precision_gradients_and_models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MODELS, "small", (lambda: [(30, 20), (30,), (7, 5)], 665))
    rows, _ = measure(SelectBench(density=0.1, dtype="bf16", rounds=3, model="small"), TimeBudget(60))
    assert [(row.method, row.scope) for row in rows[3:]] == [("threshold", "global"), ("threshold", "layer")]
    assert all(row.count is not None and 0.5 < row.count <= 1 for row in rows[3:])
    assert all(row.energy is not None and 0.5 < row.energy <= 1 for row in rows[3:])


def test_shapes_of_models() -> None:
    assert {
        model: (len(shape_spans(model)), shape_spans(model)[-1].stop) for model in ("ResNet-50", "GPT-2 small")
    } == {
        "ResNet-50": (161, 25_557_032),
        "GPT-2 small": (148, 124_439_808),
    }


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--device", "tpu"], "device must be cpu or cuda, got tpu"),
        (["--size", "0"], "size must be from 1,000 to 2,000,000,000, got 0"),
        (["--density", "0"], "density must be above 0 and at most 0.5, got 0"),
        (["--density", "nan"], "density must be above 0 and at most 0.5, got nan"),
        (["--dtype", "int8"], "dtype must be fp32 or bf16, got int8"),
        (["--rounds", "2"], "rounds must be 3 or more, got 2"),
        (["--threads", "0"], "threads must be 1 or more, got 0"),
        (["--budget", "0"], "budget must be above 0 seconds, got 0"),
        (["--out", f"{__file__}/select.csv"], "File exists"),
    ],
)
def test_bad_input_is_one_sentence_and_code_2(
    arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["bench", "select", *arguments]) == 2
    said = capsys.readouterr().err
    assert said.startswith("sparsync: ")
    assert sentence in said
    assert len(said.strip().splitlines()) == 1


@pytest.mark.parametrize("name", BASELINES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_peers_lose_nothing(name: str, kind: str, dtype: torch.dtype) -> None:
    residual = torch.zeros(3000)
    for step in range(4):
        grad = gradient(kind, 3000, dtype, step)
        total = residual + grad
        indices, values = BASELINES[name](grad, residual, 30)
        assert indices.unique().numel() == indices.numel() == values.numel()
        assert not residual[indices].any()
        assert torch.equal(residual.index_add(0, indices, values), total)


@pytest.mark.parametrize("name", ["topk", "trimmed"])
@pytest.mark.parametrize("kind", ["normal", "heavy"])
def test_exact_peers_take_the_largest(name: str, kind: str) -> None:
    grad = gradient(kind, 5000, torch.float32, 1)
    indices, values = BASELINES[name](grad, torch.zeros(5000), 50)
    wanted = grad.abs().sort(descending=True).indices[:50]
    assert torch.equal(indices.sort().values, wanted.sort().values)
    assert torch.equal(values, grad[indices])


@pytest.mark.parametrize("kind", ["normal", "heavy", "integers"])
def test_dgc_takes_what_is_above_a_threshold_between_its_bounds(kind: str) -> None:
    grad = gradient(kind, 100_000, torch.float32, 1)
    torch.manual_seed(0)
    indices, values = BASELINES["dgc"](grad, torch.zeros(100_000), 1000)
    assert 800 <= indices.numel() <= 1300
    assert values.abs().min() >= grad.abs().sort(descending=True).values[indices.numel() - 1]


def test_dgc_of_p1_takes_the_k_largest_of_what_its_sample_lets_through() -> None:
    grad = gradient("heavy", 100_000, torch.float32, 1)
    torch.manual_seed(0)
    indices, values = BASELINES["dgc, authors' code"](grad, torch.zeros(100_000), 100)
    assert indices.numel() == 100
    assert values.abs().min() >= grad.abs().sort(descending=True).values[99]
    assert SELECTIONS["dgc, authors' code"](grad, 1000).numel() == 1000  # all of the sample: what lies above its least


def test_gaussian_is_the_printed_algorithm() -> None:
    """On a perfect normal its four masks hold 2.02, 0.004, 20.6 and 0.51 k at 0.1 %; the last one counts."""
    numel = 1_000_000
    normal = torch.special.ndtri((torch.arange(numel, dtype=torch.float64) + 0.5) / numel).float()
    indices, values = BASELINES["gaussian"](normal, torch.zeros(numel), 1000)
    assert indices.numel() == pytest.approx(510, abs=10)
    assert values.abs().min() >= normal.abs().sort(descending=True).values[indices.numel() - 1]


def test_the_authors_form_needs_one_mask_of_a_normal_vector() -> None:
    numel = 1_000_000
    normal = torch.special.ndtri((torch.arange(numel, dtype=torch.float64) + 0.5) / numel).float()
    assert SELECTIONS["gaussian, authors' code"](normal, 1000).numel() == pytest.approx(1000, abs=20)


def test_selection_alone_is_that_of_the_gradient(brisk: None) -> None:
    bench = selectbench.SelectBench(size=5000, density=0.01, rounds=3, alone=True)
    rows, _ = selectbench.measure(bench, selectbench.TimeBudget(60))
    assert [row.method for row in rows] == [*FLOORS, *(f"{name} (PyTorch)" for name in SELECTIONS)]
    counts = {row.method: row.count for row in rows}
    assert counts["topk (PyTorch)"] == counts["trimmed (PyTorch)"] == 1
    assert 0.6 < (counts["gaussian, authors' code (PyTorch)"] or 0) < 1.4
