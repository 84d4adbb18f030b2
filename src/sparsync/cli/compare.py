"""``sparsync compare``: the same training with several methods, side by side."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from sparsync.cli.progress import bar
from sparsync.experiments.compare import MOVE, label, plan, summarise, train_all
from sparsync.experiments.data import check_workers, count
from sparsync.experiments.environment import environment
from sparsync.experiments.settings import Training


def compare(
    method: Annotated[
        list[str],
        typer.Option(
            help="dense, a recipe, a compressor, or compressor+collective; @0.01 behind it sets its density. "
            "May be given several times; dense is always there."
        ),
    ] = ["paper", "default"],  # noqa: B006
    seeds: Annotated[int, typer.Option(help="Trainings of each method.")] = 3,
    workers: Annotated[int, typer.Option(help="Worker processes.")] = 4,
    data: Annotated[str, typer.Option(help="digits or mnist.")] = "digits",
    model: Annotated[str, typer.Option(help="mlp or lenet5.")] = "mlp",
    steps: Annotated[int, typer.Option(help="Steps of each training.")] = 300,
    batch: Annotated[int, typer.Option(help="Images per worker and step.")] = 32,
    rate: Annotated[float, typer.Option(help="Learning rate of SGD.")] = 0.05,
    momentum: Annotated[float, typer.Option(help="Momentum of SGD; recipes may move it.")] = 0.9,
    density: Annotated[
        float | None, typer.Option(help="Share of the entries to send, in (0, 1], instead of each method's own.")
    ] = None,
    momentum_mode: Annotated[
        str, typer.Option(help="What becomes of SGD's momentum with methods that are no recipes: move, keep, correct.")
    ] = MOVE,
    data_dir: Annotated[Path | None, typer.Option(help="Folder with MNIST's files.")] = None,
    out: Annotated[Path, typer.Option(help="Folder for outcomes.json, table.csv, compare.png, report.html.")] = Path(
        "runs/compare"
    ),
) -> None:
    """Train the same model with several methods on processes of this machine, and compare."""
    like = Training("dense", data=data, model=model, steps=steps, batch=batch, rate=rate, momentum=momentum)
    side_by_side(
        "Sparsync: methods compared", plan(method, seeds, like, density, momentum_mode), workers, data_dir, out
    )


def side_by_side(title: str, trainings: Sequence[Training], workers: int, data_dir: Path | None, out: Path) -> None:
    """Run the trainings, show and write what came of them."""
    for package in ("sklearn", "matplotlib", "jinja2"):
        if find_spec(package) is None:
            raise ValueError(f"comparisons and their reports need {package}: pip install 'sparsync[lab]'")
    from sparsync.cli import comparison  # it draws

    first = trainings[0]
    check_workers(workers, count(first.data, data_dir), first.batch)
    out.mkdir(parents=True, exist_ok=True)
    where = environment()
    console = Console()

    def under_way(done: float) -> str:
        number = min(int(done // first.steps), len(trainings) - 1)
        return f"{label(trainings[number])}, training {number + 1} of {len(trainings)}"

    with bar(console, under_way, first.steps * len(trainings)) as progress:
        outcomes = train_all(trainings, data_dir, workers, progress)
    lines = summarise(outcomes)
    comparison.show(console, lines, workers)
    print(f"report: {comparison.save(out, title, outcomes, lines, workers, where)}")
