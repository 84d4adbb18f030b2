"""``sparsync compare``: the same training with several methods, side by side."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from sparsync_lab.cli.progress import progress_bar
from sparsync_lab.data import check_workers, train_size
from sparsync_lab.environment import environment
from sparsync_lab.packages import require
from sparsync_lab.training.compare import MOVE, label, plan_trainings, summarize, train_all
from sparsync_lab.training.settings import RATES, Training, rates_text

DEFAULT = Training()


def compare(
    method: Annotated[
        list[str],
        typer.Option(
            help="'dense', a recipe, a compressor ('topk', ...: 'sparsync info' lists them), or both halves of an "
            "exchange ('random+shared'); 'topk@0.01' sets its density. May be given several times; dense is always "
            "there."
        ),
    ] = ["paper", "default"],  # noqa: B006
    seeds: Annotated[int, typer.Option(help="Trainings of each method.")] = 3,
    workers: Annotated[int, typer.Option(help="Worker processes.")] = 4,
    data: Annotated[
        str, typer.Option(help="'digits' (comes with scikit-learn), 'mnist' or 'cifar10' (see --data-dir).")
    ] = DEFAULT.data,
    model: Annotated[str, typer.Option(help="'mlp', 'lenet5', or one of train's others.")] = DEFAULT.model,
    steps: Annotated[int, typer.Option(help="Steps of each training.")] = DEFAULT.steps,
    batch: Annotated[int, typer.Option(help="Images per worker and step.")] = DEFAULT.batch,
    optimizer: Annotated[
        str, typer.Option(help="'sgd', or 'adamw', whose updates our recipes exchange.")
    ] = DEFAULT.optimizer,
    rate: Annotated[float | None, typer.Option(help="Learning rate.", show_default=rates_text())] = None,
    momentum: Annotated[
        float, typer.Option(help="Momentum of SGD, which recipes may move; or AdamW's first beta.")
    ] = DEFAULT.momentum,
    density: Annotated[
        float | None, typer.Option(help="Share of the entries to send, in (0, 1], instead of each method's own.")
    ] = None,
    momentum_mode: Annotated[
        str, typer.Option(help="SGD's momentum with methods that are no recipes: 'move', 'keep' or 'correct'.")
    ] = MOVE,
    data_dir: Annotated[
        Path | None, typer.Option(help="Folder of MNIST's or CIFAR-10's files.", show_default="$SPARSYNC_DATA")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for outcomes.json, table.csv, compare.png, report.html.")] = Path(
        "runs/compare"
    ),
) -> None:
    """Train the same model with several methods on processes of this machine, and compare.

    \b
    sparsync compare                                     the papers' TopK-SGD and the default recipe against dense
    sparsync compare --method topk@0.001 --method topk@0.01 --method topk+gtopk@0.01
    sparsync compare --data mnist --model lenet5 --data-dir ~/data --steps 1000 --method default --method dgc
    """
    rate = RATES.get(optimizer, DEFAULT.rate) if rate is None else rate
    like = Training(
        "dense", data=data, model=model, steps=steps, batch=batch, rate=rate, momentum=momentum, optimizer=optimizer
    )
    run_comparison(
        "Sparsync: methods compared",
        plan_trainings(method, seeds, like, density, momentum_mode),
        workers,
        data_dir,
        out,
    )


def run_comparison(
    title: str, trainings: Sequence[Training], workers: int, data_dir: Path | None, out: Path, *remarks: str
) -> None:
    """Run the trainings, show and write their outcomes; ``remarks`` follow the findings."""
    require("sklearn", "matplotlib", "jinja2")
    from sparsync_lab.cli import compare_report

    first = trainings[0]
    check_workers(workers, train_size(first.data, data_dir), first.batch)
    out.mkdir(parents=True, exist_ok=True)
    where = environment()
    console = Console()

    def under_way(done: float) -> str:
        number = min(int(done // first.steps), len(trainings) - 1)
        return f"{label(trainings[number])}, training {number + 1} of {len(trainings)}"

    with progress_bar(console, under_way, first.steps * len(trainings)) as progress:
        outcomes = train_all(trainings, data_dir, workers, progress)
    lines = summarize(outcomes)
    compare_report.show(console, lines, workers, remarks)
    print(f"report: {compare_report.save(out, title, outcomes, lines, workers, where, remarks)}")
