"""P2: Sparse Communication for Training Deep Networks (Foroutan Eghlidi and Jaggi, 2020)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

from sparsync_lab.models import CATALOGUE
from sparsync_lab.papers import step_times
from sparsync_lab.papers.curves import display_score, quick_changes, train_runs
from sparsync_lab.papers.item import Item, Result, RunContext
from sparsync_lab.papers.published import P2_ACCURACY, P2_WORKERS, p2_table1
from sparsync_lab.papers.run import History, Run
from sparsync_lab.papers.run_queue import stored_history
from sparsync_lab.report import Curve, Figure, LineChart, Row, Table

SCOPES = {"layer": 0.1, "global": 0.01}  # and the learning rate of each
IN_WORDS = {"layer": "layer by layer", "global": "globally"}
EPOCHS, DECAY = 6, (150 / 300, 250 / 300)  # P2 has 300 epochs
LONG = 30  # epochs of those without momentum for all workers, in beyond/evidence
LOWER = (4, 16, 64)  # parts of the rate, of what is asked about blocks ...
LONGER = 90  # ... and epochs
LEARNED = f"P2, table 1, no momentum, {LONG} epochs: test accuracy in %, ours (published)"
WITH_MOMENTUM = "Test accuracy in %, ours (published)"
AS_PRINTED = "The same without momentum, as Algorithm 1 is printed"
AT_LAYERS_RATE = "layer's rate"  # of a training with entries chosen globally
AT_ONE_RATE = ("topk", "random+allgather", "block+allgather")  # have one with 8 workers
HEADINGS = ["scheme", *(f"{scope}, W = {workers}" for scope in SCOPES for workers in P2_WORKERS)]
STEP_SECONDS = 0.03  # of a worker on an H200, beside eight other trainings; alone it was not measured

BURSTS = (
    "With error feedback an entry that random-k or block-random-k chooses has waited 100 steps on average, and then "
    "brings the sum of a hundred gradients at once. Momentum of 0.9 makes ten times as much of that; the second table "
    "is without it. Dense has the rate of layers, which is ten times the one of entries that are chosen globally: what "
    "the rate does and what the scope, beyond/evidence asks."
)
DRAWN = (
    "The picture shows P2's numbers and, with an axis that begins elsewhere, those of beyond/evidence: "
    f"{LONG} epochs without momentum, one seed."
)


def training(scheme: str, scope: str, workers: int, momentum: float = 0.9) -> Run:
    """Return a training with P2's settings."""
    rate = (SCOPES["layer"] if scheme == "standard" else SCOPES[scope]) * workers
    label = f"standard, W = {workers}" if scheme == "standard" else f"{scheme}, {scope}, W = {workers}"
    label += "" if momentum else ", no momentum"
    run = Run(
        label, "resnet18", workers=workers, batch=CATALOGUE["resnet18"].batch, rate=rate, momentum=momentum,
        weight_decay=1e-4, epochs=EPOCHS, warmup=0.0, decay=DECAY, autocast=True,
    )  # fmt: skip
    if scheme == "standard":
        return run
    # P2 keeps what is left over in units of the weights, with the learning rate in it: follow_lr is the same.
    options = {
        "density": 0.01, "scope": scope, "momentum": "keep", "dense_below": 0, "dense_1d": False, "follow_lr": True
    }  # fmt: skip
    return replace(run, method=scheme, options=options)


def long_training(scheme: str, scope: str, workers: int) -> Run:
    """Return a training that learns: no momentum, 30 epochs, and a rate that grows over 5, of which P2 says nothing."""
    run = training(same(scheme, workers), scope, workers, momentum=0.0)
    return replace(run, label=f"{run.label}, {LONG} epochs", epochs=LONG, warmup=5 / LONG)


def at_layers_rate(run: Run) -> Run:
    """Return a training with entries chosen globally, at the rate of those chosen layer by layer."""
    return replace(run, label=f"{run.label}, {AT_LAYERS_RATE}", rate=SCOPES["layer"] * run.workers)


