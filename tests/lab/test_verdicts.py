"""Claims are judged by stored numbers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from sparsync_lab.papers import ITEMS, claims_p2, p2
from sparsync_lab.papers.claim import (
    MISSING,
    NOT,
    PARTLY,
    REPRODUCED,
    UNDECIDED,
    Claim,
    Judgement,
    StoredTables,
    Verdict,
    first_number,
    word_of,
)
from sparsync_lab.papers.claims_p2 import BETTER, LIKEWISE
from sparsync_lab.papers.item import Result
from sparsync_lab.papers.published import P2_ACCURACY, P2_WORKERS
from sparsync_lab.papers.report_page import write_report
from sparsync_lab.papers.store import results_of
from sparsync_lab.papers.verdicts import answer_table, verdict_table, verdicts
from sparsync_lab.report import Row, Table

RESULTS = Path("results/papers")
SHORT = 25  # words


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


def test_every_claim_is_of_an_item_and_judged_by_it():
    every = verdicts({key: found[0].result for key, item in ITEMS.items() if (found := results_of(item, RESULTS))})
    assert {one.claim.item for one in every} == ITEMS.keys()  # every item begins with a verdict
    assert all(item in ITEMS for one in every for item in one.claim.also)
    assert {one.word for one in every} <= {REPRODUCED, PARTLY, NOT, UNDECIDED}  # what is trained has one
    assert all(any(sign.isdigit() for sign in one.here) for one in every)
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
    claim = "gTop-k at 0.1, 0.5 and 1 % ends like dense"
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


def learned(**cells: str) -> Result:
    """P2's table with trainings that learn: all "not run" but these, by scheme_scope_workers."""
    rows = []
    for scheme, (title, *published) in P2_ACCURACY.items():
        own = [title]
        for scope, accuracies in zip(p2.SCOPES, published, strict=True):
            for workers, accuracy in zip(P2_WORKERS, accuracies, strict=True):
                key = f"{scheme.replace('+', '_')}_{scope}_{workers}"
                own.append(f"{cells.get(key, '–')} ({accuracy:.2f})")
        rows.append(Row(own))
    control = f"{p2.long_training('topk', 'global', 8).label}, {p2.AT_LAYERS_RATE}"
    asked = Table("asked", [""] * 4, [Row([control, "ResNet-18", cells.get("control", "not run"), "%"])])
    return Result([asked, Table(p2.LEARNED, p2.HEADINGS, rows)])


def judged(claim: str, **cells: str) -> tuple[str, str]:
    found = verdicts({"beyond/evidence": learned(**cells)})
    (one,) = (one for one in found if one.claim.text == f"{LIKEWISE} {claim}")
    return one.word, f"{one.here}. {one.detail}"


BOTH = {"topk_layer_8": "88.41", "topk_global_8": "73.28"}
NEAR = {"topk_layer_8": "93.00", "topk_global_8": "84.00"}  # not far from what P2 prints


def test_published_numbers_are_not_taken_for_ours():
    for claim in claims_p2.CLAIMS:
        if claim.item == "beyond/evidence":
            assert claim.verdict(StoredTables({"beyond/evidence": learned()})).word == MISSING
            assert claim.verdict(StoredTables({"beyond/evidence": learned(standard_layer_1="90.0")})).word == MISSING


@pytest.mark.parametrize(
    ("cells", "word", "says"),
    [
        (BOTH, PARTLY, "the same rate was not run"),
        ({**BOTH, "control": "87.95"}, PARTLY, "of Top-k the difference is P2's rate"),
        ({**BOTH, "control": "80.00"}, PARTLY, "far below P2, which has 300 epochs: global up to 18 points"),
        ({**NEAR, "control": "85.00"}, REPRODUCED, "it is not the rate alone"),
        ({**NEAR, "control": "92.50"}, PARTLY, "of Top-k the difference is P2's rate"),
        (
            {**BOTH, "control": "80.00", "topk_layer_1": "70.0", "topk_global_1": "71.0"},
            PARTLY,
            "Top-k 70.0 and 71.0 % (W = 1)",
        ),
        (
            {"block_shared_layer_8": "10.1", "block_shared_global_8": "29.0"},
            NOT,
            "in 0 of 1 pairs that learn; Block-random-k (allReduce) 10.1 and 29.0 % (W = 8)",
        ),
        ({"block_shared_layer_8": "10.1", "block_shared_global_8": "19.0"}, MISSING, ""),
    ],
)
def test_layers_are_judged_at_the_same_rate(cells, word, says):
    found, here = judged(BETTER, **cells)
    assert found == word
    assert says in here


