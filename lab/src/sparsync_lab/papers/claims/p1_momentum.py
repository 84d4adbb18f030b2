"""Whether momentum correction takes away what TopK-SGD loses to dense, as P1 expects."""

from __future__ import annotations

from contextlib import suppress
from math import inf, isfinite
from typing import NamedTuple

from sparsync_lab.papers.claims.claim import PARTLY, UNDECIDED, Judgement, sentences, word_of
from sparsync_lab.papers.claims.p1_models import OWN, VGG
from sparsync_lab.papers.claims.stored_tables import TO_DENSE, MissingResult, StoredTables, first_number, raise_missing
from sparsync_lab.papers.differences import MISSING, POINT, SEVERAL, Held, from_dense, in_words, near, stated_gap
from sparsync_lab.papers.evidence_questions import EVIDENCE
from sparsync_lab.papers.tuned import CAPTION as RATES
from sparsync_lab.papers.tuned import DGC, FALLS_ONCE, TOPK

SEARCHED = "beyond/accuracy"
ACCURACY = "accuracy, %"  # column there
RESNET = OWN[0]
IN_P1S_SCHEDULE = f"{RESNET} (P1's schedule)"
SHORT = "1,400 steps"  # that signs have
# The longest first, in place of which P1's schedule is compared.
AT_EQUAL_BYTES = ((RESNET, "11,700 steps"), (RESNET, "3,500 steps"), (RESNET, SHORT), (VGG, "700 steps"))


class Gaps(NamedTuple):
    """How far two trainings end from dense, in points.

    Args:
        kept: with momentum in the optimizer.
        corrected: with momentum corrected.
        seeds: that both have.
    """

    kept: float
    corrected: float
    seeds: int

    @property
    def alike(self) -> bool:
        """Return whether it is open which of the two ends higher."""
        return near(self.corrected - self.kept, self.seeds) is None

    @property
    def halved(self) -> bool:
        """Return whether correction takes half of the gap away, and a point at least."""
        gained = self.corrected - self.kept
        return gained >= POINT and gained > -self.kept / 2

    @property
    def in_words(self) -> str:
        """Return TopK-SGD's, and DGC's."""
        kept, fixed = (stated_gap(gap, self.seeds) for gap in self[:2])
        return f"{kept}, {DGC} {fixed}"


def momentum_corrected(stored: StoredTables) -> Judgement:
    """Judge by DGC beside TopK-SGD, which differ in more than momentum, at every length; at the longest in P1's
    schedule where DGC has it. As long as rates are missing, it is open whether one that fails does. Signs are told
    beside: the claim is of TopK-SGD."""
    rated = _in_p1s_schedule(stored)
    pairs = {_place(*at): _at_equal_bytes(stored, *at) for at in AT_EQUAL_BYTES[1 if rated else 0 :]}
    pairs = {IN_P1S_SCHEDULE: rated, **pairs} if rated else pairs
    tested = {name: gaps for name, gaps in pairs.items() if gaps is not None} or raise_missing(SEARCHED)
    untried = [name for name in _untried(stored) if name in pairs]
    like: list[Held] = []
    for name, gaps in pairs.items():
        held = None if gaps is None else near(gaps.corrected, gaps.seeds)
        like.append(None if held is False and name in untried else held)
    helped = any(gaps.halved for gaps in tested.values())
    word = PARTLY if helped and True not in like else word_of(like)
    told = [f"{name} {UNDECIDED if gaps is None else gaps.in_words}" for name, gaps in pairs.items()]
    alike = [name for name, gaps in tested.items() if gaps.alike]
    failed = [name for name, held in zip(pairs, like, strict=True) if held is False]
    detail = sentences(
        f"fails: {', '.join(failed)}; all others are open" if failed and word == UNDECIDED else "",
        "where steps are told the rate follows a cosine",
        f"seeds: {', '.join(f'{name} {gaps.seeds}' for name, gaps in tested.items())}",
        f"open with so few seeds, which of the two ends higher: {', '.join(alike)}" if alike else "",
        f"rates are still missing ({'; '.join(untried)}), and one of them may be better" if untried else "",
        _in_figure_6(stored, rated is not None),
        "DGC differs from TopK-SGD in more than that; correction alone was not trained in P1's settings",
        _signs(stored),
    )
    here = f"to dense: {TOPK}, {'; '.join(told)}"
    open_here = "; rates are missing" if untried and word == UNDECIDED else ""
    return Judgement(f"{here}{open_here}", word, detail)


