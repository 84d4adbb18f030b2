"""What no paper claims and we ask: answers follow the stored numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf
from pathlib import Path

import pytest

from sparsync_lab.papers import adamw_sweep, adamw_tables, random_forms, tables
from sparsync_lab.papers.claims.claim import LEARNS, NOT, PARTLY, REPRODUCED, UNDECIDED, Verdict
from sparsync_lab.papers.claims.p1_models import LONG, SHORT_ALIKE, spread
from sparsync_lab.papers.claims.questions_p1 import FOLLOWS
from sparsync_lab.papers.claims.stored_tables import SCORE, StoredTables
from sparsync_lab.papers.claims.verdicts import QUESTIONS
from sparsync_lab.papers.differences import MISSING, SEED
from sparsync_lab.papers.evidence_questions import FEWER_BITS, RANDOM_ASKED, TREE_ASKED
from sparsync_lab.papers.item import Result
from sparsync_lab.papers.outer import OUTER_SETTINGS
from sparsync_lab.papers.p1_runs import CARRIED, HELD
from sparsync_lab.papers.tuned import CAPTION as RATES
from sparsync_lab.papers.vgg16_gap import ASKED, PLAIN, SHORT, cause_label
from sparsync_lab.report import Row, Table

RULES = Path("docs/papers.md")


def answer(text: str, results: Mapping[str, Result]) -> Verdict:
    (one,) = (one for one in QUESTIONS if text in one.text)
    return one.verdict(StoredTables(results))


def trained(*rows: tuple[str, str, str]) -> Result:
    """Trainings of ``beyond/evidence``: label, model and last score."""
    return Result([Table("asked", ["training", "model", "last score"], [Row(list(row)) for row in rows]),
                   Table(ASKED, ["training", "model", "last score"], [])])  # fmt: skip


CARRIES = "searches its threshold"
WITHOUT_RESIDUAL, WARMED_UP = "better without its residual", "better with the density warm-up"


def test_the_carried_form_is_compared_on_the_seeds_that_both_have() -> None:
    """Its one seed is above the mean of the others' three, and below the same seed."""
    several = [("topk", "ResNet-20", "88.60"), ("topk, seed 1", "ResNet-20", "88.00")]
    one = answer(CARRIES, {"beyond/evidence": trained((CARRIED, "ResNet-20", "88.40"), *several)})
    assert (one.word, one.here) == (UNDECIDED, "ResNet-20 under a point apart (one seed), VGG-16 not run")
    more = [(f"{CARRIED}, seed {seed}", "ResNet-20", "88.20") for seed in (1, 2)]
    every = trained((CARRIED, "ResNet-20", "88.40"), *several, *more, ("topk, seed 2", "ResNet-20", "88.40"))
    one = answer(CARRIES, {"beyond/evidence": every})
    assert one.word == PARTLY
    assert "88.27 against 88.33 % (three seeds)" in one.here
    far = trained((CARRIED, "ResNet-20", "80.00"), *several)
    one = answer(CARRIES, {"beyond/evidence": far})
    assert one.word == UNDECIDED  # as VGG-16 is not run
    assert one.here == "fails: ResNet-20 80.00 against 88.60 % (one seed); open: VGG-16 not run"
    lost = [(CARRIED, "ResNet-20", "80.00"), *several, (CARRIED, "VGG-16", "60"), ("topk", "VGG-16", "70")]
    near, far = ((HELD, "VGG-16", score) for score in ("69", "59"))
    assert answer(CARRIES, {"beyond/evidence": trained(*lost, near, *shorter("40", "19"))}).word == NOT
    far = answer(CARRIES, {"beyond/evidence": trained(*lost, far)})
    assert (far.word, "open: VGG-16 within the spread" in far.here) == (UNDECIDED, True)


