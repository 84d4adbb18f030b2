"""The trainings of P1's convergence, with its settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from sparsync_lab.models import CATALOGUE
from sparsync_lab.papers.curves import with_seeds
from sparsync_lab.papers.item import RunContext
from sparsync_lab.papers.run import Run, model_title

# k = 0.001 d of the whole model, fp32, nothing travels dense, momentum stays in the optimizer.
SPARSE: Mapping[str, Any] = {
    "density": 0.001,
    "scope": "global",
    "momentum": "keep",
    "dense_below": 0,
    "dense_1d": False,
}
METHODS = {"dense": "dense", "topk": "topk", "randk": "random+allgather", "gaussiank": "gaussian"}
HELD = "gaussiank, count held"
# Other forms of Gaussian-k, with their counts over the training; two are those above once more.
ITS_COUNTS = ", its counts"
COUNTED, AUTHORS, CARRIED = f"gaussiank{ITS_COUNTS}", "gaussiank, authors' code", "gaussiank, count carried"
HELD_COUNTED = f"{HELD}{ITS_COUNTS}"
GAUSSIAN_FORMS: Mapping[str, Mapping[str, Any]] = {
    COUNTED: {}, AUTHORS: {"two_sided": True, "masks": 3}, CARRIED: {"refine": "carried"},
    HELD_COUNTED: {"refine": True},
}  # fmt: skip
LARGEST_GO = (HELD, "topk", CARRIED)  # labels of what sends the largest entries, about k
COUNT_EVERY = 60  # steps
STEPS, EVERY = 1600, 200  # of the histograms
FEWER = {"lstm-ptb": 2, "lstm-an4": 2}  # workers whose gradients make the histograms, instead of 16
# Close to one another: three seeds of each.
CLOSE = {"lenet5": ("dense", "topk", "gaussiank", HELD, CARRIED), "resnet20": ("dense", "topk", HELD)}


def counts_title(model: str) -> str:
    """Return the title of the chart of a model's counts.

    Args:
        model: as its title says it.
    """
    return f"{model}, entries over k"


def training(model: str, method: str, **changes: Any) -> Run:
    """Return a training with P1's settings."""
    options = {} if method == "dense" else SPARSE
    if method in GAUSSIAN_FORMS:
        own = {"label": method, "settings": GAUSSIAN_FORMS[method], "watch": "count", "watch_every": COUNT_EVERY}
        return replace(training(model, "gaussiank", **own), **changes)
    if method == HELD:
        return replace(training(model, "gaussiank", label=HELD, settings={"refine": True}), **changes)
    if model == "resnet50":
        run = Run(method, model, METHODS[method], options, rate=0.2, weight_decay=1e-4, epochs=70, warmup=5 / 70)
        return replace(run, decay=(30 / 70, 60 / 70), **changes)
    spec = CATALOGUE[model]
    made = Run(
        method, model, METHODS[method], options, batch=spec.batch, rate=spec.rate, momentum=spec.momentum,
        clip=spec.clip, autocast=model == "vgg16",
    )  # fmt: skip
    return replace(made, **changes)


def watched(model: str, method: str) -> Run:
    """Return a training of which histograms are taken."""
    run = training(
        model, method, label=f"{model_title(model)} {method}", steps=STEPS, warmup=0.1, decay=(), watch="shape",
        watch_every=EVERY,
    )  # fmt: skip
    return replace(run, workers=FEWER.get(model, run.workers))


def repeats(context: RunContext, model: str, method: str) -> list[Run]:
    """Return a training of the convergence, with all seeds if it is close to others: what figures ask for."""
    return every_run(context, model, method) if method in CLOSE.get(model, ()) else [training(model, method)]


def every_run(context: RunContext, model: str, method: str) -> list[Run]:
    """Return a training of the convergence with all seeds: what figures draw where it is stored."""
    return with_seeds(context, training(model, method))
