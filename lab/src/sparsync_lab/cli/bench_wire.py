"""``sparsync bench wire``: what coding indices saves and costs."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from sparsync_lab.bench.wire import WARM_UP, WORKERS, WireBench, WireRow, measure
from sparsync_lab.bench.wire_kernels import KernelRow, measure_kernels
from sparsync_lab.cli.bench_output import Out, bench_file
from sparsync_lab.cli.progress import progress_bar
from sparsync_lab.environment import environment

HEADINGS = ("entries", "density", "format", "workers", "encode", "plain", "read", "plain", "clear", "select")
KERNEL_HEADINGS = ("entries", "density", "indices", "values", "workers", "pack", "decode", "check ms", "checksum")


def wire(
    entries: Annotated[list[int], typer.Option(help="Length of the gradient; may be given several times.")] = [  # noqa: B006
        100_000,
        1_000_000,
        25_600_000,
    ],
    density: Annotated[list[float], typer.Option(help="Share of the entries to send; may be given several times.")] = [  # noqa: B006
        0.001,
        0.01,
    ],
    rounds: Annotated[int, typer.Option(help="How often everything is timed.")] = 15,
    device: Annotated[str, typer.Option(help="cpu, or cuda: then the kernels that make and read messages.")] = "cpu",
    workers: Annotated[list[int], typer.Option(help="Ranks whose messages are read; may be given several times.")] = [  # noqa: B006
        *WORKERS
    ],
    out: Out = None,
) -> None:
    """Measure size and time of messages with plain and with Elias-Fano coded indices, beside the time of selection."""
    if min(workers) < 1:
        raise ValueError(f"workers must be 1 or more, got {min(workers)}")
    where = environment()
    benches = [WireBench(n, share, rounds) for n in entries for share in density]
    out = bench_file(out, f"bench-wire-{'gpu' if device == 'cuda' else 'cpu'}.csv")
    console = Console()
    if device == "cuda":
        where |= {"device": torch.cuda.get_device_name()}
        cases = [(bench, count) for bench in benches for count in workers]
        with progress_bar(console, where["device"], len(cases) * (WARM_UP + rounds)) as progress:
            cuda = torch.device("cuda")
            timed = [(bench, n, row) for bench, n in cases for row in measure_kernels(bench, n, cuda, progress)]
        console.print(_kernel_table(timed))
        console.print("Milliseconds; the checksum as a share of reading all messages without it.", highlight=False)
        _write([_kernel_line(bench, row, count) | where for bench, count, row in timed], out)
        return
    with progress_bar(console, "1 thread", len(benches) * (WARM_UP + rounds)) as progress:
        measured = [(bench, row) for bench in benches for row in measure(bench, workers, progress)]
    console.print(_table(measured))
    console.print(
        "Milliseconds of CPU time to encode a message, and to decode those of all workers and write their mean (read); "
        "how many times as long plain PyTorch takes. Beside them clearing the mean's place alone, and selection.",
        highlight=False,
    )
    _write([_line(bench, row) | where for bench, row in measured], out)


def _write(lines: list[dict[str, Any]], out: Path) -> None:
    with out.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=list(lines[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines)
    print(f"results: {out}")


def _table(measured: list[tuple[WireBench, WireRow]]) -> Table:
    table = Table(box=SIMPLE_HEAD, collapse_padding=True, pad_edge=False, show_edge=False)
    for heading in HEADINGS:
        table.add_column(heading, justify="left" if heading == "format" else "right", no_wrap=True)
    for bench, row in measured:
        table.add_row(
            f"{bench.entries:,}",
            f"{bench.density:g}",
            f"{row.values} {row.indices}",
            str(row.workers),
            f"{row.encode_ms:.3f}",
            f"{row.plain_encode_ms / row.encode_ms:.1f} x",
            f"{row.read_ms:.2f}",
            f"{row.plain_read_ms / row.read_ms:.1f} x",
            f"{row.clear_ms:.2f}",
            f"{row.select_ms:.2f}",
        )
    return table


def _kernel_table(timed: list[tuple[WireBench, int, KernelRow]]) -> Table:
    table = Table(box=SIMPLE_HEAD, collapse_padding=True, pad_edge=False, show_edge=False)
    for heading in KERNEL_HEADINGS:
        table.add_column(heading, justify="left" if heading in ("indices", "values") else "right", no_wrap=True)
    for bench, workers, row in timed:
        times = (f"{ms:.4f}" for ms in (row.pack_ms, row.decode_ms, row.check_ms))
        what = (f"{bench.entries:,}", f"{bench.density:g}", row.indices, row.values, str(workers))
        table.add_row(*what, *times, f"{row.share:.1%}")
    return table


def _kernel_line(bench: WireBench, row: KernelRow, workers: int) -> dict[str, Any]:
    return {
        "entries": bench.entries,
        "density": bench.density,
        "workers": workers,
        "indices": row.indices,
        "values": row.values,
        "words": row.words,
        "pack_ms": f"{row.pack_ms:.5f}",
        "headers_ms": f"{row.headers_ms:.5f}",
        "check_ms": f"{row.check_ms:.5f}",
        "decode_ms": f"{row.decode_ms:.5f}",
        "checksum_to_decode": f"{row.share:.4f}",
        "rounds": bench.rounds,
    }


def _line(bench: WireBench, row: WireRow) -> dict[str, Any]:
    return {
        "entries": bench.entries,
        "density": bench.density,
        "sent": row.sent,
        "indices": row.indices,
        "values": row.values,
        "workers": row.workers,
        "bits_per_index": f"{row.bits:.4f}",
        "entropy_bound": f"{row.bound:.4f}",
        "ratio_to_bound": f"{row.bits / row.bound:.4f}",
        "encode_ms": f"{row.encode_ms:.4f}",
        "plain_encode_ms": f"{row.plain_encode_ms:.4f}",
        "read_ms": f"{row.read_ms:.4f}",
        "plain_read_ms": f"{row.plain_read_ms:.4f}",
        "clear_ms": f"{row.clear_ms:.4f}",
        "checksum_ms": f"{row.checksum_ms:.4f}",
        "select_ms": f"{row.select_ms:.4f}",
        "read_to_select": f"{row.read_ms / row.select_ms:.4f}",
        "rounds": bench.rounds,
        "threads": 1,
    }
