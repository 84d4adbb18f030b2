"""``sparsync lab real``: a real training of a few steps on links of given rates, beside emulated steps."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any

import typer

METHODS = ("dense", "bf16", "default", "balanced", "auto", "powersgd")
NOTE = (
    "The GPT on the Penn Treebank with AdamW: real passes and exchanges of worker processes on network namespaces of "
    "one machine, every method from the same weights on the same words. Step: median of the second half, whole "
    "steps with the optimizer's. Emulated: a step of the lab's model of the same shapes, which waits for as long as a "
    "real step without exchange takes, and chooses entries on the CPU."
)


def real(
    steps: Annotated[int, typer.Option(help="Of every method.")] = 100,
    workers: Annotated[int, typer.Option(help="Hosts, one worker each.")] = 4,
    rate: Annotated[list[str], typer.Option(help="Of every link; may be given several times.")] = ["1Gbit"],  # noqa: B006
    method: Annotated[list[str], typer.Option(help="May be given several times.")] = [*METHODS],  # noqa: B006
    batch: Annotated[int, typer.Option(help="Windows of 64 words of each worker.")] = 16,
    device: Annotated[str, typer.Option(help="cpu, or cuda: all workers share one GPU.")] = "cpu",
    data_dir: Annotated[
        Path | None, typer.Option(help="Folder of the Penn Treebank.", show_default="$SPARSYNC_DATA")
    ] = None,
    out: Annotated[Path, typer.Option(help="CSV file to write, a row for every step.")] = Path("results/lab-real.csv"),
) -> None:
    """Train the GPT really, a hundred steps of every method, on links of given rates. Needs root."""
    from rich.console import Console

    from sparsync.config.recipes import AUTO
    from sparsync_lab.cli.lab import new_table
    from sparsync_lab.environment import environment
    from sparsync_lab.network.auto_comparison import SettledMethod
    from sparsync_lab.network.host_workers import host_workers
    from sparsync_lab.network.methods import LOCAL
    from sparsync_lab.network.namespace import check_requirements
    from sparsync_lab.network.real_training import LOCAL_STEPS, MODEL, RealTraining, train_really
    from sparsync_lab.network.shaping import Rate
    from sparsync_lab.network.star import star
    from sparsync_lab.network.steps import StepCell, measure_cell
    from sparsync_lab.report import write_csv

    folder = None if data_dir is None else data_dir.resolve()
    training = RealTraining(steps, batch, device, folder)
    alone = RealTraining(LOCAL_STEPS, batch, device, folder)
    rates, console, where = [Rate.parse(text) for text in dict.fromkeys(rate)], Console(), environment()
    check_requirements()
    lines = list[dict[str, Any]]()
    with star(workers, rates[0]) as network, host_workers(network) as processes:
        for link in rates:
            network.set_rate(link)
            compute = processes.run(train_really, alone, LOCAL)[0].typical
            title = f"{MODEL}, {workers} hosts, {link}, {device}, {1e3 * compute:.0f} ms without exchange"
            table = new_table(title, ("method", "loss", "step ms", "emulated ms", "all s"))
            for name in dict.fromkeys(method):
                run = processes.run(train_really, training, name)[0]
                emulated = math.nan
                if name != AUTO:  # which settles first
                    cell = StepCell(link, MODEL, compute, rounds=5, seconds=5.0)
                    own = SettledMethod(name, optimizer="adamw")
                    emulated = measure_cell(processes, network, cell, [own]).methods[0].typical
                shown = (f"{1e3 * one:,.1f}" for one in (run.typical, emulated))
                table.add_row(name, f"{run.reached:.3f}", *shown, f"{sum(run.seconds):,.1f}")
                if run.decided:
                    table.caption = f"{name}: {run.decided}"
                fixed = {
                    "model": MODEL,
                    "workers": workers,
                    "rate_mbit": f"{link.mbit:g}",
                    "compute": f"computed on {device}",
                    "compute_ms": f"{1e3 * compute:.2f}",
                    "optimizer": "adamw",
                    "emulated_ms": "" if math.isnan(emulated) else f"{1e3 * emulated:.2f}",
                    "decided": run.decided,
                }
                lines += [{**fixed, **row, **where} for row in run.to_csv()]
                write_csv(out, lines)
            console.print(table)
    console.print(NOTE, highlight=False)
    print(f"results: {out}")
