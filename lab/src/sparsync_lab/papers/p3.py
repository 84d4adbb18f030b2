"""P3: A Convergence Analysis of Distributed SGD with Communication-Efficient Gradient Sparsification (Shi, 2019)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from sparsync_lab.papers import traffic
from sparsync_lab.papers.curves import (
    by_epoch,
    first_seed,
    loss_by_step,
    quick_changes,
    scores,
    spread_caption,
    train_runs,
    with_seeds,
)
from sparsync_lab.papers.item import Item, Result, RunContext
from sparsync_lab.papers.p1_runs import SPARSE, repeats, training
from sparsync_lab.papers.run import History, Run, model_title
from sparsync_lab.report import Curve, Figure, LineChart, Row, Table

DENSITIES = (0.001, 0.005, 0.01)
OTHERS = ("vgg16", "lstm-ptb")  # in beyond/evidence
ON_OTHERS, CONDITION = "P3 on other models", "P3's condition in numbers"
EVERY = 50  # steps between snapshots of the condition
ABSTRACT = (
    "We have P3's abstract only, from which its proofs cannot be checked. Model and schedule are P1's (ResNet-20), 16 "
    "workers and densities of 0.1, 0.5 and 1 % are our choice. The authors' public code (hclhkbu/gtopkssgd) draws "
    "trainings of 4 workers at densities 0.001, 0.00025, 0.0001 and 0.00005, with 0.004 in the first epoch, among them "
    "ResNet-20 (batch 32, rate 0.1) and VGG-16 (128, 0.1) for 140 epochs: a tree of 4 at those densities is not run "
    "here. dense, topk and what is less than a point below dense have three seeds; the condition has snapshots of "
    "the first."
)
CONDITION_IS = (
    "What we call P3's condition is that the ratio is at most 1: gTop-k is no worse than random-k on the sum. It is "
    "not in the abstract, which speaks of 'certain analytic assumptions'; the authors' code draws the ratio beside a "
    "line at 1. That it holds does not secure that a training converges."
)
OURS = (
    "Our gTop-k keeps what the tree drops in the residual of the worker that dropped it; the published form loses "
    "partial sums on the way."
)


def gtopk(density: float) -> Run:
    """Return a training of ResNet-20 with gTop-k, whose condition is observed."""
    run = training("resnet20", "topk", label=f"gTop-k, {density:g}", watch="gtopk", watch_every=EVERY)
    return replace(run, method="topk+gtopk", options={**SPARSE, "density": density})


def gtopk_on(model: str, density: float) -> Run:
    """Return a training with gTop-k of a model of P1; LSTM-PTB as in beyond/accuracy: 4 workers and 330 steps."""
    if model == "resnet20":
        return gtopk(density)
    run = training(model, "topk", label=f"gTop-k, {density:g}", watch="gtopk", watch_every=EVERY)
    if model == "lstm-ptb":
        run = replace(run, workers=4, steps=330, warmup=0.03, decay=None)
    return replace(run, method="topk+gtopk", options={**SPARSE, "density": density})


def tiny(context: RunContext, runs: list[Run]) -> list[Run]:
    if not context.quick:
        return runs
    return [replace(run, **quick_changes(run, workers=4, watch_every=2)) for run in runs]


def convergence(context: RunContext) -> Result:
    """Compare gTop-k with dense and top-k, and draw P3's condition over the training."""
    runs = [*repeats(context, "resnet20", "dense"), *repeats(context, "resnet20", "topk"), gtopk(DENSITIES[0])]
    done, result = train_runs(context, tiny(context, runs))
    first = first_seed(done)
    figures = [
        by_epoch("Test accuracy", done, f"ResNet-20 on CIFAR-10, 16 workers, density 0.001; {spread_caption(done)}."),
        loss_by_step("Training loss", done, f"The same, the loss; {spread_caption(done)}."),
        *_condition(first),
    ]
    tables = [scores("ResNet-20", done), *_ratios(done)]
    return replace(result, tables=tables, figures=figures, notes=[ABSTRACT, CONDITION_IS, OURS, *result.notes])


