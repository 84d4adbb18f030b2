"""P1: Understanding Top-k Sparsification in Distributed Deep Learning (Shi et al., 2019)."""

from __future__ import annotations

from sparsync.experiments import models
from sparsync.experiments.models import CATALOGUE
from sparsync.experiments.papers import shapes, timing
from sparsync.experiments.papers.item import Context, Item, Result
from sparsync.experiments.papers.published import P1_MODELS, p1_table1
from sparsync.report import Row, Table


def table1(context: Context) -> Result:
    """Sizes and settings of the six models."""
    rows, counts = [], []
    for name, title, published, *_, batch, rate, _ in P1_MODELS:
        spec = CATALOGUE[name]
        count = models.parameters(spec.make)
        counts.append(count)
        same = [
            f"{count:,}{'' if count == published else f' (published {published:,})'}",
            f"{spec.batch}{'' if spec.batch == batch else f' (published {batch})'}",
            f"{spec.rate:g}{'' if spec.rate == rate else f' (published {rate:g})'}",
        ]
        rows.append(Row([title, *same, spec.data, "–" if spec.clip is None else f"{spec.clip:g}"]))
    return Result(
        [Table("Ours", ["model", "parameters", "batch", "learning rate", "data", "clipped at"], rows)],
        notes=[
            "Sizes are counted on the models that the other parts train. P1 calls FNN-3 a network of three hidden "
            "layers; 199,210 parameters are those of 784-200-200-10: three layers in all.",
            "P1 does not say that gradients are clipped; its authors' code does, for the two LSTM.",
        ],
        rows={"model": [row[0] for row in P1_MODELS], "parameters": counts, "published": [row[2] for row in P1_MODELS]},
    )


ITEMS = (
    Item(
        "p1/table1",
        "Table 1, the models and their settings",
        "Six models of three kinds.",
        table1,
        published=p1_table1(),
    ),
    Item(
        "p1/fig3",
        "Figure 3, the shape of π",
        "Sorted magnitudes of a normal vector fall below a straight line, and so do their squares: what Theorem 1's "
        "tighter bound for Top-k rests on.",
        shapes.figure_3,
    ),
    Item(
        "p1/fig4",
        "Figure 4, time of selection on a GPU",
        "P1: torch.topk is slow on GPUs, DGC_k too where d is large, Gaussian_k is nearly free.",
        timing.figure_4,
        needs=("results/bench-select-gpu.csv",),
    ),
)