def test_on_vgg16_less_than_its_spread_decides_nothing() -> None:
    both = [(CARRIED, "VGG-16", "79.94"), ("topk", "VGG-16", "77.67")]
    for few in (both, [*both, *shorter("23.44", "18.71")]):
        alone = answer(CARRIES, {"beyond/evidence": trained(*few)})
        assert (alone.word, "79.94 against 77.67 %" in alone.here) == (UNDECIDED, True)  # how large, nobody knows
    every = trained(*both, (HELD, "VGG-16", "76.95"), *shorter("23.44", "18.71"))
    one = answer(CARRIES, {"beyond/evidence": every})
    assert one.word == UNDECIDED
    assert "VGG-16 within the spread of its trainings (one seed)" in one.here
    assert "between 76.95 and 79.94 % in 120 epochs and between 18.71 and 23.44 % in 40 epochs, one seed" in one.detail
    stored = StoredTables({"beyond/evidence": every})
    assert [spread(stored, "VGG-16", epochs) for epochs in (LONG, SHORT)] == pytest.approx([2.99, 4.73])
    without = StoredTables({"beyond/evidence": trained(*both, *shorter("23.44", "18.71"))})
    assert [spread(without, "VGG-16", epochs) for epochs in (LONG, SHORT)] == pytest.approx([inf, 4.73])


def test_changes_of_short_trainings_are_judged_by_the_spread_of_short_ones() -> None:
    """A gap of four points lies within theirs, and beyond that of long ones."""
    causes = {("topk", PLAIN): "24", ("dense", PLAIN): "80", ("topk", "rate 0.025"): "76"}
    rows = [Row([cause_label(*of), "VGG-16", score, "%", "", "", "960"]) for of, score in causes.items()]
    ends = {CARRIED: "71", "topk": "70", HELD: "69", SHORT_ALIKE[1]: "19"}
    alike = [Row([label, "VGG-16", score]) for label, score in ends.items()]
    tables = [Table(ASKED, ["training", "model", "last score", "", "", "", "steps"], rows),
              Table("alike", ["training", "model", "last score"], alike)]  # fmt: skip
    one = answer("does one changed setting", {"beyond/evidence": Result(tables)})
    assert (one.word, "rate 0.025: within the spread" in one.here) == (UNDECIDED, True)


def test_whether_rand_k_learns_is_asked_of_its_residual() -> None:
    def one(*scores: str) -> Verdict:
        ends = [Table(f"{model}: test accuracy", ["training", SCORE], [Row(["randk", score])])
                for model, score in zip(("ResNet-20", "VGG-16"), scores, strict=True)]  # fmt: skip
        return answer("does RandK-SGD learn", {"p1/fig1": Result(ends)})

    assert [one(*ends).word for ends in (("21", "40"), ("20", "40"), ("10", "20"))] == [REPRODUCED, PARTLY, NOT]
    assert one("10.05", "11.37").here == "ResNet-20 10.1 %, VGG-16 11.4 %"


def shorter(*scores: str) -> list[tuple[str, str, str]]:
    """Short trainings of VGG-16 with Top-k, and with the carried form."""
    return [(label, "VGG-16", score) for label, score in zip(SHORT_ALIKE, scores, strict=True)]


def rand_k(rows: Sequence[Sequence[str]]) -> Result:
    """Trainings with Rand-k, and those of VGG-16 that tell how far such trainings end apart: three points."""
    alike = [[form, "VGG-16", score] for form, score in (("topk", "70"), (HELD, "71"), (CARRIED, "73"))]
    alike += map(list, shorter("21", "20"))
    return Result([Table(caption, ["training", "model", "last score"], [Row(row) for row in own])
                   for caption, own in ((RANDOM_ASKED, rows), ("alike", alike))])  # fmt: skip