def density(context: RunContext) -> Result:
    """Compare gTop-k at three densities with dense. Those that come near it have three seeds."""
    runs = [*repeats(context, "resnet20", "dense"), gtopk(DENSITIES[0])]
    runs += [run for share in DENSITIES[1:] for run in with_seeds(context, gtopk(share), watch="")]
    done, result = train_runs(context, tiny(context, runs))
    first = first_seed(done)
    figures = [
        by_epoch("Test accuracy", done, f"gTop-k at three densities; {spread_caption(done)}."),
        loss_by_step("Training loss", done, f"The same, the loss; {spread_caption(done)}."),
        *_condition(first),
    ]
    tables = [scores("gTop-k at three densities", done), *_ratios(done)]
    return replace(result, tables=tables, figures=figures, notes=[ABSTRACT, CONDITION_IS, OURS, *result.notes])


def _seen(history: History) -> list[Mapping[str, Any]]:
    """Return the snapshots of the condition; there is none of what is not finite."""
    return [snapshot for snapshot in history.snapshots if "ratio" in snapshot]


def _condition(done: dict[str, History]) -> list[Figure]:
    curves = [
        Curve(label, [s["step"] for s in seen], [s["ratio"] for s in seen], look=number)
        for number, (label, history) in enumerate(done.items())  # as in the other charts
        if (seen := _seen(history))
    ]
    caption = "‖Σu − gTop_k‖² over the expectation of ‖Σu − Rand_k(Σu)‖²: at most 1 if gTop-k is no worse."
    return [Figure(LineChart("P3's condition", "steps", curves), caption)] if curves else []


def _ratios(done: dict[str, History]) -> list[Table]:
    rows = []
    for label, history in done.items():
        ratios = [snapshot["ratio"] for snapshot in _seen(history)]
        if not ratios:
            continue
        over = sum(ratio > 1 for ratio in ratios)
        rows.append(Row([label, str(len(ratios)), f"{max(ratios):.4f}", f"{sum(ratios) / len(ratios):.4f}", str(over)]))
    headings = ["training", "snapshots", "largest ratio", "mean", "above 1"]
    return [Table(CONDITION, headings, rows)] if rows else []


def on_other_models(done: Mapping[str, Mapping[str, History]]) -> list[Table]:
    """Return accuracy and condition of gTop-k on the other models, as far as it was trained.

    Args:
        done: by model, then "dense", "topk" and gTop-k by its label.
    """
    own = {model: dict(found) for model, found in done.items() if gtopk_on(model, DENSITIES[0]).label in found}
    tables = [scores(f"{ON_OTHERS}: {model_title(model)}", found) for model, found in own.items()]
    seen = {model_title(model): found[gtopk_on(model, DENSITIES[0]).label] for model, found in own.items()}
    return [*tables, *(replace(table, caption=f"{ON_OTHERS}: {table.caption}") for table in _ratios(seen))]


ITEMS = (
    Item(
        "p3/convergence",
        "convergence of gTop-k",
        "P3: gTop-k converges at a rate of the same order as dense SGD, under certain analytic assumptions. Its "
        "error beside random-k's on the summed gradient is drawn over the training, and its end compared with dense's.",
        convergence,
        ("CIFAR-10", "a GPU"),
        15,
        trains=True,
        by_epochs=True,
    ),
    Item(
        "p3/density",
        "gTop-k at densities 0.001, 0.005 and 0.01",
        "P3 discusses the impact of the compression ratio on convergence.",
        density,
        ("CIFAR-10", "a GPU"),
        27,
        trains=True,
        by_epochs=True,
    ),
    Item(
        "p3/traffic",
        "traffic of gTop-k",
        "What a worker sends grows with P for Top-k over all-gather, and hardly for dense; what gTop-k's root sends "
        "grows with log P.",
        traffic.traffic,
    ),
)
