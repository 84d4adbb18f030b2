"""P1's figure 4, from what ``sparsync bench select`` measured."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path

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


def figure_4(context: RunContext) -> Result:
    """Draw the time of selection on the GPU over d."""
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
