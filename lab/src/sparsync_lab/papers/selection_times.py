"""P1's figure 4, from what ``sparsync bench select`` measured."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path

from sparsync_lab.papers.item import Result, RunContext
from sparsync_lab.report import Curve, Figure, LineChart, Row, Table

WITH_FEEDBACK, ALONE = "bench-select-fig4-gpu.csv", "bench-select-alone-gpu.csv"
MEASURE = f"sparsync bench select --device cuda --density 0.001 --dtype fp32 --out results/{WITH_FEEDBACK}"
MEASURE_ALONE = f"sparsync bench select --alone --device cuda --density 0.001 --dtype fp32 --out results/{ALONE}"
WHERE = ("device", "cpus", "system", "python", "torch", "sparsync", "commit", "load", "date")
DENSITY = 0.001
LEAST = 20_000_000  # entries of P1's figure, which ends at 400 million
# As in P1's figure, in plain PyTorch; then ours. What came later is last, so that all others look as before.
METHODS = {
    "topk (PyTorch)": "Top_k (torch.topk)",
    "dgc (PyTorch)": "DGC_k of Lin et al. (PyTorch)",
    "gaussian (PyTorch)": "Gaussian_k (PyTorch)",
    "gaussian, authors' code (PyTorch)": "Gaussian_k, authors' code (PyTorch)",
    "trimmed (PyTorch)": "trimmed Top_k (PyTorch)",
    "topk": "ours: topk",
    "dgc": "ours: dgc",
    "gaussian": "ours: gaussian",
    "trimmed": "ours: trimmed",
    "threshold": "ours: threshold",
    "dgc, authors' code (PyTorch)": "DGC_k, authors' code (PyTorch)",
}
ORDER = ("topk (PyTorch)", "dgc (PyTorch)", "gaussian (PyTorch)", "gaussian, authors' code (PyTorch)")
AUTHORS_DGC = "dgc, authors' code (PyTorch)"
# Commits with which Gaussian_k in PyTorch summed each mask, which copies it; its authors' code does not.
SUMMED_MASKS = {"1283985", "fe437b9"}
Times = Mapping[tuple[str, int], float]  # milliseconds by method and size


def figure_4(context: RunContext) -> Result:
    """Draw the time of selection on the GPU over d: alone, as P1 times it, where that was measured, and with error
    feedback."""
    places = [context.output.parent, Path("results")]
    lines = _lines(WITH_FEEDBACK, places)
    if lines is None:
        raise ValueError(
            f"p1/fig4 is drawn from {WITH_FEEDBACK}, and there is none in {places[0]} or {places[1]}: run "
            f"'{MEASURE}' on a machine with a GPU"
        )
    if not lines:
        raise ValueError(f"{WITH_FEEDBACK} has no fp32 rows at density {DENSITY}: run '{MEASURE}' again")
    alone = _lines(ALONE, places) or []
    measured = {"Time of selection alone, as P1 times it": alone, "Time of selection with error feedback": lines}
    parts = [(caption, _times(own)) for caption, own in measured.items() if own]
    told = (
        [f"Selection alone was measured by '{MEASURE_ALONE}'."]
        if alone
        else [f"Not measured: selection alone, as P1 times it. On a machine with a GPU: '{MEASURE_ALONE}'."]
    )
    told += [f"{caption}: {_origins(own)}." for caption, own in measured.items() if own]
    forms = dict.fromkeys(line["method"] for line in alone if line["method"] not in {line["method"] for line in lines})
    told += [f"{METHODS[form]} was timed alone only." for form in forms]
    told += [gaussian_times_note(lines)] if lines else []
    both = [("no", line) for line in alone] + [("yes", line) for line in lines]
    return Result(
        [_table(caption, times) for caption, times in parts],
        [_figure(caption, times) for caption, times in parts],
        [
            f"Measured by '{MEASURE}', where and when the lines below say. With error feedback, times include "
            "adding the gradient to the residual and taking out what is sent; ours do all of it in one go and "
            "have no selection alone.",
            *told,
            "P1 prints no numbers with its figure but says that torch.topk takes 0.4 s for the 25.6 million entries of "
            f"ResNet-50 on a V100 with PyTorch 1.1{_today(*parts[0])}.",
            *(order_note(caption, times) for caption, times in parts),
        ],
        {
            "method": [line["method"] for _, line in both],
            "entries": [int(line["size"]) for _, line in both],
            "error_feedback": [feedback for feedback, _ in both],
            "ms": [float(line["p50_ms"]) for _, line in both],
        },
        where={name: ", ".join(dict.fromkeys(line[name] for line in (*lines, *alone))) for name in WHERE},
    )


def order_note(caption: str, times: Times) -> str:
    """Return for how many of P1's sizes its order holds in plain PyTorch, with each form of Gaussian_k that was timed:
    Top_k the slowest, then DGC_k, then Gaussian_k."""
    sizes = sorted({size for _, size in times if size >= LEAST})
    if not sizes:
        return f"{caption}: P1's figure begins with {LEAST / 1e6:g} million entries, and nothing so large was measured."
    top, dgc, *forms = ORDER
    timed = {name for name in (*ORDER, AUTHORS_DGC) if all((name, size) in times for size in sizes)}
    orders = {METHODS[form]: (top, dgc, form) for form in forms}
    orders["both in their authors' code"] = (top, AUTHORS_DGC, forms[-1])
    held = []
    for name, order in orders.items():
        if timed >= {*order}:
            found = [[times[each, size] for each in order] for size in sizes]
            held.append(f"{sum(own == sorted(own, reverse=True) for own in found)} with {name}")
    last = {name: times[name, sizes[-1]] for name in (*ORDER, AUTHORS_DGC) if name in timed}
    where = ", ".join(held) or "0, as Gaussian_k was not timed at all of them"
    slowest = ", ".join(f"{METHODS[name]} {last[name]:.3g} ms" for name in sorted(last, key=lambda name: -last[name]))
    return (
        f"{caption}: of {len(sizes)} sizes from {LEAST / 1e6:g} million on the V100's order (Top_k the slowest, then "
        f"DGC_k, Gaussian_k the fastest) holds here for {where}. For {sizes[-1] / 1e6:g} million entries, "
        f"the slowest first: {slowest}."
    )


def _origins(lines: Sequence[Mapping[str, str]]) -> str:
    """Return on which device and when rows were measured, and of which sizes they are."""
    sizes: dict[tuple[str, ...], dict[str, None]] = {}
    for line in lines:
        where = line["device"], line["date"]
        sizes.setdefault(where, {})[f"{int(line['size']) / 1e6:g}"] = None
    return "; ".join(f"{', '.join(own)} million entries: {', '.join(where)}" for where, own in sizes.items())


def _lines(name: str, places: Sequence[Path]) -> list[dict[str, str]] | None:
    """Return the rows of a file that are drawn; ``None`` if there is no such file."""
    path = next((place / name for place in places if (place / name).is_file()), None)
    if path is None:
        return None
    with path.open(encoding="utf-8", newline="") as file:
        return [
            line
            for line in csv.DictReader(file)
            if line["method"] in METHODS and line["dtype"] == "fp32" and float(line["density"]) == DENSITY
        ]


def _times(lines: Sequence[Mapping[str, str]]) -> Times:
    return {(line["method"], int(line["size"])): float(line["p50_ms"]) for line in lines}


def _table(caption: str, times: Times) -> Table:
    sizes = sorted({size for _, size in times})
    methods = [method for method in METHODS if any((method, n) in times for n in sizes)]
    rows = [
        Row([f"{n / 1e6:g} M", *(f"{times[m, n]:.3g} ms" if (m, n) in times else "–" for m in methods)]) for n in sizes
    ]
    return Table(caption, ["entries", *(METHODS[method] for method in methods)], rows)


def _figure(caption: str, times: Times) -> Figure:
    curves = []
    for look, (method, title) in enumerate(METHODS.items()):
        mine = sorted(n for own, n in times if own == method)
        if mine:
            curves.append(Curve(title, [n / 1e6 for n in mine], [times[method, n] for n in mine], look=look))
    chart = LineChart(caption, "million entries", curves, y_unit="ms", log_x=True, log_y=True)
    return Figure(chart, "k = 0.001 d, milliseconds, medians. P1: selection alone, a V100, 20 to 400 million entries.")


def _today(caption: str, found: Times) -> str:
    plain, fitted = (found.get((f"{name} (PyTorch)", 25_600_000)) for name in ("topk", "gaussian"))
    if plain is None or fitted is None:
        return ""
    how = "alone" if "alone" in caption else "with error feedback"
    return f"; here it takes {plain:.2g} ms, and Gaussian_k written in PyTorch {fitted:.2g} ms, {how}"


def gaussian_times_note(lines: Sequence[Mapping[str, str]]) -> str:
    """Return how much the time of Gaussian_k with error feedback differs from step to step, and how much it sends, at
    the largest size."""
    most = max(int(line["size"]) for line in lines)
    told = [
        f"{METHODS[line['method']]} {float(line['p50_ms']):.3g} ms, {float(line['p20_ms']):.3g} or less in a fifth of "
        f"all steps, and sends {float(line['count_over_k']):.2g} k"
        for line in lines
        if line["method"] in ORDER[2:] and int(line["size"]) == most
    ]
    summed = any(line["commit"] in SUMMED_MASKS for line in lines)
    why = " Both sum each mask, which copies it; the authors' code does not, so that these times are too long."
    with_feedback = "With error feedback the residual decides how many masks a step takes"
    return f"{with_feedback}: of {most / 1e6:g} million entries {'; '.join(told)}.{why if summed else ''}"
