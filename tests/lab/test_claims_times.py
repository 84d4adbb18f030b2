"""What P1 claims of times is judged by one rule, and no more than the forms that were timed decide it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from sparsync_lab.papers.claims.claim import NOT, PARTLY, REPRODUCED, UNDECIDED, Verdict
from sparsync_lab.papers.claims.p1_selection import AUTHORS, AUTHORS_COLUMN, ONE_MASK, PRINTED, SLIGHT
from sparsync_lab.papers.claims.p1_selection import CLAIMS as OF_SELECTION
from sparsync_lab.papers.claims.p1_times import CLAIMS, COPIED, EQUAL, LINS_DGC, WITH_P1S_TOPK
from sparsync_lab.papers.claims.stored_tables import StoredTables
from sparsync_lab.papers.item import Result
from sparsync_lab.papers.iteration_times import AT_K, MEASURED, WITH_P1S_COMPUTE
from sparsync_lab.papers.published import P1_STEP_TIMES
from sparsync_lab.papers.selection_times import METHODS, SUMMED_MASKS
from sparsync_lab.report import Row, Table

RULES = Path("docs/papers.md")
ALONE, FEEDBACK = "Time of selection alone", "Time of selection with error feedback"
MODELLED = "partly: the exchange is modelled"
TOPK, DGC = (METHODS[f"{name} (PyTorch)"] for name in ("topk", "dgc"))
OURS = {"ours: topk": 1.0, "ours: gaussian": 1.0}
Cells = list[str | float | None]
FORM = {PRINTED: "as printed is faster than top-k", AUTHORS: "in its authors' form is faster"}


def verdict(text: str, *tables: Table, **rows: Cells) -> Verdict:
    (claim,) = (one for one in (*OF_SELECTION, *CLAIMS) if text in one.text)
    result = Result(tables, rows=rows)
    return claim.verdict(StoredTables({"p1/fig4": result, "p1/table2": result}))


def selection(caption: str, times: Mapping[str, float]) -> Table:
    """Milliseconds of selection for ResNet-50's entries."""
    cells = [f"{ms} ms" for ms in (*times.values(), *OURS.values())]
    return Table(caption, ["entries", *times, *OURS], [Row(["25.6 M", *cells])])


def steps(seconds: Mapping[str, float], caption: str = WITH_P1S_COMPUTE, compute: float = 1.0) -> Table:
    """Iteration times of P1's models, alike in all."""
    cells = [f"{own} s" for own in (compute, *seconds.values())]
    return Table(caption, ["model", "compute", *seconds], [Row([title, *cells]) for _, title, *_ in P1_STEP_TIMES])


@pytest.mark.parametrize("form", [PRINTED, AUTHORS])
def test_the_authors_form_is_not_judged_by_its_best_case_alone(form: str) -> None:
    def one(ms: float, feedback: float | None) -> Verdict:
        times = {TOPK: 1.0, form: ms}
        beside = {TOPK: 1.0} if feedback is None else {TOPK: 1.0, form: feedback}
        return verdict(FORM[form], selection(ALONE, times), selection(FEEDBACK, beside))

    best = one(0.5, None)
    assert (best.word, ONE_MASK in best.here) == ((PARTLY, True) if form == AUTHORS else (REPRODUCED, False))
    assert one(2.0, None).word == NOT
    both = one(0.5, 0.6)
    assert (both.word, ONE_MASK in both.here) == (REPRODUCED, False)
    assert one(0.5, 2.0).word == PARTLY


def said(one: Verdict) -> str:
    """Return the verdict; of what only its modelled exchange keeps from "reproduced", that."""
    return MODELLED if one.here.endswith(MODELLED) else one.word


def test_times_under_a_percent_apart_are_equal() -> None:
    words = [verdict(FORM[PRINTED], selection(FEEDBACK, {TOPK: top, PRINTED: 1.0})).word for top in (1.009, 1.02)]
    assert words == [NOT, REPRODUCED]
    iterations = [steps({"Dense": 1.0, "TopK": top}) for top in (1.009, 1.02)]
    slower = [verdict("TopK-SGD is slower than dense", table).word for table in iterations]
    assert slower == [NOT, PARTLY]
    assert f"Times less than {100 * EQUAL:g} % apart are equal" in RULES.read_text()


