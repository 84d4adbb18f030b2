"""What we asked of gTop-k: how the stored results answer it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from statistics import mean

from sparsync_lab.papers.claim import (
    SCORE,
    SEVERAL,
    Judge,
    Judgement,
    StoredTables,
    first_number,
    from_dense,
    in_words,
    near,
    question,
    raise_missing,
    seeds_by_label,
    sentences,
    stated_gap,
    word_for,
    word_of,
)
from sparsync_lab.papers.claims_p1_models import OWN
from sparsync_lab.papers.claims_p3 import PLAIN_TREE
from sparsync_lab.papers.evidence_questions import EVIDENCE, FEWER_BITS, TREE_ASKED
from sparsync_lab.papers.p3 import DENSITIES
from sparsync_lab.papers.tuned import CAPTION as RATES
from sparsync_lab.papers.tuned import FALLS_ONCE

CORRECTED = f"{PLAIN_TREE}, momentum corrected, 0.5"
P1_RATE = "0.1"  # of ResNet-20


def _on_resnet20(stored: StoredTables) -> dict[str, dict[str, float]]:
    """Return the last accuracies of ResNet-20 in P3's question, by training and seed."""
    scores = stored.scores(TREE_ASKED)
    return seeds_by_label({label: score for (model, label), score in scores.items() if model == OWN[0]})


def _gap_to_dense(scores: Mapping[str, Mapping[str, float]], label: str) -> float:
    """Return how far a training is from dense with the same seeds, in the mean over them."""
    return mean(score - scores["dense"][seed] for seed, score in scores[label].items())


def _with_momentum_corrected(stored: StoredTables) -> Judgement:
    """Compare gTop-k at 0.1 % on ResNet-20, as published and with momentum before the residual, with dense."""
    scores, early = _on_resnet20(stored), f"{CORRECTED}, density warm-up"
    before, gap, more = (_gap_to_dense(scores, how) for how in (PLAIN_TREE, CORRECTED, early))
    share = stored.asked(TREE_ASKED)[OWN[0], early][4]
    told = f"with more entries at first, {share} in all and not 0.1 %, {_ends(scores[early], more)}"
    here = f"{_ends(scores[CORRECTED], gap)}, as published {from_dense(stated_gap(before))}"
    return Judgement(here, word_of([near(gap, len(scores[CORRECTED]))]), sentences(told))


def _ends(seeds: Mapping[str, float], gap: float) -> str:
    """Return where a training ends, and how far that is from dense."""
    return f"{mean(seeds.values()):.2f} %, {_gap(seeds, gap)}"


def _gap(seeds: Mapping[str, float], gap: float) -> str:
    return f"{from_dense(stated_gap(gap, len(seeds)))} ({in_words(len(seeds))})"


def _at_these_bytes(fits: Callable[[str], bool], asked: int) -> Judge:
    """Judge what else was tried with gTop-k in the bytes of 0.1 %: the trainings whose label fits, so many if none is
    missing."""

    def judge(stored: StoredTables) -> Judgement:
        scores = _on_resnet20(stored)
        own = {label: seeds for label, seeds in scores.items() if label.startswith("gTop-k") and fits(label)}
        gaps = {label: _gap_to_dense(scores, label) for label in own} or raise_missing(TREE_ASKED)
        names = {label: label.split(", ")[1] for label in own}
        if len(own) == 1:
            ((label, seeds),) = own.items()
            here, ends = _ends(seeds, gaps[label]), ""
        else:
            here = ", ".join(f"{names[label]} {_gap(seeds, gaps[label])}" for label, seeds in own.items())
            ends = ", ".join(f"{names[label]} {mean(seeds.values()):.2f}" for label, seeds in own.items())
            ends = f"they end at {ends} %"
        held = [near(gap, len(own[label])) for label, gap in gaps.items()]
        word = word_of([*held, *[None] * (asked - len(own))])
        named = {names[label] if len(own) > 1 else "gTop-k": seeds for label, seeds in own.items()}
        told = sentences(ends, "dense has the same seeds and P1's rate", _dense_at_best(stored, named))
        return Judgement(here, word, told)

    return judge


def _dense_at_best(stored: StoredTables, beside: Mapping[str, Mapping[str, float]]) -> str:
    """Return what dense reaches with its best rate in the same schedule, beside what it does with P1's; and how far
    from that others are, whose scores are given by name and seed."""
    rows = [row.cells for row in stored.table("beyond/evidence", RATES).rows]
    plain = ["dense", FALLS_ONCE]  # and no weight decay
    own = {c[2]: c[4] for c in rows if c[:2] == plain and c[3] == "0" and int(c[5]) >= SEVERAL}
    if P1_RATE not in own or len(own) < 2:
        return ""
    best = next(iter(own))  # the best first
    top = first_number(own[best])
    then = (f"{name} {from_dense(stated_gap(mean(s.values()) - top, len(s)))}" for name, s in beside.items())
    return (
        f"with that rate, {P1_RATE}, dense ends at {own[P1_RATE]} %, with its best, {best}, at {own[best]}; beside "
        f"that {', '.join(then)}"
    )


def _more_is_better(stored: StoredTables) -> Judgement:
    scores = [stored.number("p3/density", "gTop-k", f"gTop-k, {density:g}", SCORE) for density in DENSITIES]
    told = ", ".join(f"{score:.2f}" for score in scores)
    return Judgement(f"{told} % at 0.1, 0.5 and 1 % of the entries", word_for(scores == sorted(scores), True))


QUESTIONS = (
    question(
        EVIDENCE, "does gTop-k at 0.1 % end like dense on ResNet-20 with momentum before the residual?",
        _with_momentum_corrected,
    ),
    question(
        EVIDENCE, "does gTop-k at 0.1 % end like dense on ResNet-20 with momentum of 0.9 before the residual?",
        _at_these_bytes(lambda label: label.startswith(PLAIN_TREE) and label.endswith("0.9"), 1),
    ),
    question(
        EVIDENCE, "does gTop-k end like dense on ResNet-20 in the bytes of 0.1 % with values of fewer bits?",
        _at_these_bytes(lambda label: not label.startswith(PLAIN_TREE), len(FEWER_BITS)),
    ),
    question("p3/density", "does gTop-k end higher with more entries?", _more_is_better),
)  # fmt: skip