def _in_p1s_schedule(stored: StoredTables) -> Gaps | None:
    """Return the gaps of TopK-SGD and DGC on ResNet-20 in P1's schedule without weight decay, each at its best rate, as
    dense is; nothing where DGC was not trained so."""
    with suppress(MissingResult):
        rows = [row.cells for row in stored.table(EVIDENCE, RATES).rows]
        found = [[(first_number(score), int(seeds)) for name, schedule, _, decay, score, seeds, _ in rows
                  if (name, schedule, decay) == (method, FALLS_ONCE, "0")]
                 for method in ("dense", TOPK, DGC)]  # fmt: skip
        if all(found):
            best = (max(own, key=lambda end: end[0] if isfinite(end[0]) else -inf) for own in found)
            (dense, top, dgc), seeds = zip(*best, strict=True)
            return Gaps(top - dense, dgc - dense, min(seeds))
    return None


def _place(model: str, steps: str) -> str:
    return f"{model} ({steps})"


def _caption(model: str, steps: str) -> str:
    return f"{model} on CIFAR-10, 16 workers of 32, {steps}"


def _at_equal_bytes(stored: StoredTables, model: str, steps: str) -> Gaps | None:
    """Return the same at so many steps with a cosine, or nothing where one of them was not trained."""
    with suppress(MissingResult):
        cells = [[stored.cell(SEARCHED, _caption(model, steps), row, heading) for row in (TOPK, DGC)]
                 for heading in (TO_DENSE, "seeds")]  # fmt: skip
        top, dgc = map(first_number, cells[0])
        return Gaps(top, dgc, min(map(int, cells[1])))
    return None


def _signs(stored: StoredTables) -> str:
    """Return how far from dense signs end on ResNet-20, over the seeds of both; empty if that is not stored."""
    with suppress(MissingResult):
        rows = [f"ablation: momentum {how}" for how in ("kept", "corrected, 0.9")]
        kept, fixed = (stored.number(SEARCHED, f"Ablations: {RESNET}", row, ACCURACY) for row in rows)
        seeds = min(int(stored.number(SEARCHED, f"Ablations: {RESNET}", row, "seeds")) for row in rows)
        dense = _dense(stored, seeds)
        ends = ", corrected by 0.9 ".join(from_dense(stated_gap(own - dense, seeds)) for own in (kept, fixed))
        return f"signs, which the claim is not about, end on {RESNET} in {SHORT} {ends} ({in_words(seeds)})"
    return ""


def _dense(stored: StoredTables, seeds: int) -> float:
    """Return where dense ends on ResNet-20 in the steps that signs have; with fewer than several seeds, with the
    first."""
    if seeds >= SEVERAL:
        return stored.number(SEARCHED, _caption(RESNET, SHORT), "dense", ACCURACY)
    cells = stored.row(SEARCHED, f"The search for rates: {RESNET}", "dense")
    return first_number(next((own for own in cells if own.endswith("*")), None) or raise_missing("a best rate"))


def _in_figure_6(stored: StoredTables, with_dgc: bool) -> str:
    """Return where TopK-SGD ends with P1's schedule and rate; empty if that is not stored."""
    gap = stored.find("p1/fig6", f"{RESNET}: test", "topk", TO_DENSE)
    without = "" if with_dgc else f", where DGC is {MISSING}"
    return f"in figure 6, with P1's schedule and rate, TopK-SGD ends {from_dense(gap)}{without}" if gap else ""


def _untried(stored: StoredTables) -> list[str]:
    """Return for which of what may be compared rates are missing."""
    missing = stored.result(SEARCHED).missing
    found = [_place(model, steps) for model, steps in AT_EQUAL_BYTES
             if any(f"{model} on CIFAR-10, {steps}" in one for one in missing)]  # fmt: skip
    tables = stored.result(EVIDENCE).tables if EVIDENCE in stored.results else []
    asked = [row.cells for table in tables for row in table.rows if row.cells[0].startswith(f"{DGC}, rate")]
    return [IN_P1S_SCHEDULE, *found] if any(cells[2] == MISSING for cells in asked) else found
