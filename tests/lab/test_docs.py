"""What pages state follows the tables that they are written from."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from sparsync.theory import TOLERANCE
from sparsync_lab.docs import accuracy, adamw, gains, items, missing, outer, planner, provenance, run_times, schedules
from sparsync_lab.docs.blocks import MARKED
from sparsync_lab.docs.sources import Sources
from sparsync_lab.papers import ITEMS, RunContext, evidence, evidence_questions, tuned
from sparsync_lab.papers.adamw_sweep import MAIN
from sparsync_lab.papers.adamw_tables import where
from sparsync_lab.papers.beyond import ORDER
from sparsync_lab.papers.claims import p1, p1_gradients
from sparsync_lab.papers.claims.claim import LEARNS
from sparsync_lab.papers.claims.p1_selection import SLIGHT
from sparsync_lab.papers.claims.questions_p1 import FOLLOWS
from sparsync_lab.papers.item import Column, Result
from sparsync_lab.papers.outer import OUTER_SETTINGS
from sparsync_lab.papers.run import file_of, model_title
from sparsync_lab.papers.store import save, write_json
from sparsync_lab.papers.sweep import EARLY, TARGETS
from sparsync_lab.report import Figure, LineChart, Row, Table

ROOT = Path(__file__).parent.parent.parent
HEADINGS = ["method", "schedule", "rate", "weight decay", "accuracy, %, last", "seeds", tuned.SENT]
OF_PAPERS = ("results.md", "papers.md", "papers-reproduce.md", "papers-provenance.md")
# Of other pages that tell results, the numbers that are settings, definitions or versions.
TYPED = {
    "../README.md": {"3.11", "2.11", "2.0", "0.5", "5 %", "0.1 %"},
    "index.md": set[str](),
    "start.md": {"3.11", "2.11"},
    "choosing.md": {"0.1 %"},
    "will-it-pay.md": set[str](),
    "benchmarks.md": {"5 %", "1.1"},
    "network-lab.md": {"1.02"},
    "outer-loop.md": set[str](),
    "collectives/gtopk.md": set[str](),
}
CODE = re.compile(r"^```.*?^```$|`[^`]*`|\]\([^)]*\)", re.DOTALL | re.MULTILINE)  # and the targets of links
RESULT = re.compile(r"\d[\d,]*\.\d+(?: %)?|\d[\d,]* (?:%|points?|ms|s|min|h|kB|MB|GB)(?!\w)")
# A density, how near a perplexity must be, and what rules ask for.
SETTINGS = {"0.1 %", "1 %", f"{LEARNS:g} %", f"{FOLLOWS:g} %", f"{100 * SLIGHT:g} %"}
LIMITS = {
    f"{p1.FAR_BELOW:g} points", *(f"{own:g}" for own in (TOLERANCE, p1_gradients.NEARLY_ALL, p1_gradients.AS_WIDE)),
    *(f"{100 * share:.1f} %" for share in p1_gradients.BELL), *(f"{lost:g}" for lost in TARGETS["resnet20"].values()),
}  # fmt: skip
RULES = {"papers.md": SETTINGS | LIMITS}
COMMIT = re.compile(r"\b(?=[a-f]*\d)(?=\d*[a-f])[0-9a-f]{7,8}\b")


def test_a_higher_score_of_fewer_seeds_is_told() -> None:
    three = schedules.Tried("once", "0.1", "0", "88.26 ± 0.33", "3", "1 MB")
    one = schedules.Tried("once", "0.2", "0", "88.48", "1", "2 MB")
    assert gains._best([one, three]) == "88.26 ± 0.33 % (88.48 with rate 0.2, one seed)"
    assert gains._best([three, one]) == "88.26 ± 0.33 %"
    assert gains._best([one]) == "88.48 % (one seed)"
    assert schedules.shown_of([one, three]) == three
    two = one._replace(seeds="2", score="88.40 ± 0.10")
    assert gains._best([two, three]) == "88.26 ± 0.33 % (88.40 ± 0.10 with rate 0.2, two seeds)"
    assert gains._best([two]) == "88.40 ± 0.10 % (two seeds)"
    assert schedules.shown_of([two, three]) == three


def test_weight_decay_is_told_apart_where_a_method_ends_higher_with_it() -> None:
    def rows(decay: str, *scores: str, seeds: str = "3") -> dict[str, list[schedules.Tried]]:
        tried = (schedules.Tried(tuned.FALLS_ONCE, "0.4", decay, score, seeds, "1.00 MB") for score in scores)
        return {method: [one] for method, one in zip(gains.NAMES_HERE, tried, strict=False)}

    def both(*scores: str, seeds: str) -> dict[str, list[schedules.Tried]]:
        without, decayed = rows("0", "90.73", "90.65", "88.26"), rows("0.0001", *scores, seeds=seeds)
        return {method: decayed.get(method, []) + own for method, own in without.items()}

    told = gains._with_decay(both("91.30", "91.80", "88.00", seeds="1"))
    assert told == (
        " With weight decay 0.0001: ours 91.30 % (one seed), dense 91.80 % (one seed), TopK-SGD 88.00 % (one seed)."
    )
    assert gains._with_decay(both("90.00", "91.80 ± 0.10", seeds="3")).endswith(": ours 90.00 %, dense 91.80 ± 0.10 %.")
    assert gains._with_decay(both("90.73", "90.00", seeds="1")) == ""
    assert gains._with_decay(rows("0", "90.73", "90.65")) == ""


def test_bytes_are_of_the_trainings_whose_accuracy_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other trainings with another schedule sent more, and one of a single seed did."""
    monkeypatch.setattr(gains, "_with_adamw", lambda sources: "")

    def told(sent: str, dense: str = "90.60") -> str:
        rows = [
            Row(["dense", tuned.FALLS_ONCE, "1.6", "0.0001", "99.00 ± 0.10", "3", "99,999.99 MB"]),
            Row([EARLY, tuned.FALLS_ONCE, "3.2", "0.0001", "91.00", "1", "100.00 MB"]),
            Row(["dense", tuned.FALLS_ONCE, "0.8", "0", f"{dense} ± 0.10", "3", "23,553.71 MB"]),
            Row([EARLY, tuned.FALLS_ONCE, "1.6", "0", "90.80", "1", "100.00 MB"]),
            Row([EARLY, tuned.FALLS_ONCE, "0.8", "0", "90.70 ± 0.10", "3", "383.63 MB"]),
            Row([tuned.TOPK, tuned.FALLS_ONCE, "0.1", "0", "88.30 ± 0.10", "3", sent]),
            Row([tuned.TOPK, tuned.COSINE, "0.1", "0", "86.00", "1", "900.00 MB"]),
            Row([tuned.DGC, tuned.COSINE, "0.1", "0", "99.00", "1", "900.00 MB"]),
        ]
        return gains.gains(Stored(Table(tuned.CAPTION, HEADINGS, rows)))

    assert told("382.72 MB").startswith("- At **61 times fewer bytes**")
    assert "and at about the same bytes, ends at 88.30 ± 0.10 %" in told("382.72 MB")
    assert "and at the same bytes, ends at" in told("383.63 MB")
    assert "and at 1.15 times the bytes, ends at" in told("441.17 MB")
    both = "(90.70 ± 0.10 % (90.80 with rate 1.6, one seed) and 90.60 ± 0.10 %)"
    assert f"ends **like dense training** with `default` and nothing sent dense {both}" in told("382.72 MB")
    assert "ends **2.30 points below dense** with" in told("382.72 MB", dense="93.00")
    assert "ends **1.70 points above dense** with" in told("382.72 MB", dense="89.00")
    assert "takes 0.30 ms by `threshold`, which sends about k entries, 1.10 times" in told("382.72 MB")
    assert "by `topk`, which is exact, 0.40 ms" in told("382.72 MB")
    assert "120 epochs, without weight decay, ends" in told("382.72 MB")
    assert "With weight decay 0.0001: dense 99.00 ± 0.10 %, ours 91.00 % (one seed)." in told("382.72 MB")


