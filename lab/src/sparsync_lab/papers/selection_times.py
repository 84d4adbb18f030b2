"""P1's figure 4, from what ``sparsync bench select`` measured, and P3's traffic."""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from sparsync.collectives import AllGather, Balanced, Collective, DenseAllReduce, GTopK
from sparsync.config.recipes import RECIPES
from sparsync.layout import Layout, Span
from sparsync.wire import Wire
from sparsync_lab.papers.item import Result, RunContext
from sparsync_lab.report import Curve, Figure, LineChart, Row, Table

MEASURED = "bench-select-gpu.csv"
WHERE = ("device", "cpus", "system", "python", "torch", "sparsync", "commit", "load", "date")
DENSITY = 0.001
# As in P1's figure, in plain PyTorch; then ours.
METHODS = {
    "topk (PyTorch)": "Top_k (torch.topk)",
    "dgc (PyTorch)": "DGC_k (PyTorch)",
    "gaussian (PyTorch)": "Gaussian_k (PyTorch)",
    "topk": "ours: topk",
    "dgc": "ours: dgc",
    "gaussian": "ours: gaussian",
    "threshold": "ours: threshold",
}
RESNET50 = 25_557_032
WORKERS = (2, 4, 8, 16, 32, 64, 128)
DENSITIES = (0.001, 0.005, 0.01)


def figure_4(context: RunContext) -> Result:
    """Time of selection on the GPU over d."""
    places = [context.output.parent / MEASURED, Path("results") / MEASURED]
    path = next((place for place in places if place.is_file()), None)
    if path is None:
        raise ValueError(
            f"p1/fig4 is drawn from {MEASURED}, and there is none in {places[0].parent} or {places[1].parent}: run "
            "'sparsync bench select --device cuda' on a machine with a GPU"
        )
    with path.open(encoding="utf-8", newline="") as file:
        lines = [
            line
            for line in csv.DictReader(file)
            if line["method"] in METHODS and line["dtype"] == "fp32" and float(line["density"]) == DENSITY
        ]
    if not lines:
        raise ValueError(f"{path} has no fp32 rows at density {DENSITY}: run 'sparsync bench select' again")
    sizes = sorted({int(line["size"]) for line in lines})
    found = {(line["method"], int(line["size"])): float(line["p50_ms"]) for line in lines}
    methods = [method for method in METHODS if any((method, n) in found for n in sizes)]
    curves = []
    for method in methods:
        mine = [n for n in sizes if (method, n) in found]
        curves.append(Curve(METHODS[method], [n / 1e6 for n in mine], [found[method, n] for n in mine]))
    rows = [
        Row([f"{n / 1e6:g} M", *(f"{found[m, n]:.3g} ms" if (m, n) in found else "–" for m in methods)]) for n in sizes
    ]
    first = lines[0]
    return Result(
        [Table("Time of selection with error feedback", ["entries", *(METHODS[m] for m in methods)], rows)],
        [
            Figure(
                LineChart("Selection, k = 0.001 d", "million entries", curves, y_unit="ms", log_x=True, log_y=True),
                "Milliseconds, medians. P1 measures selection alone on a V100, for 20 to 400 million entries.",
            )
        ],
        [
            "Measured by 'sparsync bench select', where and when the line below says.",
            "P1 prints no numbers with its figure but says that torch.topk takes 0.4 s for the 25.6 million entries of "
            f"ResNet-50 on a V100 with PyTorch 1.1{_today(found)}. All times here include adding the gradient to the "
            "residual and taking out what is sent.",
        ],
        {
            "method": [line["method"] for line in lines],
            "entries": [int(line["size"]) for line in lines],
            "ms": [float(line["p50_ms"]) for line in lines],
        },
        where={name: first[name] for name in WHERE},
    )


def _today(found: Mapping[tuple[str, int], float]) -> str:
    plain, fitted = (found.get((f"{name} (PyTorch)", 25_600_000)) for name in ("topk", "gaussian"))
    if plain is None or fitted is None:
        return ""
    return f"; here it takes {plain:.2g} ms, and Gaussian_k written in PyTorch {fitted:.2g} ms"


