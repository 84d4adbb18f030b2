"""Trainings that test claims where they can fail: what they are to decide, the most valuable first."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from sparsync_lab.models import CATALOGUE
from sparsync_lab.papers import random_forms, tuned
from sparsync_lab.papers.authors_other_settings import (
    OTHER_ASKED,
    OTHER_SETTINGS,
    other_settings,
    without_them,
)
from sparsync_lab.papers.lr_search import LearningRateSearch
from sparsync_lab.papers.p1_runs import AUTHORS, CARRIED, CLOSE, COUNTED, HELD, HELD_COUNTED, training
from sparsync_lab.papers.p2 import (
    AT_ONE_RATE,
    at_layers_rate,
    block_and_random,
    block_controls,
    long_training,
)
from sparsync_lab.papers.p3 import gtopk_on
from sparsync_lab.papers.run import SEEDS, Run
from sparsync_lab.papers.trainings import SIGNED_GTOPK
from sparsync_lab.papers.vgg16_gap import ASKED, FP32, SHORT, authors_settings, cause, causes, clipped, warmed

EVIDENCE = "beyond/evidence"
JOBS = 12  # trainings beside one another, for which the times below are
# Seconds of a step beside as many others on one H200, by model and images of a worker's batch; from stored trainings.
STEP_SECONDS = {
    ("lenet5", 128): 0.06, ("resnet20", 32): 0.055, ("resnet20", 128): 0.05, ("vgg16", 128): 0.32, ("vgg16", 32): 0.1,
    ("lstm-ptb", 20): 0.2,
}  # fmt: skip
P2_STEP_SECONDS = {1: 0.08, 2: 0.06, 4: 0.11, 8: 0.22}  # of ResNet-18, by workers
IN_FP32 = 0.4  # times, of VGG-16: the workers' passes go together then
SLOWER = {"random+allgather": 2, "topk+gtopk": 1.5, f"topk+{SIGNED_GTOPK}": 2}  # times, of ResNet-20
IMAGES = {"mnist": 60_000, "cifar10": 50_000}
# Of gTop-k on ResNet-20, with Elias-Fano indices, in the bytes that 0.1 % take with 32 + 32 bits.
FEWER_BITS = {"sign": 0.0062, "levels": 0.0051, "bf16": 0.0024}
RANDOM_ASKED = (
    "P1, figure 1: does Rand-k learn without its residual, as in one of the two forms in its authors' code, or with "
    "more at first?"
)
TREE_ASKED = (
    "P3: its condition and its accuracy on VGG-16 and LSTM-PTB; what momentum before the residual brings, and values "
    "of fewer bits in the bytes of 0.1 %, signs too, made anew of every partial sum."
)
AUTHORS_ASKED = (
    "P1, figure 6: with weight decay and density warm-up of the authors' code, 120 epochs; and VGG-16 clipped."
)
TUNED, TREE, SETTINGS, RANDOM = "tuned", "gTop-k", "authors' settings", "randk"  # questions
OF_P2 = "no momentum, a rate that grows over 5 epochs, 30 epochs, ResNet-18"


@dataclass(frozen=True)
class Question:
    """What a group of trainings is to decide.

    Args:
        name: of the question.
        asks: in a sentence.
        runs: the most valuable first.
        beside: trainings of other items that they are compared with.
    """

    name: str
    asks: str
    runs: tuple[Run, ...]
    beside: tuple[Run, ...] = ()


def priced(run: Run) -> Run:
    """Return the run with the seconds that it takes beside others, about."""
    each = P2_STEP_SECONDS[run.workers] if run.model == "resnet18" else STEP_SECONDS[run.model, run.batch]
    each *= SLOWER.get(run.method, 1) if run.model == "resnet20" else 1
    each *= IN_FP32 if run.model == "vgg16" and not run.autocast else 1
    kind = CATALOGUE[run.model].data
    steps = run.steps or run.epochs * (IMAGES[kind] // run.workers // run.batch)
    return replace(run, seconds=round(20 + each * steps))


def recipe_of_gtopk(density: float, **changes: Any) -> Run:
    """Return gTop-k on ResNet-20 with momentum before the residual."""
    run = gtopk_on("resnet20", density)
    beta = changes.pop("beta", 0.5)
    label = f"{run.label}, momentum corrected, {beta:g}" + (", density warm-up" if "front" in changes else "")
    options = {**run.options, "momentum": "correct", "beta": beta}
    return replace(run, label=label, options=options, watch="", **changes)


def gtopk_in_fewer_bits(values: str, seed: int = 0) -> Run:
    """Return the same with as many bytes as 0.1 % take in fp32: shorter values and indices, and so more entries."""
    density = FEWER_BITS[values]
    run = recipe_of_gtopk(density)
    method = "topk+gtopk" if values == "bf16" else f"topk+{SIGNED_GTOPK}"
    label = f"gTop-k, {values}, {density:g}, momentum corrected, 0.5"
    options = {**run.options, "values": values, "indices": "ef"}
    return tuned.seeded(replace(run, label=label, method=method, options=options), seed)


def other_causes() -> tuple[Run, ...]:
    """Return what else may be behind VGG-16's gap: precision, and a warm-up of as many epochs as in figure 6."""
    return (
        cause("topk", FP32, autocast=False),
        warmed(),
        *(cause(method, "warm-up of 5 epochs", warmup=5 / SHORT) for method in ("topk", "dense")),
    )


