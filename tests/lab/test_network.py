"""The network lab: hosts, links and their rates, bytes by the kernel's counters, and nothing left behind."""

from __future__ import annotations

import csv
import ctypes
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from sparsync.config import resolve
from sparsync.engine.budget import within_budget
from sparsync.engine.traffic import bytes_per_step
from sparsync_lab.cli.app import run
from sparsync_lab.network.counters import measure_link
from sparsync_lab.network.emulated_model import EmulatedModel, shapes_of
from sparsync_lab.network.host_workers import host_workers
from sparsync_lab.network.methods import Method, groups_that_fit, mean_plan
from sparsync_lab.network.namespace import Namespace, check_requirements
from sparsync_lab.network.shaping import Rate
from sparsync_lab.network.star import INTERFACE, Star, star
from sparsync_lab.training.local_workers import LocalWorkers, Worker
from tests.world import processes_of

SPARSYNC = [sys.executable, "-c", "from sparsync.cli import main; main()"]
MANY = ["lab", "collectives", "--workers", "2", "--model", "100000", "--method", "dense", "--rounds", "100000"]
PR_CAPBSET_DROP, CAP_SYS_ADMIN = 24, 21


def _why_not() -> str:
    try:
        check_requirements()
    except ValueError as error:
        return str(error)
    return ""


WHY_NOT = _why_not()
needs_namespaces = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)


# ---- what is refused ------------------------------------------------------------------------------------------------


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


# ---- parts ----------------------------------------------------------------------------------------------------------


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
    methods = [Method(name) for name in ("dense", "default", "topk", "bf16", "balanced")]
    names = [[m.name for m in group] for group in groups_that_fit(methods, 1000, 2, 2 * (16 + 20) * 1000)]
    assert names == [["dense", "default"], ["topk", "bf16"], ["balanced"]]
    assert groups_that_fit(methods, 1000, 2, 10**9) == [methods]


# ---- hosts and links ------------------------------------------------------------------------------------------------


def _where(worker: Worker) -> tuple[str, list[str]]:
    lines = Path("/proc/net/dev").read_text().splitlines()[2:]
    return os.readlink("/proc/self/ns/net"), sorted(line.split(":")[0].strip() for line in lines)


def _check_rate(workers: LocalWorkers, network: Star, text: str) -> None:
    """Measure the link from host 0 to host 1 until it comes near its rate, which a busy machine does not always."""
    rate = Rate.parse(text)
    seen = []
    for _ in range(5):
        seen.append(workers.run(measure_link, network, rate)[0] / rate.bits)
        if seen[-1] > 0.85:
            break
    assert 0.6 < max(seen) < 1.02, (text, seen)


@needs_namespaces
def test_links_have_the_rate_that_was_asked_for_also_after_a_change() -> None:
    ours = os.readlink("/proc/self/ns/net")
    devices = Path("/proc/net/dev").read_text().count(":")
    with star(3, Rate.parse("100Mbit")) as network, host_workers(network) as workers:
        places = workers.run(_where)
        assert len({place for place, _ in places} | {ours}) == 4  # each worker is on a host of its own
        assert all(devices == [INTERFACE, "lo"] for _, devices in places)
        for text in ("100Mbit", "300Mbit"):
            network.set_rate(Rate.parse(text))
            _check_rate(workers, network, text)
        network.hosts[1].set_rate(Rate.parse("30Mbit"))  # what one end receives is held as well
        _check_rate(workers, network, "30Mbit")
        network.set_rate(Rate.parse("100Mbit"))
        network.hosts[0].set_rate(Rate.parse("30Mbit"))
        _check_rate(workers, network, "30Mbit")
    assert Path("/proc/net/dev").read_text().count(":") == devices
    assert not _users({place for place, _ in places})


@needs_namespaces
def test_a_command_that_fails_inside_says_why() -> None:
    made = Namespace.create()
    try:
        with pytest.raises(OSError, match=r"ip link show nothing failed: .*nothing"):
            made.run("ip", "link", "show", "nothing")
        made.run("ip", "link", "show", "lo")
    finally:
        made.close()


