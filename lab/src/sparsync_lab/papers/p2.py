"""P2: Sparse Communication for Training Deep Networks (Foroutan Eghlidi and Jaggi, 2020)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from sparsync_lab.models import CATALOGUE
from sparsync_lab.papers import step_times
from sparsync_lab.papers.claim import POINT
from sparsync_lab.papers.curves import display_score, findings, quick_changes, train_runs
from sparsync_lab.papers.item import Item, Result, RunContext
from sparsync_lab.papers.published import P2_ACCURACY, P2_WORKERS, p2_table1
from sparsync_lab.papers.run import History, Run
from sparsync_lab.report import Bar, BarChart, Figure, Row, Table

SCOPES = {"layer": 0.1, "global": 0.01}  # and the learning rate of each
EPOCHS, DECAY = 6, (150 / 300, 250 / 300)  # P2 has 300 epochs
LONG = 30  # epochs of those without momentum for all workers, in beyond/evidence
LOWER = (4, 16, 64)  # parts of the rate, of what is asked about blocks ...
LONGER = 90  # ... and epochs
LEARNED = f"P2, table 1, with trainings that learn (no momentum, {LONG} epochs): test accuracy in %, ours (published)"
WITH_MOMENTUM = "Test accuracy in %, ours (published)"
AS_PRINTED = "The same without momentum, as Algorithm 1 is printed"
AT_LAYERS_RATE = "layer's rate"  # of a training with entries chosen globally
HEADINGS = ["scheme", *(f"{scope}, W = {workers}" for scope in SCOPES for workers in P2_WORKERS)]
STEP_SECONDS = 0.03  # of a worker on an H200, beside eight other trainings; alone it was not measured

BURSTS = (
    "With error feedback an entry of a random kind waits 100 steps on average, and then brings a hundred gradients "
    "at once. Momentum makes ten times as much of that, with which random and block kinds diverge at P2's rates or "
    "hardly learn. Without it all learn but block-random-k globally, and layer by layer the three stand as in P2: "
    "Top-k, random-k, block-random-k. Globally, where the rate is ten times lower, all are behind, as in P2, which has "
    "random-k ahead of Top-k by 0.3 points there; for Top-k that is the rate and not the scope (beyond/evidence). "
    "With momentum Top-k is better globally, with every number of workers. That dense is behind Top-k here may be the "
    "few epochs."
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
    """Return a training that learns: no momentum, 30 epochs, a rate that grows over 5 as its scaling rule asks."""
    run = training(_same(scheme, workers), scope, workers, momentum=0.0)
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
    runs = [training(_same(name, w), scope, w) for w in sizes for name in schemes for scope in SCOPES]
    runs += [training(_same(name, 1), scope, 1, momentum=0.0) for name in schemes for scope in SCOPES]
    if context.quick:
        runs = [replace(run, **quick_changes(run, model="resnet20", workers=run.workers)) for run in runs]
    return list({run.label: run for run in runs}.values())


def _same(scheme: str, workers: int) -> str:
    return scheme.replace("+shared", "+allgather") if workers == 1 else scheme


def table_1(context: RunContext) -> Result:
    """Compare test accuracies of six schemes, two scopes and 1 to 8 workers."""
    done, result = train_runs(context, table_runs(context))
    rows = []
    for scheme, (title, *published) in P2_ACCURACY.items():
        cells = []
        for scope, accuracies in zip(SCOPES, published, strict=True):
            for workers, accuracy in zip(P2_WORKERS, accuracies, strict=True):
                cells.append(_cell(done, training(_same(scheme, workers), scope, workers).label, accuracy))
        rows.append(Row([title, *cells]))
    table = Table(WITH_MOMENTUM, HEADINGS, rows)
    without = ["scheme", *(f"{scope}, W = 1" for scope in SCOPES)]
    plain = Table(AS_PRINTED, without, _plain(done))
    most = max(history.run.workers for history in done.values()) if done else 0
    bars = [
        Bar(
            label.rsplit(",", 1)[0],
            display_score(history.last, history.score),
            f"{display_score(history.last, history.score):.1f}",
        )
        for label, history in done.items()
        if history.run.workers == most and history.run.momentum
    ]
    figures = (
        [Figure(BarChart(f"{most} workers", "test accuracy", bars, "%"), "The last accuracy of each.")] if bars else []
    )
    notes = [
        "P2's Algorithm 1 sums over the workers and its text multiplies the rate by their number: both at once would "
        "be the square. Here the mean is taken and the rate multiplied. Line 11 keeps what the sum left over; "
        "error feedback needs each worker's own, which is what we keep.",
        "Momentum stays in the optimizer, 0.9 as the text says. Algorithm 1 has none, and neither has the optimizer "
        "for sparsified SGD in MLBench, of which P2 says that it holds its code: hence the second table, with one "
        "worker. Images are cut and mirrored at random.",
        f"P2 trains for 300 epochs and divides the rate by 10 after 150 and 250. Here it is {EPOCHS} epochs, the "
        "schedule shortened in proportion, unless --epochs says otherwise; what the schemes reach is less, and how "
        "they rank may differ from what it is after 300. Passes compute in bfloat16 where torch's autocast takes that "
        "to be safe; weights, gradients and what is sent are fp32.",
    ]
    notes += [*findings(context, result.missing, [BURSTS]), *result.notes]
    return replace(result, tables=[table, plain], figures=figures, notes=notes)


def learned(done: Mapping[str, History]) -> Table:
    """Return the accuracies of the trainings that learn, beside the published ones.

    Args:
        done: by label.
    """
    rows = []
    for scheme, (title, *published) in P2_ACCURACY.items():
        cells = [
            _cell(done, long_training(scheme, scope, workers).label, accuracy)
            for scope, accuracies in zip(SCOPES, published, strict=True)
            for workers, accuracy in zip(P2_WORKERS, accuracies, strict=True)
        ]
        rows.append(Row([title, *cells]))
    return Table(LEARNED, HEADINGS, rows)


def block_gaps(scores: Mapping[str, float]) -> list[tuple[float, float, float]]:
    """Return rate, and accuracies of block-random-k and random-k, 8 workers layer by layer, the highest rate first.

    Args:
        scores: last accuracies in % by label; of rates of which one of the two is missing nothing is told.
    """
    block, single = block_and_random()
    pairs = [(block, single), *((at_share_of_rate(block, share), at_share_of_rate(single, share)) for share in LOWER)]
    return [(a.rate, scores[a.label], scores[b.label]) for a, b in pairs if {a.label, b.label} <= scores.keys()]


def brought_by_epochs(scores: Mapping[str, float]) -> float | None:
    """Return how much more block-random-k reaches after more epochs, 8 workers layer by layer; ``None`` if that was not
    trained."""
    block, _ = block_and_random()
    longer = for_longer(block).label
    return scores[longer] - scores[block.label] if {longer, block.label} <= scores.keys() else None


def block_gap_text(scores: Mapping[str, float]) -> str:
    """Return how far block-random-k is behind random-k at each rate, and after more epochs, if that is trained; empty
    if lower rates are not."""
    found = block_gaps(scores)
    if len(found) < 2:
        return ""
    told = ", ".join(f"{block:.1f} and {single:.1f} (rate {rate:g})" for rate, block, single in found)
    before, best = found[0][1], max(block for _, block, _ in found)
    of = P2_ACCURACY["block+allgather"][1][P2_WORKERS.index(8)] - before
    lowest = ", the lowest that was tried," if found[-1][1] == best else ""
    brings = f"another rate{lowest} brings blocks {best - before:.1f} of the {of:.1f} points that they are below P2's"
    if best - before < POINT:
        brings = f"another rate brings blocks nothing of the {of:.1f} points that they are below P2's"
    longer = [scores[run.label] for run in map(for_longer, block_and_random()) if run.label in scores]
    if len(longer) == 2:
        block, single = longer
        told += f", and after {LONGER} epochs at {block:.1f} and {single:.1f}"
        brings += f"; {LONGER} epochs instead of {LONG} bring {block - before:.1f}"
        return f"with 8 workers layer by layer block-random-k and random-k end at {told}: {brings}"
    rest = "the rest is not explained, and P2 has ten times as many epochs"
    return f"with 8 workers layer by layer block-random-k and random-k end at {told}: {brings}; {rest}"


def learned_notes(done: Mapping[str, History]) -> list[str]:
    """Return what the trainings that learn say of the scope and of blocks, where these are there.

    Args:
        done: by label.
    """
    layer, whole = (long_training("topk", scope, 8) for scope in SCOPES)
    asked = [run.label for run in (layer, whole, at_layers_rate(whole))]
    notes = []
    if done.keys() >= {*asked}:
        scores = [f"{display_score(done[label].last, done[label].score):.2f}" for label in asked]
        alike = float(scores[0]) - float(scores[2]) < POINT
        notes.append(
            f"P2's rate is ten times lower where entries are chosen globally. With 8 workers Top-k ends at {scores[0]} "
            f"layer by layer, at {scores[1]} globally with P2's rate, and at {scores[2]} globally with the rate of "
            f"layers (one seed each){': here the rate makes what P2 puts down to the scope' if alike else ''}."
        )
    if any("block" in label for label in done):
        notes.append(
            "Block-random-k is far below what P2 prints, by all-gather, too, and the more so with more workers, with "
            "whom the rate is higher and there are fewer steps. What its two ways to exchange differ by is compared "
            "with the same number of workers."
        )
    if gaps := block_gap_text({label: display_score(one.last, one.score) for label, one in done.items()}):
        notes.append(f"At this and other rates, and for longer: {gaps}.")
    return notes


def _plain(done: Mapping[str, History]) -> list[Row]:
    """Return the rows of one worker, for whom the two ways to exchange are the same."""
    rows = []
    for scheme, (title, *published) in P2_ACCURACY.items():
        if scheme == _same(scheme, 1):
            labels = [training(scheme, scope, 1, momentum=0.0).label for scope in SCOPES]
            cells = [_cell(done, label, own[0]) for label, own in zip(labels, published, strict=True)]
            rows.append(Row([title.removesuffix(" (allGather)"), *cells]))
    return rows


def _cell(done: Mapping[str, History], label: str, published: float) -> str:
    ours = f"{display_score(done[label].last, done[label].score):.2f}" if label in done else "–"
    return f"{ours} ({published:.2f})"


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
