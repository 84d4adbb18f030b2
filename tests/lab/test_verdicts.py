"""Claims are judged by stored numbers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from sparsync_lab.papers import ITEMS, RunContext
from sparsync_lab.papers.claims.claim import (
    NOT,
    PARTLY,
    REPRODUCED,
    UNDECIDED,
    Claim,
    Judge,
    Judgement,
    Verdict,
    word_of,
)
from sparsync_lab.papers.claims.p1_dense import CODE, TEXT
from sparsync_lab.papers.claims.stored_tables import StoredTables, first_number
from sparsync_lab.papers.claims.verdicts import CLAIMS, answer_table, verdict_table, verdicts
from sparsync_lab.papers.differences import MISSING
from sparsync_lab.papers.item import Result
from sparsync_lab.papers.report_page import write_report
from sparsync_lab.papers.store import results_of, save
from sparsync_lab.report import Row, Table

RESULTS = Path("results/papers")
SHORT = 30  # words


def stored(*keys: str) -> dict[str, Result]:
    return {key: results_of(ITEMS[key], RESULTS)[0].result for key in keys}


def changed(result: Result, row: str, column: int, cell: str) -> Result:
    """The result with another number in its first table."""
    table = result.tables[0]
    rows = [
        Row([*line.cells[:column], cell, *line.cells[column + 1 :]]) if line.cells[0] == row else line
        for line in table.rows
    ]
    return replace(result, tables=[Table(table.caption, table.headings, rows), *result.tables[1:]])


def test_what_was_not_run_has_no_verdict():
    assert {one.word for one in verdicts({})} == {MISSING}


def test_a_mistake_in_a_judge_is_not_taken_for_a_missing_training() -> None:
    def word(judge: Judge) -> str:
        return Claim("p1/fig1", "it holds", "5", judge).verdict(StoredTables({"p1/fig1": Result()})).word

    for missing in (("p1/fig2", ""), ("p1/fig1", "a table")):
        assert word(lambda stored, at=missing: Judgement(str(stored.table(*at)), NOT)) == MISSING
    with pytest.raises(KeyError, match="resnet"):
        word(lambda stored: Judgement({"ResNet-20": "4"}["resnet20"], NOT))


def test_every_claim_names_the_items_that_it_is_judged_by() -> None:
    every = stored(*(key for key, item in ITEMS.items() if results_of(item, RESULTS)))
    for claim in CLAIMS:
        named = {key: result for key, result in every.items() if key in (claim.item, *claim.also)}
        assert claim.verdict(StoredTables(named)) == claim.verdict(StoredTables(every)), claim.text


def test_every_claim_is_of_an_item_and_judged_by_it():
    every = verdicts({key: found[0].result for key, item in ITEMS.items() if (found := results_of(item, RESULTS))})
    assert {one.claim.item for one in every} == ITEMS.keys()  # every item begins with a verdict
    assert all(item in ITEMS for one in every for item in one.claim.also)
    trained = [one for one in every if CODE not in one.claim.text or one.word != MISSING]
    assert {one.word for one in trained} <= {REPRODUCED, PARTLY, NOT, UNDECIDED}
    assert all(any(sign.isdigit() for sign in one.here) for one in trained)
    assert all(len(one.here.split()) <= SHORT for one in every)


def test_a_sentence_begins_with_the_verdict() -> None:
    claim = Claim("p1/fig1", "it holds", "5", lambda stored: Judgement("4", NOT, "Why is not known."))
    question = replace(claim, text="does it hold?", published="", also=("p1/fig6",))
    one, other = (each.verdict(StoredTables({})) for each in (claim, question))
    assert one.sentence == "Not reproduced: it holds (published: 5; here: 4)."
    assert (other.sentence, other.answer) == ("No: does it hold? (4)", "no")
    assert verdict_table([one, other]).rows[0].cells[1:] == ["5", "4", NOT, "sparsync papers run p1/fig1"]
    commands = "sparsync papers run p1/fig1; sparsync papers run p1/fig6"
    assert answer_table([one, other]).rows[0].cells[1:] == ["4", "no", commands]
    assert verdict_table([one, other]).caption == "Verdicts: 1 not"
    assert answer_table([one, other]).caption == "What no paper claims and we asked: 1 no"


@pytest.mark.parametrize(
    ("parts", "word"),
    [
        ([True, True], REPRODUCED),
        ([True, None], PARTLY),
        ([True, None, False], PARTLY),
        ([None], UNDECIDED),
        ([False, None], UNDECIDED),
        ([False, False], NOT),
    ],
)
def test_what_few_seeds_leave_open_is_neither_held_nor_failed(parts: list[bool | None], word: str) -> None:
    assert word_of(parts) == word
    assert word_of(each for each in parts) == word


def test_what_is_not_decided_is_counted_by_itself() -> None:
    claims = [Claim("p1/fig1", "it holds", "5", lambda stored, word=word: Judgement("4", word))
              for word in (MISSING, UNDECIDED, NOT, UNDECIDED)]  # fmt: skip
    every = [claim.verdict(StoredTables({})) for claim in claims]
    assert verdict_table(every).caption == "Verdicts: 1 not, 2 not decided, 1 not run"
    assert every[1].sentence == "Not decided: it holds (published: 5; here: 4)."
    asked = [replace(claim, published="").verdict(StoredTables({})) for claim in claims]
    assert answer_table(asked).caption == "What no paper claims and we asked: 1 no, 2 not decided, 1 not run"


def test_a_verdict_follows_the_numbers():
    def word(results: dict[str, Result], claim: str) -> str:
        (one,) = (one for one in verdicts(results) if claim in one.claim.text)
        return one.word

    results = stored("p3/density")
    claim = "gTop-k at 0.1, 0.5 and 1 % end like dense"
    assert word(results, claim) == PARTLY
    near = changed(results["p3/density"], "gTop-k, 0.001", 3, "-0.50")
    assert word({"p3/density": near}, claim) == REPRODUCED
    assert word({"p3/density": changed(near, "gTop-k, 0.01", 3, "under a point")}, claim) == PARTLY
    far = changed(changed(near, "gTop-k, 0.001", 3, "-9"), "gTop-k, 0.005", 3, "-2")
    assert word({"p3/density": changed(far, "gTop-k, 0.01", 3, "-1.2")}, claim) == NOT
    assert word({"p3/density": changed(far, "gTop-k, 0.01", 3, "under a point")}, claim) == UNDECIDED
    less = changed(results["p3/density"], "gTop-k, 0.01", 1, "70.00")
    assert word(results, "more entries") == REPRODUCED
    assert word({"p3/density": less}, "more entries") == NOT


def test_p1_is_judged_by_its_own_models():
    """LeNet-5, which it does not draw, ends like dense, and that does not count."""
    results = stored("p1/fig1", "p1/fig6", "beyond/evidence")
    found = {one.claim.text: one for one in verdicts(results)}
    top = found[f"TopK-SGD ends like dense (16 workers, 0.1 %), {TEXT}"]
    assert "LeNet-5, which P1 does not draw, 0.01 points below dense" in top.detail
    kept, bare = (found[f"RandK-SGD {form} its residual{eq} ends far below TopK-SGD on CIFAR-10"]
                  for form, eq in (("with", " (Eq. 2)"), ("without", "")))  # fmt: skip
    assert (kept.word, bare.word) == (REPRODUCED, REPRODUCED)
    alone = {key: result for key, result in results.items() if key != "beyond/evidence"}
    assert next(one for one in verdicts(alone) if one.claim == bare.claim).word == MISSING
    assert "LeNet-5, which P1 does not draw, 79.5 %" in kept.detail
    assert top.word == NOT
    assert next(one for one in verdicts(alone) if one.claim == top.claim).word == UNDECIDED  # VGG-16 has one seed
    assert "ImageNet" in kept.claim.published
    tables = [
        replace(table, rows=[Row([*row.cells[:3], "-0.50", *row.cells[4:]]) for row in table.rows])
        if table.caption.startswith("ResNet-20") else table
        for table in results["p1/fig1"].tables
    ]  # fmt: skip
    near = {**alone, "p1/fig1": replace(results["p1/fig1"], tables=tables)}
    assert next(one for one in verdicts(near) if one.claim == top.claim).word == PARTLY
    only = {**near, "p1/fig1": replace(results["p1/fig1"], tables=tables[:2])}  # VGG-16 not run
    one = next(one for one in verdicts(only) if one.claim == top.claim)
    assert (one.word, "VGG-16 not run" in one.here) == (PARTLY, True)


def test_errors_of_one_sign_are_no_reproduction():
    results = stored("p1/table2-model")
    (one,) = verdicts_of(results, "p1/table2-model")
    assert one.word == PARTLY
    assert "all too long" in one.detail
    mixed = changed(results["p1/table2-model"], "AlexNet", 3, "0.880 s (0.891), -1.2 %")
    assert verdicts_of({"p1/table2-model": mixed}, "p1/table2-model")[0].word == REPRODUCED


def verdicts_of(results: dict[str, Result], item: str) -> list[Verdict]:
    return [one for one in verdicts(results) if one.claim.item == item]


@pytest.mark.parametrize(
    ("text", "number"), [("89.67 ± 0.25", 89.67), ("−1.41", -1.41), ("1,612.20 MB", 1612.2), ("5.88e-05", 5.88e-5)]
)
def test_the_first_number_of_a_cell(text, number):
    assert first_number(text) == number


def test_the_report_opens_with_all_verdicts(tmp_path):
    write_report([ITEMS[key] for key in ("p1/fig5", "p3/density", "p3/traffic")], RESULTS, tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    first = page.index("Verdicts: ")
    assert page.index("Verdicts</h2>") < first < page.index("Contents") < page.index("P1: Figure 5")
    assert page.count("Reproduced: ") == 1
    assert page.count("Yes: ") == 2


def test_the_report_names_what_is_missing_if_that_is_little(tmp_path):
    def told(key: str, missing: int) -> str:
        result = Result(runs=["done"], missing=[f"training {number}" for number in range(missing)])
        save(RunContext(output=tmp_path), ITEMS[key], result, 1.0)
        write_report([ITEMS[key]], tmp_path, tmp_path / "report.html")
        return (tmp_path / "report.html").read_text(encoding="utf-8")

    assert "not done yet: training 0, training 1." in told("beyond/evidence", 2)
    many = told("beyond/evidence", 47)
    assert "47 of 48 trainings are not done yet: sparsync papers list beyond/evidence names them" in many
    assert "training 1" not in many
    assert "training 46" in told("p1/fig6", 47)  # which has no list of them
