"""Who is compared at equal bytes, on what, and in which order the trainings are made."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from math import floor, isnan, log10
from typing import Any

from sparsync.collectives import AllGather
from sparsync.experiments.papers.p1 import METHODS as NAMES
from sparsync.experiments.papers.p1 import SPARSE
from sparsync.experiments.papers.records import History, Run
from sparsync.experiments.papers.steps import spans_of
from sparsync.experiments.papers.trainings import traffic_of
from sparsync.layout import Layout
from sparsync.wire import Wire

FACTORS = (0.5, 1.0, 2.0)  # of a setting's rate, tried for every method ...
FURTHER = (0.25, 4.0)  # ... and of these the next one, while the best stands at the edge
START = 6.0  # seconds until a training is under way
SEEDS = (0, 1, 2)


@dataclass(frozen=True)
class Setting:
    """What is trained, and for how long.

    Args:
        title: in words.
        rate: the middle of the rates that are tried.
        lengths: in steps; rates are chosen at the first.
        seconds: of a step on an H200, about: dense, sparse.
        further: factors of the rate that are tried where the best stands at the edge.
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
    further: tuple[float, ...] = FURTHER


@dataclass(frozen=True)
class Method:
    """A row of the tables.

    Args:
        label: its name there.
        name: as ``options_of`` takes it.
        options, settings, front: as in ``Run``.
        like: the method whose chosen rate it takes; its own is searched for if it is empty.
    """

    label: str
    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    front: float = 1.0
    like: str = ""


SETTINGS = {
    s.model: s
    for s in (
        Setting("ResNet-20 on CIFAR-10", "resnet20", 0.2, (1400, 3500, 11700), (0.0097, 0.010),
                further=(0.25, 0.125, 4.0, 8.0)),
        Setting("GPT on PTB, AdamW", "gpt", 0.001, (600,), (0.02, 0.03), batch=4, clip=1.0, optimizer="adamw",
                weight_decay=0.01, warmup=0.1),
        Setting("LeNet-5 on MNIST", "lenet5", 0.05, (600,), (0.008, 0.014)),
        Setting("VGG-16 on CIFAR-10", "vgg16", 0.1, (700,), (0.007, 0.01), autocast=True,
                further=(0.25, 0.125, 0.0625, 4.0)),
        Setting("LSTM-PTB", "lstm-ptb", 22.0, (330,), (0.035, 0.045), workers=4, batch=20, momentum=0.0, clip=0.25,
                further=(0.25, 4.0, 8.0)),
        Setting("LSTM-AN4", "lstm-an4", 0.0008, (600,), (0.1, 0.1), workers=4, batch=4, clip=400.0),
    )
}  # fmt: skip
WHOLE = {"dense_below": 0, "dense_1d": False}
BASE, BALANCED = "recipe default, nothing dense", "recipe balanced, nothing dense"
LEVELS = "recipe balanced with levels, nothing dense"
WARM = "recipe balanced, density warm-up, nothing dense"
EARLY = "recipe default, momentum corrected, density warm-up, nothing dense"
METHODS = {
    m.label: m
    for m in (
        Method("dense", "dense"),
        Method("TopK-SGD", NAMES["topk"], SPARSE),
        Method(BASE, "default", WHOLE),
        Method(BALANCED, "balanced", WHOLE),
        Method(LEVELS, "balanced", {**WHOLE, "values": "levels"}),
        Method(WARM, "balanced", WHOLE, front=4.0),
        Method(EARLY, "default", {**WHOLE, "momentum": "correct", "beta": 0.5}, front=8.0),
        Method("recipe default", "default"),
        Method("GaussianK-SGD", NAMES["gaussiank"], SPARSE, {"refine": True}),
        Method("DGC", "dgc", WHOLE),
    )
}
# Each changes one thing of BASE, BALANCED or DGC. That 1-D tensors travel dense is the default recipe itself, and a
# density warm-up of BALANCED is a row.
ABLATIONS = {
    m.label: m
    for m in (
        Method("recipe default, density warm-up, nothing dense", "default", WHOLE, front=4.0, like=BASE),
        Method("ablation: momentum kept", "default", {**WHOLE, "momentum": "keep"}),
        Method("ablation: momentum corrected, 0.5", "default", {**WHOLE, "momentum": "correct", "beta": 0.5}),
        Method("ablation: momentum corrected, 0.9", "default", {**WHOLE, "momentum": "correct", "beta": 0.9}),
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
    )
}
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
# Of long trainings there are other seeds only where a row comes near dense.
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
)