def test_what_rand_k_does_otherwise_is_told_of_lenet_too() -> None:
    forms = {"": ("10.05", "79.48"), ", no residual": ("39.97", "28.81"),
             ", with residual, density warm-up": ("10.00", "17.30"),
             ", no residual, density warm-up": ("40.64", "30.20")}  # fmt: skip
    assert [*forms][1:] == [*random_forms.FORMS]
    rows = [Row([f"randk{form}", model, score]) for form, scores in forms.items()
            for model, score in zip(("ResNet-20", "LeNet-5"), scores, strict=True)]  # fmt: skip
    table = Table(RANDOM_ASKED, ["training", "model", "last score"], rows)
    one = answer(WITHOUT_RESIDUAL, {"beyond/evidence": Result([table])})
    assert (one.word, one.here) == (PARTLY, "ResNet-20 10.1 → 40.0 %, VGG-16 not run")
    assert one.detail == "LeNet-5, which P1 does not draw, 79.5 → 28.8 %."
    one = answer(WARMED_UP, {"beyond/evidence": Result([table])})
    assert one.word == UNDECIDED
    assert one.here == "ResNet-20 10.1 → 10.0, without residual 40.0 → 40.6 %, VGG-16 not run"
    assert one.detail == "LeNet-5, which P1 does not draw, 79.5 → 17.3, without residual 28.8 → 30.2 %."


def asked_of_gtopk(**scores: Sequence[str]) -> Result:
    """Trainings of ResNet-20 in P3's question: accuracies by seed."""
    names = {"dense": "dense", **{own: f"gTop-k, {own}, 0.005, momentum corrected, 0.5" for own in FEWER_BITS}}
    rows = [Row([names[name] + (f"{SEED}{seed}" if seed else ""), "ResNet-20", score, "%", "0.5 %"])
            for name, own in scores.items() for seed, score in enumerate(own) if score != "not run"]  # fmt: skip
    rates = Table(RATES, ["training", "schedule", "rate", "decay", "accuracy", "seeds"], [])
    return Result([Table(TREE_ASKED, ["training", "model", "last score", "unit", "density"], rows), rates])


FEWER = "values of fewer bits"


def test_gtopk_is_compared_on_the_seeds_that_dense_has_too() -> None:
    levels = {own: ["90.0", "90.0", "90.0"] for own in FEWER_BITS}
    assert answer(FEWER, {"beyond/evidence": asked_of_gtopk(**levels, dense=["90.2"] * 3)}).word == REPRODUCED
    one = answer(FEWER, {"beyond/evidence": asked_of_gtopk(**levels, dense=["90.2", "not run", "99.0"])})
    assert one.word == NOT
    assert "sign 4.60 points below dense (two seeds)" in one.here
    none = asked_of_gtopk(**{**levels, "sign": ["not run", "90.0"]}, dense=["92.2", "not run"])
    one = answer(FEWER, {"beyond/evidence": none})
    assert (one.word, "sign" in one.here) == (UNDECIDED, False)
    lost = asked_of_gtopk(**{**levels, "sign": ["nan"] * 3}, dense=["90.2"] * 3)
    one = answer(FEWER, {"beyond/evidence": lost})
    assert (one.word, "sign diverged (three seeds)" in one.here) == (PARTLY, True)
    assert one.detail.startswith("They end at levels 90.00, bf16 90.00 %.")


def test_a_form_of_rand_k_that_is_missing_may_be_the_better_one() -> None:
    def word(question: str, *forms: str) -> str:
        rows = [[f"randk{form}", model, "30"] for form in forms for model in ("ResNet-20", "VGG-16")]
        rows += [["randk", model, "50"] for model in ("ResNet-20", "VGG-16")]
        return answer(question, {"beyond/evidence": rand_k(rows)}).word

    bare, warm, both = random_forms.FORMS
    assert word(WITHOUT_RESIDUAL, bare) == NOT
    assert word(WARMED_UP, warm) == word(WARMED_UP, bare, warm) == word(WARMED_UP, warm, both) == UNDECIDED


