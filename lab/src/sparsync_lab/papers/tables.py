"""Tables and charts of the trainings at equal bytes that are stored."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product

from sparsync_lab.models import CATALOGUE
from sparsync_lab.papers.curves import (
    by_epoch,
    difference,
    first_seed,
    last_score,
    mean_and_std,
    seeds_notes,
    shown_difference,
    spread_caption,
    with_their_seeds,
)
from sparsync_lab.papers.item import Column
from sparsync_lab.papers.lr_search import LearningRateSearch, goodness
from sparsync_lab.papers.run import History
from sparsync_lab.papers.sweep import ABLATIONS, EARLY, METHODS, RELATED, TARGETS, base_of
from sparsync_lab.report import Figure, LineChart, Row, Table

STANDING = "Where the recipe stands at the bytes of 0.1 % density"
LOOKS = {label: number for number, label in enumerate(METHODS)}  # a method has the same in all charts
NOT_RUN = "not run"
SEARCH_NOT_DONE = "search not done"
GIVEN_UP = "given up"
RECIPE = "recipe"
MAY_DO_BETTER = "but dense may do better"
OF_EARLY = (
    "Other seeds are for what makes the recipe: the warm-up (taken away in the second row) and momentum (moved instead "
    "of corrected in the last). How far both go is a search like that of rates, with one seed: what differs by less "
    "than seeds do is no ranking. All but the first two rows take the first one's rate, which may not be their best."
)
KINDS = {"ptb": "validation perplexity", "an4": "word error rate"}  # by data; else accuracy


def all_tables(search: LearningRateSearch) -> list[Table]:
    """Return of every setting a table a length, one for all that change the same method, and the search for rates."""
    tables = []
    for model, setting in search.settings.items():
        labels = search.methods(model)
        ablations = [label for label in search.asked(model) if label in ABLATIONS]
        for length, steps in enumerate(setting.lengths):
            where = f"{setting.title}, {setting.workers} workers of {setting.batch}, {steps:,} steps"
            tables.append(results_table(search, model, length, labels, "dense", where))
        for base in dict.fromkeys(base_of(label) for label in ablations):
            rows = [base, *RELATED.get(base, ()), *(label for label in ablations if base_of(label) == base)]
            caption = f"Ablations: {setting.title}, {setting.lengths[0]:,} steps, {base}"
            table = results_table(search, model, 0, rows, base, caption)
            notes = [*([OF_EARLY] if base == EARLY else []), *several_rates(search, model, rows)]
            tables.append(replace(table, notes=[*notes, *table.notes]))
        tables.append(rate_search_table(search, model, [*labels, *ablations]))
    return tables


def results_table(
    search: LearningRateSearch, model: str, length: int, labels: Sequence[str], against: str, caption: str
) -> Table:
    """Return every method with its chosen rate: mean and deviation over the seeds, and what it sent."""
    base = search.repeats(model, against, length)
    rows = []
    for label in labels:
        histories = search.repeats(model, label, length)
        if not histories:
            rows.append(Row([label, NOT_RUN, "–", "–", missing_rate(search, model, label), "–", "–", "–"]))
            continue
        gap = "–" if label == against else shown_difference(histories, base)
        rows.append(
            Row(
                [
                    label,
                    mean_and_std(histories),
                    gap,
                    str(len(histories)),
                    f"{histories[0].run.rate:g}",
                    f"{statistics.mean(h.bytes[-1] for h in histories) / 1e6:,.2f} MB",
                    f"{100 * histories[0].density:.3g} %",
                    f"{statistics.mean(h.seconds for h in histories):,.0f} s",
                ]
            )
        )
    kind = KINDS.get(CATALOGUE[model].data, "accuracy")
    unit = "accuracy, %" if kind == "accuracy" else f"{kind}, less is better"
    headings = ["training", unit, f"to {against}", "seeds", "rate", "sent by a worker", "density", "time"]
    notes = seeds_notes((search.repeats(model, label, length) for label in labels), base)
    return Table(caption, headings, rows, notes)


def missing_rate(search: LearningRateSearch, model: str, label: str) -> str:
    """Return what stands in place of the rate of a row without a score: whether its search has begun."""
    model, label = search.searched(model, label)
    begun = any(history is not None for history in search.tried(model, label).values())
    return SEARCH_NOT_DONE if begun and search.chosen(model, label) is None else "–"


def several_rates(search: LearningRateSearch, model: str, labels: Sequence[str]) -> list[str]:
    """Return which of the rows that take a rate from another were made with several, of which the best is shown."""
    told = []
    for label in labels:
        made = [history for history in search.tried(model, label).values() if history is not None]
        if len(made) > 1 and search.searched(model, label) != (model, label) and search.repeats(model, label, 0):
            rates = ", ".join(f"{last_score(h)} with rate {h.run.rate:g}" for h in made)
            told.append(f"{label}: {rates}")
    return [f"Made with several rates, and shown with the best: {'; '.join(told)}."] if told else []


def rate_search_table(search: LearningRateSearch, model: str, labels: Sequence[str]) -> Table:
    """Return the last scores of every rate that was tried; the chosen one is marked."""
    setting = search.settings[model]
    factors = sorted((*setting.factors, *setting.further))
    rows = []
    for label in labels:
        tried, best = search.tried(model, label), search.chosen(model, label)
        tried = {**search.made(model, label, 0, factors), **tried}  # of ablations also what was not chosen
        mark, cells = " * edge" if search.at_edge(model, label) else " *", []
        for factor in factors:
            history = tried.get(factor)
            score = last_score(history) if history is not None else NOT_RUN
            score += f", {GIVEN_UP}" if factor in tried and search.given_up(model, label, factor) else ""
            cells.append("–" if factor not in tried else f"{score}{mark}" if factor == best else score)
        rows.append(Row([label, *cells]))
    return Table(
        f"The search for rates: {setting.title}, {setting.lengths[0]:,} steps, one seed",
        ["training", *(f"rate {factor * setting.rate:g}" for factor in factors)],
        rows,
        [
            f"*: chosen. {GIVEN_UP}: another seed does not learn with it (less than half the accuracy, or more than "
            "twice the error); the best stays if that is so with all. "
            "edge: no lower or no higher rate was tried, and a better one may lie there. –: not trained. The search "
            "widens only when the best is at its edge."
        ],
    )


def summary_table(search: LearningRateSearch) -> Table:
    """Return how the library's recipe compares with tuned dense, and where it loses."""
    rows = []
    for model, setting in search.settings.items():
        for length, steps in enumerate(setting.lengths):
            target = TARGETS.get(model, {}).get(steps)
            aim = "–" if target is None else f"{target:g}"
            dense = search.repeats(model, "dense", length)
            found = {n: search.repeats(model, n, length) for n in search.methods(model) if n.startswith(RECIPE)}
            found = {label: histories for label, histories in found.items() if histories}
            if not dense or not found:
                missing = "dense" if not dense else "the recipe"
                rows.append(Row([setting.title, f"{steps:,}", "–", "–", "–", aim, f"{missing} is not run"]))
                continue
            best = max(found, key=lambda label: statistics.mean(goodness(h) for h in found[label]))
            ends = [mean_and_std(dense), mean_and_std(found[best])]
            gap = difference(found[best], dense)
            if gap is None:
                why = "they have no seed in common, or went astray"
                rows.append(Row([setting.title, f"{steps:,}", *ends, "–", aim, f"{best}: {why}"]))
                continue
            lost = -gap if dense[0].score == "accuracy" else gap
            conclusion = "loses" if lost > 0 else "does not lose"
            if target is not None:
                conclusion = "target met" if lost <= target else "target missed"
            if search.at_edge(model, "dense"):
                conclusion += f", {MAY_DO_BETTER}: its rate stands at the edge of the search"
            shown = shown_difference(found[best], dense)
            rows.append(Row([setting.title, f"{steps:,}", *ends, shown, aim, f"{best}: {conclusion}"]))
    headings = ["setting", "steps", "dense, tuned", "best recipe, tuned alike", "difference", "may lose", "result"]
    notes = [
        "Tuned: the rate is the best at the setting's shortest length, for longer trainings too; dense may be better "
        "there with another. The recipe is the best of those in the tables below at each length."
    ]
    return Table(STANDING, headings, rows, notes)