def block_controls() -> tuple[Run, ...]:
    """Return trainings with 8 workers at lower rates and for more epochs: is it these that keep block-random-k down?"""
    lower = (at_share_of_rate(run, share) for run in block_and_random() for share in LOWER)
    return (*lower, *map(for_longer, block_and_random()))


def block_and_random() -> tuple[Run, Run]:
    """Return what is compared of them: 8 workers layer by layer, by all-gather."""
    block, single = (long_training(f"{scheme}+allgather", "layer", 8) for scheme in ("block", "random"))
    return block, single


def for_longer(run: Run) -> Run:
    """Return a training that learns, for more epochs; the rate grows over as many as before."""
    return replace(run, label=run.label.replace(f"{LONG} epochs", f"{LONGER} epochs"), epochs=LONGER, warmup=5 / LONGER)


def at_share_of_rate(run: Run, share: int) -> Run:
    """Return a training at one part in so many of its rate."""
    return replace(run, label=f"{run.label}, rate {run.rate / share:g}", rate=run.rate / share)


def table_runs(context: RunContext) -> list[Run]:
    """Return all trainings of the tables; with one worker the two ways to exchange are the same."""
    schemes = ("standard", "topk", "block+shared") if context.quick else tuple(P2_ACCURACY)
    sizes = (2, 4) if context.quick else P2_WORKERS
    runs = [training(same(name, w), scope, w) for w in sizes for name in schemes for scope in SCOPES]
    runs += [training(same(name, 1), scope, 1, momentum=0.0) for name in schemes for scope in SCOPES]
    if context.quick:
        runs = [replace(run, **quick_changes(run, model="resnet20", workers=run.workers)) for run in runs]
    return list({run.label: run for run in runs}.values())


def same(scheme: str, workers: int) -> str:
    """Return the scheme that is trained: with one worker the two ways to exchange are the same."""
    return scheme.replace("+shared", "+allgather") if workers == 1 else scheme


def table_1(context: RunContext) -> Result:
    """Compare test accuracies of six schemes, two scopes and 1 to 8 workers."""
    done, result = train_runs(context, table_runs(context))
    rows = []
    for scheme, (title, *published) in P2_ACCURACY.items():
        cells = []
        for scope, accuracies in zip(SCOPES, published, strict=True):
            for workers, score in zip(P2_WORKERS, accuracies, strict=True):
                cells.append(cell(done, training(same(scheme, workers), scope, workers), score))
        rows.append(Row([title, *cells]))
    table = Table(WITH_MOMENTUM, HEADINGS, rows)
    without = ["scheme", *(f"{scope}, W = 1" for scope in SCOPES)]
    plain = Table(AS_PRINTED, without, _plain(done))
    figures = [] if context.quick else table_1_figures(context)
    notes = [
        "P2 sums over the workers (Algorithm 1) and also multiplies the rate by their number (text). Doing both scales "
        "twice; we average and multiply the rate. Line 11 keeps what the sum left over; error feedback needs each "
        "worker's own, which is what we keep. P2's figure 1 is a diagram of the two ways to exchange.",
        "Momentum stays in the optimizer, 0.9 as the text says. Algorithm 1 has none, and neither has the optimizer "
        "for sparsified SGD in MLBench, of which P2 says that it holds its code: hence the second table, with one "
        "worker. Images are cut and mirrored at random.",
        f"P2 trains for 300 epochs and divides the rate by 10 after 150 and 250. Here it is {EPOCHS} epochs, the "
        "schedule shortened in proportion, unless --epochs says otherwise; what the schemes reach is less, and how "
        "they rank may differ from what it is after 300. Passes compute in bfloat16 where torch's autocast takes that "
        "to be safe; weights, gradients and what is sent are fp32. ResNet-18 begins with a convolution of 3 × 3, as is "
        "usual for CIFAR-10; P2 does not say how its own begins. The effect of both is not measured.",
    ]
    notes += [*([DRAWN] if figures else []), BURSTS, *result.notes]
    return replace(result, tables=[table, plain], figures=figures, notes=notes)


