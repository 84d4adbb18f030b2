"""ResNet-20 for 120 epochs: every method with several rates, in two schedules, with weight decay and without."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from statistics import mean

from sparsync_lab.papers.claims.stored_tables import SCORE
from sparsync_lab.papers.curves import mean_and_std
from sparsync_lab.papers.differences import SEED
from sparsync_lab.papers.lr_search import LearningRateSearch
from sparsync_lab.papers.p1_runs import HELD, training
from sparsync_lab.papers.run import SEEDS, History, Run
from sparsync_lab.papers.sweep import ALSO, BALANCED, BASE, EARLY, LEVELS, SETTINGS
from sparsync_lab.papers.vgg16_gap import authors_settings
from sparsync_lab.report import Row, Table

MODEL = "resnet20"
CAPTION = "ResNet-20, 120 epochs, at the bytes of 0.1 %: rates and schedules"
TOPK, GAUSSIANK, DGC = "TopK-SGD", "GaussianK-SGD", "DGC"
# The other rows, with the factor of the rate that is the best with the cosine.
OTHERS = {LEVELS: 2.0, BASE: 1.0, DGC: 0.25, BALANCED: 4.0, "recipe default": 1.0}
METHODS = ("dense", EARLY, LEVELS, BALANCED, BASE, "recipe default", GAUSSIANK, TOPK, DGC)
P1_NAMES = {"dense, authors' settings": "dense", "topk": TOPK, HELD: GAUSSIANK}  # of trainings with P1's settings
DECAY = 1e-4  # of the weights, in the code of P1's authors
SENT = "sent by a worker"  # a column
COSINE, FALLS_ONCE = "cosine", "P1's: to a tenth at 81 of 120 epochs"


def asked(search: LearningRateSearch) -> tuple[Run, ...]:
    """Return the trainings that this asks for, the most valuable first."""
    return (
        search.run(MODEL, "dense", 1.0, 2),
        training(MODEL, "topk", label="topk, rate 0.2", rate=0.2),
        *(search.run("vgg16", "DGC", factor, 0) for factor in ALSO["vgg16", "DGC"]),
        training(MODEL, "dense", label="dense, rate 0.4", rate=0.4),
        search.run(MODEL, "dense", 4.0, 2),
        *(in_p1_schedule(search.run(MODEL, EARLY, factor, 2)) for factor in (2.0, 1.0)),
        *(in_p1_schedule(search.run(MODEL, "dense", 2.0, 2), seed) for seed in SEEDS[1:]),
        in_p1_schedule(search.run(MODEL, EARLY, 4.0, 2)),
        in_p1_schedule(search.run(MODEL, "dense", 4.0, 2)),
        *(in_p1_schedule(search.run(MODEL, EARLY, 1.0, 2), seed) for seed in SEEDS[1:]),
        *(search.run(MODEL, "dense", 1.0, 2, seed) for seed in SEEDS[1:]),
        *(in_p1_schedule(search.run(MODEL, label, 4.0, 2), seed) for seed in SEEDS[1:] for label in (EARLY, "dense")),
        *(in_p1_schedule(search.run(MODEL, label, 8.0, 2)) for label in (EARLY, "dense")),
        *(in_p1_schedule(search.run(MODEL, label, 8.0, 2), seed) for seed in SEEDS[1:] for label in ("dense", EARLY)),
        *(in_p1_schedule(search.run(MODEL, label, 16.0, 2)) for label in ("dense", EARLY)),
        *(seeded(training(MODEL, "topk", label="topk, rate 0.4", rate=0.4), seed) for seed in SEEDS),
        *(seeded(training(MODEL, "topk", label="topk, rate 0.2", rate=0.2), seed) for seed in SEEDS[1:]),
        *(training(MODEL, "topk", label=f"topk, rate {rate:g}", rate=rate) for rate in (0.8, 0.05)),
        *(with_decay(in_p1_schedule(search.run(MODEL, label, 4.0, 2))) for label in (EARLY, "dense")),
        *(with_decay(training(MODEL, "topk", label=f"topk, rate {rate:g}", rate=rate)) for rate in (0.1, 0.2)),
        *(with_decay(in_p1_schedule(search.run(MODEL, label, 2.0, 2))) for label in (EARLY, "dense")),
        *(
            in_p1_schedule(search.run(MODEL, label, best * times, 2))
            for times in (2.0, 1.0, 4.0)
            for label, best in OTHERS.items()
        ),
        *(training(MODEL, HELD, label=f"{HELD}, rate {rate:g}", rate=rate) for rate in (0.2, 0.05)),
    )


def beside(search: LearningRateSearch) -> tuple[Run, ...]:
    """Return the trainings of other items that belong to the same comparison."""
    return (
        *(search.run(MODEL, label, 2.0, 2, seed) for label in ("dense", EARLY) for seed in SEEDS),
        *(search.run(MODEL, label, factor, 2) for label in (TOPK, GAUSSIANK) for factor in (0.125, 0.25)),
        *(search.run(MODEL, label, best, 2, seed) for label, best in OTHERS.items() for seed in SEEDS),
        search.run(MODEL, DGC, 0.5, 2),
        *(seeded(training(MODEL, method), seed) for method in ("dense", "topk", HELD) for seed in SEEDS),
        *(seeded(authors_settings(MODEL, "dense"), seed) for seed in SEEDS),
    )


def in_p1_schedule(run: Run, seed: int = 0) -> Run:
    """Return a training of 11,700 steps with as many as P1's, and P1's schedule."""
    like = training(MODEL, "dense")
    label = f"{run.label.removesuffix(f'{SEED}0').removeprefix('11700 ')}, P1's schedule"
    return seeded(replace(run, label=label, steps=11_640, warmup=like.warmup, decay=like.decay), seed)


def seeded(run: Run, seed: int) -> Run:
    """Return a training with another seed, which its label tells."""
    return replace(run, label=f"{run.label}{SEED}{seed}", seed=seed) if seed else run


def with_decay(run: Run) -> Run:
    """Return a training with weight decay."""
    return replace(run, label=f"{run.label}, weight decay {DECAY:g}", weight_decay=DECAY)


def method_of(run: Run) -> str:
    """Return the row that a training belongs to, from its label."""
    name = run.label.removeprefix(f"{SETTINGS[MODEL].words(2)} ").partition(", rate")[0].partition(SEED)[0]
    return P1_NAMES.get(name, name)


def comparison(runs: Iterable[Run], done: Mapping[str, History]) -> Table:
    """Return what each method reached with each rate in each schedule, the best first."""
    found: dict[tuple[str, ...], list[History]] = {}
    for run in {run.name: run for run in runs if run.model == MODEL and run.name in done}.values():
        schedule = COSINE if run.decay is None else FALLS_ONCE
        key = method_of(run), schedule, f"{run.rate:g}", f"{run.weight_decay:g}"
        found.setdefault(key, []).append(done[run.name])
    best = {key: mean(history.last for history in own) for key, own in found.items()}
    order = sorted(found, key=lambda key: (METHODS.index(key[0]), -best[key]))
    sent = {key: f"{mean(history.bytes[-1] for history in own) / 1e6:,.2f} MB" for key, own in found.items()}
    rows = [Row([*key, mean_and_std(found[key]), str(len(found[key])), sent[key]]) for key in order]
    return Table(CAPTION, ["method", "schedule", "rate", "weight decay", SCORE, "seeds", SENT], rows)
