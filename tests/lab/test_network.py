"""The network lab: what it refuses, and its parts that need no root."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from sparsync.config import resolve
from sparsync.engine.budget import within_budget
from sparsync.engine.traffic import bytes_per_step
from sparsync_lab.cli.app import run
from sparsync_lab.network.emulated_model import EmulatedModel, shapes_of
from sparsync_lab.network.methods import NetworkMethod, groups_that_fit, mean_plan
from sparsync_lab.network.shaping import Rate
from tests.lab.namespaces import WHY_NOT

SPARSYNC = [sys.executable, "-c", "from sparsync.cli import main; main()"]
PR_CAPBSET_DROP, CAP_SYS_ADMIN = 24, 21


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="drops a right that Linux has")
def test_without_root_it_says_so_in_one_sentence(tmp_path: Path) -> None:
    def drop() -> None:
        ctypes.CDLL(None).prctl(PR_CAPBSET_DROP, CAP_SYS_ADMIN, 0, 0, 0)

    command = [*SPARSYNC, "lab", "collectives", "--out", str(tmp_path / "x.csv")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, preexec_fn=drop)
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("sparsync: the network lab needs root"), done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("there", [["ip"], []])
def test_without_ip_or_tc_it_says_which_is_missing(
    there: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in there:
        (tmp_path / name).symlink_to(shutil.which(name) or sys.executable)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert run(["lab", "step", "--out", str(tmp_path / "x.csv")]) == 2
    missing = "tc" if there else "ip and tc"
    assert f"the network lab needs the command {missing}, which the package iproute2 has" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["collectives", "--rate", "fast"], "a rate is a number and Mbit or Gbit, as in 100Mbit, got 'fast'"),
        (["collectives", "--rate", "10Mbit"], "a rate must be from 20Mbit to 100Gbit, got 1e+07 bits a second"),
        (["collectives", "--workers", "1"], "workers must be from 2 to 64, got 1"),
        (["collectives", "--model", "vgg99"], "got 'vgg99'"),
        (["collectives", "--method", "top"], "unknown method 'top'"),
        (["collectives", "--method", "topk@model"], "the scope of 'topk@model' must be one of"),
        (["collectives", "--method", "dense", "--method", "dense"], "a method was given twice"),
        (["collectives", "--rounds", "2"], "rounds must be 3 or more, got 2"),
        (["collectives", "--compute", "1 hour"], "a time is a number and ms or s, as in 120ms, got '1 hour'"),
        (["collectives", "--optimizer", "lion"], "optimizer must be one of sgd, adamw, got 'lion'"),
        (["step", "--change-at", "3"], "--change-at needs --change-to"),
        (["step", "--change-to", "1Gbit", "--change-at", "29"], "may change at a step from 3 to 27 of 30, got 29"),
    ],
)
def test_what_the_user_can_put_right_is_one_sentence(
    arguments: list[str], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if WHY_NOT and arguments[-1] in ("1", "dense"):
        pytest.skip(WHY_NOT)
    assert run(["lab", *arguments, "--out", str(tmp_path / "x.csv")]) == 2
    said = capsys.readouterr().err
    assert sentence in said
    assert said.count("\n") == 1, said


def test_another_csv_file_is_not_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = tmp_path / "other.csv"
    other.write_text("name,value\na,1\n")
    assert run(["lab", "collectives", "--out", str(other)]) == 2
    assert "holds no rows of the network lab" in capsys.readouterr().err
    assert other.read_text() == "name,value\na,1\n"


def test_rates_read_and_write() -> None:
    for text, bits in {"100Mbit": 1e8, "2.5Gbit": 2.5e9, "10Gbit": 1e10, "20mbit": 2e7}.items():
        assert Rate.parse(text).bits == bits
        assert Rate.parse(str(Rate.parse(text))) == Rate.parse(text)
    assert Rate.parse("100Mbit").token_bucket == "tbf rate 100000000bit burst 12500 limit 4194304"


@pytest.mark.parametrize(
    ("model", "entries"), [("1048576", 2**20), ("3000000", 3_000_000), ("5", 5), ("resnet50", 25_557_032),
                           ("vgg16", 14_728_266), ("gpt", 5_752_320)]
)  # fmt: skip
def test_shapes_are_those_of_the_model(model: str, entries: int) -> None:
    assert sum(torch.Size(shape).numel() for shape in shapes_of(model)) == entries


def test_an_emulated_model_waits_as_long_as_it_says_and_yields_gradients_from_last_to_first() -> None:
    model = EmulatedModel([(20, 10), (10,), (30, 10), (10,)], compute=0.12, seed=1)
    order = list[int]()
    for number, weight in enumerate(model.weights):
        weight.register_post_accumulate_grad_hook(lambda _, number=number: order.append(number))
    seen = []
    for _ in range(3):
        model.zero_grad()
        begun = time.perf_counter()
        out = model()
        between = time.perf_counter()
        out.backward()
        seen.append((between - begun, time.perf_counter() - between))
    forward, backward = (min(times) for times in zip(*seen, strict=True))
    assert 0.03 < forward < 0.06, seen
    assert 0.07 < backward < 0.12, seen
    assert order == 3 * [3, 2, 1, 0]
    grads = [weight.grad for weight in model.weights]
    flat = torch.cat([grad.reshape(-1) for grad in grads if grad is not None])
    assert flat.numel() == model.numel == 520
    assert 0.8 < float(flat.std()) < 1.2


@pytest.mark.parametrize("workers", [4, 16])
def test_a_recipe_is_measured_at_the_mean_of_its_bytes(workers: int) -> None:
    module = torch.nn.Sequential(*(torch.nn.Linear(500, 500) for _ in range(4)))
    tensors = dict(module.named_parameters())
    plan = resolve("default", optimizer=torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9))
    spending = within_budget(plan, tensors, workers).spending
    assert spending is not None
    assert spending.first > 2 * spending.last
    mean = mean_plan(plan, module, workers)
    sent = bytes_per_step(mean, tensors, workers)(mean.density(0))
    assert sent == pytest.approx(spending.mean, rel=0.01)
    assert mean.density(0) == mean.density(1999)
    assert mean.momentum == "correct"


def test_methods_that_do_not_fit_into_memory_go_in_groups() -> None:
    methods = [NetworkMethod(name) for name in ("dense", "default", "topk", "bf16", "balanced")]
    names = [[m.name for m in group] for group in groups_that_fit(methods, 1000, 2, 2 * (16 + 20) * 1000)]
    assert names == [["dense", "default"], ["topk", "bf16"], ["balanced"]]
    assert groups_that_fit(methods, 1000, 2, 10**9) == [methods]