@cache
def questions() -> tuple[Question, ...]:
    """Return all questions, the most valuable first."""
    search = LearningRateSearch(lambda run: None)
    wide = [f"{scheme}+{how}" for scheme in ("random", "block") for how in ("allgather", "shared")]

    def cells(scope: str, workers: int, schemes: tuple[str, ...]) -> tuple[Run, ...]:
        return tuple(long_training(scheme, scope, workers) for scheme in schemes)

    both = ("topk", "dense")
    groups = (
        Question(
            SETTINGS,
            AUTHORS_ASKED,
            (
                *(authors_settings(model, method) for model in ("vgg16", "resnet20") for method in both),
                *map(clipped, both),
                *(authors_settings(model, form) for model in ("vgg16", "resnet20") for form in (AUTHORS, "gaussiank")),
                *(tuned.seeded(authors_settings("vgg16", method), seed) for seed in SEEDS[1:] for method in both),
                *(tuned.seeded(authors_settings("resnet20", method), seed) for seed in SEEDS[1:] for method in both),
                *(authors_settings("lenet5", method) for method in (*both, AUTHORS, "gaussiank")),
            ),
            (
                *(training(model, method) for model in ("vgg16", "resnet20", "lenet5") for method in both),
                *(tuned.seeded(training("resnet20", method), seed) for seed in SEEDS[1:] for method in both),
            ),
        ),
        Question(
            "cause",
            ASKED,
            (*other_causes(), *causes(), cause("dense", FP32, autocast=False)),
        ),
        Question(
            OTHER_SETTINGS,
            OTHER_ASKED,
            other_settings(),
            without_them(),
        ),
        Question(
            "no momentum",
            f"P2, table 1 ({OF_P2}): layer by layer against globally, block against random, and all-reduce.",
            (
                *cells("layer", 8, ("standard", "topk", *wide)),
                *cells("global", 8, ("topk", *wide)),
                *cells("layer", 4, ("standard", "topk", *wide)),
            ),
        ),
        Question(
            RANDOM,
            RANDOM_ASKED,
            tuple(random_forms.random_k(model, form) for model in random_forms.MODELS for form in random_forms.FORMS),
            tuple(training(model, method) for model in random_forms.MODELS for method in ("dense", "randk")),
        ),
        Question(
            TREE,
            TREE_ASKED,
            (
                recipe_of_gtopk(0.001),
                gtopk_on("lstm-ptb", 0.001),
                recipe_of_gtopk(0.001, front=8.0, steps=11_640),
                gtopk_on("vgg16", 0.001),
                recipe_of_gtopk(0.001, beta=0.9),
                *(gtopk_in_fewer_bits(values) for values in FEWER_BITS),
                *(gtopk_in_fewer_bits(values, seed) for seed in SEEDS[1:] for values in ("levels", "sign")),
                *(tuned.seeded(recipe_of_gtopk(0.001, front=8.0, steps=11_640), seed) for seed in SEEDS[1:]),
            ),
            (
                *(training("resnet20", method) for method in both),
                *(tuned.seeded(training("resnet20", "dense"), seed) for seed in SEEDS[1:]),
                gtopk_on("resnet20", 0.001),
                *(training("vgg16", method) for method in both),
                *(search.run("lstm-ptb", method, 1.0, 0) for method in ("dense", "TopK-SGD")),
            ),
        ),
        Question(
            "counts",
            "P1, figure 6: the forms on VGG-16 for 120 epochs; and how many entries Algorithm 1 sends over a training.",
            (
                *(training(model, COUNTED) for model in ("lenet5", "resnet20")),
                *(training("vgg16", form) for form in (AUTHORS, CARRIED, COUNTED)),
            ),
            tuple(training("vgg16", method) for method in (*both, "gaussiank", HELD)),
        ),
        Question(
            "held",
            "P1, figure 6: how often does Gaussian-k with its count held fall back to the k largest?",
            tuple(training(model, HELD_COUNTED) for model in ("lenet5", "resnet20")),
        ),
        Question(
            "blocks",
            "P2, table 1: is it the rate, or the few epochs, that keeps block-random-k far below what is published?",
            block_controls(),
            block_and_random(),
        ),
        Question(
            "the rest",
            f"P2, table 1 ({OF_P2}): the other cells.",
            (
                *map(at_layers_rate, cells("global", 8, AT_ONE_RATE)),
                *cells("layer", 2, ("standard", "topk", *wide)),
                *cells("layer", 1, ("block+allgather", "random+allgather", "topk", "standard")),
                *cells("global", 4, ("topk", *wide)),
                *cells("global", 2, ("topk", *wide)),
                *cells("global", 1, ("topk", "random+allgather", "block+allgather")),
                *(
                    tuned.seeded(long_training(f"random+{how}", "layer", 8), seed)
                    for seed in SEEDS[1:]
                    for how in ("allgather", "shared")
                ),
            ),
        ),
        Question(
            TUNED,
            "Baselines at their best: dense, TopK-SGD and the best recipe on ResNet-20 with other rates, and in P1's "
            "schedule; DGC on VGG-16 with lower rates.",
            tuned.asked(search),
            tuned.beside(search),
        ),
        Question(
            "forms",
            "P1, figure 6: is Gaussian-k as good as Top-k in the authors' form, and where it searches its threshold?",
            (
                *(training(model, form) for model in ("resnet20", "lenet5") for form in (AUTHORS, CARRIED)),
                *(tuned.seeded(training(model, CARRIED), seed) for model in CLOSE for seed in SEEDS[1:]),
            ),
            (
                *(training(model, method) for model in ("resnet20", "lenet5") for method in (*both, "gaussiank", HELD)),
                *(tuned.seeded(training("lenet5", "gaussiank"), seed) for seed in SEEDS[1:]),
                *(tuned.seeded(training(model, "topk"), seed) for model in CLOSE for seed in SEEDS[1:]),
            ),
        ),
    )
    return tuple(replace(one, runs=tuple(map(priced, one.runs))) for one in groups)
