"""The models by which P1 is judged: what is told of each, and how far trainings that select alike end apart."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from math import inf, isfinite

from sparsync_lab.papers.claims.claim import NOT_TRAINED, UNDECIDED, Judgement, sentences, word_of
from sparsync_lab.papers.claims.stored_tables import MissingResult, StoredTables, raise_missing
from sparsync_lab.papers.differences import DIVERGED, MISSING, POINT, Held
from sparsync_lab.papers.p1_runs import CARRIED, LARGEST_GO, training
from sparsync_lab.papers.vgg16_gap import PLAIN, SHORT, cause_label

OWN, BESIDE = ("ResNet-20", "VGG-16"), "LeNet-5"  # models that P1 draws, and one that it does not
VGG = OWN[1]
LONG = round(training("vgg16", "topk").epochs)
SHORT_ALIKE = tuple(cause_label(form, PLAIN) for form in ("topk", CARRIED))
ALIKE = {LONG: LARGEST_GO, SHORT: SHORT_ALIKE}  # trainings of VGG-16 that send about the k largest, by epochs


def own_models(told: Mapping[str, str], held: Mapping[str, Held]) -> Judgement:
    """Judge by P1's own models; one that was not trained leaves it open, and then it is told which fails. LeNet-5,
    which P1 does not draw, is told beside."""
    beside = sentences(f"{BESIDE}, which P1 does not draw, {told[BESIDE]}" if BESIDE in told else "")
    if not held.keys() & {*OWN}:
        return Judgement(NOT_TRAINED, MISSING, beside or raise_missing("P1's own models"))
    word = word_of(held.get(model) for model in OWN)
    said = {model: f"{model} {told.get(model, MISSING)}" for model in OWN}
    here = ", ".join(said.values())
    if word == UNDECIDED and any(held.get(model) is False for model in OWN):
        here = "; ".join(f"{'open' if held.get(model) is None else 'fails'}: {own}" for model, own in said.items())
    return Judgement(here, word, beside)


def columns(stored: StoredTables, item: str, method: str, heading: str) -> dict[str, str]:
    """Return a method's cells of a column, by model, of the models that it was trained on."""
    found = {model: stored.find(item, f"{model}: test", method, heading) for model in (*OWN, BESIDE)}
    return {model: cell for model, cell in found.items() if cell is not None}


def percent(score: float | None) -> str:
    """Return where a training ends."""
    return MISSING if score is None else f"{score:.1f} %" if isfinite(score) else DIVERGED


def spread(stored: StoredTables, model: str, epochs: int = LONG) -> float:
    """Return by how many points trainings of a model differ anyway, a point at least. On VGG-16 these are the points
    between those of as many epochs that send about the k largest; as long as they are not stored, nobody knows, and no
    difference of one seed decides."""
    return spread_of(_scores(stored), epochs) if model == VGG else POINT


def spread_of(scores: Mapping[str, float], epochs: int) -> float:
    """Return the same of VGG-16 from last scores by training."""
    own = _ends(scores).get(epochs)
    return max(POINT, max(own) - min(own)) if own else inf


def spread_in_words(stored: StoredTables) -> str:
    """Return how far these end apart; empty as long as they are not stored."""
    return spread_words(_scores(stored))


def spread_words(scores: Mapping[str, float]) -> str:
    """Return the same from last scores by training."""
    if not (ends := _ends(scores)):
        return ""
    between = (f"between {min(own):.2f} and {max(own):.2f} % in {epochs} epochs" for epochs, own in ends.items())
    said = f"on {VGG} methods that send about the k largest end {' and '.join(between)}, one seed each"
    return f"{said}: what is less apart in as many epochs is no ranking"


def _scores(stored: StoredTables) -> Mapping[str, float]:
    with suppress(MissingResult):
        return stored.last_scores(VGG)
    return {}


def _ends(scores: Mapping[str, float]) -> dict[int, list[float]]:
    """Return where they end, by epochs, of which all are stored."""
    return {
        epochs: [scores[label] for label in labels] for epochs, labels in ALIKE.items() if scores.keys() >= {*labels}
    }