class Items:
    """Results by their files."""

    def __init__(self, **results: Result) -> None:
        self.results = results

    def item(self, name: str) -> SimpleNamespace:
        return SimpleNamespace(result=self.results[name.replace("-", "_")])

    def has_item(self, name: str) -> bool:
        return name.replace("-", "_") in self.results


def gpt(*trained: tuple[str, str, float, float], model: str = "gpt", of: str = "") -> Result:
    """Trainings by method, seeds, score and bytes; ``of`` makes dense another task's."""
    every = [(model, method, 0.001, score, sent, f"{method}-{seed}{of}") for method, seeds, score, sent in trained
             for seed in seeds]  # fmt: skip
    names = ("model", "method", "rate", "score", "bytes", "run")
    return Result(rows={name: [own[at] for own in every] for at, name in enumerate(names)})


def test_the_best_of_the_others_is_that_of_every_item_with_the_same_dense_trainings() -> None:
    dense = ("dense", "012", 130.0, 4000.0)
    own = gpt(dense, ("gradient feedback", "012", 195.0, 100.0), ("preconditioned, 1/40", "012", 119.0, 100.0))
    assert gains.best_of_others(Items(beyond_adamw=own)) == "195.00 ± 0.00 (gradient feedback; 1/40)"
    others = [("recipe default", "012", 190.0, 62.5), ("too few", "01", 180.0, 62.5), ("too much", "012", 170.0, 101.0),
              ("ablation: x", "012", 160.0, 62.5)]  # fmt: skip
    both = Items(beyond_adamw=own, beyond_accuracy=gpt(dense, *others))
    assert gains.best_of_others(both) == "190.00 ± 0.00 (`default`; 1/64)"
    elsewhere = Items(beyond_adamw=own, beyond_accuracy=gpt(dense, *others, of=", other data"))
    assert gains.best_of_others(elsewhere).startswith("195.00")
    twice = Items(beyond_adamw=own, beyond_outer=gpt(dense, ("once", "0", 150.0, 100.0)), beyond_accuracy=gpt(
        dense, ("once", "0", 150.0, 100.0), ("once", "1", 150.0, 100.0)))  # fmt: skip
    assert gains.best_of_others(twice).startswith("195.00")  # a training that stands in two items is one seed


