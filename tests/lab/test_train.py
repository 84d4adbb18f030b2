"""``sparsync train`` on real processes: run folders, resuming, interrupting, torchrun, and what goes wrong."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from sparsync_lab.training.local_workers import LocalWorkers, Worker, WorkerFailed
from sparsync_lab.training.settings import Outcome, Training, dense_bytes
from tests.lab.trainings import (
    DENSE,
    LIMIT,
    ROOT,
    SPARSE,
    TRAIN,
    common,
    cut_off,
    end_in_the_middle,
    flip_a_byte,
    metrics,
    refuse,
    train,
    weights,
)
from tests.world import fork_server, processes_of


@pytest.fixture(scope="module", autouse=True)
def forked() -> None:
    fork_server()


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sparse training of 20 steps, in one go."""
    folder = tmp_path_factory.mktemp("runs") / "straight"
    train(*SPARSE, "--steps", "20", "--out", folder)
    return folder


@pytest.fixture(scope="module")
def half(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same, ended after 10 steps. Tests work on copies."""
    folder = tmp_path_factory.mktemp("runs") / "half"
    train(*SPARSE, "--steps", "10", "--out", folder)
    return folder


@pytest.fixture
def copy(half: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(half, tmp_path / "copy"))


def test_a_run_folder_tells_everything(straight: Path) -> None:
    config = json.loads((straight / "config.json").read_text())
    asked = Training("topk", density=0.02, momentum_mode="keep", steps=20)
    assert Training.from_json(config["training"]) == asked
    assert config["workers"] == 2
    assert config["environment"]["torch"] == torch.__version__
    outcome = Outcome.from_json(json.loads((straight / "outcome.json").read_text()))
    assert (outcome.training, outcome.workers, outcome.numel) == (asked, 2, 85_002)
    assert outcome.dense_bytes == dense_bytes(85_002, 2) == 340_008
    assert 0.02 < outcome.density < 0.03  # biases and the last layer travel dense
    assert outcome.dense_bytes / 50 < outcome.bytes < outcome.dense_bytes / 10
    assert 0 < outcome.step_s < 10
    assert [point.to_json() for point in outcome.curve] == metrics(straight)
    assert [point.step for point in outcome.curve] == list(range(2, 21, 2))
    assert outcome.curve[-1].accuracy == outcome.accuracy
    assert outcome.curve[-1].bytes == pytest.approx(20 * outcome.bytes)
    assert outcome.curve[-1].loss < outcome.curve[0].loss
    assert sorted(path.name for path in straight.glob("checkpoint/*")) == ["step-00000018", "step-00000020"]
    state = torch.load(straight / "checkpoint/step-00000020/rank-1.pt", weights_only=True)["sync"]
    assert (state["rank"], state["step"]) == (1, 20)
    assert any(residual.any() for residual in state["residuals"].values())


def test_resumed_is_as_good_as_never_interrupted(straight: Path, copy: Path) -> None:
    with (copy / "metrics.jsonl").open("a") as file:  # a later point and half a line, as a killed run leaves them
        file.write(json.dumps({"step": 12, "loss": 9.0, "accuracy": 0.0, "bytes": 1.0}) + '\n{"step": 14, "lo')
    (copy / "checkpoint/step-00000013.part").mkdir()  # and a checkpoint that was not completed
    train("--resume", "--steps", "20", "--out", copy)
    assert common(copy)["step"] == 20
    assert torch.equal(weights(copy), weights(straight))
    assert [point["step"] for point in metrics(copy)] == [*range(1, 11), *range(12, 21, 2)]
    assert metrics(copy)[10:] == metrics(straight)[5:]
    assert sorted(path.name for path in copy.glob("checkpoint/*")) == ["step-00000018", "step-00000020"]
    ours, theirs = (json.loads((folder / "outcome.json").read_text()) for folder in (copy, straight))
    assert (ours["bytes"], ours["density"]) == (theirs["bytes"], theirs["density"])


def test_a_resumed_dense_training_sums_in_the_same_order(tmp_path: Path) -> None:
    train(*DENSE, "--steps", "6", "--out", tmp_path / "straight")
    train(*DENSE, "--steps", "3", "--out", tmp_path / "half")
    train("--resume", "--steps", "6", "--out", tmp_path / "half")
    assert torch.equal(weights(tmp_path / "half"), weights(tmp_path / "straight"))


def test_more_workers_may_go_on(copy: Path) -> None:
    before = [torch.load(copy / f"checkpoint/step-00000010/rank-{n}.pt")["sync"]["residuals"] for n in range(2)]
    train("--resume", "--steps", "11", "--workers", "3", "--out", copy)
    outcome = json.loads((copy / "outcome.json").read_text())
    assert outcome["workers"] == json.loads((copy / "config.json").read_text())["workers"] == 3
    assert [point["step"] for point in metrics(copy)] == list(range(1, 12))
    after = [torch.load(copy / f"checkpoint/step-00000011/rank-{n}.pt")["sync"]["residuals"] for n in range(3)]
    for name in before[0]:  # one step later, what was kept is still there, for the greater part
        run_folder, then = torch.stack([r[name] for r in before]).mean(0), torch.stack([r[name] for r in after]).mean(0)
        assert torch.cosine_similarity(run_folder.flatten(), then.flatten(), dim=0) > 0.8


@pytest.mark.slow
def test_torchrun_goes_on_where_the_command_ended(straight: Path, copy: Path) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*launcher, "-m", "sparsync_lab", "train", "--resume", "--steps", "20", "--out", str(copy)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(
        r"topk on 2 worker\(s\): test accuracy \d+\.\d% after 20 steps\n"
        r"each sent \d+\.\d kB a step \(\d+\.\d x less than dense\), \d\.\d\d% of all entries, .* ms a step\n"
        rf"run: {copy}\n",
        done.stdout,
    )
    assert done.stderr.count("step 20/20: loss ") == 1  # rank 0 alone speaks
    assert torch.equal(weights(copy), weights(straight))


def test_bad_input_under_a_launcher_is_one_sentence_and_code_2(tmp_path: Path) -> None:
    launched = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    command = [*TRAIN, "--density", "2", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | launched, capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 2
    assert done.stderr == "sparsync: density must be above 0 and at most 1, got 2\n"


# ---- interrupted and killed -----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_interrupted_training_can_be_resumed(tmp_path: Path) -> None:
    code, errors = end_in_the_middle(tmp_path, lambda pid: os.kill(pid, signal.SIGINT))
    assert code == 130
    assert errors.splitlines()[-1] == "sparsync: interrupted"
    assert "Traceback" not in errors
    step = common(tmp_path)["step"]
    assert step >= 100
    train("--resume", "--steps", str(step + 2), "--out", tmp_path)
    assert common(tmp_path)["step"] == step + 2


@pytest.mark.slow
def test_a_killed_worker_ends_the_others(tmp_path: Path) -> None:
    def kill_a_worker(pid: int) -> None:
        processes = processes_of(pid)
        (server,) = {parent for parent in processes.values() if parent != pid and parent in processes}
        os.kill(max(child for child, parent in processes.items() if parent == server), signal.SIGKILL)

    code, errors = end_in_the_middle(tmp_path, kill_a_worker, "--method", "dense")
    assert code == 1
    assert re.fullmatch(
        r"sparsync: worker \d was killed by SIGKILL, the others were stopped; "
        rf"go on with: sparsync train --out {tmp_path} --resume\n",
        errors,
    )


@pytest.mark.slow
def test_a_terminated_command_says_how_to_go_on(tmp_path: Path) -> None:
    code, errors = end_in_the_middle(tmp_path, lambda pid: os.kill(pid, signal.SIGTERM), "--method", "dense")
    assert code == 1
    assert errors == f"sparsync: stopped by SIGTERM; go on with: sparsync train --out {tmp_path} --resume\n"


@pytest.mark.slow
def test_no_worker_outlives_a_killed_command(tmp_path: Path) -> None:
    code, _ = end_in_the_middle(tmp_path, lambda pid: os.kill(pid, signal.SIGKILL), "--method", "dense")
    assert code == -signal.SIGKILL


# ---- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--method", "nothing"], "unknown method 'nothing'"),
        (["--density", "0"], "density must be above 0 and at most 1, got 0"),
        (["--density", "2"], "density must be above 0 and at most 1, got 2"),
        (["--workers", "0"], "workers must be from 1 to 42, so that each has 32 images, got 0"),
        (["--workers", "43"], "workers must be from 1 to 42, so that each has 32 images, got 43"),
        (["--data", "mnist", "--data-dir", "/nowhere"], "the data folder /nowhere does not exist"),
        (["--out", __file__], "test_train.py is a file; --out must be a folder"),
        (["--resume", "--out", "/nowhere"], "/nowhere holds no run to resume: there is no config.json in it"),
    ],
)
def test_bad_input_starts_nothing(arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert sentence in refuse(capsys, *arguments)


def test_what_a_worker_finds_wrong_is_said_by_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    said = refuse(capsys, "--workers", "2", "--steps", "1", "--out", tmp_path / "file/run")
    assert "Not a directory" in said


def test_a_training_that_ends_in_nan_fails_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = refuse(capsys, *SPARSE, "--steps", "8", "--rate", "1e6", "--out", tmp_path / "run")
    assert "the training ended in NaN: loss or weights are not finite, first seen at step " in said
    assert "lower --rate, which was 1e+06" in said
    assert json.loads((tmp_path / "run" / "outcome.json").read_text())["curve"][-1]["loss"] is None


def test_adamw_is_trained_resumed_and_preconditioned(tmp_path: Path) -> None:
    options = ["--workers", "2", "--optimizer", "adamw", "--density", "0.02"]  # a budget would follow the steps
    train(*options, "--steps", "5", "--out", tmp_path / "run")
    assert json.loads((tmp_path / "run" / "config.json").read_text())["training"]["rate"] == 0.002
    train("--out", tmp_path / "run", "--resume", "--steps", "10")
    train(*options, "--steps", "10", "--out", tmp_path / "straight")
    assert torch.equal(weights(tmp_path / "straight"), weights(tmp_path / "run"))
    assert "moments" in torch.load(max((tmp_path / "run").glob("checkpoint/*/rank*0.pt")), weights_only=True)["sync"]


def divide(worker: Worker, by: int) -> None:
    print(1 / by)


def divide_on_a_worker(by: int) -> None:
    with LocalWorkers(1) as workers:
        workers.run(divide, by)


def test_a_fault_in_a_worker_shows_where_it_is() -> None:
    with pytest.raises(WorkerFailed, match=r"(?s)^worker 0 failed:\nTraceback.*in divide\n.*ZeroDivisionError"):
        divide_on_a_worker(0)


def test_workers_start_where_the_temporary_folder_has_a_long_name(tmp_path: Path) -> None:
    long = tmp_path / ("long" * 20)
    long.mkdir()
    code = "from sparsync_lab.training.local_workers import fork_server; fork_server([])"
    command, variables = [sys.executable, "-c", code], os.environ | {"TMPDIR": str(long)}
    done = subprocess.run(command, cwd=ROOT, env=variables, stderr=subprocess.PIPE, text=True, timeout=LIMIT)
    assert done.returncode == 0, done.stderr


def test_another_training_is_not_resumed(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert f"{copy} holds a run already; continue it with --resume" in refuse(capsys, *SPARSE, "--out", copy)
    for option, value, now in [("model", "lenet5", "mlp"), ("method", "threshold", "topk"), ("density", "0.1", "0.02")]:
        said = refuse(capsys, "--resume", "--steps", "20", "--out", copy, f"--{option}", value)
        assert f"{copy} was trained with {option} {now}, not {value}" in said
    assert "has been trained for 10 steps, which is all of --steps 10" in refuse(capsys, "--resume", "--out", copy)
    assert "workers must be from 1 to 42" in refuse(capsys, "--resume", "--out", copy, "--workers", "0")
    config = json.loads((copy / "config.json").read_text())
    config["training"]["model"] = "lenet5"  # the checkpoint is then another model's
    (copy / "config.json").write_text(json.dumps(config))
    said = refuse(capsys, "--resume", "--steps", "20", "--out", copy)
    assert f"the checkpoint in {copy} was trained with model mlp, not lenet5" in said


def fill_with(text: str) -> Callable[[Path], None]:
    return lambda path: path.write_text(text) and None


@pytest.mark.parametrize(
    ("name", "damage", "sentence"),
    [
        ("config.json", cut_off, "config.json cannot be read, the run is damaged"),
        ("config.json", fill_with("{}"), "config.json cannot be read, the run is damaged: it is not of schema 1"),
        ("config.json", fill_with('{"schema": 1, "training": 3, "workers": 2}'), "config.json cannot be read"),
        ("metrics.jsonl", fill_with("no\n{}\n"), "metrics.jsonl, line 1 cannot be read"),
        ("metrics.jsonl", Path.unlink, "metrics.jsonl is missing, the run is damaged"),
        ("checkpoint/step-00000010/model.pt", cut_off, "model.pt cannot be read, the run is damaged"),
        ("checkpoint/step-00000010/model.pt", flip_a_byte, "model.pt cannot be read, the run is damaged"),
        ("checkpoint/step-00000010/model.pt", Path.unlink, "model.pt is missing, the run is damaged"),
        ("checkpoint/step-00000010/rank-1.pt", cut_off, "rank-1.pt cannot be read, the run is damaged"),
        ("checkpoint/step-00000010/rank-1.pt", Path.unlink, "rank-1.pt is missing, the run is damaged"),
    ],
)
def test_a_damaged_run_is_not_resumed(
    copy: Path, name: str, damage: Callable[[Path], None], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    damage(copy / name)
    if name.startswith("checkpoint"):
        damage(copy / name.replace("10", "09"))  # the one before, which would be taken
    assert sentence in refuse(capsys, "--resume", "--steps", "20", "--out", copy)
