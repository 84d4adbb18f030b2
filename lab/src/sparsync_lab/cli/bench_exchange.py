"""``sparsync bench exchange``: what the kernels of both collectives take, for many workers, on one GPU."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from sparsync_lab.bench.exchange_kernels import STAGES, measure_exchange
from sparsync_lab.cli.progress import progress_bar
from sparsync_lab.environment import environment


def exchange(
    entries: Annotated[list[int], typer.Option(help="Length of the gradient; may be given several times.")] = [  # noqa: B006
        25_557_032,
        124_439_808,
    ],
    workers: Annotated[list[int], typer.Option(help="Workers; may be given several times.")] = [2, 4, 16, 64],  # noqa: B006
    rounds: Annotated[int, typer.Option(help="How often everything is timed.")] = 15,
    out: Annotated[Path, typer.Option(help="CSV file to write.")] = Path("results/bench-exchange-gpu.csv"),
) -> None:
    """Measure, stage by stage, what a rank's kernels take between its selection and the mean gradient, for all-gather
    and balanced at a 60th of dense's bytes; the other workers' messages are at hand. Needs a GPU."""
    if not torch.cuda.is_available():
        raise ValueError("this measures kernels, and needs a CUDA device")
    if min(workers) < 2:
        raise ValueError(f"workers must be 2 or more, got {min(workers)}")
    where, cases = environment() | {"device": torch.cuda.get_device_name()}, [(n, p) for n in entries for p in workers]
    console, lines = Console(), []
    table = Table(box=SIMPLE_HEAD, collapse_padding=True, pad_edge=False, show_edge=False)
    for heading in ("entries", "workers", "collective", "sent", *STAGES, "ms"):
        table.add_column(heading, justify="left" if heading == "collective" else "right", no_wrap=True)
    with progress_bar(console, where["device"], len(cases)) as progress:
        for number, count in cases:
            for row in measure_exchange(number, count, torch.device("cuda"), rounds):
                stages = {stage: f"{row.stages[stage]:.4f}" if stage in row.stages else "" for stage in STAGES}
                table.add_row(
                    f"{number:,}", str(count), row.collective, f"{row.sent:,}", *stages.values(), f"{row.total:.3f}"
                )
                lines.append(
                    {"entries": number, "workers": count, "collective": row.collective, "sent": row.sent}
                    | {f"{stage}_ms": value for stage, value in stages.items()}
                    | {"total_ms": f"{row.total:.4f}", "rounds": rounds}
                    | where
                )
            progress(1)
    console.print(table)
    out.parent.mkdir(parents=True, exist_ok=True)
    with out.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=list(lines[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines)
    print(f"results: {out}")