def test_a_setting_with_few_seeds_says_so() -> None:
    def told(seeds: str) -> str:
        standing = Table(adamw.STANDING, ["setting", "dense", MAIN, "target"], [Row(["GPT", "130", "135", "missed"])])
        own = Table("GPT", ["training", "score", "seeds"], [Row(["dense", "130", "3"]), Row([MAIN, "135", seeds])])
        return adamw.losses(Stored(standing, own)).splitlines()[0]

    assert told("1").endswith("GPT: 135 instead of dense's 130 (one seed each).")
    assert told("3").endswith("GPT: 135 instead of dense's 130.")


def test_seeds_that_are_far_apart_are_told_with_their_method() -> None:
    def told(score: str) -> str:
        standing = Table(adamw.STANDING, ["setting", "dense", MAIN, "target"], [Row(["GPT", "130", score, "met"])])
        return adamw.losses(Stored(standing))

    assert f"- Seeds of AdamW, {MAIN}, are far apart with GPT: 130.00 ± 9.00, dense 130" in told("130.00 ± 9.00")
    assert "far apart" not in told("130.00 ± 1.00")


def test_ablations_that_end_far_from_what_is_unchanged_are_listed() -> None:
    ratios = {"a_1": "× 1.060", "b": "× 1.300", "c": "× 1.040", "d": "× 0.940", "e": "– "}
    rows = [Row(["GPT", "130.00", "–"]), *(Row([f"ablation: {label}", "1", own]) for label, own in ratios.items())]
    own = Table(f"{adamw.ABLATIONS}GPT, 1/40", ["training", "perplexity", "to GPT"], rows)
    line, _, rest = adamw.ablations(Stored(own)).partition("\n\n")
    assert line == "- GPT, 1/40. More than 5 % higher: b; a\\_1. More than 5 % lower: d."
    assert rest.startswith("**Ablations: GPT, 1/40**")
    none = adamw.ablations(Stored(replace(own, rows=rows[:1])))
    assert none.startswith("- GPT, 1/40. More than 5 % higher: none. More than 5 % lower: none.")