def test_blocks_are_judged_by_their_gap_at_the_same_number_of_workers():
    """Both fall with W here, by as much: the gap does not grow."""
    claim = "block-random-k by all-reduce is worse than by all-gather, the more so with W"
    near = {"block_shared_layer_4": "88.0", "block_allgather_layer_4": "91.0"}
    assert judged(claim, **near, block_shared_layer_8="87.0", block_allgather_layer_8="91.0")[0] == REPRODUCED
    assert judged(claim, **near, block_shared_layer_8="81.0", block_allgather_layer_8="84.0")[0] == PARTLY
    word, here = judged(claim, **near, block_shared_layer_8="10.1", block_allgather_layer_8="57.4")
    assert word == PARTLY  # it holds, and is far from what P2 trained
    assert "far below P2, which has 300 epochs: layer up to 36 points" in here
    far = {"block_shared_global_2": "28.2", "block_allgather_global_2": "54.1"}
    assert (
        "300 epochs: layer up to 36, global up to 37 points"
        in judged(claim, **near, **far, block_shared_layer_8="10.1", block_allgather_layer_8="57.4")[1]
    )
    lost = {"block_shared_layer_8": "10.1", "block_allgather_layer_8": "84.0"}
    both = {"block_shared_layer_2": "90.0", "block_allgather_layer_2": "91.5"}
    word, here = judged(claim, **both, **near, **lost)
    assert word == REPRODUCED
    assert "it does not learn (layer, W = 8), where the gap cannot grow" in here


def test_blocks_are_compared_with_random_entries_at_lower_rates():
    block, single = p2.block_and_random()
    high = {block.label: 57.4, single.label: 83.9}
    assert p2.block_gap_text(high) == ""
    low = {p2.at_share_of_rate(block, 16).label: 63.8, p2.at_share_of_rate(single, 16).label: 65.8}
    told = p2.block_gap_text({**high, **low})
    assert (
        "57.4 and 83.9 (rate 0.8), 63.8 and 65.8 (rate 0.05): another rate, the lowest that was tried, brings blocks "
        "6.4 of the 35.7 points" in told
    )
    high[block.label] = 70.0
    assert "brings blocks nothing of the 23.1 points" in p2.block_gap_text(
        {**low, block.label: 70.0, single.label: 83.9}
    )


def test_every_scope_of_p2_counts():
    claim = "block-random-k is as good as random-k layer by layer, and worse globally (all-gather)"
    layer = {"block_allgather_layer_8": "90.5", "random_allgather_layer_8": "91.0"}
    assert judged(claim, **layer)[0] == REPRODUCED
    assert judged(claim, **layer, block_allgather_global_8="80", random_allgather_global_8="70")[0] == PARTLY
    word, here = judged("Top-k is better than random-k and block-random-k (all-gather)", **layer, topk_layer_8="92.0")
    assert word == PARTLY
    assert "1 of 8 settings are trained" in here
    same = {"random_shared_layer_8": "90.5", "random_allgather_layer_8": "91.0", "random_shared_global_2": "60"}
    assert judged("random-k by all-reduce is as good as by all-gather", **same)[0] == PARTLY
    assert (
        judged("random-k by all-reduce is as good as by all-gather", **same, random_allgather_global_2="70")[0]
        == PARTLY
    )
    every = {f"random_{how}_{scope}_{w}": f"{score}" for how, score in (("shared", 90.5), ("allgather", 91.0))
             for scope in p2.SCOPES for w in (2, 4, 8)}  # fmt: skip
    assert judged("random-k by all-reduce is as good as by all-gather", **every)[0] == REPRODUCED
    far = {name: "70.0" for name in every if "global" in name}
    word, here = judged("random-k by all-reduce is as good as by all-gather", **{**every, **far})
    assert word == PARTLY
    assert here.endswith("which has 300 epochs: global up to 22 points.")
    tops = {f"{scheme}_{scope}_{w}": score for scheme, score in
            (("topk", "92.0"), ("random_allgather", "91.0"), ("block_allgather", "90.0"))
            for scope in p2.SCOPES for w in P2_WORKERS}  # fmt: skip
    claim = "Top-k is better than random-k and block-random-k (all-gather)"
    assert judged(claim, **tops)[0] == REPRODUCED
    word, here = judged(claim, **{**tops, "topk_layer_1": "91.9", "topk_global_8": "80.0"})
    assert word == PARTLY
    assert "in 6 of 8 settings Top-k is ahead by a point or more, in 1 within a point" in here.replace("In 6", "in 6")
    worse = {"random_shared_layer_8": "80", "random_allgather_layer_8": "91.0"}
    assert judged("random-k by all-reduce is as good as by all-gather", **worse)[0] == NOT


