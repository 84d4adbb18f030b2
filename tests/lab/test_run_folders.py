"""Run folders: wanted by two trainings, with torn checkpoints, found again by a launcher, on a full disk."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from sparsync_lab.cli.checked_training import check_launched
from sparsync_lab.data import load
from sparsync_lab.training import loop
from sparsync_lab.training.all_ranks import gather
from sparsync_lab.training.checkpoints import Checkpoint, Checkpoints
from sparsync_lab.training.local_workers import free_port
from sparsync_lab.training.run_folder import RunFolder
from sparsync_lab.training.run_lock import hold_lock
from sparsync_lab.training.settings import Point, Training
from tests.lab.trainings import (
    LIMIT,
    ROOT,
    SPARSE,
    TRAIN,
    common,
    cut_off,
    flip_a_byte,
    metrics,
    refuse,
    train,
    weights,
)
from tests.world import World, fork_server, processes_of

SETTINGS = Training("topk", density=0.02, momentum_mode="keep", steps=20)
MODEL, RANK_1 = "checkpoint/step-00000010/model.pt", "checkpoint/step-00000010/rank-1.pt"


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
    """The same, ended after 10 steps, with checkpoints of steps 9 and 10. Tests work on copies."""
    folder = tmp_path_factory.mktemp("runs") / "half"
    train(*SPARSE, "--steps", "10", "--out", folder)
    return folder


@pytest.fixture
def copy(half: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(half, tmp_path / "copy"))


def resume(rank: int, size: int, folder: Path, largest: tuple[int, int] | None = None) -> tuple[str, list[str]]:
    """Go on with a run on this rank; what it was refused with, and what was warned of.

    Args:
        largest: a rank, and how many bytes a file that it writes may have.
    """
    said = ""
    limit = largest[1] if largest is not None and largest[0] == rank else resource.RLIM_INFINITY
    with warnings.catch_warnings(record=True) as caught, file_limit(limit):
        warnings.simplefilter("always")
        try:
            loop.train(rank, size, SETTINGS, load("digits", None), folder=folder, resume=True)
        except ValueError as error:
            said = str(error)
    return said, [str(warning.message) for warning in caught if "momentum" not in str(warning.message)]


@contextmanager
def file_limit(size: int) -> Iterator[None]:
    """Let no file of this process grow beyond a size."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def wait_for(what: Callable[[], Any], process: subprocess.Popen[str]) -> Any:
    """Wait until there is something, while a process lives."""
    until = time.monotonic() + LIMIT / 2
    while not (found := what()):
        assert process.poll() is None, process.communicate(timeout=10)[1]
        assert time.monotonic() < until
        time.sleep(0.02)
    return found


@contextmanager
def started(command: list[str]) -> Iterator[subprocess.Popen[str]]:
    """Start a command in a session of its own, of which nothing is left at the end."""
    scratch = tempfile.TemporaryDirectory()  # a process that is killed leaves its temporary files
    process = subprocess.Popen(
        command, cwd=ROOT, env=os.environ | {"TMPDIR": scratch.name}, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, start_new_session=True,
    )  # fmt: skip
    try:
        yield process
    finally:
        left = set(processes_of(process.pid))
        if process.poll() is None:
            left |= {child.pid for child in psutil.Process(process.pid).children(recursive=True)}  # torchrun's workers
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.communicate(timeout=60)
        scratch.cleanup()


# ---- two trainings in one folder ------------------------------------------------------------------------------------


