"""P3's traffic: bytes a worker sends with each collective, from the collectives' own ``traffic``."""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from pathlib import Path

import torch

from sparsync.collectives import AllGather, Balanced, Collective, DenseAllReduce, GTopK
from sparsync.config import RECIPES, resolve
from sparsync.config.recipes import AUTO
from sparsync.engine.budget import within_budget
from sparsync.engine.traffic import bytes_per_step
from sparsync.layout import Layout, Span
from sparsync.wire import HEADER, WORD, Wire
from sparsync_lab.papers.item import Result, RunContext
from sparsync_lab.report import Curve, Figure, LineChart, Row, Table

RESNET50 = 25_557_032
WORKERS = (2, 4, 8, 16, 32, 64, 128)
DENSITIES = (0.001, 0.005, 0.01)
MEASURED, COUNTED = "bench-traffic.csv", "What a network interface counted, beside what is computed"
NAMES = {"gtopk": "gTop-k", "allgather": "Top-k, all-gather"}  # of what is counted


def traffic(context: RunContext) -> Result:
    """Compare P3's O(k log P) with O(kP), from the collectives' own ``traffic``."""
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
    counted = _counted([context.output.parent, Path("results")])
    return Result(
        [
            Table("Bytes a worker sends in a step: k (P − 1) entries against k log₂ P", headings, rows),
            *counted,
            _recipes(),
        ],
        figures,
        [
            "P3's abstract, all we have of it, gives the orders O(kP) and O(k log P) and no numbers. With our tree "
            "the root sends and receives k log₂ P entries each; a worker sends less than 2k on average.",
            "Balanced is ours, after Ok-Topk, which came later: every worker sends about 2k, none more than another.",
            f"An entry takes 8 bytes (index and value) and a message has a header of {WORD * HEADER} bytes. "
            "These numbers are computed; sparsync bench traffic holds some of them against the counters of a network "
            f"interface (results/{MEASURED}).",
        ],
        columns,
    )


def _counted(places: Sequence[Path]) -> list[Table]:
    """Return what a network interface counted of gTop-k and all-gather beside what is computed; none if that was not
    measured."""
    path = next((place / MEASURED for place in places if (place / MEASURED).is_file()), None)
    if path is None:
        return []
    with path.open(encoding="utf-8", newline="") as file:
        own = [
            line
            for line in csv.DictReader(file)
            if line["collective"] in NAMES and (line["values"], line["indices"], line["recipe"]) == ("fp32", "int", "")
        ]
    rows = [
        Row([NAMES[line["collective"]], line["workers"], line["density"], f"{float(line['ratio']):.3f} ×"])
        for line in own
    ]
    notes = [
        f"By sparsync bench traffic (results/{MEASURED}): all workers together, packet headers taken off. What the "
        "root of the tree sends is not counted by itself."
    ]
    return [Table(COUNTED, ["collective", "workers", "density", "counted, to computed"], rows, notes)]


def _recipes() -> Table:
    """Return how many times less than dense the library's recipes send."""
    rows = []
    notes = [
        "All entries in one message. DGC's threshold is an estimate: its messages have room for three tenths more."
    ]
    whole = {"all": torch.empty(RESNET50, 1, device="meta")}
    for name in (name for name in RECIPES if name != AUTO):  # which sends what another does
        plan, cells, last = resolve(name, momentum="keep"), [], []
        about = f"{100 * plan.density(0):g} % of the entries"
        for workers in WORKERS:
            own = within_budget(plan, whole, workers)
            if own.spending is None:
                sent = bytes_per_step(own, whole, workers)(own.density(0))
            else:
                sent, about = own.spending.mean, "its budget, over the training"
                share = 100 * own.spending.densities[1]
                last.append(f"{share:.2g} % by {type(own.collective).__name__} ({workers} workers)")
            cells.append(f"{8 * (workers - 1) / workers * RESNET50 / sent:,.1f} ×")
        rows.append(Row([f"{name}: {about}", *cells]))
        if last:
            notes.append(f"Entries that {name} sends after the first tenth of the steps: {', '.join(last)}.")
    return Table(
        "The library's recipes: how many times less than dense a worker sends",
        ["recipe", *(f"{workers} workers" for workers in WORKERS)],
        rows,
        notes,
    )
