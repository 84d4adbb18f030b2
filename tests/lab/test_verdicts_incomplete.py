"""Verdicts where trainings are missing: none becomes firmer, those that do not rest on them stay, and nothing fails."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path

import pytest

from sparsync_lab.models import CATALOGUE
from sparsync_lab.papers import ITEMS, RunContext, run_queue
from sparsync_lab.papers.claims.claim import NOT, PARTLY, REPRODUCED, UNDECIDED, Verdict
from sparsync_lab.papers.claims.verdicts import verdicts
from sparsync_lab.papers.differences import MISSING
from sparsync_lab.papers.item import Result
from sparsync_lab.papers.p2 import SCOPES
from sparsync_lab.papers.run import History, Run, model_title
from sparsync_lab.papers.store import results_of

OUTPUT = Path(__file__).parent.parent.parent / "results" / "papers"
SINGLE = 80  # trainings that are left out one at a time
# What a verdict may become where trainings are missing.
LOOSER = {
    REPRODUCED: {PARTLY, UNDECIDED, MISSING}, NOT: {UNDECIDED, MISSING}, PARTLY: {UNDECIDED, MISSING},
    UNDECIDED: {MISSING}, MISSING: set(),
}  # fmt: skip
# What only trainings with such a label decide is told by these words of a claim.
ABOUT = {"cause: ": "one changed setting", "randk": "RandK-SGD", "gTop-k": "gTop-k", "clipped at": "clipped",
         "authors' settings": "authors' code"}  # fmt: skip
# Claims of one part, that one training may leave without a verdict.
ONE_PART = (
    "end like dense on ResNet-20?",
    "at a rate of the same order",
    "more entries",
    "before the residual",
    "is RandK-SGD better",
    "one changed setting",
    "clipped at a norm of 1",
)
TITLES = {model_title(model) for model in CATALOGUE}
Gone = Callable[[Run], bool]
Words = Mapping[tuple[str, str], Verdict]


class Remade:
    """The items, made from the stored trainings without some of them."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._context = RunContext(output=OUTPUT).read_only()
        self._known, self._gone, self._item = dict[Path, History](), lambda run: False, ""
        self._file_of, self._read = run_queue.file_of, run_queue.read
        patch.setattr(run_queue, "file_of", self._path)
        patch.setattr(run_queue, "read", self._history)
        self.results = {key: found[0].result for key, item in ITEMS.items() if (found := results_of(item, OUTPUT))}
        self.readers: dict[str, set[str]] = {}  # items that read a training, by its name ...
        self.runs: dict[str, Run] = {}  # ... and the training
        self.results = self._without(lambda run: False, [key for key, item in ITEMS.items() if item.trains])
        self.whole = words(self.results)

    def without(self, gone: Gone) -> Words:
        """Return the verdicts; of items that read none of what is gone, the results are as they were."""
        items = {key for name, run in self.runs.items() if gone(run) for key in self.readers[name]}
        return words(self._without(gone, items))

    def _without(self, gone: Gone, items: Collection[str]) -> dict[str, Result]:
        self._gone, made = gone, dict(self.results)
        for self._item in items:
            made[self._item] = ITEMS[self._item].run(self._context)
        return made

    def _path(self, context: RunContext, run: Run) -> Path:
        path = self._file_of(context, run)
        if path.is_file():
            self.runs.setdefault(run.name, run)
            self.readers.setdefault(run.name, set()).add(self._item)
        return Path("gone") if self._gone(run) else path

    def _history(self, path: Path, run: Run) -> History:
        return self._known.get(path) or self._known.setdefault(path, self._read(path, run))


def words(results: Mapping[str, Result]) -> Words:
    return {(one.claim.item, one.claim.text): one for one in verdicts(results)}


def firmer(less: Words, whole: Words) -> list[tuple[object, str, str]]:
    """The verdicts that are firmer where trainings are missing than where they are not."""
    assert less.keys() == whole.keys()
    return [(key, whole[key].word, one.word) for key, one in less.items()
            if one.word not in {whole[key].word} | LOOSER[whole[key].word]]  # fmt: skip