def test_schedules_are_compared_by_their_best_rates() -> None:
    def told(cosine: str, seeds: str = "3") -> str:
        both = ((tuned.FALLS_ONCE, "0.2", "0", "90.00 ± 0.10"), (tuned.FALLS_ONCE, "0.1", "0", "80.00"))
        rows = [Row([method, *cells, seeds if method == "dense" else "3", "1.00 MB"])
                for method in gains.NAMES_HERE
                for cells in ((tuned.FALLS_ONCE, "0.1", "0.0001", "99.00"), *both,
                              (tuned.COSINE, "0.1", "0", cosine if method == "dense" else "85.00"))]  # fmt: skip
        rows += [Row([tuned.DGC, *both[0], "3", "1.00 MB"])]  # never with cosine
        rows += [Row(["dense", tuned.COSINE, "0.4", "0", "95.00", "2", "1.00 MB"])]  # of too few seeds, beside others
        return schedules.schedules(Stored(Table(tuned.CAPTION, HEADINGS, rows)))

    assert "each of the 3 methods ends higher with P1's schedule" in told("89.00")
    assert "2 of the 3 methods end higher with P1's schedule" in told("91.00")
    assert "(rates with P1's and with cosine: 2 and 2 for dense; " in told("91.00")
    assert "2 of the 3 methods end higher with P1's schedule than with cosine, and 1 differ by under" in told(
        "89.50", "2"
    )
    nothing = schedules.schedules(Stored(Table(tuned.CAPTION, HEADINGS, [])))
    assert nothing.startswith("No method was trained with both schedules.")


def test_topk_with_the_settings_of_its_authors_stands_beside_the_schedules() -> None:
    def told(score: str, dense: str = "not run", *, topk: str = "not run") -> str:
        ends = [("topk", "", score), ("dense", "", "90.50"), ("dense", ", seed 2", dense), ("topk", ", seed 1", topk)]
        rows = [Row([f"{method}, authors' settings{seed}", model, own, "%", "0.115 %", "–", "11,640"])
                for model in ("VGG-16", "ResNet-20") for method, seed, own in ends]  # fmt: skip
        theirs = Table(evidence_questions.AUTHORS_ASKED, evidence.HEADINGS, rows)
        return schedules.schedules(Stored(Table(tuned.CAPTION, HEADINGS, []), theirs))

    assert "which sends 0.115 % of the entries, TopK-SGD ends at 89.50 % (one seed), and" in told("89.50")
    assert "dense with that decay at 90.50 % (one seed), both with rate 0.1." in told("89.50")
    # Of the seeds that both have.
    unpaired = told("89.50", dense="90.10", topk="89.60")
    assert "TopK-SGD ends at 89.50 % (one seed), and dense with that decay at 90.50 % (one seed), both" in unpaired
    assert "authors" not in told("not run", dense="90.10", topk="89.60")
    assert "authors" not in told("not run")


def test_a_best_rate_at_an_end_of_those_of_its_schedule_is_told() -> None:
    def rows(*tried: tuple[str, str]) -> list[schedules.Tried]:
        return [schedules.Tried(schedule, rate, "0", "90.00", "3", "1 MB") for schedule, rate in tried]

    high = rows(("once", "0.8"), ("once", "0.4"), ("cosine", "1.6"))
    low = rows(("once", "0.1"), ("once", "0.2"), ("cosine", "0.05"))
    inside = rows(("once", "0.4"), ("once", "0.2"), ("once", "0.8"))
    assert gains._edges({EARLY: high, "dense": inside, tuned.TOPK: low}) == (
        " (not tried in its schedule: ours above 0.8, TopK-SGD below 0.1)"
    )
    assert gains._edges({"dense": inside}) == ""