def test_with_momentum_what_learns_is_judged():
    (one,) = (one for one in verdicts(stored("p2/table1")) if "momentum 0.9 as P2 states" in one.claim.text)
    assert one.word == NOT
    assert one.here.startswith("in 0 of 6 pairs that learn, of 18; Top-k 61.5 and 76.5 %")


def test_what_p2_prints_reproduces_what_it_claims():
    """So no criterion asks for more than P2 itself shows."""
    printed = {
        f"{scheme.replace('+', '_')}_{scope}_{workers}": f"{accuracy:.2f}"
        for scheme, (_, *own) in P2_ACCURACY.items()
        for scope, accuracies in zip(p2.SCOPES, own, strict=True)
        for workers, accuracy in zip(P2_WORKERS, accuracies, strict=True)
        if not (scheme.endswith("shared") and workers == 1)
    }
    found = verdicts({"beyond/evidence": learned(**printed, control="80.00")})
    own = {one.claim.text: one.word for one in found if one.claim.text.startswith(LIKEWISE)}
    assert len(own) == 5
    assert set(own.values()) == {REPRODUCED}


def test_what_p2_prints_is_counted():
    printed = {
        (scheme, scope, workers): accuracy
        for scheme, (_, *own) in P2_ACCURACY.items()
        for scope, accuracies in zip(p2.SCOPES, own, strict=True)
        for workers, accuracy in zip(P2_WORKERS, accuracies, strict=True)
        if not (scheme.endswith("shared") and workers == 1)
    }
    pairs = claims_p2._scopes(printed)
    assert sum(layer > whole for layer, whole in pairs.values()) == len(pairs) == 18
    best = list(claims_p2._settings(printed, "topk", "random+allgather", "block+allgather"))
    assert (sum(top > max(others) for _, _, (top, *others) in best), len(best)) == (6, 8)


def test_p1_is_judged_by_its_own_models():
    """LeNet-5, which it does not draw, ends like dense, and that does not count."""
    results = stored("p1/fig1", "p1/fig6", "beyond/evidence")
    found = {one.claim.text: one for one in verdicts(results)}
    top = found["TopK-SGD ends like dense (16 workers, 0.1 %)"]
    assert "LeNet-5, which P1 does not draw, 0.02 points below dense" in top.detail
    slow = found["RandK-SGD learns on CIFAR-10, but slower than TopK-SGD"]
    assert slow.word == PARTLY  # without its residual it does, on one of two models
    assert "ResNet-20 10.1 % with and 40.0 without its residual, TopK-SGD 88.3" in slow.here
    alone = {key: result for key, result in results.items() if key != "beyond/evidence"}
    assert next(one for one in verdicts(alone) if one.claim == slow.claim).word == NOT
    assert next(one for one in verdicts(alone) if one.claim == top.claim).word == NOT
    assert "ImageNet" in slow.claim.published
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
    assert page.count("Reproduced: ") == 3
    assert page.count("Yes: ") == 1
