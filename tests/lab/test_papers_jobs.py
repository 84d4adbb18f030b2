"""Several processes at the trainings of an item: real ones, that share them."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
import typer

from sparsync_lab.cli import parallel_jobs as jobs
from sparsync_lab.cli.app import run as command
from sparsync_lab.cli.papers import papers
from sparsync_lab.cli.parallel_jobs import ParallelJobs, command_arguments, exit_when_stdin_closes
from sparsync_lab.papers import ITEMS, RunContext, beyond, locks, run_queue, store, tasks
from sparsync_lab.papers.curves import train_runs
from sparsync_lab.papers.item import Item, Result
from sparsync_lab.papers.locks import try_lock, wait_for_lock
from sparsync_lab.papers.run import History, Run, file_of
from sparsync_lab.papers.run_queue import train_missing, write_result
from sparsync_lab.papers.store import load, replacing
from sparsync_lab.papers.sweep import SETTINGS, Stage
from sparsync_lab.papers.trainings import train_run
from sparsync_lab.training.local_workers import WorkerFailed
from tests.lab.generated import images, run_forked
from tests.lab.test_papers import TINY, names_in, task
from tests.world import fork_server

LIMIT = 120  # seconds: for what hangs, on a busy machine
ITEM = ITEMS["p3/density"]
TRAINED = re.compile(r"(\S+): step 4 of 4,")


@pytest.fixture
def context(tmp_path: Path) -> RunContext:
    return RunContext(quick=True, output=tmp_path / "papers", scratch=tmp_path / "scratch")


@pytest.fixture
def trained_here(context: RunContext, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of what this process trains; after the first it waits until another has trained something, too."""
    monkeypatch.setattr(tasks, "load_images", lambda kind, folder: ("generated", images(3, 32)))
    names: list[str] = []

    def slowly(run: Run, context: RunContext) -> History | None:
        history = train_run(run, context)
        names.append(run.name)
        until(lambda: any(name not in names for name in names_in(context.output)))
        return history

    monkeypatch.setattr(run_queue, "train_run", slowly)
    return names


def arguments(context: RunContext, *more: str) -> list[str]:
    places = ["--output", str(context.output), "--scratch", str(context.scratch)]
    return ["papers", "run", ITEM.key, "--quick", *places, *more]


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.05)


def lock(context: RunContext, run: Run) -> Path:
    return context.scratch / f"{run.made(context).name}.lock"


def check_complete(context: RunContext, here: list[str], there: list[str]) -> None:
    """Both had their share, no training was made twice, and the result holds them all."""
    assert here
    assert there
    names = sorted(here + there)
    assert len(set(names)) == len(names) == 4
    path = store.place(context, ITEM)
    assert sorted(load(path).result.runs) == names
    assert not load(path).result.missing
    assert path.with_suffix(".png").is_file()
    assert not [*context.output.rglob("*.part"), *context.scratch.glob("*.pt")]