@dataclass(frozen=True)
class Contest:
    """Settings, methods and stages; and the lookup of what has been trained.

    Args:
        get: a run's history, if there is one.
        seed: the context's.
    """

    get: Callable[[Run], History | None]
    seed: int = 0
    settings: Mapping[str, Setting] = field(default_factory=lambda: SETTINGS)
    stages: Sequence[Stage] = STAGES

    def run(self, model: str, label: str, factor: float, length: int, seed: int = 0) -> Run:
        """One training, within the bytes of TopK-SGD at 0.1 %."""
        setting, method = self.settings[model], method_of(label)
        steps, rate, dense = setting.lengths[length], setting.rate * factor, method.name == "dense"
        own = Run(
            f"{steps} {label}, rate {rate:g}, seed {seed + self.seed}", model, method.name,
            workers=setting.workers, batch=setting.batch, rate=rate, momentum=setting.momentum,
            weight_decay=setting.weight_decay, clip=setting.clip, steps=steps, warmup=setting.warmup, decay=None,
            seed=seed, limit=setting.limit, optimizer=setting.optimizer, settings=method.settings,
            autocast=setting.autocast, seconds=START + steps * setting.seconds[not dense],
        )  # fmt: skip
        if dense:
            return own
        options = {**options_in(setting, method), "density": density_of(setting, label, length)}
        return replace(own, options=options, front=method.front)

    def tried(self, model: str, label: str) -> dict[float, History | None]:
        """The search for a rate: by factor, those that are asked for so far; ``None`` where there is nothing yet."""
        like = method_of(label).like
        if like:  # the rate of what it changes, or, if it was trained before that was chosen, its own
            taken, made = self.chosen(model, like), self.made(model, label, 0, self.tried(model, like))
            if taken is None or (made and taken not in made):
                return dict(made)
            return {taken: made.get(taken)}
        factors = list(FACTORS)
        while True:
            found = {factor: self.get(self.run(model, label, factor, 0)) for factor in sorted(factors)}
            known = {factor: history for factor, history in found.items() if history is not None}
            if len(known) < len(found):
                return found
            asked, bests = self.settings[model].further, (best_of(known), self._steady(model, label, known))
            further = [f for f in asked if f not in factors and any(f == b * (0.5 if f < 1 else 2) for b in bests)]
            if not further:
                return found
            factors += further

    def made(self, model: str, label: str, length: int, factors: Iterable[float]) -> dict[float, History]:
        """Of these factors, what was trained with the first seed."""
        found = {factor: self.get(self.run(model, label, factor, length)) for factor in factors}
        return {factor: history for factor, history in found.items() if history is not None}

    def chosen(self, model: str, label: str, so_far: bool = False) -> float | None:
        """The factor with the best last score, once the search is complete; if other seeds do not learn with it, the
        next best. ``so_far``: also if there is nothing yet beyond the edge at which it stands."""
        tried = self.tried(model, label)
        known = {factor: history for factor, history in tried.items() if history is not None}
        enough = set(FACTORS) & set(tried) if so_far else set(tried)
        return self._steady(model, label, known) if known and enough <= set(known) else None

    def _steady(self, model: str, label: str, known: Mapping[float, History]) -> float:
        """The best factor with which all seeds learn that were trained with it; of none, the best."""
        left = dict(known)
        while left:
            factor = best_of(left)
            others = (self.get(self.run(model, label, factor, 0, seed)) for seed in SEEDS[1:])
            if all(learnt(other, left[factor]) for other in others if other is not None):
                return factor
            del left[factor]
        return best_of(known)

    def runs(self, stage: Stage) -> tuple[list[Run], list[Run]]:
        """A stage's trainings; and in place of those that wait for their rate, as many with the middle one."""
        ready: list[Run] = []
        waiting: list[Run] = []
        for label in stage.methods:
            if stage.search:
                factors = self.tried(stage.model, label)
                ready += [self.run(stage.model, label, factor, 0) for factor in factors]
                waiting += [] if factors else [self.run(stage.model, label, 1.0, 0)]
                continue
            factor = self.chosen(stage.model, label)
            own = [self.run(stage.model, label, factor or 1.0, stage.length, seed) for seed in stage.seeds]
            (waiting if factor is None else ready).extend(own)
        return ready, waiting

    def others(self, stage: Stage) -> list[Run]:
        """A stage's trainings with all rates of the search: they may have been made when another one was the best."""
        likes = {label: method_of(label).like for label in stage.methods}
        return [
            self.run(stage.model, label, factor, stage.length, seed)
            for label, like in likes.items()
            if like or not stage.search
            for factor in self.tried(stage.model, like or label)
            for seed in stage.seeds
        ]

    def repeats(self, model: str, label: str, length: int) -> list[History]:
        """What was trained with the chosen rate, seed by seed; a longer training that was made with several, with the
        best of them."""
        factor = self.chosen(model, label, so_far=True)
        if factor is None:
            return []
        longer = self.made(model, label, length, self.tried(model, label)) if length else {}
        factor = best_of(longer) if longer else factor
        found = (self.get(self.run(model, label, factor, length, seed)) for seed in SEEDS)
        return [history for history in found if history is not None]

    def methods(self, model: str) -> list[str]:
        """Labels of the methods that are compared on a model, without ablations."""
        asked = dict.fromkeys(label for stage in self.stages if stage.model == model for label in stage.methods)
        return [label for label in asked if label in METHODS]


