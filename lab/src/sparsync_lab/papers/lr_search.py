"""The search for learning rates: what is trained next, and which rate is chosen."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from math import isnan, log10
from statistics import mean
from typing import Any

from sparsync_lab.papers.equal_bytes import density_of, options_in
from sparsync_lab.papers.run import SEEDS, History, Run
from sparsync_lab.papers.sweep import ABLATIONS, ALSO, METHODS, SETTINGS, STAGES, Method, Setting, Stage

START = 6.0  # seconds until a training is under way


@dataclass(frozen=True)
class LearningRateSearch:
    """A sweep over learning rates, and the lookup of what has been trained of it.

    Args:
        get: a run's history, if there is one.
        seed: the context's.
        settings: by name.
        stages: in the order in which they are trained.
        rows: the methods that are compared, by label ...
        ablations: ... and those that change one thing of them.
        equal_bytes: every method has the density at which it sends as much as TopK-SGD at 0.1 %; else what its options
            say.
    """

    get: Callable[[Run], History | None]
    seed: int = 0
    settings: Mapping[str, Setting] = field(default_factory=lambda: SETTINGS)
    stages: Sequence[Stage] = STAGES
    rows: Mapping[str, Method] = field(default_factory=lambda: METHODS)
    ablations: Mapping[str, Method] = field(default_factory=lambda: ABLATIONS)
    equal_bytes: bool = True
    made_before: dict[tuple[Any, ...], Run] = field(default_factory=dict, init=False, repr=False)

    def method(self, label: str) -> Method:
        return self.rows[label] if label in self.rows else self.ablations[label]

    def run(self, model: str, label: str, factor: float, length: int, seed: int = 0) -> Run:
        """Return one training; always the same object, which knows its name.

        Args:
            model: name of the setting.
        """
        key = model, label, factor, length, seed
        if key not in self.made_before:
            self.made_before[key] = self._run(*key)
        return self.made_before[key]

    def _run(self, model: str, label: str, factor: float, length: int, seed: int) -> Run:
        setting, method = self.settings[model], self.method(label)
        steps, rate, dense = setting.lengths[length], setting.rate * factor, method.name == "dense"
        own = Run(
            f"{setting.words(length)} {label}, rate {rate:g}, seed {seed + self.seed}", setting.model, method.name,
            workers=setting.workers, batch=setting.batch, rate=rate, momentum=setting.momentum,
            weight_decay=setting.weight_decay, clip=setting.clip, steps=steps, warmup=setting.warmup, decay=None,
            seed=seed, limit=setting.limit, optimizer=setting.optimizer, settings=method.settings,
            autocast=setting.autocast, windows=setting.windows, seconds=START + steps * setting.seconds[not dense],
        )  # fmt: skip
        own = replace(own, **method.changes)
        if dense:
            return own
        if not self.equal_bytes:
            return replace(own, options=method.options, front=method.front)
        options = {**options_in(setting, method), "density": density_of(setting, label, length)}
        return replace(own, options=options, front=method.front)

    def searched(self, model: str, label: str) -> tuple[str, str]:
        """Return the setting and the method whose search a rate is taken from: its own, unless it is like another."""
        return self.settings[model].like or model, self.method(label).like or label

    def tried(self, model: str, label: str) -> dict[float, History | None]:
        """Return the search for a rate by factor, as far as it is asked for; ``None`` where nothing is trained yet."""
        setting, like = self.settings[model], self.searched(model, label)
        if like != (model, label):  # that rate, or, if it was trained before it was chosen, its own
            taken, made = self.chosen(*like), self.made(model, label, 0, self.tried(*like))
            # An ablation that was made with several shows the best; a setting like another has that one's rates.
            if taken is None or (made and (taken not in made or not setting.like)):
                return dict(made)
            return {taken: made.get(taken)}
        factors = [*setting.factors, *ALSO.get((model, label), ())]
        whole = sorted({*factors, *setting.further})
        while True:
            found = {factor: self.get(self.run(model, label, factor, 0)) for factor in sorted(factors)}
            known = {factor: history for factor, history in found.items() if history is not None}
            if len(known) < len(found):
                return found
            bests = {whole.index(factor) for factor in (best_factor(known), self._steady(model, label, known))}
            beside = {whole[at] for best in bests for at in (max(best - 1, 0), min(best + 1, len(whole) - 1))}
            further = sorted(beside - set(factors))
            if not further:
                return found
            factors += further

    def made(self, model: str, label: str, length: int, factors: Iterable[float]) -> dict[float, History]:
        """Return what was trained with these factors and the first seed."""
        found = {factor: self.get(self.run(model, label, factor, length)) for factor in factors}
        return {factor: history for factor, history in found.items() if history is not None}

    def chosen(self, model: str, label: str) -> float | None:
        """Return the factor with the best last score, once the search that it is taken from is complete; if other seeds
        do not learn with it, the next best."""
        tried, like = self.tried(model, label), self.searched(model, label)
        known = {factor: history for factor, history in tried.items() if history is not None}
        if not known or len(known) < len(tried) or (like != (model, label) and self.chosen(*like) is None):
            return None
        return self._steady(model, label, known)

    def at_edge(self, model: str, label: str) -> bool:
        """Return whether the chosen rate is the lowest or the highest of those that were searched; one that is taken
        from another search is not."""
        best = self.chosen(model, label) if self.searched(model, label) == (model, label) else None
        known = [factor for factor, history in self.tried(model, label).items() if history is not None]
        return best is not None and len(known) > 1 and best in (min(known), max(known))

    def _steady(self, model: str, label: str, known: Mapping[float, History]) -> float:
        """Return the best factor with which all seeds learn that were trained with it; if there is none, the best."""
        left = dict(known)
        while left:
            factor = best_factor(left)
            if not self.given_up(model, label, factor):
                return factor
            del left[factor]
        return best_factor(known)

    def given_up(self, model: str, label: str, factor: float) -> bool:
        """Return whether another seed does not learn with a factor with which the first does."""
        first = self.get(self.run(model, label, factor, 0))
        return first is not None and not all(has_learned(other, first) for other in self.seeds(model, label, factor))

    def seeds(self, model: str, label: str, factor: float, length: int = 0) -> list[History]:
        """Return what was trained with a factor, seed by seed."""
        found = (self.get(self.run(model, label, factor, length, seed)) for seed in SEEDS)
        return [history for history in found if history is not None]

    def runs(self, stage: Stage) -> tuple[list[Run], list[Run]]:
        """Return a stage's trainings; and in place of those that wait for their rate, as many with the middle one."""
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
            if factor is not None and stage.length and stage.seeds == SEEDS[:1]:
                further = self.further(stage.model, label, factor, stage.length)
                ready += [self.run(stage.model, label, other, stage.length) for other in further]
        return ready, waiting

    def further(self, model: str, label: str, chosen: float, length: int) -> list[float]:
        """Return with which factors beside the chosen one a longer training is made: the next inside where that stands
        at the edge of its search; and where the best of those that it was made with is the lowest or the highest of
        them, the next beyond, if the search tried it."""
        whole = sorted(self.tried(model, label))
        made = self.made(model, label, length, whole)
        asked = {chosen, *made}
        if self.at_edge(model, label):
            asked.add(whole[1] if chosen == whole[0] else whole[-2])
        if 1 < len(asked) == len(made):
            best = self._best_longer(model, label, length, made)
            at = whole.index(best) + (-1 if best == min(asked) else 1)
            if best in (min(asked), max(asked)) and 0 <= at < len(whole):
                asked.add(whole[at])
        return sorted(asked - {chosen})

    def possible(self) -> Iterator[Run]:
        """Yield all trainings that may be asked for, whatever rates are chosen."""
        for stage in self.stages:
            setting = self.settings[self.settings[stage.model].like or stage.model]
            factors = (*setting.factors, *setting.further)
            for label, factor, seed in product(stage.methods, factors, stage.seeds):
                yield self.run(stage.model, label, factor, stage.length, seed)

    def others(self, stage: Stage) -> list[Run]:
        """Return a stage's trainings with all rates of the search: they may have been made when another one was the
        best. Of a search that is not done, with all rates there are: some may lie beyond one that is missing."""
        setting, found = self.settings[stage.model], list[Run]()
        for label in stage.methods:
            source = stage.model, self.method(label).like or label
            done = self.chosen(*source) is not None
            for factor in self.tried(*source) if done else (*setting.factors, *setting.further):
                found += [self.run(stage.model, label, factor, stage.length, seed) for seed in stage.seeds]
        return found

    def repeats(self, model: str, label: str, length: int) -> list[History]:
        """Return what was trained with the chosen rate, seed by seed, and nothing before it is chosen; a longer
        training that was made with several, with that which is the best in the mean over its seeds."""
        factor = self.chosen(model, label)
        if factor is None:
            return []
        longer = self.made(model, label, length, self.tried(model, label)) if length else {}
        if longer:
            factor = self._best_longer(model, label, length, longer)
        return self.seeds(model, label, factor, length)

    def _best_longer(self, model: str, label: str, length: int, made: Iterable[float]) -> float:
        """Return, of the factors that a longer training was made with, the best in the mean over its seeds."""
        means = {factor: mean(map(goodness, self.seeds(model, label, factor, length))) for factor in made}
        return max(means, key=lambda factor: (means[factor], -abs(log10(factor))))

    def asked(self, model: str) -> list[str]:
        """Return the labels of all that is trained on a model, each once."""
        return list(dict.fromkeys(label for stage in self.stages if stage.model == model for label in stage.methods))

    def methods(self, model: str) -> list[str]:
        """Return, of these, the methods that are compared, without ablations."""
        return [label for label in self.asked(model) if label in self.rows]


def best_factor(known: Mapping[float, History]) -> float:
    """Return the factor with the best last score; among equals the one nearest to 1."""
    return max(known, key=lambda factor: (goodness(known[factor]), -abs(log10(factor))))


def has_learned(history: History, like: History) -> bool:
    """Return whether a training got near another of its kind: to half the accuracy, or twice the error."""
    if isnan(history.last) or isnan(like.last):
        return isnan(like.last)
    return history.last >= like.last / 2 if history.score == "accuracy" else history.last <= 2 * like.last


def goodness(history: History) -> float:
    """Return the last score, so that more is better; least of all if it is not a number."""
    last = history.last
    return float("-inf") if isnan(last) else last if history.score == "accuracy" else -last
