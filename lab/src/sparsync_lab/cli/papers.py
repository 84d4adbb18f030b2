"""``sparsync papers``: the papers' figures and tables, made again."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Annotated

import torch
import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from sparsync_lab.cli.command_list import CommandList
from sparsync_lab.cli.parallel_jobs import ParallelJobs, command_arguments, exit_when_stdin_closes

if TYPE_CHECKING:
    from sparsync_lab.papers import Item

OUTPUT = Path("results/papers")
SHOWN = 3  # of the trainings that are not done yet
UNBOUND = 10_000  # characters of a line that goes into a file or another command
Output = Annotated[Path, typer.Option(help="Folder of the results.")]

papers = typer.Typer(cls=CommandList, help="The papers' figures and tables, made again.", no_args_is_help=True)


@papers.command("list")
def list_items(
    item: Annotated[str, typer.Argument(help="Of an item with many trainings, their order: 'beyond/accuracy'.")] = "",
    output: Output = OUTPUT,
    seed: Annotated[int, typer.Option(help="As in 'run'.")] = 0,
) -> None:
    """List the items, what each needs, and what has been run."""
    from sparsync_lab.papers import ITEMS, RunContext
    from sparsync_lab.papers.report_page import listed

    if item:
        orders = {key: one.order for key, one in ITEMS.items() if one.order is not None}
        if item not in orders:
            raise ValueError(f"item must be one of {', '.join(orders)} or left out, got {item!r}")
        found = orders[item](RunContext(output=output, seed=seed))
        _print(found.headings, [row.cells for row in found.rows])
        return
    _print(("item", "what it is", "full run needs", "result"), listed(list(ITEMS.values()), output))


def _print(headings: Iterable[str], lines: Iterable[Iterable[str]]) -> None:
    """Print a table: names whole, to be copied into --only, and a line a row where no terminal wraps it."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for heading in headings:
        table.add_column(heading, overflow="fold")
    for line in lines:
        table.add_row(*line)
    console = Console()
    if not console.is_terminal:
        console.width = UNBOUND
    console.print(table)