def _plain(done: Mapping[str, History]) -> list[Row]:
    """Return the rows of one worker, for whom the two ways to exchange are the same."""
    rows = []
    for scheme, (title, *published) in P2_ACCURACY.items():
        if scheme == same(scheme, 1):
            runs = [training(scheme, scope, 1, momentum=0.0) for scope in SCOPES]
            cells = [cell(done, run, own[0]) for run, own in zip(runs, published, strict=True)]
            rows.append(Row([title.removesuffix(" (allGather)"), *cells]))
    return rows


def cell(done: Mapping[str, History], run: Run, published: float) -> str:
    """Return "ours (published)"; "– (published)" of what is not trained."""
    ours = accuracy(done, run)
    return f"{'–' if ours is None else f'{ours:.2f}'} ({published:.2f})"


def accuracy(done: Mapping[str, History], run: Run) -> float | None:
    """Return the last accuracy of a training in %, by its label; ``None`` if it is not there."""
    return display_score(done[run.label].last, done[run.label].score) if run.label in done else None


def table_1_figures(context: RunContext) -> list[Figure]:
    """Draw accuracies over the number of workers, of the trainings without momentum that are stored, and those that P2
    prints: in a chart for each scope."""

    def stored(scheme: str, scope: str, workers: int) -> float | None:
        history = stored_history(context.read_only(), long_training(scheme, scope, workers).made(context))
        return None if history is None else display_score(history.last, history.score)

    def printed(scheme: str, scope: str, workers: int) -> float:
        _, *own = P2_ACCURACY[scheme]
        return dict(zip(SCOPES, own, strict=True))[scope][P2_WORKERS.index(workers)]

    ours = over_workers(f"Here, {LONG} epochs", stored)
    pairs = zip(ours, over_workers("P2, 300 epochs", printed), strict=False)
    return [figure for pair in pairs for figure in pair]


def over_workers(title: str, accuracy_of: Callable[[str, str, int], float | None]) -> list[Figure]:
    """Draw accuracies over the number of workers, in a chart for each scope.

    Args:
        title: of what is drawn; the scope follows.
        accuracy_of: the accuracy in % of a scheme, a scope and a number of workers.
    """
    figures = []
    for scope, words in IN_WORDS.items():
        curves = []
        for look, (scheme, (name, *_)) in enumerate(P2_ACCURACY.items()):
            every = {workers: accuracy_of(scheme, scope, workers) for workers in P2_WORKERS}
            own = {workers: score for workers, score in every.items() if score is not None and math.isfinite(score)}
            curves += [Curve(name, [*own], [*own.values()], look=look)] if own else []
        scores = [score for curve in curves for score in curve.y]
        if scores:
            least, most = math.floor(min(scores)) - 1, math.floor(max(scores)) + 1
            heading = f"{title}, {words}: accuracy from {least} %"
            chart = LineChart(heading, "workers", curves, y_range=(least, most), y_unit="%")
            figures.append(Figure(chart, f"{title}: P2's table 1, entries chosen {words}."))
    return figures


ITEMS = (
    Item(
        "p2/table1",
        "Table 1, accuracy of six schemes",
        "P2: choosing layer by layer is better than globally, top-k is best, and block-random-k with the same blocks "
        "on all workers loses most, the more workers there are.",
        table_1,
        ("CIFAR-10", "a GPU"),
        round(47 * EPOCHS * 50_000 / 128 * STEP_SECONDS / 60),
        p2_table1(),
        trains=True,
        by_epochs=True,
    ),
    Item(
        "p2/table2",
        "Table 2, where the time of a step goes",
        "P2: compression costs more than it saves for top-k and random-k, and only block-random-k is faster than "
        "standard SGD.",
        step_times.table_2_of_p2,
        ("a GPU",),
        1,
        redraw=step_times.tables_of_p2,
    ),
)