def test_what_has_not_learned_is_no_better_and_vgg16_has_its_spread() -> None:
    def word(before: str, after: str) -> str:
        rows = [["randk", "VGG-16", before], ["randk, no residual", "VGG-16", after]]
        rows += [[label, "ResNet-20", "10"] for label in ("randk", "randk, no residual")]
        return answer(WITHOUT_RESIDUAL, {"beyond/evidence": rand_k(rows)}).word

    assert f"what ends at {LEARNS:g} % or less" in RULES.read_text()
    assert word("11.4", "16.8") == NOT
    assert word("11.4", "12.8") == NOT  # within the spread, and at chance
    assert word("50", "52") == UNDECIDED
    assert word("50", "55") == PARTLY  # not on ResNet-20


def planned(errors: Sequence[float], off: float, right: int) -> Result:
    """The planner's predictions of P1's table 2: TopK's errors by model."""
    rows = [Row([f"model {number}", f"1.0 s, {error:+.1f} %"]) for number, error in enumerate(errors)]
    told = Row(["TopK, stated", f"{off:.1f} %", f"right for {right} of {len(errors)}"])
    headings = ["column", "mean absolute error", "faster than dense"]
    return Result(
        [Table("Iteration time", ["model", told.cells[0]], rows), Table("Errors by column", headings, [told])]
    )


@pytest.mark.parametrize(
    ("right", "off", "errors", "word"),
    [
        (4, 14.9, [-15, -15, 15, 15], REPRODUCED),
        (4, 15.0, [-15, -15, 15, 15], PARTLY),
        (4, 14.9, [15, 15, 15, 15], PARTLY),
        (3, 14.9, [-15, -15, 15, 15], NOT),
    ],
)
def test_times_that_a_model_predicts_are_judged_by_the_rule_of_the_page(
    right: int, off: float, errors: Sequence[float], word: str
) -> None:
    assert answer("P1's published times follow", {"p1/table2-model": planned(errors, off, right)}).word == word
    assert f"is less than {FOLLOWS:g} % off on average" in RULES.read_text()


RECIPES = "a recipe of ours"
HEADINGS = ["training", "accuracy, %", "to dense", "seeds"]


def at_equal_bytes(ends: str, named: str, dense: str = "", seeds: str = "3") -> Result:
    """ResNet-20 at two lengths, of which the first misses its target, and LeNet-5."""
    rows = [
        ["ResNet-20", "1,400", "84.00", "80.00", "-4.00", "1.5", "recipe a: target missed"],
        ["ResNet-20", "11,700", "90.00", "89.90", "-0.10", "0.2", "recipe a: target met"],
        ["LeNet-5", "600", "98.00", "98.50", ends, "–", f"recipe b: does not lose{dense}"],
    ]
    found = [
        Table(tables.STANDING, [""] * 7, [Row(row) for row in rows]),
        Table("ResNet-20, 16 workers of 32, 11,700 steps", HEADINGS, [Row(["recipe a", "89.90", "-0.10", "3"])]),
        Table(
            "LeNet-5, 16 workers of 32, 600 steps",
            HEADINGS,
            [Row(["recipe a", "97.00", named, "3"]), Row(["recipe b", "98.50", ends, seeds])],
        ),
    ]
    return Result(found)


@pytest.mark.parametrize(
    ("result", "word", "here"),
    [
        (at_equal_bytes("+0.50", "-0.75"), PARTLY, "in 2 of 2 settings; recipe a alone in 1 of 2"),
        (at_equal_bytes("+0.50", "+0.10"), REPRODUCED, "in 2 of 2 settings; recipe a alone in 2 of 2"),
        (at_equal_bytes("under a point", "+0.10", seeds="1"), PARTLY, "in 1 of 2 settings; recipe a alone in 2 of 2"),
        (
            at_equal_bytes("+0.50", "+0.10", dense=", but dense may do better: its rate"),
            PARTLY,
            "in 1 of 2 settings; recipe a alone in 1 of 2",
        ),
    ],
)
def test_recipes_are_judged_by_every_model_once_and_by_the_one_that_is_named(
    result: Result, word: str, here: str
) -> None:
    one = answer(RECIPES, {"beyond/accuracy": result})
    assert (one.word, here in one.here) == (word, True)
    assert "LeNet-5 97.00 (dense 98.00)" in one.detail