def traffic(context: RunContext) -> Result:
    """P3's O(k log P) against O(kP), from the collectives' own ``traffic``."""
    figures, rows = [], []
    columns: dict[str, list[float | int | str | None]] = {
        name: [] for name in ("density", "workers", "collective", "mean_bytes", "max_bytes", "rounds")
    }
    spans = [Span("all", 0, RESNET50)]
    for density in DENSITIES:
        layout = Layout.cut(spans, numel=RESNET50, scope="global", density=density)
        kinds: dict[str, tuple[Collective, str]] = {
            "dense": (DenseAllReduce(), "mean_bytes"),
            "Top-k, all-gather": (AllGather(), "mean_bytes"),
            "gTop-k, mean worker": (GTopK(), "mean_bytes"),
            "gTop-k, root": (GTopK(), "max_bytes"),
            "ours: balanced": (Balanced(), "mean_bytes"),
        }
        curves = []
        for name, (collective, kind) in kinds.items():
            costs = [collective.traffic(layout, Wire(), workers) for workers in WORKERS]
            curves.append(Curve(name, WORKERS, [getattr(cost, kind) / 1e6 for cost in costs]))
            if kind == "mean_bytes":
                for workers, cost in zip(WORKERS, costs, strict=True):
                    values: tuple[float | str, ...] = (
                        density,
                        workers,
                        name,
                        cost.mean_bytes,
                        cost.max_bytes,
                        cost.rounds,
                    )
                    for column, value in zip(columns.values(), values, strict=True):
                        column.append(value)
        figures.append(
            Figure(
                LineChart(
                    f"Sent per step, density {density:g}", "workers", curves, y_unit="MB", log_x=True, log_y=True
                ),
                f"Bytes a worker puts on the network for ResNet-50's {RESNET50:,} entries.",
            )
        )
        for workers in WORKERS:
            gathered = AllGather().traffic(layout, Wire(), workers)
            tree = GTopK().traffic(layout, Wire(), workers)
            dense = DenseAllReduce().traffic(layout, Wire(), workers)
            balanced = Balanced().traffic(layout, Wire(), workers)
            message = 8 * layout.k
            cells = (
                f"{dense.mean_bytes / 1e6:,.1f}",
                f"{gathered.mean_bytes / 1e6:,.2f}",
                f"{gathered.mean_bytes / message:,.1f}",
                f"{tree.max_bytes / 1e6:,.2f}",
                f"{tree.max_bytes / message:,.1f}",
                f"{tree.mean_bytes / 1e6:,.2f}",
                f"{balanced.mean_bytes / 1e6:,.2f}",
                f"{balanced.mean_bytes / message:,.1f}",
            )
            rows.append(Row([f"{density:g}, {workers} workers (log₂ P = {math.log2(workers):g})", *cells]))
    headings = ["density, workers", "dense MB", "Top-k MB", "in k entries", "gTop-k root MB", "in k entries", "mean MB"]
    headings += ["balanced MB", "in k entries"]
    return Result(
        [Table("Bytes a worker sends in a step: k (P − 1) entries against k log₂ P", headings, rows), _recipes(spans)],
        figures,
        [
            "P3's abstract, all we have of it, gives the orders O(kP) and O(k log P) and no numbers. With our tree "
            "the root sends and receives k log₂ P entries each; a worker sends less than 2k on average.",
            "Balanced is ours, after Ok-Topk, which came later: every worker sends about 2k, none more than another.",
            "An entry takes 8 bytes (index and value) and a message has a header of 32 bytes. sparsync bench traffic "
            "holds these numbers against the counters of a network interface (results/bench-traffic.csv).",
        ],
        columns,
    )


def _recipes(spans: Sequence[Span]) -> Table:
    """How many times less than dense the library's recipes send."""
    rows = []
    for name, recipe in RECIPES.items():
        options = recipe.options
        density = options["compressor"].density
        room = options["compressor"].capacity
        layout = Layout.cut(spans, numel=RESNET50, scope="global", density=density, capacity=room)
        collective, wire = options.get("collective"), Wire(options["values"], options["indices"])
        gathered = AllGather() if collective in (None, "allgather") else collective
        costs = [
            (DenseAllReduce().traffic(layout, Wire(), workers), gathered.traffic(layout, wire, workers))
            for workers in WORKERS
        ]
        cells = [f"{dense.mean_bytes / own.mean_bytes:,.1f} ×" for dense, own in costs]
        rows.append(Row([f"{name}: {100 * density:g} % of the entries", *cells]))
    return Table(
        "The library's recipes: how many times less than dense a worker sends",
        ["recipe", *(f"{workers} workers" for workers in WORKERS)],
        rows,
        ["All entries in one message. DGC's threshold is an estimate: its messages have room for three tenths more."],
    )
