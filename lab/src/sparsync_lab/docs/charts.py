"""The charts of the pages, drawn from results/: what a step takes on slow links, and what fewer bytes cost."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from statistics import median

from sparsync_lab.docs import accuracy, adamw
from sparsync_lab.docs.network import AUTO, PREDICT, rate_text, settings
from sparsync_lab.docs.sources import Line, Sources
from sparsync_lab.papers.adamw_tables import AGAINST_BUDGET
from sparsync_lab.papers.sweep import BALANCED, EARLY
from sparsync_lab.report.plots import Bar, BarChart, Chart, Curve, LineChart

MODELS = {"gpt": "GPT, 4 layers", "vit": "ViT", "vgg16": "VGG-16", "resnet50": "ResNet-50", "resnet20": "ResNet-20"}
WORKERS = "4"
LANGUAGE = "GPT on PTB, 16 workers of 4, 600 steps"
# Trainings of the comparison at equal bytes, in the order they are shown.
EQUAL = {
    "dense": "dense, all bytes",
    "preconditioned, 1/40": "preconditioned",
    "gradient feedback + AdamW, 1/40": "gradient feedback",
    "DeMo, 1/40": "DeMo",
    "SparseLoCo, every 15 steps, 1/40": "SparseLoCo",
}
IMAGES = {
    "dense": "dense, all bytes",
    EARLY: "default",
    BALANCED: "balanced",
    "TopK-SGD": "TopK-SGD",
    "GaussianK-SGD": "GaussianK-SGD",
    "DGC": "DGC",
}


def minutes_on(rate: str) -> Callable[[Sources], Chart]:
    """Return what draws a GPT's perplexity over minutes on links of ``rate`` Mbit/s: the first seed of each method."""

    def chart(sources: Sources) -> Chart:
        own = settings(sources)[0]
        curves = []
        for label in own.labels:
            lines = own.of(label, rate)[0]
            minutes, values = ([float(line[name]) for line in lines] for name in ("minutes", "value"))
            curves.append(Curve(label, minutes, values))
        top = 2.2 * own.target
        title = f"Perplexity of a GPT, links of {rate_text(rate)}"
        return LineChart(title, "minutes of training", curves, y_range=(0.8 * own.target, top))

    return chart


def step_of(model: str) -> Callable[[Sources], Chart]:
    """Return what draws a model's step over the rate of links: dense, bf16, and what `auto` settles on."""

    def chart(sources: Sources) -> Chart:
        lines = [line for line in sources.lines(AUTO[0]) if (line["model"], line["workers"]) == (model, WORKERS)]
        curves = [_over_rates(label, lines, (name,)) for name, label in
                  (("dense", "dense"), ("bf16", "dense, bf16"), ("auto", "auto"))]  # fmt: skip
        title = f"{MODELS[model]}: a step, {WORKERS} workers"
        return LineChart(title, "links, Gbit/s", curves, log_x=True, log_y=True, y_unit="ms")

    return chart


def speed_up(sources: Sources) -> Chart:
    """Return how many times faster than dense bf16 `auto` is, over the rate of links, a curve a model."""
    lines, curves = sources.lines(AUTO[0]), []
    for number, (model, name) in enumerate(MODELS.items()):
        own = [line for line in lines if (line["model"], line["workers"]) == (model, WORKERS)]
        times = {(line["rate_mbit"], line["method"]): float(line["step_p50_ms"]) for line in own}
        if not own:
            continue
        rates = sorted({line["rate_mbit"] for line in own}, key=float)
        ratios = [times[rate, "bf16"] / times[rate, "auto"] for rate in rates]
        curves.append(Curve(name, [float(rate) / 1000 for rate in rates], ratios, look=number + 1))
    title = f"auto against dense in bf16, {WORKERS} workers"
    return LineChart(title, "links, Gbit/s", curves, log_x=True, log_y=True, y_unit="×")


def predicted(sources: Sources) -> Chart:
    """Return a GPT's steps as the planner predicts them, and as they were measured."""
    lines = [line for line in sources.lines(PREDICT) if (line["model"], line["workers"]) == ("gpt", WORKERS)]
    curves = []
    for number, method in enumerate(("dense", "bf16", "default")):
        for kind, column in (("measured", "step_p50_ms"), ("predicted", "predicted_ms")):
            curves.append(_over_rates(f"{method}, {kind}", lines, (method,), column, 2 * number + (column[0] == "p")))
    title = f"GPT: a step, predicted and measured, {WORKERS} workers"
    return LineChart(title, "links, Gbit/s", curves, log_x=True, log_y=True, y_unit="ms")


