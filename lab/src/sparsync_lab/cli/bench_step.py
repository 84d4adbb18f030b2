"""``sparsync bench step``: what the hook adds to a training step."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from sparsync_lab.bench.step_cpu import WARM_UP, CpuStepRow, StepBench, measure_all
from sparsync_lab.bench.step_gpu import MODELS, OPTIMIZERS, GpuStepRow
from sparsync_lab.bench.step_gpu import WARM_UP as WARM_UP_ON_GPU
from sparsync_lab.bench.step_gpu import measure as measure_on_gpu
from sparsync_lab.cli.bench_output import Out, bench_file
from sparsync_lab.cli.progress import progress_bar
from sparsync_lab.environment import environment

HEADINGS = ("method", "step ms", "p20-p80", "ratio", "compress", "exchange", "decode", "MB sent")


def step(
    parameters: Annotated[list[int], typer.Option(help="Model size, about; may be given several times.")] = [  # noqa: B006
        5_000_000
    ],
    workers: Annotated[int, typer.Option(help="Worker processes.")] = 2,
    rounds: Annotated[int, typer.Option(help="Steps of each method.")] = 60,
    density: Annotated[float, typer.Option(help="Share of the gradient entries to send, in (0, 1].")] = 0.001,
    device: Annotated[str, typer.Option(help="cpu; or cuda: one GPU, one worker, over NCCL.")] = "cpu",
    model: Annotated[list[str], typer.Option(help=f"On a GPU: {' or '.join(MODELS)}; may be given several times.")] = [  # noqa: B006
        *MODELS
    ],
    method: Annotated[list[str], typer.Option(help="On a GPU: beside plain DDP; by default all.")] = [],  # noqa: B006
    optimizer: Annotated[str, typer.Option(help=f"On a GPU: {' or '.join(OPTIMIZERS)}.")] = "sgd",
    out: Out = None,
) -> None:
    """Time a training step with each method against plain DDP, interleaved in one run."""
    if device not in ("cpu", "cuda"):
        raise ValueError(f"device must be cpu or cuda, got {device!r}")
    if device == "cuda":
        name = "bench-step-gpu.csv" if optimizer == "sgd" else f"bench-step-{optimizer}-gpu.csv"
        _on_gpu(model, rounds, method, optimizer, bench_file(out, name))
        return
    if optimizer != "sgd":
        raise ValueError(f"optimizer {optimizer} is timed on a GPU alone: --device cuda")
    where = environment()
    benches = [StepBench(size, rounds, density=density) for size in parameters]
    out = bench_file(out, "bench-step-cpu.csv")
    console = Console()
    with progress_bar(console, f"{workers} workers", len(benches) * (WARM_UP + rounds)) as progress:
        measured = measure_all(benches, workers, progress)
    for _, rows in measured:
        console.print(_table(rows, workers))
    console.print(
        "One machine, loopback network: this shows what the hook costs, not what a slow network would gain. "
        "Compress runs inside backward; exchange and decode run beside it, so the parts do not add up to the step.",
        highlight=False,
    )
    _write(out, [_line(bench, row, rows[0], workers) | where for bench, rows in measured for row in rows])


def _write(out: Path, lines: list[dict[str, Any]]) -> None:
    with out.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=list(lines[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines)
    print(f"results: {out}")


def _on_gpu(models: list[str], rounds: int, methods: list[str], optimizer: str, out: Path) -> None:
    console, lines = Console(), []
    for model in models:
        with progress_bar(console, model, WARM_UP_ON_GPU + rounds) as progress:
            rows = measure_on_gpu(model, rounds, methods, optimizer, progress)
        console.print(_gpu_table(rows))
        where = environment() | {"device": torch.cuda.get_device_name()}
        lines += [_gpu_line(row, rows[0], rounds, optimizer) | where for row in rows]
    console.print(
        "One GPU, one worker, bf16 autocast: nothing travels, so this is what selection, messages and sums add to a "
        "step. Host: how long a step keeps the host.",
        highlight=False,
    )
    _write(out, lines)


def _gpu_table(rows: list[GpuStepRow]) -> Table:
    title = f"{rows[0].model}, {rows[0].parameters:,} parameters, one GPU; ms, ratio to plain DDP"
    table = Table(title=title, box=SIMPLE_HEAD, collapse_padding=True, pad_edge=False, show_edge=False)
    for heading in ("method", "step ms", "p20-p80", "ratio", "added ms", "host ms"):
        table.add_column(heading, justify="left" if heading == "method" else "right", no_wrap=True)
    for row in rows:
        low, median, high = row.quantiles()
        plain = rows[0].quantiles()[1]
        table.add_row(
            row.method,
            f"{median:.2f}",
            f"{low:.2f}-{high:.2f}",
            f"{median / plain:.3f}",
            f"{median - plain:.2f}",
            f"{float(np.median(row.host)):.2f}",
        )
    return table


def _gpu_line(row: GpuStepRow, plain: GpuStepRow, rounds: int, optimizer: str) -> dict[str, Any]:
    low, median, high = row.quantiles()
    return {
        "model": row.model,
        "method": row.method,
        "optimizer": optimizer,
        "parameters": row.parameters,
        "rounds": rounds,
        "step_p20_ms": f"{low:.3f}",
        "step_p50_ms": f"{median:.3f}",
        "step_p80_ms": f"{high:.3f}",
        "ratio_to_plain_ddp": f"{median / plain.quantiles()[1]:.4f}",
        "host_p50_ms": f"{float(np.median(row.host)):.3f}",
        "handed_bytes": row.sent_bytes,
    }


def _table(rows: list[CpuStepRow], workers: int) -> Table:
    title = f"{rows[0].parameters:,} parameters, {workers} workers; ms, ratio to plain DDP"
    table = Table(title=title, box=SIMPLE_HEAD, collapse_padding=True, pad_edge=False, show_edge=False)
    for heading in HEADINGS:
        table.add_column(heading, justify="left" if heading == "method" else "right", no_wrap=True)
    for row in rows:
        low, median, high = row.step_ms
        table.add_row(
            f"{row.method} {row.scope}",
            f"{median:.1f}",
            f"{low:.0f}-{high:.0f}",
            f"{median / rows[0].step_ms[1]:.2f}",
            f"{row.compress_ms:.1f}",
            f"{row.exchange_ms:.1f}",
            f"{row.decode_ms:.1f}",
            f"{row.sent_bytes / 1e6:,.3f}",
        )
    return table


def _line(bench: StepBench, row: CpuStepRow, plain: CpuStepRow, workers: int) -> dict[str, Any]:
    low, median, high = row.step_ms
    return {
        "method": row.method,
        "scope": row.scope,
        "parameters": row.parameters,
        "workers": workers,
        "asked_density": row.asked,
        "density": f"{row.density:.6f}",
        "batch": bench.batch,
        "rounds": bench.rounds,
        "step_p20_ms": f"{low:.3f}",
        "step_p50_ms": f"{median:.3f}",
        "step_p80_ms": f"{high:.3f}",
        "ratio_to_plain_ddp": f"{median / plain.step_ms[1]:.3f}",
        "compress_ms": f"{row.compress_ms:.3f}",
        "exchange_ms": f"{row.exchange_ms:.3f}",
        "decode_ms": f"{row.decode_ms:.3f}",
        "sent_bytes": f"{row.sent_bytes:.0f}",
        "handed_bytes": f"{row.handed_bytes:.0f}",
    }