def method_of(label: str) -> Method:
    return METHODS[label] if label in METHODS else ABLATIONS[label]


def options_in(setting: Setting, method: Method) -> dict[str, Any]:
    """A method's options; where the optimizer has no momentum of SGD's kind, there is none to correct."""
    options = dict(method.options)
    if setting.momentum > 0 and setting.optimizer == "sgd":
        return options
    if method.name == "dgc":
        return options | {"momentum": "keep"}
    corrects = options.get("momentum") == "correct"
    return {name: value for name, value in options.items() if not (corrects and name in ("momentum", "beta"))}


def best_of(known: Mapping[float, History]) -> float:
    """The factor with the best last score; among equals the one nearest to 1."""
    return max(known, key=lambda factor: (goodness(known[factor]), -abs(log10(factor))))


def learnt(history: History, like: History) -> bool:
    """Whether a training got anywhere near another of its kind: to half the accuracy, or twice the error."""
    if isnan(history.last) or isnan(like.last):
        return isnan(like.last)
    return history.last >= like.last / 2 if history.score == "accuracy" else history.last <= 2 * like.last


def goodness(history: History) -> float:
    """The last score, so that more is better; least of all if it is not a number."""
    last = history.last
    return float("-inf") if isnan(last) else last if history.score == "accuracy" else -last


def budget(model: str, workers: int) -> float:
    """Bytes of a step of TopK-SGD: 0.1 % of all entries, 32 + 32 bits each, gathered."""
    spans = spans_of(model)
    layout = Layout.cut(spans, numel=spans[-1].stop, scope="global", density=0.001)
    return AllGather().traffic(layout, Wire(), workers).mean_bytes


@cache
def density_of(setting: Setting, label: str, length: int) -> float:
    """The largest density at which a method sends no more than TopK-SGD, over the whole training."""
    method = method_of(label)
    if method.front == 1 and length > 0:
        return density_of(setting, label, 0)
    options = {**options_in(setting, method), "density": 0.001}
    run = Run(label, setting.model, method.name, options, method.settings, setting.workers, front=method.front,
              steps=setting.lengths[length])  # fmt: skip
    return within(run, budget(setting.model, setting.workers))


def within(run: Run, allowed: float) -> float:
    """The largest density at which a step of the run sends no more than that."""
    cost, low, high = traffic_of(run), 1e-5, 0.05
    if cost(high) <= allowed:
        low, high = high, 0.5
    for _ in range(16):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if cost(middle) <= allowed else (low, middle)
    if cost(low) > allowed:
        raise ValueError(f"{run.label} sends {cost(low):,.0f} bytes a step, most of them dense, of {allowed:,.0f}")
    # To four digits, downwards: they are part of the run's name.
    unit = 10.0 ** (floor(log10(low)) - 3)
    return round(floor(low / unit) * unit, 12)