def against_budget(column: int, title: str, unit: str = "") -> Callable[[Sources], Chart]:
    """Return what draws a column of the scores over budgets."""

    def chart(sources: Sources) -> Chart:
        own = next(own for own in sources.item(adamw.FILE).result.tables if own.caption == AGAINST_BUDGET)
        found = {row.cells[0]: _score(row.cells[column]) for row in own.rows}
        points = [(float(match[1]), *score) for name, score in found.items()
                  if score and (match := re.match(r"1/(\d+)", name))]  # fmt: skip
        x, y, spread = zip(*sorted(points), strict=True)
        dense, own_spread = found["dense"] or (0.0, 0.0)
        flat = Curve("dense", (x[0], x[-1]), (dense,) * 2, (dense - own_spread,) * 2, (dense + own_spread,) * 2)
        low = [value - by for value, by in zip(y, spread, strict=True)]
        high = [value + by for value, by in zip(y, spread, strict=True)]
        curves = [flat, Curve("sparse, with this budget", x, y, low, high)]
        return LineChart(title, "times fewer bytes than dense", curves, log_x=True, y_unit=unit)

    return chart


def language_at_equal_bytes(sources: Sources) -> Chart:
    """Return the perplexities of a GPT with a 40th of the bytes."""
    own = next(own for own in sources.item(adamw.FILE).result.tables if own.caption == LANGUAGE)
    return BarChart("A GPT with a 40th of dense's bytes", "perplexity, less is better", _bars(own.rows, EQUAL))


def images_at_equal_bytes(sources: Sources) -> Chart:
    """Return the accuracies of ResNet-20 with the bytes of TopK-SGD."""
    steps, own = next(iter(accuracy.score_tables(sources, accuracy.LENGTHS).items()))
    title = f"ResNet-20, {steps} steps, TopK-SGD's bytes"
    return BarChart(title, "test accuracy, %", _bars(own.rows, IMAGES, " %"))


def traffic(sources: Sources) -> Chart:
    """Return how many times less than dense each recipe sends, over workers."""
    own = next(own for own in sources.item("p3-traffic").result.tables if "recipes" in own.caption)
    workers = [float(heading.split()[0]) for heading in own.headings[1:]]
    curves = [Curve(row.cells[0].split(":")[0], workers, [float(cell.split()[0]) for cell in row.cells[1:]])
              for row in own.rows]  # fmt: skip
    return LineChart("How many times less than dense", "workers", curves, log_x=True, log_y=True, y_unit="×")


def selection(name: str, size: str, where: str) -> Callable[[Sources], Chart]:
    """Return what draws the time that choosing 0.1 % of the entries takes."""

    def chart(sources: Sources) -> Chart:
        wanted = {"size": size, "density": "0.001", "dtype": "fp32"}
        lines = [line for line in sources.lines(name) if all(line[key] == value for key, value in wanted.items())]
        shown = [line for line in lines if line["family"] in ("floor", "ours") and line["floor"] == "e += g"]
        shown = [line for line in shown if "zero_" not in line["method"] and "(" not in line["method"]]
        bars = [Bar(line["method"], float(line["p50_ms"]) / 1e3, f"{float(line['p50_ms']):.3g} ms") for line in shown]
        title = f"Choosing 0.1 % of {int(size) / 1e6:g} million, {where}"
        return BarChart(title, "with error feedback", bars, x_unit="s")

    return chart


def _over_rates(
    label: str, lines: Sequence[Line], methods: Sequence[str], column: str = "step_p50_ms", look: int | None = None
) -> Curve:
    """Return a column of a method's lines over the rate of the links."""
    own = [line for line in lines if line["method"] in methods]
    rates = sorted({line["rate_mbit"] for line in own}, key=float)
    times = [median(float(line[column]) for line in own if line["rate_mbit"] == rate) for rate in rates]
    return Curve(label, [float(rate) / 1000 for rate in rates], times, look=look)


def _bars(rows: Sequence[object], names: Mapping[str, str], unit: str = "") -> list[Bar]:
    cells = {row.cells[0]: row.cells[1] for row in rows}  # type: ignore[attr-defined]
    scores = {shown: _score(cells[name]) for name, shown in names.items()}
    return [Bar(shown, score[0], f"{score[0]:.1f}{unit}") for shown, score in scores.items() if score]


def _score(cell: str) -> tuple[float, float] | None:
    """Return the mean and the deviation of a cell; ``None`` if it holds no score."""
    found = re.match(r"([\d.]+)(?: ± ([\d.]+))?", cell)
    return (float(found[1]), float(found[2] or 0)) if found else None


CHARTS: Mapping[str, Callable[[Sources], Chart]] = {
    "minutes-100mbit": minutes_on("100"),
    "minutes-1gbit": minutes_on("1000"),
    "minutes-10gbit": minutes_on("10000"),
    "speed-up": speed_up,
    "step-gpt": step_of("gpt"),
    "step-resnet50": step_of("resnet50"),
    "predicted": predicted,
    "budget-gpt": against_budget(1, "Perplexity of a GPT, less is better"),
    "budget-resnet20": against_budget(2, "Accuracy of ResNet-20", "%"),
    "equal-bytes-gpt": language_at_equal_bytes,
    "equal-bytes-resnet20": images_at_equal_bytes,
    "traffic": traffic,
    "selection-gpu": selection("bench-select-gpu.csv", "100000000", "a GPU"),
    "selection-cpu": selection("bench-select-cpu.csv", "25600000", "a CPU core"),
}
