"""``sparsync bench traffic``: whether collectives put on the network what they say."""

from __future__ import annotations

import csv
import os
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from sparsync_lab.bench import loopback
from sparsync_lab.bench.traffic import TOLERANCE, TrafficRow, benches_for, check_worker_count, measure_all
from sparsync_lab.cli.bench_output import Out, bench_file
from sparsync_lab.cli.progress import progress_bar
from sparsync_lab.environment import environment

HEADINGS = ("method", "density", "traffic", "on lo", "ratio", "framing", "net", "handed")
OWN, HOST = "own namespace", "host"


def traffic(
    workers: Annotated[list[int], typer.Option(help="Worker processes; may be given several times.")] = [8, 5, 3],  # noqa: B006
    entries: Annotated[int, typer.Option(help="Length of the gradient.")] = 1_000_000,
    density: Annotated[list[float], typer.Option(help="Share of the entries to send; may be given several times.")] = [  # noqa: B006
        0.001,
        0.01,
    ],
    exchanges: Annotated[int, typer.Option(help="How many exchanges are counted.")] = 100,
    out: Out = None,
) -> None:
    """Compare what every collective says it sends with what the loopback interface counts."""
    benches = benches_for(entries, density, exchanges)
    for number in workers:
        check_worker_count(number)
    loopback.sent()  # refuses where it cannot be counted
    out = bench_file(out, "bench-traffic.csv")
    where = environment()
    # In a namespace of its own nobody answers which host 127.0.0.1 is, and every process would warn of that.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    interface = OWN if loopback.isolate() else HOST
    console = Console()
    with progress_bar(console, "exchanges on loopback", len(workers) * len(benches)) as progress:
        rows = measure_all(benches, workers, progress)
    for number in dict.fromkeys(workers):
        console.print(_table([row for row in rows if row.workers == number]))
    for note in _notes(rows, interface):
        console.print(note, highlight=False)
    lines = [_line(row, interface) | where for row in rows]
    with out.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=list(lines[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines)
    print(f"results: {out}")
    if not all(row.agrees for row in rows):
        raise typer.Exit(1)


def _table(rows: list[TrafficRow]) -> Table:
    title = f"{rows[0].workers} workers; bytes a worker and exchange"
    table = Table(title=title, box=SIMPLE_HEAD, collapse_padding=True, pad_edge=False, show_edge=False)
    for heading in HEADINGS:
        table.add_column(heading, justify="left" if heading == "method" else "right", no_wrap=True)
    for row in rows:
        sends = row.workers * row.bench.exchanges
        table.add_row(
            _name(row),
            f"{row.bench.density:g}",
            f"{row.bench.traffic(row.workers) / sends:,.0f}",
            f"{row.payload / sends:,.0f}",
            f"{row.ratio:.3f}",
            f"{row.framing / sends:,.0f}",
            f"{row.tensor_ratio:.3f}",
            f"{row.handed / sends:,.0f}",
            style=None if row.agrees else "red",
        )
    return table


def _name(row: TrafficRow) -> str:
    """Return the recipe; or the collective, and what is not the default."""
    if row.bench.recipe:
        return f"recipe {row.bench.recipe}"
    more = [codec for codec in (row.bench.values, row.bench.indices) if codec not in ("fp32", "int")]
    return " ".join([row.bench.collective, *more])


def _notes(rows: list[TrafficRow], interface: str) -> list[str]:
    notes = [
        f"On lo: without {rows[0].header} bytes of headers a packet. Framing: what the backend adds to messages "
        "whatever their size; net: the ratio without it. Handed: tensors given to torch.distributed.",
    ]
    heavy = [row for row in rows if row.agrees and abs(row.ratio - 1) > TOLERANCE]
    if heavy:
        which = "; ".join(f"{_name(row)} at {row.bench.density:g}, {row.workers} workers" for row in heavy)
        notes.append(f"Messages so small that framing weighs more than {TOLERANCE:.0%}: {which}.")
    if not all(row.agrees for row in rows):
        notes.append(f"Red: the interface carried over {TOLERANCE:.0%} more or less than traffic says.")
    if interface == HOST:
        notes.append("On the host's own interface, where others may have sent too; root gets one of its own.")
    return notes


def _line(row: TrafficRow, interface: str) -> dict[str, Any]:
    bench = row.bench
    return {
        "collective": bench.collective,
        "values": bench.values,
        "indices": bench.indices,
        "share": "" if bench.share is None else bench.share,
        "recipe": bench.recipe,
        "workers": row.workers,
        "entries": bench.entries,
        "density": bench.density,
        "exchanges": bench.exchanges,
        "traffic_bytes": f"{bench.traffic(row.workers):.0f}",
        "payload_bytes": row.payload,
        "ratio": f"{row.ratio:.4f}",
        "framing_bytes": f"{row.framing:.0f}",
        "ratio_without_framing": f"{row.tensor_ratio:.4f}",
        "handed_bytes": row.handed,
        "interface_bytes": row.count.bytes,
        "packets": row.count.packets,
        "resent_packets": row.count.resent,
        "header_bytes_a_packet": row.header,
        "control_bytes": row.control.bytes,
        "control_packets": row.control.packets,
        "interface": interface,
    }