@papers.command("run")
def run(
    ctx: typer.Context,
    item: Annotated[str, typer.Argument(help="A key of 'sparsync papers list', a paper ('p1'), or 'all'.")],
    quick: Annotated[bool, typer.Option("--quick", help="A tiny setting: 2 minutes at most on 2 CPU cores.")] = False,
    device: Annotated[str, typer.Option(help="cpu or cuda; by default cuda, if there is one.")] = "",
    data_dir: Annotated[
        Path | None, typer.Option(help="Folder of the data sets.", show_default="$SPARSYNC_DATA")
    ] = None,
    output: Output = OUTPUT,
    seed: Annotated[int, typer.Option(help="Of weights, order of the data and random methods.")] = 0,
    epochs: Annotated[
        float | None, typer.Option(help="Of each training, instead of the paper's; schedules shrink with it.")
    ] = None,
    only: Annotated[
        list[str],
        typer.Option(help="Only trainings whose name holds this word ('topk', 'resnet20'); repeatable."),
    ] = [],  # noqa: B006
    minutes: Annotated[
        float | None,
        typer.Option(
            help="Stop in time; what is not finished is resumed by the next call. Nothing is begun in the last "
            "half minute."
        ),
    ] = None,
    whole: Annotated[
        bool,
        typer.Option(
            "--whole",
            help="With --minutes: begin only trainings that will be done in time, as far as their length is known. For "
            "a machine that is gone then, with its checkpoints.",
        ),
    ] = False,
    jobs: Annotated[
        int,
        typer.Option(
            help="Processes that share the trainings; the same as to start the command so many times. On a GPU, "
            "NVIDIA's MPS (nvidia-cuda-mps-control -d) lets their kernels run at the same time; without it they take "
            "turns. What measures time (p1/table2, p2/table2) is done by one process, before the others start."
        ),
    ] = 1,
    resume: Annotated[
        bool, typer.Option(help="Use finished trainings and go on with others; or begin all of them anew.")
    ] = True,
    scratch: Annotated[
        Path, typer.Option(help="Folder for checkpoints of unfinished trainings, and locks of those under way.")
    ] = Path("runs/papers"),
    helps: Annotated[
        float | None,
        typer.Option(hidden=True, help="Only train: for a command with --jobs that began at this time.time()."),
    ] = None,
) -> None:
    """Make a figure or a table again: JSON and PNG in the folder of the results.

    \b
    sparsync papers run p1/fig3
    sparsync papers run p1/fig6 --device cuda --epochs 20 --minutes 8
    sparsync papers run beyond/accuracy --device cuda --minutes 9 --jobs 6
    sparsync papers run all --quick

    Several of these commands may run side by side: a training is made by the one that locks it first, and each waits
    for the others' as long as there is time. What measures time (p1/table2, p2/table2) should run alone.
    """
    from sparsync_lab.papers import RunContext, chosen
    from sparsync_lab.papers.run_queue import NoMatchingRun, SomeRunsFailed, write_result

    if minutes is not None and not minutes > 0:
        raise ValueError(f"minutes must be above 0, got {minutes:g}")
    if whole and minutes is None:
        raise ValueError("whole must be left out without minutes, got True")
    if jobs < 1:
        raise ValueError(f"jobs must be 1 or more, got {jobs}")
    if device not in ("", "cpu", "cuda"):
        raise ValueError(f"device must be cpu or cuda, got {device!r}")
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device must be cpu here, where torch finds no GPU, got 'cuda'")
    if quick:
        torch.set_num_threads(1)  # tiny tensors: a second thread costs more than it brings
    begun = time.time() if helps is None else helps
    ago = time.time() - begun
    context = RunContext(
        quick=quick,
        device=torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu")),
        data=data_dir,
        output=output,
        scratch=scratch,
        seed=seed,
        epochs=epochs,
        only=tuple(only),
        begun=begun,
        deadline=time.monotonic() - ago + 60 * minutes if minutes is not None else float("inf"),
        whole=whole,
        resume=resume,
        log=lambda line: print(f"  {line}\n", end="", flush=True),
    )
    items = chosen(item)
    if epochs is not None and not any(one.by_epochs for one in items):
        raise ValueError(
            f"epochs must be left out: {item} has no training whose length is given in them, got {epochs:g}"
        )
    if seed < 0:
        raise ValueError(f"seed must not be below 0, got {seed}")
    if only and not any(one.trains for one in items):
        raise ValueError(f"only must be left out: {item} trains nothing, got {', '.join(only)}")
    check_writable("output", output)
    if any(one.trains for one in items):
        check_writable("scratch", scratch)
    started: dict[str, float] = {}
    failed: list[str] = []
    unfit: list[str] = []

    def train(one: Item) -> bool:
        """Train an item and return whether its result can be made. An error stops no other item, which may need other
        data."""
        started[one.key] = time.monotonic()
        print(f"{one.key}: {one.title}", flush=True)
        try:
            if one.trains:
                one.run(context)
        except NoMatchingRun as error:  # of several items, another may have it
            if len(items) == 1:
                raise
            print(f"  {error}", flush=True)
            unfit.append(one.key)
            return False
        except SomeRunsFailed as error:  # the result is made from the others
            failed.append(one.key)
            print(f"  {error}", flush=True)
        except (ValueError, OSError, RuntimeError) as error:
            return give_up(one, error)
        return True

    def finish(one: Item) -> None:
        try:
            path, result = write_result(context, one)
        except (ValueError, OSError) as error:
            give_up(one, error)
            return
        print(f"  {path}, {time.monotonic() - started[one.key]:.0f} s{unfinished(result.missing)}", flush=True)

    def give_up(one: Item, error: Exception) -> bool:
        if len(items) == 1:
            raise error
        failed.append(one.key)
        print(f"  not made: {error}", flush=True)
        return False

    shared = [one for one in items if one.trains]
    if helps is not None:
        exit_when_stdin_closes()
        for one in shared:
            train(one)
        check_made(items, failed, unfit)
        return
    for one in items:
        if (jobs == 1 or not one.trains) and train(one):
            finish(one)
    if jobs == 1 or not shared:
        check_made(items, failed, unfit)
        return
    threads = max(1, torch.get_num_threads() // jobs)
    torch.set_num_threads(threads)
    same = ["papers", "run", *command_arguments(ctx, without=("jobs", "helps")), f"--helps={begun}"]
    with ParallelJobs(same, jobs - 1, threads) as others:
        ready = [one for one in shared if train(one)]
        others.wait()
    for one in ready:
        finish(one)
    check_made(items, failed, unfit)
    others.check()


@papers.command("redraw")
def redraw(
    item: Annotated[str, typer.Argument(help="A key of 'sparsync papers list', a paper ('p1'), or 'all'.")],
    output: Output = OUTPUT,
    seed: Annotated[int, typer.Option(help="As in 'run'.")] = 0,
) -> None:
    """Make tables and figures anew from what is stored; train and measure nothing."""
    from sparsync_lab.papers import RunContext, chosen
    from sparsync_lab.papers.run_queue import redraw_result
    from sparsync_lab.papers.store import place

    context = RunContext(output=output, seed=seed).read_only()
    for one in chosen(item):
        if not (one.trains or one.redraw):
            print(f"{one.key}: made by 'sparsync papers run' alone")
        elif place(context, one).is_file() or (one.trains and one.run(context).runs):
            path, result = redraw_result(context, one)
            print(f"{one.key}: {path}{unfinished(result.missing)}", flush=True)


@papers.command("report")
def report(
    output: Output = OUTPUT,
    page: Annotated[Path | None, typer.Option(help="File to write.", show_default="report.html there")] = None,
) -> None:
    """Write all results on one page that loads nothing from elsewhere."""
    from sparsync_lab.papers import ITEMS
    from sparsync_lab.papers.report_page import write_report

    if not output.is_dir():
        raise ValueError(f"output must be a folder with results, and there is no {output}")
    path = page or output / "report.html"
    path.parent.mkdir(parents=True, exist_ok=True)
    full, quick, left = write_report(ITEMS.values(), output, path)
    print(f"{full} results, {quick} quick ones, {left} not run yet")
    print(f"report: {path}")


@papers.command("verify")
def verify(output: Output = OUTPUT) -> None:
    """Make everything that is stated anew from the stored trainings, and fail on any that differs.

    Tables, figures, notes and what is missing. What needs no training is computed again; what was measured is taken as
    it is stored, and what is made of it is made anew. Where README.md and docs/ are here, they are compared with the
    results, too.
    """
    from sparsync_lab.papers import ITEMS, RunContext
    from sparsync_lab.papers.verify import differences, stale_pages

    if not output.is_dir():
        raise ValueError(f"output must be a folder with results, and there is no {output}")
    wrong = 0
    for item, found in differences(ITEMS.values(), RunContext(output=output)):
        print(f"{item.key}: {f'{len(found)} differ' if found else 'as stated'}")
        for line in found:
            print(f"  {line}")
        wrong += len(found)
    if Path("docs/papers.md").is_file() and output == OUTPUT:
        stale = stale_pages(Path(), output.parent)
        print(f"pages: {', '.join(map(str, stale)) or 'as stated'}")
        wrong += len(stale)
    if wrong:
        raise ValueError(f"{wrong} statements do not follow from what is stored, see above")


def unfinished(missing: Sequence[str]) -> str:
    """Return what is not done yet, for the end of a line: the first few, and how many more there are."""
    if not missing:
        return ""
    more = f" and {len(missing) - SHOWN} more" if len(missing) > SHOWN else ""
    return f"; not done yet: {', '.join(missing[:SHOWN])}{more}"


def check_made(items: Sequence[Item], failed: Sequence[str], unfit: Sequence[str]) -> None:
    """Raise if items failed or none matched ``--only``; called when all others are made."""
    if unfit and len(unfit) == sum(one.trains for one in items):
        raise ValueError("no training of any item has a word of --only in its name, see above")
    if failed:
        whole = "not made, or without trainings that failed"
        raise ValueError(f"{len(failed)} of {len(items)} items are {whole}, see above: {', '.join(failed)}")


def check_writable(name: str, folder: Path) -> None:
    """Raise, before anything is trained, if its result could not be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):
            pass
    except OSError as error:
        reason = error.strerror or str(error)
        raise ValueError(f"{name} must be a folder that can be written to, got {folder}: {reason}") from None
