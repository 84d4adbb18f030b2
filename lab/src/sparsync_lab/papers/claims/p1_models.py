"""The models by which P1 is judged: what is told of each, and how far trainings that do the same end apart."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from math import inf

from sparsync_lab.papers.claims.claim import UNDECIDED, Judgement, sentences, word_of
from sparsync_lab.papers.claims.stored_tables import MissingResult, StoredTables, raise_missing
from sparsync_lab.papers.differences import MISSING, POINT, Held
from sparsync_lab.papers.p1_runs import LARGEST_GO

OWN, BESIDE = ("ResNet-20", "VGG-16"), "LeNet-5"  # models that P1 draws, and one that it does not
VGG = OWN[1]


def own_models(told: Mapping[str, str], held: Mapping[str, Held]) -> Judgement:
    """Judge by P1's own models; one that was not trained leaves it open, and then it is told which fails. LeNet-5,
    which P1 does not draw, is told beside."""
    if not held.keys() & {*OWN}:
        raise_missing("P1's own models")
    word = word_of(held.get(model) for model in OWN)
    said = {model: f"{model} {told.get(model, MISSING)}" for model in OWN}
    here = ", ".join(said.values())
    if word == UNDECIDED and any(held.get(model) is False for model in OWN):
        here = "; ".join(f"{'open' if held.get(model) is None else 'fails'}: {own}" for model, own in said.items())
    beside = sentences(f"{BESIDE}, which P1 does not draw, {told[BESIDE]}" if BESIDE in told else "")
    return Judgement(here, word, beside)


def columns(stored: StoredTables, item: str, method: str, heading: str) -> dict[str, str]:
    """Return a method's cells of a column, by model, of the models that it was trained on."""
    found = {model: stored.find(item, f"{model}: test", method, heading) for model in (*OWN, BESIDE)}
    return {model: cell for model, cell in found.items() if cell is not None}


def spread(stored: StoredTables, model: str) -> float:
    """Return by how many points trainings of a model differ anyway, a point at least. On VGG-16 these are the points
    between those that send about the k largest; as long as they are not stored, nobody knows, and no difference of one
    seed decides."""
    return spread_of(_scores(stored)) if model == VGG else POINT


def spread_of(scores: Mapping[str, float]) -> float:
    """Return the same of VGG-16 from last scores by training."""
    ends = _ends(scores)
    return max(POINT, max(ends) - min(ends)) if ends else inf


def spread_in_words(stored: StoredTables) -> str:
    """Return how far these end apart; empty as long as they are not stored."""
    if not (ends := _ends(_scores(stored))):
        return ""
    low, high = min(ends), max(ends)
    said = f"on {VGG} runs that send about the k largest end between {low:.2f} and {high:.2f} %, one seed each"
    return f"{said}: smaller differences mean nothing"


def _scores(stored: StoredTables) -> Mapping[str, float]:
    with suppress(MissingResult):
        return stored.last_scores(VGG)
    return {}


def _ends(scores: Mapping[str, float]) -> list[float]:
    return [scores[form] for form in LARGEST_GO] if scores.keys() >= {*LARGEST_GO} else []