class Stored:
    """A result with these tables, notes and columns, whichever is asked for; and lines of ``bench select``."""

    folder = Path("none")

    def __init__(self, *tables: Table, notes: Sequence[str] = (), **rows: Column) -> None:
        self.result = Result(tables, notes=notes, rows=rows)

    def item(self, name: str) -> SimpleNamespace:
        return SimpleNamespace(result=self.result)

    def has_item(self, name: str) -> bool:
        return True

    def lines(self, name: str) -> list[dict[str, str]]:
        of = {"method": "threshold", "size": "100000000", "density": "0.001", "dtype": "fp32", "device": "H200"}
        return [{**of, "p50_ms": "0.3", "ratio_to_floor": "1.1"}, {**of, "method": "topk", "p50_ms": "0.4"}]


def test_a_best_rate_at_the_edge_of_its_search_is_told() -> None:
    caption, headings = "The search for rates: LSTM-PTB, 330 steps, one seed", ["training", "rate 1", "rate 2"]
    inside = Table(caption, headings, [Row(["dense", "9.00", "8.00"])])
    assert accuracy.edges(Stored(inside)).endswith("no best one stands at the edge of its search.")
    edge = Table(caption, headings, [Row(["dense", "9.00", "8.00"]), Row(["DGC", "7.00 * edge", "8.00"])])
    assert accuracy.edges(Stored(edge)).endswith("beyond: DGC (`dgc`), nothing dense: LSTM-PTB, rate 1.")


def test_an_ablation_whose_best_rate_is_an_end_of_those_it_was_made_with_is_told() -> None:
    """It takes the rate of what it changes, and so has no search with an edge."""
    caption, headings = (
        "The search for rates: LSTM-PTB, 330 steps, one seed",
        ["training", "rate 1", "rate 2", "rate 4"],
    )

    def told(*cells: str) -> str:
        return accuracy.edges(Stored(Table(caption, headings, [Row(["ablation: x", *cells])])))

    begins = (
        "no best one stands at the edge of its search. Ablations that were not searched for, whose best rate is at "
    )
    assert f"{begins}an end of those tried: ablation: x: LSTM-PTB, the lowest of 2 and 4." in told(
        "–", "9.00 *", "8.00"
    )
    assert told("8.00", "9.00 *", "–").endswith("the highest of 1 and 2.")
    for alone in (("–", "9.00 *", "–"), ("8.00", "9.00 *", "8.00"), ("–", "9.00 *", "not run")):
        assert told(*alone).endswith("stands at the edge of its search.")


def scores(steps: str, rate: str) -> Table:
    rows = [Row(["dense", "90.00", "–", "3", "0.4"]), Row(["DGC", "80.00", "-10.00", "1", rate])]
    headings = ["training", "accuracy, %", "to dense", "seeds", "rate"]
    return Table(f"ResNet-20 on CIFAR-10, 16 workers of 32, {steps} steps", headings, rows)


def test_a_longer_training_whose_best_rate_is_an_end_of_those_it_was_made_with_is_told() -> None:
    def told(*made: tuple[str, str, int, float]) -> str:
        columns = dict(zip(("model", "method", "steps", "rate"), map(list, zip(*made, strict=True)), strict=True))
        return accuracy.edges(Stored(scores("1,400", "0.1"), scores("3,500", "0.2"), **columns))

    dense = tuple(("resnet20", "dense", 3500, rate) for rate in (0.2, 0.4, 0.8))
    short, other = ("resnet20", "DGC", 1400, 0.4), ("vgg16", "DGC", 3500, 0.4)
    low, best, high = (("resnet20", "DGC", 3500, rate) for rate in (0.1, 0.2, 0.4))
    name = "DGC (`dgc`), nothing dense, 3,500 steps: 0.2"
    assert told(*dense, short, other, low, best).endswith(f"may lie beyond: {name}, the highest of 0.1 and 0.2.")
    assert told(*dense, best, high).endswith(f"may lie beyond: {name}, the lowest of 0.2 and 0.4.")
    assert name not in told(*dense, low, best, high)
    assert told(*dense, best).endswith(f"one rate that is not the best of the shortest length: {name}.")


