"""``sparsync bench follow``: how well ``threshold`` keeps to k over real trainings."""

from __future__ import annotations

import csv
import importlib.metadata
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from sparsync_lab.bench.follow import (
    DROP,
    ENERGY,
    MODELS,
    SETTLING,
    SHARE,
    TOLERANCE,
    WARM_UP,
    FollowBench,
    FollowStep,
    follow,
    summarize_steps,
)
from sparsync_lab.bench.workloads import make_workload
from sparsync_lab.cli.bench_output import Out, bench_file
from sparsync_lab.cli.progress import progress_bar
from sparsync_lab.environment import environment
from sparsync_lab.models import CATALOGUE

HEADINGS = ("model", "k", "in 10 %", "least", "most", "energy", "median", "least", "≥ 99 %", "loss", "met")


def follow_command(
    model: Annotated[
        list[str],
        typer.Option(help=f"One of {', '.join(MODELS)}; may be given several times.", show_default="all of them"),
    ] = [],  # noqa: B006
    steps: Annotated[int, typer.Option(help="Steps of each training.")] = 300,
    density: Annotated[float, typer.Option(help="Share of the gradient entries to send, in (0, 1].")] = 0.001,
    device: Annotated[str, typer.Option(help="cpu or cuda; by default cuda, if there is one.")] = "",
    feedback: Annotated[
        bool,
        typer.Option(help="Train with what is sent, momentum moved; without, with the whole gradient, momentum kept."),
    ] = True,
    rate: Annotated[
        float | None, typer.Option(help="Learning rate of the first half.", show_default="the published one")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of first weights and batches.")] = 0,
    data_dir: Annotated[
        Path | None,
        typer.Option(
            help="Folder with mnist, cifar10 and ptb, as far as the models need them.", show_default="$SPARSYNC_DATA"
        ),
    ] = None,
    out: Out = None,
) -> None:
    """Train one worker and compare what threshold sends of every gradient with k and with exact top-k."""
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    runs = [FollowBench(name, steps, density, device, feedback, rate, seed) for name in model or MODELS]
    out = bench_file(out, f"bench-follow-{'gpu' if device == 'cuda' else 'cpu'}.csv")
    where, console = _where(device), Console()
    table = Table(box=SIMPLE_HEAD, collapse_padding=True, pad_edge=False, show_edge=False)
    for heading in HEADINGS:
        table.add_column(heading, justify="left" if heading == "model" else "right")
    lines: list[dict[str, Any]] = []
    for run in runs:
        with progress_bar(console, CATALOGUE[run.model].title, run.steps) as progress:
            done = follow(run, make_workload(run.model, data_dir, torch.device(device), run.seed), progress)
        table.add_row(*_row(run, done))
        lines += [_line(run, step) | where for step in done]
        _write(out, lines)  # after every training: a run that is broken off leaves what it has
    console.print(table)
    for note in _notes(runs[0]):
        console.print(note, highlight=False)
    print(f"results: {out}")


def _notes(run: FollowBench) -> list[str]:
    trained = "what is sent, momentum moved" if run.feedback else "the whole gradient"
    return [
        f"in 10 %: share of the steps with a count within {TOLERANCE:.0%} of k; least, most: counts over k; energy: "
        f"sent over exact top-k's, mean, median, least, and the share of the steps with {ENERGY:.0%} of it; met: each "
        f"in {SHARE:.0%} of the steps.",
        f"One worker, density {run.density:g} of the whole model, fp32 values, error feedback; trained with {trained}.",
        f"The learning rate is reached in {WARM_UP} steps and divided by {DROP} after step {run.steps // 2}; the first "
        f"{SETTLING} steps are not judged.",
    ]


def _row(run: FollowBench, steps: Sequence[FollowStep]) -> list[str]:
    found, tenth = summarize_steps(steps), max(1, len(steps) // 10)
    first, last = (sum(step.loss for step in part) / tenth for part in (steps[:tenth], steps[-tenth:]))
    return [
        CATALOGUE[run.model].title,
        str(steps[0].k),
        f"{found.within:.1%}",
        f"{found.fewest:.3f}",
        f"{found.most:.3f}",
        f"{found.mean_energy:.4f}",
        f"{found.energy:.4f}",
        f"{found.least_energy:.4f}",
        f"{found.enough:.1%}",
        f"{first:.2f} → {last:.2f}",
        "yes" if found.met else "no",
    ]


def _where(device: str) -> dict[str, str]:
    where = environment()
    if device == "cuda":
        where["device"] = torch.cuda.get_device_name()
    return where | {"triton": importlib.metadata.version("triton") if importlib.util.find_spec("triton") else ""}


def _line(run: FollowBench, step: FollowStep) -> dict[str, Any]:
    return {
        "model": CATALOGUE[run.model].title,
        "parameters": CATALOGUE[run.model].parameters,
        "density": run.density,
        "feedback": run.feedback,
        "seed": run.seed,
        "step": step.step,
        "rate": step.rate,
        "loss": f"{step.loss:.4f}",
        "k": step.k,
        "count": step.count,
        "count_over_k": f"{step.ratio:.4f}",
        "candidates": step.candidates,
        "energy_over_topk": f"{step.energy:.6f}",
    }


def _write(out: Path, lines: Sequence[dict[str, Any]]) -> None:
    with out.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=list(lines[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines)
