"""P1: Understanding Top-k Sparsification in Distributed Deep Learning (Shi et al., 2019)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from sparsync_lab import models
from sparsync_lab.models import CATALOGUE
from sparsync_lab.papers import gradient_shapes, iteration_times, planner_check, selection_times
from sparsync_lab.papers.curves import quick_changes, train_runs
from sparsync_lab.papers.gaussian_forms import ONE_SIDED
from sparsync_lab.papers.gradient_histograms import draw_histograms
from sparsync_lab.papers.item import Item, Result, RunContext
from sparsync_lab.papers.observers import ratios
from sparsync_lab.papers.p1_convergence import figure_1, figure_6
from sparsync_lab.papers.p1_runs import STEPS, watched
from sparsync_lab.papers.published import P1_MODELS, p1_table1, p1_table2
from sparsync_lab.papers.run import Run
from sparsync_lab.papers.vgg16_notes import precision_note
from sparsync_lab.report import Row, Table

MODELS = tuple(row[0] for row in P1_MODELS)
SHAPE_STEPS = (
    f"All have {STEPS:,} steps: the learning rate grows over the first tenth of them and stays, of the LSTM, too: "
    "that is ours."
)


def histograms(context: RunContext, method: str, remarks: Sequence[str] = ()) -> Result:
    """Draw histograms of the first worker's gradient plus residual, of all six models."""
    own, topk = ([asked_for(context, watched(model, name)) for model in MODELS] for name in (method, "topk"))
    notes = [*remarks, f"{SHAPE_STEPS} {precision_note(context)}"]
    return draw_histograms(context, own, topk if method != "topk" else [], notes)


def asked_for(context: RunContext, run: Run) -> Run:
    """Return a training of which histograms are taken, tiny in a tiny setting."""
    return replace(run, **quick_changes(run, watch_every=2)) if context.quick else run


def figure_5(context: RunContext) -> Result:
    """Draw the bounds on a normal vector, and on gradients of the trainings of figure 2."""
    runs = [asked_for(context, watched(model, "topk")) for model in ("fnn3", "resnet20")]
    done, result = train_runs(context, runs)
    found = [
        (f"{label}, step {history.snapshots[-1]['step']}", ratios(history.snapshots[-1]))
        for label, history in done.items()
        if history.snapshots and "errors" in history.snapshots[-1]
    ]
    return gradient_shapes.figure_5(context, found, result)


def table1(context: RunContext) -> Result:
    """Return sizes and settings of the six models."""
    rows, counts = [], []
    for name, title, published, *_, batch, rate, _ in P1_MODELS:
        spec = CATALOGUE[name]
        count = models.count_parameters(spec.make)
        counts.append(count)
        same = [
            f"{count:,}{'' if count == published else f' (published {published:,})'}",
            f"{spec.batch}{'' if spec.batch == batch else f' (published {batch})'}",
            f"{spec.rate:g}{'' if spec.rate == rate else f' (published {rate:g})'}",
        ]
        rest = [f"{spec.momentum:g}", spec.data, "–" if spec.clip is None else f"{spec.clip:g}"]
        rows.append(Row([title, *same, *rest]))
    return Result(
        [Table("Ours", ["model", "parameters", "batch", "learning rate", "momentum", "data", "clipped at"], rows)],
        notes=[
            "Sizes are counted on the models that the other parts train. P1 calls FNN-3 a network of three hidden "
            "layers; 199,210 parameters are those of 784-200-200-10: three layers in all.",
            "Table 1 prints names of initialisations and activations only: the ranges of the weights are ours.",
            "Not in P1's text: LeNet-5's images are padded, where the authors' code resizes them to 32 x 32 (what that "
            "changes, p1/fig6 says); and, with effects that are not measured, LSTM-PTB drops 0.65 of its units and is "
            "unrolled over 35 words, and both LSTM have a schedule of ours (see p1/fig2). CIFAR-10 is cropped and "
            "flipped at random, as in that code.",
            "P1 says that momentum is 0.9 and nothing of clipping. Its authors' code clips the two LSTM (after the "
            "exchange; here each worker's gradient is clipped), and trains LSTM-PTB without momentum: with 0.9 a rate "
            "of 22 would act as 220.",
        ],
        rows={"model": [row[0] for row in P1_MODELS], "parameters": counts, "published": [row[2] for row in P1_MODELS]},
    )