def test_a_dgc_that_its_authors_do_not_have_is_not_held_against_the_claim() -> None:
    def one(alone: float, feedback: float) -> Verdict:
        return verdict("DGC_k is slow", *(selection(caption, {TOPK: 1.0, DGC: ms})
                                          for caption, ms in ((ALONE, alone), (FEEDBACK, feedback))))  # fmt: skip

    fast = one(0.5, 0.5)
    assert (fast.word, LINS_DGC in fast.here) == (UNDECIDED, True)
    assert [one(2.0, 0.5).word, one(2.0, 2.0).word] == [PARTLY, REPRODUCED]
    for ms, word in ((0.5, NOT), (2.0, REPRODUCED)):  # theirs decides, once it is timed
        theirs = verdict("DGC_k is slow", selection(ALONE, {TOPK: 1.0, DGC: 3.0, AUTHORS_COLUMN: ms}))
        assert (theirs.word, LINS_DGC in theirs.here) == (word, False)
    lins = verdict("DGC_k is slow", selection(ALONE, {TOPK: 1.0, DGC: 0.1, AUTHORS_COLUMN: 2.0}))
    assert (lins.word, lins.here.endswith("Lin et al.'s, as in P1's text, at all 1")) == (PARTLY, True)


def test_a_count_that_copies_the_mask_leaves_a_slow_gaussian_k_open() -> None:
    """Its authors' code has no such copy; what is fast nevertheless is."""
    claim = next(one for one in OF_SELECTION if FORM[PRINTED] in one.text)

    def one(ms: float, commit: str) -> Verdict:
        tables = [selection(caption, {TOPK: 1.0, PRINTED: ms}) for caption in (ALONE, FEEDBACK)]
        result = Result(tables, rows={}, where={"commit": f"abc, {commit}"})
        return claim.verdict(StoredTables({"p1/fig4": result}))

    for commit in SUMMED_MASKS:
        assert [one(2.0, commit).word, one(0.5, commit).word] == [UNDECIDED, REPRODUCED]
        assert one(2.0, commit).here.endswith(COPIED)
    assert one(2.0, "fffffff").word == NOT


def test_dgc_of_p1s_authors_is_told_beside_lins_in_table_2() -> None:
    claim = next(one for one in CLAIMS if "DGC-SGD as P1 states" in one.text)
    names = ["ResNet-50", "ResNet-50"], ["TopK", "DGC"], [0.5, 0.25]
    rows = dict(zip(("model", "method", "selection_s"), names, strict=True))
    tables = [steps({"DGC": 1.0, AT_K: 1.0})], [selection(FEEDBACK, {TOPK: 1.0, AUTHORS_COLUMN: 500.0})]
    told = [claim.verdict(StoredTables({"p1/table2": Result(tables[0], rows=rows), "p1/fig4": Result(own, rows={})}))
            for own in (tables[1], [])]  # fmt: skip
    sentence = "With the 500.00 ms that DGC of P1's authors takes in figure 4, ResNet-50 has 1.25×."
    assert [sentence in one.detail for one in told] == [True, False]


def test_p1s_own_cost_of_selection_decides_nothing_in_table_2() -> None:
    """That makes of P1's times what P1 says of them, which is no test."""
    claim = "TopK-SGD is slower than dense"
    theirs = steps({"Dense": 1.0, "TopK": 2.0}, WITH_P1S_TOPK)
    one = verdict(claim, steps({"Dense": 1.0, "TopK": 0.5}), theirs)
    assert (one.word, one.here.startswith("slower in none of 4 models")) == (NOT, True)
    assert "with P1's 0.4 s of selection, has it slower in all 4: ResNet-50 takes 2.0 s" in one.detail
    alone = verdict(claim, steps({"Dense": 1.0, "TopK": 1.5}))
    assert (said(alone), alone.detail) == (MODELLED, "")