def test_processes_side_by_side_share_the_trainings(
    context: RunContext, trained_here: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    text = context.output.parent / "said"
    process = fork_server().Process(target=run_forked, args=(arguments(context), text), daemon=True)
    process.start()
    try:
        assert command(arguments(context)) == 0
        process.join(LIMIT)
    finally:
        process.kill()
    assert process.exitcode == 0
    check_complete(context, trained_here, TRAINED.findall(text.read_text()))
    assert "not done yet" not in text.read_text() + capsys.readouterr().out


@pytest.mark.slow
def test_one_command_with_several_jobs(
    context: RunContext,
    trained_here: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(jobs, "COMMAND", (sys.executable, "-m", "tests.lab.generated"))
    # Anew, and yet what the other process has trained is used.
    assert command(arguments(context, "--jobs", "2", "--no-resume", "--minutes", "10")) == 0
    lines = capsys.readouterr().out.splitlines()
    theirs = [line for line in lines if line.startswith("  [2] ")]
    check_complete(context, trained_here, TRAINED.findall("\n".join(theirs)))
    assert len(TRAINED.findall("\n".join(lines))) == 4
    assert [line.partition(",")[0] for line in lines if ".json" in line] == [f"  {store.place(context, ITEM)}"]


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """Ctrl-C interrupts, which it does not where a shell started the tests in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_ends_all(
    context: RunContext, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = tmp_path / "pid"
    code = f"import os, pathlib, time; pathlib.Path({str(told)!r}).write_text(f'{{os.getpid()}}.'); time.sleep(100)"
    monkeypatch.setattr(jobs, "COMMAND", (sys.executable, "-S", "-c", code))

    def interrupt() -> None:
        until(lambda: told.exists() and told.read_text().endswith("."))
        os.kill(os.getpid(), signal.SIGINT)

    with ExitStack() as held:
        for name in ITEM.run(context.read_only()).missing:
            assert held.enter_context(try_lock(context.scratch / f"{name}.lock"))
        threading.Thread(target=interrupt).start()
        assert command(arguments(context, "--jobs", "2")) == 130
    assert "sparsync: interrupted" in capsys.readouterr().err
    with pytest.raises(ProcessLookupError):
        os.kill(int(told.read_text()[:-1]), 0)
    assert not store.place(context, ITEM).exists()


# ---- locks ----------------------------------------------------------------------------------------------------------


def test_a_lock_is_one_process_s_and_ends_with_it(tmp_path: Path) -> None:
    path = tmp_path / "scratch" / "run.lock"
    code = (
        "import pathlib, sys, time\nsys.path.insert(0, sys.argv[2])\nfrom locks import try_lock\n"
        "with try_lock(pathlib.Path(sys.argv[1])) as locked: print(locked, flush=True); time.sleep(100)"
    )
    holding = [sys.executable, "-c", code, str(path), str(Path(locks.__file__).parent)]
    with subprocess.Popen(holding, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "True\n"
        with try_lock(path) as locked:
            assert not locked
        holder.kill()  # it has no time to tidy up
        holder.wait()
        with try_lock(path) as locked:
            assert locked
            with try_lock(path) as again:
                assert not again
    with wait_for_lock(path), try_lock(path) as locked:
        assert not locked


def test_nothing_is_begun_at_the_very_end(context: RunContext, monkeypatch: pytest.MonkeyPatch) -> None:
    """A training of unknown length wants half a minute; a short one as long as it takes."""
    monkeypatch.setattr(tasks, "load_images", lambda kind, folder: ("generated", images(1, 28)))
    late = replace(context, deadline=time.monotonic() + 25)
    assert train_missing(late, [TINY]) == ({}, [TINY.name])
    assert not list(context.scratch.glob("*.pt"))
    assert not train_missing(late, [replace(TINY, rate=0.1, seconds=1)])[1]
    waits = replace(context, deadline=time.monotonic() + 0.3)
    with try_lock(lock(context, TINY)):
        assert train_missing(waits, [TINY]) == ({}, [TINY.name])
    assert not waits.in_time()


def test_where_all_must_be_whole_what_cannot_end_in_time_makes_way(
    context: RunContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    """How long trainings take here is learned from the first."""
    long, short, unknown = (replace(TINY, rate=rate, seconds=s) for rate, s in ((0.1, 40.0), (0.2, 10.0), (0.3, 0.0)))
    made: list[float] = []

    def train(run: Run, context: RunContext) -> History | None:
        made.append(run.rate)
        clock[0] += run.seconds * 1.5
        return None if time.monotonic() > context.deadline else history

    monkeypatch.setattr(tasks, "load_images", lambda kind, folder: ("generated", images(1, 28)))
    history = train_run(TINY, context)
    clock = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(run_queue, "train_run", train)
    whole = replace(context, deadline=72.0, whole=True)
    assert train_missing(whole, [replace(short, rate=0.4), long, short, unknown])[1] == [long.name]
    assert made == [0.4, 0.2, 0.3]  # 57 seconds are left after the first, and the long one wants 70 of them
    made.clear()
    clock[0] = 0.0
    train_missing(replace(whole, whole=False), [long, short])
    assert made[0] == 0.1
    made.clear()
    clock[0] = 0.0
    history = replace(history, seconds=60.0)  # the first goes on from a checkpoint, after most of its time
    assert train_missing(whole, [replace(short, rate=0.5), replace(short, rate=0.6)])[1] != []
    assert made == [0.5]


def test_waiting_opens_the_next_stage(context: RunContext, monkeypatch: pytest.MonkeyPatch) -> None:
    """One training of the search is another's: what comes after the search begins when that is there."""
    monkeypatch.setattr(tasks, "load_images", lambda kind, folder: ("generated", images(1, 28)))
    tiny = replace(SETTINGS["lenet5"], workers=2, batch=4, lengths=(3, 4), limit=32)
    stages = (Stage("lenet5", 0, (0,), ("dense",)), Stage("lenet5", 1, (0,), ("dense",)))
    monkeypatch.setattr(beyond, "QUICK_SETTINGS", {"lenet5": tiny})
    monkeypatch.setattr(beyond, "QUICK_STAGES", stages)
    elsewhere = replace(context, output=context.output.parent / "elsewhere")
    everything = beyond.accuracy(elsewhere).runs
    first = beyond.Sweep(context).search.run("lenet5", "dense", 0.5, 0)
    lines: list[str] = []

    def said(line: str) -> None:
        lines.append(line)
        if line.startswith("waiting"):
            threading.Timer(0.2, finish).start()

    def finish() -> None:
        source, place = (file_of(where, first.made(context)) for where in (elsewhere, context))
        shutil.copy(source, part := place.with_suffix(".part"))
        part.rename(place)  # whole or not at all: it is being waited for
        held.close()

    held = ExitStack()
    assert held.enter_context(try_lock(lock(context, first)))
    monkeypatch.setattr(run_queue, "POLL_SECONDS", 0.1)
    result = beyond.accuracy(replace(context, log=said))
    assert not result.missing
    assert set(result.runs) == set(everything)
    waited = [line.startswith("waiting") for line in lines].index(True)
    assert not any(": step 4 of 4" in line for line in lines[:waited])
    assert any(": step 4 of 4" in line for line in lines[waited:])
    assert not any(line.startswith(first.made(context).name) for line in lines)


def test_the_last_result_has_seen_everything(context: RunContext) -> None:
    """A process that waits to write the result reads what is stored when its turn has come."""
    item = Item("p9/fig1", "", "", lambda context: train_runs(context, [TINY])[1], trains=True)
    found: list[Result] = []
    with try_lock(context.scratch / "p9-fig1-quick.lock"):
        waits = threading.Thread(target=lambda: found.append(write_result(context, item)[1]))
        waits.start()
        time.sleep(0.2)
        assert train_run(TINY, context, task(TINY)) is not None
        assert not found
    waits.join(LIMIT)
    assert found[0].runs == [TINY.name]
    assert load(context.output / "p9-fig1-quick.json").result.runs == [TINY.name]


def test_a_file_is_replaced_as_a_whole(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")

    def torn() -> None:
        with replacing(path) as part:
            part.write_text("half")
            assert path.read_text() == "old"
            raise OSError("no space")

    with pytest.raises(OSError, match="no space"):
        torn()
    assert [p.name for p in tmp_path.iterdir()] == ["file"]
    with replacing(path) as part:
        part.write_text("new")
    assert path.read_text() == "new"


def test_items_that_train_are_known(context: RunContext) -> None:
    """Those are shared; what measures time must not be among them."""
    for item in ITEMS.values():
        if item.trains:
            assert item.run(context.read_only()).missing, item.key
        else:
            assert item.key in (
                "p1/table1",
                "p1/fig3",
                "p1/fig4",
                "p1/table2",
                "p1/table2-model",
                "p2/table2",
                "p3/traffic",
            )
    assert not context.scratch.exists()  # whoever only reads claims nothing


# ---- the other processes --------------------------------------------------------------------------------------------


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small programs in place of the command line."""
    monkeypatch.setattr(jobs, "COMMAND", (sys.executable, "-S", "-c"))


@pytest.mark.usefixtures("plain")
def test_a_process_that_fails_is_quoted(capsys: pytest.CaptureFixture[str]) -> None:
    code = "import os, sys; print('threads', os.environ['OMP_NUM_THREADS']); sys.exit('out of memory')"
    with ParallelJobs([code], 2, 3) as others:
        others.wait()
    with pytest.raises(WorkerFailed, match=r"process 2 ended with code 1; its last lines:\n(.*\n)?  out of memory"):
        others.check()
    shown = capsys.readouterr().out.splitlines()
    assert sorted(shown) == [f"  [{n}] {line}" for n in (2, 3) for line in ("out of memory", "threads 3")]


@pytest.mark.usefixtures("plain")
def test_no_process_is_left_behind() -> None:
    def interrupted() -> None:
        with ParallelJobs(["import time; time.sleep(100)"], 2, 1) as others:
            processes.extend(others._processes)
            raise KeyboardInterrupt

    processes: list[subprocess.Popen[str]] = []
    begun = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert [process.returncode for process in processes] == [-signal.SIGTERM] * 2
    assert time.monotonic() - begun < 50


def test_a_process_ends_with_its_starter() -> None:
    """Even if that was killed: the standard input of those it started ends."""
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(theirs)
        os.dup2(ours, 0)
        exit_when_stdin_closes()
        time.sleep(LIMIT)
        os._exit(7)
    os.close(ours)
    time.sleep(0.2)
    assert os.waitpid(child, os.WNOHANG) == (0, 0)
    os.close(theirs)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1


def test_the_same_arguments_again() -> None:
    parser = typer.main.get_command(papers).commands["run"]  # type: ignore[attr-defined]
    given = ["p1", "--quick", "--only=a b", "--only", "c", "--no-resume", "--seed", "-1", "--minutes=2.5", "--jobs=3"]
    first = parser.make_context("run", list(given))
    words = command_arguments(first, without=("jobs", "helps"))
    again = parser.make_context("run", words)
    assert again.params == first.params | {"jobs": 1}