def rests_on(one: Verdict, run: Run, readers: Collection[str]) -> bool:
    """Whether a verdict may change where this training is missing."""
    claim = one.claim
    if not {claim.item, *claim.also} & {*readers}:
        return False
    about = next((word for label, word in ABOUT.items() if label in run.label), "")
    named = {title for title in TITLES if title in f"{claim.text} {one.here}"}
    models = {model_title("resnet18")} if "P2" in claim.text else named
    return about in claim.text and (not models or model_title(run.model) in models)


@pytest.fixture(scope="module")
def remade() -> Iterator[Remade]:
    with pytest.MonkeyPatch.context() as patch:
        yield Remade(patch)


def test_one_training_that_is_missing_leaves_what_does_not_rest_on_it(remade: Remade) -> None:
    searched = {"beyond/accuracy", "beyond/adamw", "beyond/outer"}  # most trainings are theirs alone, and alike
    names = sorted(remade.runs)
    chosen = [name for name in names if not remade.readers[name] <= searched]
    alike = random.Random(0).sample([name for name in names if remade.readers[name] <= searched], SINGLE // 8)
    changed, lost = [], []
    for name in [*random.Random(0).sample(chosen, SINGLE), *alike]:
        run, less = remade.runs[name], remade.without(lambda one, name=name: one.name == name)  # type: ignore[misc]
        assert not firmer(less, remade.whole), name
        for key, one in less.items():
            same = (one.word, one.here) == (remade.whole[key].word, remade.whole[key].here)
            if not (same or rests_on(remade.whole[key], run, remade.readers[name])):
                changed.append((name, key))
            if one.word == MISSING and not same and not any(part in one.claim.text for part in ONE_PART):
                lost.append((name, key))
    assert (changed, lost) == ([], [])


GROUPS: Mapping[str, Gone] = {
    **{f"all of {model}": lambda run, model=model: run.model == model  # type: ignore[misc]
       for model in ("lenet5", "resnet20", "vgg16", "resnet18", "lstm-ptb", "fnn3")},
    **{f"dense {model}": lambda run, model=model: run.model == model and run.method == "dense"  # type: ignore[misc]
       for model in ("resnet20", "vgg16", "resnet18", "lenet5", "lstm-ptb")},
    **{f"topk {model}": lambda run, model=model: run.model == model and run.method == "topk"  # type: ignore[misc]
       for model in ("resnet20", "vgg16", "resnet18")},
    **{f"{scope} cells": lambda run, scope=scope: run.model == "resnet18" and f", {scope}," in run.label  # type: ignore[misc]
       for scope in SCOPES},
    **{f"{workers} workers": lambda run, workers=workers: run.model == "resnet18" and run.workers == workers  # type: ignore[misc]
       for workers in (1, 8)},
    **{f"{label} of {model}": lambda run, model=model, label=label: (run.model, run.label) == (model, label)  # type: ignore[misc]
       for label in ("dense", "topk", "randk", "gTop-k, 0.001") for model in ("resnet20", "vgg16")},
    **{label: lambda run, label=label: label in run.label  # type: ignore[misc]
       for label in ("authors' settings", "randk, no residual", "layer's rate", "cause: ", "gTop-k, 0.001", "DGC")},
    "gaussian": lambda run: run.method == "gaussian",
    "randk": lambda run: run.method == "random+allgather",
    "gTop-k": lambda run: "gtopk" in run.method,
    "one seed of dense": lambda run: run.method == "dense" and run.seed == 1,
    "other seeds": lambda run: run.seed > 0,
    "the first seed": lambda run: run.seed == 0 and run.model == "resnet20",
    "everything": lambda run: True,
}  # fmt: skip


@pytest.mark.parametrize("group", GROUPS)
def test_what_is_missing_makes_no_verdict_firmer(group: str, remade: Remade) -> None:
    assert any(map(GROUPS[group], remade.runs.values()))
    assert not firmer(remade.without(GROUPS[group]), remade.whole)
