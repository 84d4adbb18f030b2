"""What we asked of gTop-k: how the stored results answer it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from math import isfinite
from statistics import mean

from sparsync_lab.papers.claims.claim import Judge, Judgement, question, sentences, word_for, word_of
from sparsync_lab.papers.claims.p1_models import OWN
from sparsync_lab.papers.claims.p3 import PLAIN_TREE
from sparsync_lab.papers.claims.stored_tables import SCORE, MissingResult, StoredTables, first_number, raise_missing
from sparsync_lab.papers.differences import MISSING, SEVERAL, from_dense, in_words, near, seeds_by_label, stated_gap
from sparsync_lab.papers.evidence_questions import EVIDENCE, FEWER_BITS, TREE_ASKED
from sparsync_lab.papers.p3 import DENSITIES
from sparsync_lab.papers.tuned import CAPTION as RATES
from sparsync_lab.papers.tuned import FALLS_ONCE

CORRECTED = f"{PLAIN_TREE}, momentum corrected, 0.5"
P1_RATE = "0.1"  # of ResNet-20
LIKE_DENSE = "dense has the same seeds and P1's rate"


def _on_resnet20(stored: StoredTables) -> dict[str, dict[str, float]]:
    """Return the last accuracies of ResNet-20 in P3's question, by training and seed."""
    scores = stored.scores(TREE_ASKED)
    return seeds_by_label({label: score for (model, label), score in scores.items() if model == OWN[0]})


def _beside_dense(scores: Mapping[str, Mapping[str, float]], label: str) -> tuple[dict[str, float], float]:
    """Return a training's scores over the seeds that dense has, too, and how far from dense they are in the mean."""
    dense = scores.get("dense", {})
    own = {seed: score for seed, score in scores.get(label, {}).items() if seed in dense}
    return own or raise_missing(label), mean(score - dense[seed] for seed, score in own.items())


def _with_momentum_corrected(stored: StoredTables) -> Judgement:
    """Compare gTop-k at 0.1 % on ResNet-20, with momentum before the residual and without, with dense."""
    scores, early = _on_resnet20(stored), f"{CORRECTED}, density warm-up"
    own, gap = _beside_dense(scores, CORRECTED)
    before, told = MISSING, ""
    with suppress(MissingResult):
        plain, apart = _beside_dense(scores, PLAIN_TREE)
        before = from_dense(stated_gap(apart, len(plain)))
    with suppress(MissingResult):
        more = _ends(*_beside_dense(scores, early))
        shares = {cells[4]: None for (model, label), cells in stored.asked(TREE_ASKED).items()
                  if model == OWN[0] and label.startswith(early)}  # fmt: skip
        told = f"with more entries at first, {' or '.join(shares)} in all and not 0.1 %, {more}"
    more = sentences(told, LIKE_DENSE, _dense_at_best(stored, {"gTop-k": own}))
    return Judgement(f"{_ends(own, gap)}, without it {before}", word_of([near(gap, len(own))]), more)


def _ends(seeds: Mapping[str, float], gap: float) -> str:
    """Return where a training ends, and how far that is from dense."""
    return f"{mean(seeds.values()):.2f} %, {_gap(seeds, gap)}" if isfinite(gap) else _gap(seeds, gap)


def _gap(seeds: Mapping[str, float], gap: float) -> str:
    return f"{from_dense(stated_gap(gap, len(seeds)))} ({in_words(len(seeds))})"


def _at_these_bytes(fits: Callable[[str], bool], asked: int) -> Judge:
    """Judge what else was tried with gTop-k in the bytes of 0.1 %: the trainings whose label fits, so many if none is
    missing."""

    def judge(stored: StoredTables) -> Judgement:
        scores, own = _on_resnet20(stored), dict[str, tuple[dict[str, float], float]]()
        for label in scores:
            if label.startswith("gTop-k") and fits(label):
                with suppress(MissingResult):
                    own[label.split(", ")[1] if asked > 1 else "gTop-k"] = _beside_dense(scores, label)
        pairs = [*own.values()] or raise_missing(TREE_ASKED)
        here, ends = _ends(*pairs[0]), ""
        if asked > 1:
            here = ", ".join(f"{name} {_gap(*pair)}" for name, pair in own.items())
            ends = ", ".join(
                f"{name} {mean(seeds.values()):.2f}" for name, (seeds, gap) in own.items() if isfinite(gap)
            )
            ends = f"they end at {ends} %" if ends else ""
        word = word_of([near(gap, len(seeds)) for seeds, gap in pairs], asked)
        best = _dense_at_best(stored, {name: seeds for name, (seeds, _) in own.items()})
        return Judgement(here, word, sentences(ends, LIKE_DENSE, best))

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
        EVIDENCE, "does gTop-k at 0.1 % end like dense on ResNet-20 with momentum of 0.5 before the residual?",
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