def test_rates_that_differ_by_length_are_told() -> None:
    told = (
        "Rates that are not the same at all lengths: DGC (`dgc`), nothing dense 0.05 (1,400 steps), 0.1 (3,500 steps)."
    )
    assert accuracy.by_length(Stored(scores("1,400", "0.05"), scores("3,500", "0.1"))).endswith(told)
    assert "Rates" not in accuracy.by_length(Stored(scores("1,400", "0.1"), scores("3,500", "0.1")))


def test_the_best_local_steps_are_told_with_searches_that_are_not_finished() -> None:
    headings = ["training", "perplexity", outer.SCORES, "sent, of dense"]
    rows = [Row(["dense", "133.01 ± 0.74", "–", "1"]), Row(["OuterLoop, every 8 steps", "227.20", "× 1.7", "1/48.4"])]
    captions = [where(setting, 0) for setting in OUTER_SETTINGS.values()]
    tables = [Table(caption, headings, rows) for caption in captions]
    notes = [f"{captions[0]}, searches that are not done: OuterLoop, every 4 steps 195.63.", "Rates are searched for."]
    trained = [("gpt", "dense", 133.0, 400), ("gpt", "OuterLoop, every 4 steps", 195.63, 10),
               ("gpt", "OuterLoop, every 2 steps", 220.93, 10), ("gpt", "OuterLoop, every 8 steps", 224.0, 10),
               ("gpt-w4-own", "dense", 133.0, 400), ("gpt-w4-own", "OuterLoop, every 4 steps", 230.0, 10)]  # fmt: skip
    names = ("model", "method", "score", "bytes")
    columns = {name: [line[at] for line in trained] for at, name in enumerate(names)} | {"rate": [0.002] * len(trained)}
    shown = outer.best_of_each(Stored(*tables, notes=notes, **columns))
    own, other = shown.split(f"**{captions[1]}**")
    assert own.startswith(f"**{captions[0]}**: the best finished row of each kind")
    assert "| OuterLoop, every 4 steps | 195.63 (one seed, rate 0.002, search not finished) | – | 1/40 |" in own
    assert "220.93" not in own  # the best of them is enough
    assert "230.00" not in other  # it is above the best finished row
    assert own.rstrip().endswith(f"- {notes[0]}")
    assert notes[0] not in other
    assert notes[1] not in shown


def test_every_training_is_told_by_its_commit(tmp_path: Path) -> None:
    runs = tmp_path / "papers" / "runs"
    runs.mkdir(parents=True)
    for number, (commit, model) in enumerate((("abc", "vgg16"), ("abc", "lenet5"), ("def+12", "vgg16"))):
        where = {"commit": commit, "device": "H200", "date": f"2026-01-0{number + 1}"}
        write_json(runs / f"{number}.json.gz", {"environment": where, "run": {"model": model}})
    text = provenance.commits(Sources(tmp_path, ""))
    assert text.startswith("3 trainings, 2 commits.")
    assert "| `abc` | 2 | VGG-16 1, LeNet-5 1 | H200 | 2026-01-01 to 2026-01-02 |" in text
    assert text.index("`def+12`") < text.index("`abc`")
    stored = len(list((ROOT / "results" / "papers" / "runs").iterdir()))
    assert f"{stored:,} trainings" in (ROOT / "docs" / "papers-provenance.md").read_text(encoding="utf-8")