CIFAR, ALL_DATA = ("CIFAR-10", "a GPU"), ("MNIST", "CIFAR-10", "PTB", "AN4", "a GPU")
ITEMS = (
    Item(
        "p1/fig1",
        "Figure 1, TopK-SGD and RandK-SGD against Dense-SGD",
        "P1: TopK-SGD converges like Dense-SGD on 16 workers, RandK-SGD much more slowly.",
        figure_1,
        ("MNIST", *CIFAR),
        22,
        trains=True,
        by_epochs=True,
    ),
    Item(
        "p1/table1",
        "Table 1, the models and their settings",
        "Six models of three kinds.",
        table1,
        published=p1_table1(),
    ),
    Item(
        "p1/fig2",
        "Figure 2, histograms of u in TopK-SGD",
        "P1: most coordinates of gradient plus residual are close to zero, in every model.",
        lambda context: histograms(context, "topk"),
        ALL_DATA,
        20,
        trains=True,
    ),
    Item(
        "p1/fig3",
        "Figure 3, the shape of π",
        "P1: sorted magnitudes of a normal vector (π) are convex and below a straight line. Its area argument for "
        "Theorem 1 takes their squares.",
        gradient_shapes.figure_3,
    ),
    Item(
        "p1/fig4",
        "Figure 4, time of selection on a GPU",
        "P1: torch.topk is slow on GPUs, DGC_k too where d is large; Gaussian_k only generates slight overheads.",
        selection_times.figure_4,
        needs=(f"results/{selection_times.WITH_FEEDBACK}",),
    ),
    Item(
        "p1/fig5",
        "Figure 5, the bounds over k",
        "P1: the exact ratio is below (1 − k/d)², and that is below 1 − k/d: on a normal vector of 100,000 entries and "
        "in real training.",
        figure_5,
        ("MNIST", *CIFAR),
        2,
        trains=True,
    ),
    Item(
        "p1/fig6",
        "Figure 6, GaussianK-SGD against TopK-SGD and Dense-SGD",
        "P1: GaussianK-SGD has nearly the accuracy of TopK-SGD; both are 0.6 to 0.8 points below Dense-SGD.",
        figure_6,
        ("MNIST", *CIFAR),
        32,
        trains=True,
        by_epochs=True,
    ),
    Item(
        "p1/table2",
        "Table 2, iteration time and scaling efficiency",
        "P1: on 16 GPUs and 10 Gbit/s TopK-SGD is slower than Dense-SGD, GaussianK-SGD up to 2.33 times faster.",
        iteration_times.table_2_of_p1,
        ("a GPU", "torchvision", "timm"),
        1,
        p1_table2(),
        redraw=iteration_times.tables_of_p1,
    ),
    Item(
        "p1/table2-model",
        "Table 2 as the planner predicts it",
        "What sparsync plan says of a network that nobody here has: two constants are fitted on the dense column, the "
        "sparse columns are predicted.",
        planner_check.table_2_predicted,
    ),
    Item(
        "p1/fig7",
        "Figure 7, histograms of u in Dense-SGD",
        "P1: TopK-SGD (figure 2) shows wider distributions than these.",
        lambda context: histograms(context, "dense"),
        ALL_DATA,
        20,
        trains=True,
    ),
    Item(
        "p1/fig8",
        "Figure 8, histograms of u in GaussianK-SGD",
        "P1: they are similar to TopK-SGD's.",
        lambda context: histograms(context, "gaussiank", [ONE_SIDED]),
        ALL_DATA,
        20,
        trains=True,
    ),
)