@pytest.mark.parametrize(
    ("gauss", "dgc", "top", "word"),
    [
        (1.0, 1.1, 1.2, MODELLED),
        (1.0, 0.9, 1.2, PARTLY),  # Top-k is the slowest
        (1.0, 1.3, 1.2, PARTLY),  # Gaussian-k is the fastest
        (1.0, 1.009, 1.017, NOT),
        (1.0, 1.2, 0.9, NOT),  # Top-k is faster than Gaussian-k, whatever DGC takes
    ],
)
def test_equal_times_have_no_order(gauss: float, dgc: float, top: float, word: str) -> None:
    times = steps({AT_K: gauss, "DGC": dgc, "TopK": top, "Gaussian": gauss})
    rows: dict[str, Cells] = {
        "model": ["ResNet-50", "ResNet-50"], "method": ["Gaussian", "TopK"], "sent": [1, 1], "entries": [1000, 1000],
        "selection_s": [0.1, 0.2],
    }  # fmt: skip
    one = verdict("of the sparse methods", times, **rows)
    assert (said(one), "Lin et al.'s DGC" in one.here) == (word, True)


def test_too_small_a_speedup_over_another_dgc_is_open() -> None:
    def one(other: str, seconds: float) -> Verdict:
        return verdict(f"as many times faster than {other}-SGD", steps({other: seconds, AT_K: 1.0}))

    assert [said(one("DGC", seconds)) for seconds in (1.0, 1.3, 3.0)] == [UNDECIDED, MODELLED, NOT]
    assert [said(one("TopK", seconds)) for seconds in (1.0, 2.0, 5.0)] == [NOT, MODELLED, NOT]
    assert [LINS_DGC in one(other, 1.0).here for other in ("DGC", "TopK")] == [True, False]


def test_what_is_slight_is_a_tenth_of_compute() -> None:
    def words(*seconds: float | None) -> list[str]:
        rows: dict[str, Cells] = {
            "model": ["A", "A", "B", "B"], "method": ["TopK", "Gaussian"] * 2, "selection_s": [0.2, *seconds[:1]] * 2,
            "compute_s": [1.0, 1.0, *seconds[1:] * 2],
        }  # fmt: skip
        own = selection(FEEDBACK, {TOPK: 1.0})
        return [verdict(text, own, **rows).word for text in ("top-k selection takes", "as printed takes at most")]

    assert f"at most {100 * SLIGHT:g} % of a step's compute" in RULES.read_text()
    assert words(0.1, 1.0) == [REPRODUCED, REPRODUCED]
    assert words(0.11, 1.0) == [REPRODUCED, NOT]
    assert words(0.11, 4.0) == [PARTLY, PARTLY]
    assert words(0.11, None) == [REPRODUCED, NOT]  # the other model's compute was not timed


def test_how_times_grow_is_told_beside() -> None:
    table = Table(ALONE, ["entries", TOPK], [Row(["1 M", "9 ms"]), Row(["20 M", "2 ms"]), Row(["40 M", "3 ms"])])
    rows: dict[str, Cells] = {
        "model": ["A"], "method": ["TopK"], "selection_s": [0.2], "compute_s": [1.0],
    }  # fmt: skip
    one = verdict("top-k selection takes", table, **rows)
    assert one.detail.endswith("Alone 2.0 times the entries take 1.5 times as long.")
    assert "selection and exchange take 76 to 1,011 % of compute" in one.detail  # P1's own


def test_scaling_efficiency_is_judged_with_either_compute() -> None:
    def word(theirs: float, ours: float) -> str:
        tables = steps({AT_K: 1.0}, compute=theirs), steps({AT_K: 1.0}, MEASURED, compute=ours)
        return said(verdict("scaling efficiency", *tables))

    assert [word(0.9, 0.86), word(0.9, 0.8), word(0.8, 0.8)] == [MODELLED, PARTLY, NOT]