def test_trainings_that_are_missing_are_listed_with_their_minutes(tmp_path: Path) -> None:
    """Those of ``beyond/evidence`` by their files, stages of the others from their stored tables."""
    context = RunContext(output=tmp_path / "papers")
    runs = [run for one in evidence_questions.questions() for run in one.runs]
    for run in runs[1:]:
        file_of(context, run).parent.mkdir(parents=True, exist_ok=True)
        file_of(context, run).touch()
    stages = Table(ORDER, [""] * 7, [Row(["1", "all done: x; y", "-", "3 of 3", "2", "0.0", ""]),
                                     Row(["2", "search: x; y", "-", "1 of 3", "2", "4.0", "y"])])  # fmt: skip
    save(context, ITEMS["beyond/outer"], Result([stages], missing=["2. search"]), 1.0)
    save(context, ITEMS["p1/fig1"], Result(missing=["vgg16-randk"]), 1.0)
    told = missing.trainings(Sources(tmp_path, ""))
    minutes = runs[0].seconds / 60 / evidence_questions.JOBS
    first = evidence_questions.questions()[0].name
    assert told.startswith(f"`beyond/evidence`, {minutes:.0f} minutes in all, with 12 trainings at a time:")
    asks = evidence_questions.questions()[0].asks
    assert f"| {first} | {asks} | {model_title(runs[0].model)}: {runs[0].label} | {minutes:.1f} |" in told
    assert "The others, 4 minutes in all, one training at a time" in told
    assert "- `beyond/outer`: do local steps end as well as an exchange in every step" in told
    assert "- `p1/fig1`: TopK-SGD ends like dense" in told
    assert "| `beyond/outer` | search: y (1 of 3 done) | 4.0 |" in told
    assert "| `p1/fig1` | vgg16-randk | – |" in told
    assert "all done" not in told


def test_of_what_is_missing_an_item_tells_its_own_claims_alone(tmp_path: Path) -> None:
    """Other claims are judged by some of its trainings, and need not be concerned."""
    context = RunContext(output=tmp_path / "papers")
    stages = Table(ORDER, [""] * 7, [Row(["1", "search: x", "-", "1 of 3", "2", "4.0", "y"])])
    save(context, ITEMS["beyond/accuracy"], Result([stages]), 1.0)
    (line,) = (line for line in missing.trainings(Sources(tmp_path, "")).splitlines() if line.startswith("- "))
    assert line == "- `beyond/accuracy`: does a recipe of ours lose nothing to tuned dense at the bytes of 0.1 %?"


def test_that_nothing_is_missing_is_a_sentence(tmp_path: Path) -> None:
    """And no empty table."""
    context = RunContext(output=tmp_path / "papers")
    for run in (run for one in evidence_questions.questions() for run in one.runs):
        file_of(context, run).parent.mkdir(parents=True, exist_ok=True)
        file_of(context, run).touch()
    nothing = "No training of `beyond/evidence` is missing."
    assert missing.trainings(Sources(tmp_path, "")) == f"{nothing}\n\nNo other item lacks a training."
    save(context, ITEMS["p1/fig1"], Result(missing=["vgg16-randk"]), 1.0)
    assert missing.trainings(Sources(tmp_path, "")).startswith(f"{nothing}\n\nThe others, 0 minutes in all")


def test_a_picture_is_told_with_its_captions(tmp_path: Path) -> None:
    """Each once; with the titles of the charts where it is not clear which these are."""
    bands, one = "With its chosen rate: the mean of 3 seeds, from the lowest to the highest.", "One seed of each."
    captions = {"GPT": bands, "ViT": bands, "VGG-16, accuracy": "VGG-16, data x; one seed_0.", "Loss": one}
    figures = [Figure(LineChart(title, "steps", []), caption) for title, caption in captions.items()]
    assert items._captions(figures) == (f"GPT; ViT: {bands} VGG-16, data x; one seed\\_0. Loss: {one}")
    assert items._captions(figures[:2]) == bands
    third = Figure(LineChart("FNN", "steps", []), bands)
    assert items._captions([third, *figures[:2], figures[3]]) == f"Loss: {one} All others: {bands}"
    assert items._captions([Figure(LineChart("A", "", []), "A: x."), Figure(LineChart("B", "", []), "B: x.")]) == "x."
    save(RunContext(output=tmp_path / "papers"), ITEMS["p1/fig1"], Result(figures=figures[:2]), 1.0)
    assert f"p1-fig1.png)\n\n{bands}\n\n" in items.papers(Sources(tmp_path, "results"))