@pytest.mark.slow  # a process of its own must come up while the machine is busy
def test_a_second_training_in_a_run_folder_says_who_holds_it(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    holder = copy / "holder.json"
    command = [*TRAIN, "--resume", "--steps", "100000", "--out", str(copy)]
    with started(command) as first:
        wait_for(holder.exists, first)
        for arguments in (["--resume", "--steps", "20"], SPARSE):
            said = refuse(capsys, *arguments, "--out", copy)
            told = re.fullmatch(
                rf"sparsync: {copy} is in use by process (\d+) on {socket.gethostname()} since "
                r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d[+-]\d\d:\d\d; wait for its end, or give another --out\n",
                said,
            )
            assert told, said
            assert int(told[1]) in processes_of(first.pid)
    assert holder.exists()  # it was killed: nobody tidied up, and nobody is kept out
    step = common(copy)["step"]
    train("--resume", "--steps", str(step + 2), "--out", copy)
    assert common(copy)["step"] == step + 2
    assert not holder.exists()


def test_every_rank_is_told_that_the_folder_is_in_use(copy: Path, worlds: dict[int, World]) -> None:
    before = metrics(copy)
    with hold_lock(copy):
        answers = worlds[2].run(resume, folder=copy)
    assert answers[0] == answers[1]
    assert f"{copy} is in use by process {os.getpid()} on {socket.gethostname()} since " in answers[0][0]
    assert metrics(copy) == before
    assert (copy / "outcome.json").exists()


# ---- torn checkpoints -----------------------------------------------------------------------------------------------


def fill_with_garbage(path: Path) -> None:
    path.write_bytes(b"\x00\xff" * 5000)


@pytest.mark.each_value
@pytest.mark.parametrize("damage", [cut_off, flip_a_byte, fill_with_garbage, Path.unlink])
@pytest.mark.parametrize("name", [MODEL, RANK_1])
def test_a_torn_checkpoint_falls_back_to_the_one_before(
    straight: Path, copy: Path, name: str, damage: Callable[[Path], None], worlds: dict[int, World]
) -> None:
    damage(copy / name)
    (said, warned), other = worlds[2].run(resume, folder=copy)
    assert said == ""
    assert other == ("", [])  # rank 0 says it for all
    assert len(warned) == 1
    assert re.fullmatch(
        rf"{copy / name} (cannot be read|is missing), the run is damaged.*; "
        "going on from the checkpoint before it, of step 9",
        warned[0],
    )
    assert torch.equal(weights(copy), weights(straight))
    assert [point["step"] for point in metrics(copy)] == [*range(1, 10), *range(10, 21, 2)]
    assert (copy / "checkpoint/step-00000010.damaged").is_dir()


@pytest.mark.slow
def test_one_command_says_that_it_falls_back(straight: Path, copy: Path) -> None:
    cut_off(copy / RANK_1)
    command = [*TRAIN, "--resume", "--steps", "20", "--out", str(copy)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 0, done.stderr
    assert f"sparsync: {copy / RANK_1} cannot be read, the run is damaged" in done.stderr
    assert "; going on from the checkpoint before it, of step 9\n" in done.stderr
    assert torch.equal(weights(copy), weights(straight))


def newest(rank: int, size: int, folders: list[Path]) -> tuple[int | None, str | None]:
    """The checkpoint to go on from, where each rank reads a folder of its own."""
    return Checkpoints(folders[rank] / "checkpoint").newest_whole(rank, size, gather)


def test_all_ranks_take_the_checkpoint_that_each_can_read(half: Path, tmp_path: Path, worlds: dict[int, World]) -> None:
    folders = [Path(shutil.copytree(half, tmp_path / str(rank))) for rank in range(3)]
    assert worlds[3].run(newest, folders=folders) == [(10, None)] * 3
    cut_off(folders[2] / MODEL)  # ranks 0 and 1 find nothing wrong
    answers = worlds[3].run(newest, folders=folders)
    assert [step for step, _ in answers] == [9] * 3
    assert all(str(folders[2] / MODEL) in str(wrong) for _, wrong in answers)


def save(rank: int, size: int, folder: Path) -> list[str]:
    """Save three checkpoints; what was written through to the disk, renamed and deleted for the last one, in order."""
    seen: list[str] = []
    fsync, rename, rmtree = os.fsync, Path.rename, shutil.rmtree

    def note_fsync(descriptor: int) -> None:
        seen.append(f"fsync {os.path.basename(os.readlink(f'/proc/self/fd/{descriptor}'))}")
        fsync(descriptor)

    def note_rename(path: Path, target: Path) -> Path:
        seen.append(f"rename {path.name} {target.name}")
        return rename(path, target)

    def note_rmtree(path: Path, **keywords: Any) -> None:
        seen.append(f"delete {path.name}")
        rmtree(path, **keywords)

    checkpoints = Checkpoints(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", note_fsync)
        patch.setattr(Path, "rename", note_rename)
        patch.setattr(shutil, "rmtree", note_rmtree)
        for step in (1, 2, 3):
            seen.clear()
            checkpoints.save(rank, Checkpoint(SETTINGS, size, step, {}, {}, {}), {"kept": torch.ones(9)})
    return seen


def test_a_checkpoint_is_on_the_disk_before_it_counts(tmp_path: Path, worlds: dict[int, World]) -> None:
    first, second = worlds[2].run(save, folder=tmp_path)
    assert second == ["fsync rank-1.pt"]
    assert first == [
        "fsync rank-0.pt",
        "fsync model.pt",
        "fsync step-00000003.part",
        "rename step-00000003.part step-00000003",
        f"fsync {tmp_path.name}",
        "delete step-00000001",
    ]
    assert Checkpoints(tmp_path).steps() == [3, 2]


# ---- started again by torchrun --------------------------------------------------------------------------------------


def worker_of(launcher: int, rank: int, folder: Path) -> int | None:
    """Return the process of a rank that torchrun has started, once its training has begun."""
    if not (folder / "holder.json").exists():
        return None
    for process in psutil.Process(launcher).children():
        if process.environ().get("RANK") == str(rank):
            return process.pid
    return None


@pytest.mark.slow
@pytest.mark.parametrize(("rank", "size", "named"), [(0, 3, True), (1, 2, False)], ids=["first", "last"])
def test_torchrun_recovers_from_a_killed_rank(rank: int, size: int, named: bool, tmp_path: Path) -> None:
    options = [*SPARSE[:-2], "--steps", "600", "--out"]
    train("--workers", size, *options, tmp_path / "straight")
    folder = tmp_path / "run"
    rendezvous = ["--standalone"] if named else ["--master-port", str(free_port())]
    launcher = [sys.executable, "-m", "torch.distributed.run", *rendezvous, "--nproc-per-node", str(size)]
    command = [*launcher, "--max-restarts", "2", "-m", "sparsync_lab", "train", *options, str(folder)]
    with started(command) as process:
        pid = wait_for(lambda: worker_of(process.pid, rank, folder), process)
        wait_for(lambda: len(Checkpoints(folder / "checkpoint").steps()) == 2, process)
        os.kill(pid, signal.SIGKILL)
        kept = Checkpoints(folder / "checkpoint").steps()[0]
        _, errors = process.communicate(timeout=LIMIT)
    assert process.returncode == 0, errors
    _, again = errors.split(f"sparsync: started again, going on from the last checkpoint in {folder}\n")
    steps = [int(step) for step in re.findall(r"^step (\d+)/600: ", again, flags=re.MULTILINE)]
    assert kept < steps[0]  # nothing of before the checkpoint was trained again
    assert steps == list(range(steps[0], 601, 60))
    assert torch.equal(weights(folder), weights(tmp_path / "straight"))
    assert metrics(folder) == metrics(tmp_path / "straight")


def test_only_the_launch_that_began_a_run_goes_on_with_it(
    copy: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = {"method": "topk", "density": 0.02, "momentum_mode": "keep"}
    asked = given | {"steps": 20}
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"launch": "job 7"}))
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    for other in ("job 8", "none", None):  # the second is no name: then it is the launcher's process
        if other is None:
            monkeypatch.delenv("TORCHELASTIC_RUN_ID")
        else:
            monkeypatch.setenv("TORCHELASTIC_RUN_ID", other)
        with pytest.raises(ValueError, match="holds a run already; continue it with --resume"):
            check_launched(asked, 2, copy, None, resume=False)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job 7")
    checked = check_launched(asked, 2, copy, None, resume=False)
    assert checked is not None
    assert (checked.resume, checked.launch) == (True, "job 7")
    capsys.readouterr()
    for resumed in (False, True):  # killed when all was done
        assert check_launched(given | {"steps": 10}, 2, copy, None, resumed) is None
        shown = capsys.readouterr()
        assert shown.out.startswith("topk on 2 worker(s): test accuracy ")
        assert shown.err == ""


def test_a_launcher_that_starts_workers_once_resumes_nothing(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    with pytest.raises(ValueError, match="holds a run already"):
        check_launched({"method": "topk", "density": 0.02, "momentum_mode": "keep"}, 2, copy, None, resume=False)


# ---- no room on the disk --------------------------------------------------------------------------------------------


def may_mount() -> bool:
    return (
        subprocess.run(["unshare", "-rm", "mount", "-t", "tmpfs", "none", "/mnt"], capture_output=True).returncode == 0
    )


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("unshare") is None or not may_mount(), reason="file systems cannot be mounted here")
def test_a_full_disk_is_one_sentence_and_code_2(tmp_path: Path) -> None:
    disk, after = tmp_path / "disk", tmp_path / "after"
    disk.mkdir()
    command = " ".join([*TRAIN, *SPARSE, "--steps", "100", "--out", str(disk / "run")])
    script = f"mount -t tmpfs -o size=3500k none {disk} && {command}; code=$?; cp -r {disk}/run {after}; exit $code"
    done = subprocess.run(
        ["unshare", "-rm", "sh", "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=LIMIT
    )
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    said = done.stderr.splitlines()[-1]
    assert re.fullmatch(
        rf"sparsync: {disk}/run/checkpoint/step-00000030.part/(model|rank-\d).pt cannot be written: "
        r"No space left on device; the checkpoint of step 20 is whole: --resume",
        said,
    )
    assert done.stderr.count("sparsync: ") == 1
    assert [path.name for path in sorted(after.glob("checkpoint/*"))] == ["step-00000010", "step-00000020"]
    train("--resume", "--steps", "22", "--out", after)
    assert common(after)["step"] == 22


@pytest.mark.parametrize(
    ("largest", "name"),
    [((0, 100_000), "rank-0.pt"), ((0, 500_000), "model.pt"), ((1, 100_000), "rank-1.pt")],
)
def test_a_checkpoint_that_cannot_be_written_is_said_by_all_ranks(
    straight: Path, copy: Path, largest: tuple[int, int], name: str, worlds: dict[int, World]
) -> None:
    answers = worlds[2].run(resume, folder=copy, largest=largest)
    assert [said for said, _ in answers] == 2 * [
        f"{copy}/checkpoint/step-00000012.part/{name} cannot be written: File too large; "
        "the checkpoint of step 10 is whole: --resume"
    ]
    assert [path.name for path in sorted(copy.glob("checkpoint/*"))] == ["step-00000009", "step-00000010"]
    assert [said for said, _ in worlds[2].run(resume, folder=copy)] == ["", ""]
    assert torch.equal(weights(copy), weights(straight))
    assert metrics(copy)[10:] == metrics(straight)[5:]


def test_other_files_that_cannot_be_written_leave_the_old_ones(copy: Path, worlds: dict[int, World]) -> None:
    before = {path.name: path.read_bytes() for path in copy.glob("*.json*")}
    answers = worlds[2].run(resume, folder=copy, largest=(0, 150))  # enough for the lock's holder
    assert [said for said, _ in answers] == 2 * [f"{copy / 'config.json.part'} cannot be written: File too large"]
    assert {path.name: path.read_bytes() for path in copy.glob("*.json*")} == before
    with file_limit(100), pytest.raises(ValueError, match=r"metrics.jsonl cannot be written: .* step 10 is whole"):
        RunFolder(copy).append(Point(12, 1.0, 0.5, 3.0))