def test_recipes_that_are_not_trained_are_not_judged() -> None:
    assert answer(RECIPES, {"beyond/accuracy": Result([Table(tables.STANDING, ["setting"], [])])}).word == MISSING


def with_adamw(*rows: tuple[str, str, str, str]) -> Result:
    """Settings with what preconditioned feedback ended at, whether that met its target, and its seeds."""
    main = adamw_sweep.MAIN
    standing = [Row([setting, "130.00", ends, word]) for setting, ends, word, _ in rows]
    own = [
        Table(setting, ["training", "score", "seeds"], [Row([main, ends, seeds])]) for setting, ends, _, seeds in rows
    ]
    return Result([Table(adamw_tables.STANDING, ["setting", "dense", main, "target"], standing), *own])


def test_a_setting_of_adamw_counts_once_with_rates_of_its_own() -> None:
    twice = [
        ("GPT, 4 workers", "130.85 ± 9.53", "missed", "3"),
        ("GPT, rates of its own, 4 workers", "121", "met", "3"),
    ]
    one = answer("does AdamW", {"beyond/adamw": with_adamw(*twice)})
    assert (one.word, one.here.startswith("in 1 of 1 settings; GPT, rates of its own")) == (REPRODUCED, True)
    assert (
        one.detail
        == "Not counted, with the rate of another number of workers: GPT, 4 workers, 130.85 ± 9.53, dense 130.00."
    )
    few = [("ViT", "75.05", "not decided", "1"), ("GPT", "121", "met", "3")]
    one = answer("does AdamW", {"beyond/adamw": with_adamw(*few)})
    assert (one.word, one.here.startswith("in 1 of 2 settings")) == (PARTLY, True)
    assert "Few seeds have ViT (one seed)" in one.detail


def local(single: float) -> Result:
    name, rows = "GPT on PTB, 16 workers of 4, 600 steps", [
        ["dense", "133.00 ± 1.00", "–", "1", "3"],
        [adamw_sweep.MAIN, "119.00 ± 1.00", "× 0.9", "1/40", "3"],
        ["OuterLoop, every 8 steps, 1/40", "227.20 ± 4.86", "× 1.7", "1/48.4", "3"],
        ["OuterLoop, every 4 steps, 1/40", "not run", "–", "–", "–"],
    ]  # fmt: skip
    columns = {
        "model": ["gpt", "gpt", "gpt-w4-own"],
        "method": ["dense", "OuterLoop, every 4 steps, 1/40", "OuterLoop, every 4 steps, 1/40"],
        "score": [133.0, single, 1.0],
        "rate": [0.002, 0.0028, 0.002],
        "bytes": [400, 10, 1],
    }
    assert adamw_tables.where(OUTER_SETTINGS["gpt"], 0) == name
    table = Table(name, ["training", "perplexity", "to dense", "sent, of dense", "seeds"], [Row(row) for row in rows])
    return Result([table], rows=columns)


def test_single_trainings_of_searches_that_are_not_finished_are_told() -> None:
    one = answer("do local steps", {"beyond/outer": local(195.63)})
    assert one.word == UNDECIDED
    assert one.here == (
        "perplexity 195.63 (one seed, search not finished), 227.20 ± 4.86 (three seeds, 1/48.4); with an exchange in "
        "every step 119.00 ± 1.00"
    )
    assert "195.63 is OuterLoop, every 4 steps, 1/40 with rate 0.0028" in one.detail
    assert answer("do local steps", {"beyond/outer": local(110.0)}).word == REPRODUCED
    done = local(195.63)
    done.rows["model"][1] = "gpt-w4-own"  # no search is begun and not finished
    one = answer("do local steps", {"beyond/outer": done})
    assert (one.word, one.here.startswith("perplexity 227.20 ± 4.86 (three seeds")) == (NOT, True)