def figures(search: LearningRateSearch) -> list[Figure]:
    """Draw scores over epochs of every setting and length; accuracy over bytes of the first."""
    made = []
    for model, setting in search.settings.items():
        for length, steps in enumerate(setting.lengths):
            found = {label: search.repeats(model, label, length) for label in search.methods(model)}
            seeds = with_their_seeds(found)
            first = first_seed(seeds)
            if len(first) < 2:
                continue
            title = f"{setting.title}, {steps:,} steps"
            whole = by_epoch(title, seeds, f"With its chosen rate each: {spread_caption(seeds)}.", LOOKS)
            made.append(whole)
            if length == 0:
                chart = over_bytes(f"{title}: over bytes", whole, first)
                made.append(Figure(chart, "All sparse methods send the same bytes in all."))
    return made


def over_bytes(title: str, whole: Figure, first: Mapping[str, History]) -> LineChart:
    """Return scores over the bytes that a worker has sent.

    Args:
        whole: the same over epochs.
        first: a training of each label.
    """
    assert isinstance(whole.chart, LineChart)
    curves = [replace(curve, x=first[curve.label].bytes) for curve in whole.chart.curves]
    return replace(whole.chart, title=title, x_label="sent by a worker", curves=curves, log_x=True, x_unit="B")


def columns(search: LearningRateSearch) -> dict[str, Column]:
    """Return all finished trainings of the tables, one row each."""
    rows = []
    for model, setting in search.settings.items():
        for label in search.asked(model):
            lengths = range(len(setting.lengths))
            every = product(lengths, search.tried(model, label))
            known = {h.run.name: h for length, factor in every for h in search.seeds(model, label, factor, length)}
            rows += [
                (model, label, h.run.steps, h.run.rate, h.run.seed, h.last, h.bytes[-1], name)
                for name, h in known.items()
            ]
    names = ("model", "method", "steps", "rate", "seed", "score", "bytes", "run")
    return {name: [row[i] for row in rows] for i, name in enumerate(names)}


def method_names(search: LearningRateSearch, labels: Sequence[str]) -> str:
    """Join labels in one line."""
    if all(label in search.ablations for label in labels):
        return "ablations"
    return "; ".join(labels)
