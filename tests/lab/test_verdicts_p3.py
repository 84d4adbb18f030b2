"""Claims of P3 are judged by stored numbers."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

from sparsync_lab.papers import ITEMS, RunContext, p3, traffic
from sparsync_lab.papers.claims.claim import NOT, PARTLY, REPRODUCED, UNDECIDED, Verdict
from sparsync_lab.papers.claims.verdicts import verdicts
from sparsync_lab.papers.curves import OVER_SEEDS
from sparsync_lab.papers.differences import MISSING
from sparsync_lab.papers.item import Result
from sparsync_lab.papers.store import results_of
from sparsync_lab.report import Row

RESULTS = Path("results/papers")


RATE = "P3 claims a rate 'at the same order as the vanilla minibatch SGD', which where a training ends does not test."


def stored(*keys: str) -> dict[str, Result]:
    return {key: results_of(ITEMS[key], RESULTS)[0].result for key in keys}


def verdict_on(results: dict[str, Result], claim: str) -> Verdict:
    (one,) = (one for one in verdicts(results) if claim in one.claim.text)
    return one


def test_a_condition_that_holds_secures_nothing():
    results = stored("p3/density")
    one = verdict_on(results, "0.1, 0.5 and 1 % no worse than random-k")
    assert (one.word, one.is_question) == (REPRODUCED, True)  # and no claim of P3's abstract
    assert "It is 0.0004 below 1 at the closest. That it holds does not secure convergence" in one.detail
    assert one.detail.startswith("P3's abstract does not say this: its authors' public code draws the ratio.")
    density = results["p3/density"]
    tables = [
        replace(table, rows=[Row([*row.cells[:2], "1.0100", row.cells[3], "3"]) for row in table.rows])
        if table.caption.startswith(p3.CONDITION) else table
        for table in density.tables
    ]  # fmt: skip
    over = verdict_on({"p3/density": replace(density, tables=tables)}, "0.1, 0.5 and 1 % no worse than random-k")
    assert (over.word, "below 1" in over.detail) == (PARTLY, False)


def test_a_density_that_is_missing_is_not_decided():
    density = stored("p3/density")["p3/density"]

    def words(*missing: str) -> list[str]:
        tables = [
            replace(table, rows=[row for row in table.rows if row.cells[0] not in missing]) for table in density.tables
        ]
        results = {"p3/density": replace(density, tables=[table for table in tables if table.rows])}
        claims = ("0.1, 0.5 and 1 % no worse than random-k", "0.1, 0.5 and 1 % end like dense")
        return [verdict_on(results, claim).word for claim in claims]

    assert words() == [REPRODUCED, PARTLY]
    assert words("gTop-k, 0.001") == [PARTLY, PARTLY]
    assert words("gTop-k, 0.005", "gTop-k, 0.01") == [PARTLY, UNDECIDED]  # the other has failed
    assert words("gTop-k, 0.001", "gTop-k, 0.005", "gTop-k, 0.01") == [MISSING, MISSING]


def test_a_rate_is_not_judged_by_an_end():
    one = verdict_on(stored("p3/convergence"), "at a rate of the same order as dense SGD")
    here = "the order of a rate is not tested; at 0.1 % gTop-k ends 9.27 points below dense"
    assert (one.word, one.here) == (UNDECIDED, here)
    one = verdict_on(stored("p3/convergence"), "does gTop-k at 0.1 % end like dense on ResNet-20?")
    told = f"A worker sends 47.84 MB with gTop-k, 382.72 MB with TopK-SGD. {RATE} The tree is ours: what it drops"
    assert (one.word, one.detail.startswith(told)) == (NOT, True)


def changed(result: Result, label: str, **cells: str) -> Result:
    """Other cells of a row, by the first word of their heading."""
    tables = []
    for table in result.tables:
        words = [heading.split(",")[0].split()[0] for heading in table.headings]
        rows = [
            Row([cells.get(word, cell) if row.cells[0] == label else cell
                 for word, cell in zip(words, row.cells, strict=True)])
            for row in table.rows
        ]  # fmt: skip
        tables.append(replace(table, rows=rows))
    return replace(result, tables=tables)


def test_gtopk_stands_beside_what_sends_more():
    """At more entries in fewer bytes than TopK-SGD; with few seeds less than a point is not told."""
    results, claim = stored("p3/density", "p3/convergence"), "0.1, 0.5 and 1 % end like dense"
    one = verdict_on(results, claim)
    top = "In fewer bytes than TopK-SGD at 0.1 % (382.72 MB, 88.26 ± 0.33 %, three seeds) gTop-k ends"
    first = "lower at 0.1 % (47.84 MB, 80.55 %, one seed)"
    told = f"{top} {first}, higher at 0.5 % (236.23 MB, 88.78 ± 0.09 %, three seeds). P3 claims a rate"
    assert one.detail.startswith(told)
    assert "p3/convergence" in " ".join(one.commands)
    few = changed(results["p3/density"], "gTop-k, 0.005", seeds="1")
    assert "), under a point away at 0.5 % (" in verdict_on({**results, "p3/density": few}, claim).detail
    more = changed(results["p3/density"], "gTop-k, 0.005", sent="400.00 MB")
    assert f"{top} {first}. P3 claims" in verdict_on({**results, "p3/density": more}, claim).detail
    assert verdict_on(stored("p3/density"), claim).detail.startswith(RATE)


def test_what_dense_reaches_with_another_rate_is_told():
    claim = "does gTop-k at 0.1 % end like dense on VGG-16"
    results = stored("beyond/evidence", "beyond/accuracy")
    assert "with rate 44 dense ends at 375.9 in 330 steps" in verdict_on(results, claim).detail
    assert "rate 44" not in verdict_on(stored("beyond/evidence"), claim).detail


def test_what_an_interface_counted_stands_beside_what_is_computed(tmp_path, monkeypatch):
    root = Path.cwd()
    monkeypatch.chdir(tmp_path)
    context, claim = RunContext(output=tmp_path / "papers"), "a worker sends O(k log P) entries"
    alone = verdict_on({"p3/traffic": ITEMS["p3/traffic"].run(context)}, claim)
    told = "P − 1 and log₂ P times k in 21 of 21 settings, computed from the tree."
    assert (alone.word, alone.detail) == (PARTLY, told)
    shutil.copy(root / "results" / traffic.MEASURED, tmp_path)
    result = ITEMS["p3/traffic"].run(context)
    own = verdict_on({"p3/traffic": result}, claim)
    assert own.word == PARTLY  # log P is of one worker, and what was counted is of all
    assert own.here.endswith("gTop-k's root 7 k; partly: what one worker sends is computed")
    counted = "with up to 8 workers a network interface counted 1.002 to 1.037 times what is computed, all workers"
    assert f"{counted} together; one worker alone was not counted." in own.detail
    wrong = result.tables[0].rows[3].cells[0]  # not that with the most workers
    tables = [replace(result.tables[0], rows=[Row([c if c != "15.0" else "14.0" for c in row.cells])
                                              if row.cells[0] == wrong else row for row in result.tables[0].rows]),
              *result.tables[1:]]  # fmt: skip
    other = verdict_on({"p3/traffic": replace(result, tables=tables)}, claim)
    assert (other.word, "in 20 of 21 settings" in other.detail) == (PARTLY, True)
    assert any("1.2 % by AllGather (8 workers)" in note for table in result.tables for note in table.notes)


def test_a_gap_over_fewer_seeds_is_said_to_be():
    """So that nobody takes it for the difference of the two means."""
    result = ITEMS["p3/density"].run(RunContext(output=RESULTS).read_only())
    assert list(result.tables[0].notes) == [OVER_SEEDS]
