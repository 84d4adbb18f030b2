"""P1: Understanding Top-k Sparsification in Distributed Deep Learning (Shi et al., 2019)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from sparsync_lab import models
from sparsync_lab.models import CATALOGUE
from sparsync_lab.papers import gradient_shapes, iteration_times, planner_check, selection_times
from sparsync_lab.papers.curves import (
    base_result,
    by_epoch,
    findings,
    quick_changes,
    scores,
    spread_caption,
    train_runs,
)
from sparsync_lab.papers.gaussian_forms import (
    FORMS,
    ONE_SIDED,
    count_figures,
    fallback_note,
    older_rule,
    spread_note,
    stored,
    uncounted_note,
)
from sparsync_lab.papers.gradient_histograms import draw_histograms
from sparsync_lab.papers.item import Item, Result, RunContext
from sparsync_lab.papers.observers import ratios
from sparsync_lab.papers.p1_runs import AUTHORS, CARRIED, COUNTED, HELD, HELD_COUNTED, STEPS, repeats, watched
from sparsync_lab.papers.published import P1_MODELS, p1_table1, p1_table2
from sparsync_lab.papers.run import History, Run, model_title
from sparsync_lab.papers.run_queue import train_missing
from sparsync_lab.papers.vgg16_notes import change_tables, gap_note
from sparsync_lab.report import Figure, Row, Table

MODELS = tuple(row[0] for row in P1_MODELS)
SCHEDULE = (
    "P1 does not print its schedule. As in its authors' code, the learning rate grows over the first 5 of 120 epochs "
    "and is divided by 10 after 81; density is 0.001 from the first step on, as the text says (the code begins with "
    "1/64 and 0.004, for an epoch each). Weight decay is 0; in the authors' code it is 0.0001, of weights alone. "
    "Whether these two matter, beyond/evidence measures, with weight decay of all parameters, biases too. "
    "VGG-16's passes compute in bfloat16 where torch's autocast takes that to be safe. LeNet-5 on MNIST, which P1 "
    "trains but does not draw here, has the same schedule. LeNet-5 and ResNet-20 have three seeds of dense, TopK-SGD "
    "and Gaussian-k with its count held, LeNet-5 of Gaussian-k as printed, too (mean and standard deviation; curves "
    "have the range of the seeds); all others have one, and what differs by less than a point is no ranking."
)
IMAGENET = (
    "P1's third model, ResNet-50 on ImageNet, is for those who have it: --only resnet50 with --data-dir at a folder "
    "that holds train/<class>/ and val/<class>/ trains it on 16 virtual workers of 32 pictures, 70 epochs, rate 0.2 "
    "divided by 10 after 30 and 60 (P1 prints no rate, and a batch of 128 with its times only)."
)
RANDOM = (
    "RandK-SGD diverges here (LeNet-5 learns, far behind), and in P1 it learns on CIFAR-10, if slowly, and cannot "
    "converge on ImageNet. With error feedback an "
    "entry waits a thousand steps on average and then brings a thousand gradients at once, of which momentum in the "
    "optimizer makes ten thousand; the learning rate is dense SGD's. P1 does not say what it did about that. Its "
    "authors' code does not add the residual, and begins with densities that are four to sixteen times as high: what "
    "these two change, beyond/evidence measures. Of what it sends, the density column counts what is not 0."
)
SHAPE_STEPS = (
    f"All have {STEPS:,} steps: the learning rate grows over the first tenth of them and stays. VGG-16's passes are in "
    "bfloat16 where torch's autocast takes that to be safe."
)


def convergence(
    context: RunContext, methods: Sequence[str], remarks: Sequence[str], found: Sequence[str], again: Sequence[str] = ()
) -> Result:
    """Compare test accuracies of LeNet-5, ResNet-20 and VGG-16 with each method; of ResNet-50 if it is asked for.

    Args:
        remarks: on the methods.
        found: what came of the full trainings.
        again: forms of Gaussian-k that were trained again to count: their counts are drawn where they are stored.
    """
    figures: list[Figure] = []
    tables: list[Table] = []
    histories: list[History] = []
    imagenet = any(word.startswith("resnet5") for word in context.only)
    names = ("lenet5", "resnet20", "vgg16", *(["resnet50"] if imagenet else []))
    asked = {model: [run for method in methods for run in repeats(context, model, method)] for model in names}
    if context.quick:
        asked = {model: [replace(run, **quick_changes(run)) for run in runs] for model, runs in asked.items()}
    # Those of all models in one go, so that several processes have enough to share.
    missing = train_missing(context, [run for runs in asked.values() for run in runs])[1]
    counted = {form: stored(context, form) for form in again}
    for model, runs in asked.items():
        done, _ = train_missing(context.read_only(), runs)
        counts = {form: own[model] for form, own in counted.items() if model in own}
        histories += [*done.values(), *counts.values()]
        if done:
            title = model_title(model)
            on = next(iter(done.values())).data["name"]
            caption = f"{title}, data {on}; {spread_caption(done)}."
            figures.append(by_epoch(f"{title}, test accuracy", done, caption))
            tables.append(scores(f"{title}: test accuracy", done))
            figures += count_figures(title, done, counts)
    result = base_result(context, histories, missing)
    schedule = f"{SCHEDULE}{spread_note(context)}"
    notes = [*remarks, *findings(context, missing, found), schedule, IMAGENET, *result.notes]
    return replace(result, tables=tables, figures=figures, notes=notes)


def figure_1(context: RunContext) -> Result:
    return convergence(context, ("dense", "topk", "randk"), gap_note(context), [RANDOM])


def figure_6(context: RunContext) -> Result:
    methods = ("dense", "topk", "gaussiank", HELD, AUTHORS, CARRIED, COUNTED)
    counted = [note for form in (HELD_COUNTED, CARRIED) for note in fallback_note(form, stored(context, form).values())]
    remarks = [*FORMS, *older_rule(context), *counted, *uncounted_note(context), *gap_note(context)]
    result = convergence(context, methods, remarks, [], [HELD_COUNTED])
    return replace(result, tables=[*result.tables, *change_tables(context)])


def histograms(context: RunContext, method: str, remarks: Sequence[str] = ()) -> Result:
    """Draw histograms of the first worker's gradient plus residual, of all six models."""
    own, topk = ([asked_for(context, watched(model, name)) for model in MODELS] for name in (method, "topk"))
    return draw_histograms(context, own, topk if method != "topk" else [], [*remarks, SHAPE_STEPS])


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
            "Initial weights and activations are the published ones.",
            "P1 says that momentum is 0.9 and nothing of clipping. Its authors' code clips the two LSTM, and trains "
            "LSTM-PTB without momentum: with 0.9 a rate of 22 would act as 220.",
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
        "P1: most coordinates of gradient plus residual are close to zero, in every model: a bell.",
        lambda context: histograms(context, "topk"),
        ALL_DATA,
        20,
        trains=True,
    ),
    Item(
        "p1/fig3",
        "Figure 3, the shape of π",
        "Sorted magnitudes of a normal vector fall below a straight line, and so do their squares: what Theorem 1's "
        "tighter bound for Top-k rests on.",
        gradient_shapes.figure_3,
    ),
    Item(
        "p1/fig4",
        "Figure 4, time of selection on a GPU",
        "P1: torch.topk is slow on GPUs, DGC_k too where d is large, Gaussian_k is nearly free.",
        selection_times.figure_4,
        needs=("results/bench-select-gpu.csv",),
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
        "P1: without residuals the distributions are narrower than those of figure 2.",
        lambda context: histograms(context, "dense"),
        ALL_DATA,
        20,
        trains=True,
    ),
    Item(
        "p1/fig8",
        "Figure 8, histograms of u in GaussianK-SGD",
        "P1: much like those of TopK-SGD.",
        lambda context: histograms(context, "gaussiank", [ONE_SIDED]),
        ALL_DATA,
        20,
        trains=True,
    ),
)
