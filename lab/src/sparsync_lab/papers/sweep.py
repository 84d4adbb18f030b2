"""The methods that are compared at equal bytes, on which models, and in which order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sparsync_lab.papers.p1_runs import METHODS as NAMES
from sparsync_lab.papers.p1_runs import SPARSE
from sparsync_lab.papers.run import SEEDS

FACTORS = (0.5, 1.0, 2.0)  # of a setting's rate, tried for every method ...
FURTHER = (0.25, 4.0)  # ... and of these the next one, while the best stands at the edge


@dataclass(frozen=True)
class Setting:
    """A model, its hyperparameters, and the lengths of its trainings.

    Args:
        title: in words.
        rate: the middle of the rates that are tried.
        lengths: in steps; rates are chosen at the first.
        seconds: of a step on an H200, about: dense, sparse.
        factors: of the rate that are tried for every method.
        further: ... and where the best stands at the edge, the next of these.
        like: the setting whose chosen rates it takes; its own are searched for if it is empty.
        windows: as in ``Run``.
    """

    title: str
    model: str
    rate: float
    lengths: tuple[int, ...]
    seconds: tuple[float, float]
    workers: int = 16
    batch: int = 32
    momentum: float = 0.9
    clip: float | None = None
    optimizer: str = "sgd"
    weight_decay: float = 0.0
    warmup: float = 0.03
    limit: int | None = None
    autocast: bool = False
    factors: tuple[float, ...] = FACTORS
    further: tuple[float, ...] = FURTHER
    like: str = ""
    windows: str = "streams"

    def words(self, length: int) -> str:
        """Return what the labels of its trainings begin with."""
        return f"{self.lengths[length]}{' random windows' if self.windows == 'random' else ''}"


@dataclass(frozen=True)
class Method:
    """A row of the tables.

    Args:
        label: its name there.
        name: as ``method_options`` takes it.
        options, settings, front: as in ``Run``.
        changes: other fields of ``Run``.
        like: the method whose chosen rate it takes; its own is searched for if it is empty.
    """

    label: str
    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    front: float = 1.0
    like: str = ""
    changes: Mapping[str, Any] = field(default_factory=dict)


SETTINGS = {
    s.model: s
    for s in (
        Setting("ResNet-20 on CIFAR-10", "resnet20", 0.2, (1400, 3500, 11700), (0.0097, 0.010),
                further=(0.25, 0.125, 0.0625, 0.03125, 4.0, 8.0)),
        Setting("GPT on PTB, AdamW", "gpt", 0.001, (600,), (0.02, 0.03), batch=4, clip=1.0, optimizer="adamw",
                weight_decay=0.01, warmup=0.1, further=(0.25, 0.125, 0.0625, 4.0)),
        Setting("LeNet-5 on MNIST", "lenet5", 0.05, (600,), (0.008, 0.014)),
        Setting("VGG-16 on CIFAR-10", "vgg16", 0.1, (700,), (0.007, 0.01), autocast=True,
                further=(0.25, 0.125, 0.0625, 0.03125, 0.015625, 4.0)),
        Setting("LSTM-PTB", "lstm-ptb", 22.0, (330,), (0.035, 0.045), workers=4, batch=20, momentum=0.0, clip=0.25,
                further=(0.25, 4.0, 8.0, 16.0)),
        Setting("LSTM-AN4", "lstm-an4", 0.0008, (600,), (0.1, 0.1), workers=4, batch=4, clip=400.0),
    )
}  # fmt: skip
# Tried for a method in a setting beside these, since with those it does not learn.
ALSO: Mapping[tuple[str, str], tuple[float, ...]] = {("vgg16", "DGC"): (0.25, 0.125, 0.0625, 0.03125, 0.015625)}
WHOLE = {"dense_below": 0, "dense_1d": False}
BASE, BALANCED = "recipe default, nothing dense", "recipe balanced, nothing dense"
LEVELS = "recipe balanced with levels, nothing dense"
WARM = "recipe balanced, density warm-up, nothing dense"
EARLY = "recipe default, momentum corrected, density warm-up, nothing dense"
CORRECTED = "ablation: momentum corrected, 0.5"  # EARLY without its warm-up


def _corrected(beta: float) -> dict[str, Any]:
    """Return the options for nothing dense, and momentum before the residual."""
    return {**WHOLE, "momentum": "correct", "beta": beta}


METHODS = {
    m.label: m
    for m in (
        Method("dense", "dense"),
        Method("TopK-SGD", NAMES["topk"], SPARSE),
        Method(BASE, "default", WHOLE),
        Method(BALANCED, "balanced", WHOLE),
        Method(LEVELS, "balanced", {**WHOLE, "values": "levels"}),
        Method(WARM, "balanced", WHOLE, front=4.0),
        Method(EARLY, "default", _corrected(0.5), front=8.0),
        Method("recipe default", "default"),
        Method("GaussianK-SGD", NAMES["gaussiank"], SPARSE, {"refine": True}),
        Method("DGC", "dgc", WHOLE),
    )
}
# Each changes one thing of BASE, BALANCED, DGC or EARLY. That 1-D tensors travel dense is the default recipe itself,
# and a density warm-up of BALANCED is a row.
ABLATIONS = {
    m.label: m
    for m in (
        Method("recipe default, density warm-up, nothing dense", "default", WHOLE, front=4.0, like=BASE),
        Method("ablation: momentum kept", "default", {**WHOLE, "momentum": "keep"}),
        Method(CORRECTED, "default", _corrected(0.5)),
        Method("ablation: momentum corrected, 0.9", "default", _corrected(0.9)),
        Method("ablation: values fp32", "default", {**WHOLE, "values": "fp32"}, like=BASE),
        Method("ablation: values fp16", "default", {**WHOLE, "values": "fp16"}, like=BASE),
        Method("ablation: values levels", "default", {**WHOLE, "values": "levels"}, like=BASE),
        Method("ablation: scope layer", "default", {**WHOLE, "scope": "layer"}, like=BASE),
        Method("ablation: rate inside the residual", "default", {**WHOLE, "follow_lr": True}, like=BASE),
        Method("ablation: balanced, momentum kept", "balanced", {**WHOLE, "momentum": "keep"}),
        Method("ablation: balanced, momentum moved", "balanced", {**WHOLE, "momentum": "move"}),
        Method("ablation: balanced, values fp16", "balanced", {**WHOLE, "values": "fp16"}, like=BALANCED),
        Method("ablation: balanced, 1-D dense", "balanced", like=BALANCED),
        Method("ablation: DGC, density warm-up", "dgc", WHOLE, front=4.0, like="DGC"),
        Method("ablation: DGC, 1-D dense", "dgc", like="DGC"),
        Method("ablation: DGC, density warm-up, 1-D dense", "dgc", front=4.0, like="DGC"),
        # What lies around EARLY.
        Method("ablation: warm-up from 4 times, corrected, 0.5", "default", _corrected(0.5), front=4.0, like=EARLY),
        Method("ablation: warm-up from 16 times, corrected, 0.5", "default", _corrected(0.5), front=16.0, like=EARLY),
        Method("ablation: warm-up from 8 times, corrected, 0.3", "default", _corrected(0.3), front=8.0, like=EARLY),
        Method("ablation: warm-up from 8 times, corrected, 0.7", "default", _corrected(0.7), front=8.0, like=EARLY),
        Method("ablation: warm-up from 8 times, moved", "default", WHOLE, front=8.0, like=EARLY),
    )
}
# What they are compared with, by the method's name where none is named; and rows that change one thing of it, too.
BASES = {"default": BASE, "balanced": BALANCED, "dgc": "DGC"}
RELATED = {BASE: ("recipe default",), BALANCED: (LEVELS, WARM), EARLY: (CORRECTED,)}
# Of these, what was less than a point from what it changes with the first seed, and is no search of EARLY's settings.
NEAR = (
    "recipe default, density warm-up, nothing dense",
    CORRECTED,
    "ablation: scope layer",
    "ablation: rate inside the residual",
    "ablation: balanced, momentum moved",
    "ablation: warm-up from 8 times, moved",
)
# Of these, what may matter to a transformer and AdamW.
OF_GPT = (
    "recipe default, density warm-up, nothing dense",
    "ablation: momentum kept",
    "ablation: values levels",
    "ablation: scope layer",
    "ablation: rate inside the residual",
    "ablation: balanced, momentum kept",
)
# What LeNet-5 would send dense is more than its budget, and on the larger models it is little.
EVERYWHERE = ("dense", "TopK-SGD", BASE, BALANCED, "GaussianK-SGD", "DGC")
# Accuracy points that the recipe may lose to tuned dense, by steps.
TARGETS = {"resnet20": {1400: 1.5, 3500: 0.5, 11700: 0.2}}


@dataclass(frozen=True)
class Stage:
    """Trainings that are made together; those of an earlier stage come first.

    Args:
        model: of the setting.
        length: which of the setting's.
        seeds: the first seed of the first length is the search for the rate.
        methods: their labels.
    """

    model: str
    length: int
    seeds: tuple[int, ...]
    methods: tuple[str, ...]

    @property
    def search(self) -> bool:
        return self.length == 0 and self.seeds == SEEDS[:1]


MAIN = ("dense", "TopK-SGD", BASE, BALANCED, "recipe default")
REST = ("GaussianK-SGD", "DGC")
# Of long trainings there are other seeds only where a row is less than a point below dense.
STAGES = (
    Stage("resnet20", 0, (0,), (*MAIN, LEVELS, WARM, EARLY)),
    Stage("resnet20", 1, (0,), (*MAIN, LEVELS, WARM, EARLY)),
    Stage("resnet20", 2, (0,), ("dense", EARLY, LEVELS, BALANCED, BASE, "TopK-SGD")),
    Stage("resnet20", 0, (1, 2), (*MAIN, LEVELS, WARM, EARLY)),
    Stage("resnet20", 1, (1, 2), ("dense", EARLY, LEVELS)),
    Stage("resnet20", 2, (1, 2), ("dense", EARLY, LEVELS)),
    Stage("resnet20", 0, (0,), REST),
    Stage("resnet20", 0, (0,), tuple(ABLATIONS)),
    Stage("gpt", 0, (0,), (*MAIN, LEVELS, WARM, EARLY, *REST)),
    Stage("gpt", 0, (0,), OF_GPT),
    Stage("lenet5", 0, (0,), (*EVERYWHERE, LEVELS, WARM, EARLY)),
    Stage("resnet20", 1, (0,), REST),
    Stage("vgg16", 0, (0,), (*EVERYWHERE, EARLY)),
    Stage("lstm-ptb", 0, (0,), EVERYWHERE),
    Stage("lstm-an4", 0, (0,), EVERYWHERE),
    Stage("resnet20", 2, (0,), ("recipe default", *REST)),
    Stage("resnet20", 1, (1, 2), (BASE, "recipe default")),
    Stage("lenet5", 0, (1, 2), (*EVERYWHERE, LEVELS, WARM, EARLY)),
    Stage("vgg16", 0, (1, 2), ("dense", BASE, BALANCED, EARLY)),
    Stage("gpt", 0, (1, 2), ("dense", BASE, BALANCED, LEVELS, EARLY)),
    Stage("resnet20", 0, (1, 2), REST),
    Stage("resnet20", 1, (1, 2), (WARM,)),
    Stage("resnet20", 2, (1, 2), (BASE, BALANCED, "recipe default")),
    Stage("resnet20", 0, (1, 2), NEAR),
)


def base_of(label: str) -> str:
    """Return the method that an ablation changes one thing of."""
    method = ABLATIONS[label]
    return method.like or BASES[method.name]


def method_of(label: str) -> Method:
    return METHODS[label] if label in METHODS else ABLATIONS[label]
