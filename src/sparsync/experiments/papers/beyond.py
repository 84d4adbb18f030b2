"""What the papers do not have: tuned dense training against sparse methods that send the same bytes in all."""

from __future__ import annotations

from dataclasses import replace
from math import floor, log10
from typing import Any

from sparsync.collectives import AllGather
from sparsync.experiments.models import CATALOGUE
from sparsync.experiments.papers.curves import by_epoch, quickly, scores, trained
from sparsync.experiments.papers.item import Context, Item, Result
from sparsync.experiments.papers.p1 import METHODS, SPARSE
from sparsync.experiments.papers.steps import spans_of
from sparsync.experiments.papers.trainings import Run, bytes_per_step, traffic_of
from sparsync.layout import Layout
from sparsync.report import Curve, Figure, LineChart, Row, Table
from sparsync.wire import Wire

STEPS = 1400
RATES = (0.1, 0.2, 0.4)  # that dense is tuned over


def base(label: str, method: str = "dense", rate: float = 0.1, **changes: Any) -> Run:
    """ResNet-20 with a short cosine schedule."""
    run = Run(label, "resnet20", method, batch=CATALOGUE["resnet20"].batch, rate=rate, steps=STEPS, warmup=0.03)
    return replace(run, decay=None, **changes)


def budget(workers: int) -> float:
    """Bytes of TopK-SGD: 0.1 % of all entries, 32 + 32 bits each, gathered."""
    spans = spans_of("resnet20")
    layout = Layout.cut(spans, numel=spans[-1].stop, scope="global", density=0.001)
    return AllGather().traffic(layout, Wire(), workers).mean_bytes


def within(run: Run, bytes_allowed: float) -> Run:
    """The run at the largest density whose step sends no more than that."""
    cost, low, high = traffic_of(run), 1e-5, 0.05
    for _ in range(16):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if cost(middle) <= bytes_allowed else (low, middle)
    # To four digits, downwards: they are part of the run's name.
    unit = 10 ** (floor(log10(low)) - 3)
    return replace(run, options={**run.options, "density": round(floor(low / unit) * unit, 12)})


def runs_of(workers: int) -> list[Run]:
    """Dense at several rates, and what sends as much as TopK-SGD."""
    allowed = budget(workers)
    whole = {"dense_below": 0, "dense_1d": False}
    sparse = [
        base("TopK-SGD", METHODS["topk"], options=SPARSE),
        base("GaussianK-SGD", METHODS["gaussiank"], options=SPARSE, settings={"refine": True}),
        base("DGC", "dgc"),
        base("recipe default", "default"),
        base("recipe default, nothing dense", "default", options=whole),
        base("recipe default, twice the rate", "default", rate=0.2, options=whole),
    ]
    sparse = [within(replace(run, workers=workers), allowed) for run in sparse]
    dense = [base(f"dense, rate {rate:g}", rate=rate, workers=workers) for rate in RATES]
    return [*dense, *sparse]


def accuracy(context: Context) -> Result:
    """Test accuracy at equal bytes."""
    workers = 2 if context.quick else 16
    runs = runs_of(workers)
    if context.quick:
        runs = [replace(run, **quickly(run, workers=workers)) for run in runs]
    done, result = trained(context, runs)
    tuned = {label: h for label, h in done.items() if label.startswith("dense")}
    best = max(tuned, key=lambda label: tuned[label].last) if tuned else None
    kept = {label: h for label, h in done.items() if label not in tuned or label == best}
    curves = [Curve(label, h.bytes, [100 * score for score in h.scores]) for label, h in kept.items()]
    figures = [
        by_epoch("Test accuracy", kept, "ResNet-20 on CIFAR-10, 16 workers of 32 images, cosine schedule."),
        Figure(
            LineChart("Test accuracy over bytes", "sent by a worker", curves, y_unit="%", log_x=True, x_unit="B"),
            "All sparse methods send the same bytes in all; dense about 500 times as many.",
        ),
    ]
    densities = Table(
        "What each sends",
        ["training", "density of what is compressed", "bytes of a step"],
        [Row([run.label, f"{run.options.get('density', 1):g}", f"{bytes_per_step(run):,.0f}"]) for run in runs],
    )
    notes = [
        "Densities are chosen so that a worker sends the same bytes in a step as TopK-SGD at 0.1 % (index and value of "
        "32 bits each). GaussianK-SGD has its count held near k (refine=True): as printed, its messages need room for "
        "8 k. DGC has no warm-up of the density, which would send more. Biases and norms travel dense in DGC and in "
        "the default recipe, which leaves less for the rest; one row compresses them, too.",
        "One seed unless several were run; two dense seeds of such a training differ by about 0.3 points.",
    ]
    return replace(
        result, tables=[scores("Test accuracy", done, best), densities], figures=figures, notes=[*notes, *result.notes]
    )


ITEMS = (
    Item(
        "beyond/accuracy",
        "accuracy at equal bytes",
        "Dense SGD, tuned, against TopK-SGD, GaussianK-SGD, DGC and the library's default recipe, which all send the "
        "same bytes.",
        accuracy,
        ("CIFAR-10", "a GPU"),
        15,
    ),
)