def test_the_prose_holds_no_number_that_is_a_result() -> None:
    """Nobody would notice when the results change: such a number belongs into a generated block."""
    assert RESULT.findall("it was 83.5 and 88.0, 2 points or 4.1 % in 2,100 s, of 1,400 steps") == [
        "83.5", "88.0", "2 points", "4.1 %", "2,100 s"]  # fmt: skip
    for page, settings in (dict.fromkeys(OF_PAPERS, SETTINGS) | RULES | TYPED).items():
        prose = " ".join(CODE.sub("", _typed(page)).split())
        assert set(RESULT.findall(prose)) <= settings, page


def test_commits_are_on_a_page_of_their_own() -> None:
    assert COMMIT.findall("of 5593cb6 and b9dc6b94, feedback, 2,400 or 23553712 bytes") == ["5593cb6", "b9dc6b94"]
    assert [page for page in OF_PAPERS if COMMIT.search(_typed(page))] == ["papers-provenance.md"]
    assert not COMMIT.search(planner.check(Sources(ROOT / "results", "")))


def test_every_item_is_told_what_it_covers() -> None:
    """The table of ``docs/papers.md`` names every item, and no other."""
    covered = _typed("papers.md").partition("## What covers what")[2].partition("\n## ")[0]
    assert set(re.findall(r"`([^`]+)`", covered)) == set(ITEMS)


def _typed(page: str) -> str:
    """Return what of a page is written by hand."""
    return MARKED.sub("", (ROOT / "docs" / page).read_text(encoding="utf-8"))


def test_items_are_told_with_commits_times_and_data(tmp_path: Path) -> None:
    """An item that trains, one that shares its training, and one that measures."""
    context = RunContext(output=tmp_path / "papers")
    where = {"commit": "abc, def+12", "device": "H200", "torch": "2.11", "date": "2026-01-03, 2026-01-01, 2026-01-02"}
    trained = Result(runs=["a", "b"], data={"mnist": "123"}, where=where, seconds=120.0)
    save(context, ITEMS["p1/fig1"], trained, 0.0)
    save(context, ITEMS["p1/fig6"], Result(runs=["b"], data={"mnist": "123"}, where=where, seconds=30.0), 0.0)
    save(context, ITEMS["p2/table2"], Result(where={**where, "commit": "abc", "date": "2026-01-01"}), 7.0)
    sources = Sources(tmp_path, "")
    told = provenance.measured(sources)
    assert "| `p1/fig1` | trained 2 | `abc`, `def+12` | H200 | 2.11 | 2026-01-01 to 2026-01-03 |" in told
    assert "| `p2/table2` | measured or computed | `abc` | H200 | 2.11 | 2026-01-01 |" in told
    assert "| mnist | `123` | `p1/fig1`, `p1/fig6` |" in provenance.data(sources)
    times = run_times.of_items(sources)
    assert "| `p1/fig1` | 2 | 1 | 1.0 min | 2.0 min | H200 |" in times
    assert "| `p1/fig6` | 1 | 1 | 30 s | 30 s | H200 |" in times
    assert "| `p2/table2` | none | – | – | 7 s | H200 |" in times
    page = items.papers(sources)
    assert "Command: `sparsync papers run p1/fig1`. H200, 2026-01-01 to 2026-01-03. File" in page
    assert not COMMIT.search(page)
    first, _, sections = page.partition("\n\n### ")
    assert [line.partition("]")[0].removeprefix("- [") for line in first.splitlines()] == [
        section.partition("\n")[0] for section in sections.split("\n\n### ")
    ]