@needs_namespaces
def test_interfaces_count_within_5_percent_of_traffic_and_a_run_is_resumed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All collectives, and DDP's own hooks; then nothing is left to measure."""
    out = tmp_path / "new" / "lab.csv"
    methods = ["dense", "bf16", "default", "balanced", "topk+allgather@bucket", "topk+gtopk", "random+shared@bucket"]
    words = [
        "lab",
        "collectives",
        "--workers",
        "3",
        "--rate",
        "500Mbit",
        "--model",
        "1000000",
        "--rounds",
        "3",
        "--density",
        "0.02",
    ]
    words += ["--out", str(out), *(word for name in methods for word in ("--method", name))]
    assert run(words) == 0
    first = _read(out)
    assert [row["method"] for row in first] == methods
    for row in first:
        assert abs(float(row["interface_over_traffic"]) - 1) <= 0.05, row
        assert float(row["step_p20_ms"]) <= float(row["step_p50_ms"]) <= float(row["step_p80_ms"]), row
        assert row["compute"] == "waited for, not computed"
        assert row["date"], row
    by_name = {row["method"]: row for row in first}
    assert float(by_name["dense"]["traffic_bytes"]) == pytest.approx(4e6 * 4 / 3)
    assert float(by_name["bf16"]["traffic_bytes"]) == pytest.approx(2e6 * 4 / 3)
    assert float(by_name["default"]["traffic_bytes"]) == pytest.approx(4e6 * 4 / 3 / 60, rel=0.02)
    # What 16/3 MB need on a link of 500 Mbit, give or take what a busy machine adds.
    assert 85 < float(by_name["dense"]["step_p20_ms"]) < 400

    capsys.readouterr()
    assert run(words) == 0
    assert "1 of 1 cells are in" in capsys.readouterr().out
    assert _read(out) == first


@needs_namespaces
def test_a_rate_changes_in_the_middle_of_a_run(tmp_path: Path) -> None:
    out = tmp_path / "steps.csv"
    words = (
        "lab step --workers 2 --model 500000 --method dense --steps 8 --rate 1Gbit --change-to 100Mbit --change-at 5"
    )
    done = subprocess.run([*SPARSYNC, *words.split(), "--out", out], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    rows = _read(out)
    assert [row["rate_mbit"] for row in rows] == 5 * ["1000"] + 3 * ["100"]
    times = [float(row["step_ms"]) for row in rows]
    assert min(times[5:]) > 150  # 2 MB at 100 Mbit
    assert sorted(times[:5])[1] < 100
    assert all(abs(float(row["interface_bytes"]) / 2e6 - 1) < 0.05 for row in rows)


# ---- nothing is left behind -----------------------------------------------------------------------------------------


@needs_namespaces
@pytest.mark.parametrize(
    "number",
    [signal.SIGKILL, signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)],
    ids=lambda number: number.name,
)
def test_nothing_is_left_behind(number: signal.Signals, tmp_path: Path) -> None:
    """Whatever ends a run, its processes and namespaces are gone soon after, and the host has no interface of it."""
    devices = Path("/proc/net/dev").read_text().count(":")
    with _running([*MANY, "--out", str(tmp_path / "x.csv")]) as lab:
        places = _namespaces(lab.pid)
        assert len(places) >= 3, places  # a switch and two hosts
        os.kill(lab.pid, number)
        code = lab.wait(30)
    assert code == {signal.SIGKILL: -9, signal.SIGINT: 130, signal.SIGTERM: 1}[number]
    _soon(lambda: not processes_of(lab.pid))
    _soon(lambda: not _users(places))
    assert Path("/proc/net/dev").read_text().count(":") == devices
    assert not any("sparsync" in name for name in os.listdir("/run/netns")) if os.path.isdir("/run/netns") else True


@contextmanager
def _running(arguments: list[str]) -> Iterator[subprocess.Popen[str]]:
    """Start a run in a session of its own and yield it once its workers are on their hosts."""
    lab = subprocess.Popen(
        [*SPARSYNC, *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, text=True, start_new_session=True
    )
    try:
        ours = os.readlink("/proc/self/ns/net")
        _soon(lambda: len({_link(f"/proc/{pid}/ns/net") for pid in processes_of(lab.pid)} - {ours, ""}) == 2, 120)
        yield lab
    finally:
        if lab.poll() is None:
            lab.kill()
        lab.wait(10)


def _namespaces(session: int) -> set[str]:
    """Return the network namespaces that processes of a session are in or hold, but for ours."""
    found = {place for pid in processes_of(session) for place in _held(pid)}
    return found - {os.readlink("/proc/self/ns/net")}


def _held(pid: int) -> set[str]:
    try:
        files = [f"/proc/{pid}/fd/{name}" for name in os.listdir(f"/proc/{pid}/fd")]
    except OSError:
        files = []
    links = [_link(path) for path in [f"/proc/{pid}/ns/net", *files]]
    return {link for link in links if re.fullmatch(r"net:\[\d+\]", link)}


def _users(places: set[str]) -> list[int]:
    """Return the processes that are in one of these namespaces or hold one."""
    return [int(name) for name in os.listdir("/proc") if name.isdigit() and _held(int(name)) & places]


def _link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""


def _soon(holds: object, seconds: float = 20.0) -> None:
    until = time.monotonic() + seconds
    while not holds():  # type: ignore[operator]
        assert time.monotonic() < until, "not in time"
        time.sleep(0.05)


def _read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))
