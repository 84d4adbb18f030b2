"""What pages state follows the tables that they are written from."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

from sparsync_lab.docs import accuracy, provenance
from sparsync_lab.docs.sources import Sources
from sparsync_lab.papers import tuned
from sparsync_lab.papers.item import Result
from sparsync_lab.papers.store import write_json
from sparsync_lab.papers.sweep import EARLY
from sparsync_lab.report import Row, Table

ROOT = Path(__file__).parent.parent.parent


def test_a_higher_score_of_one_seed_is_told() -> None:
    three, one = ["0.1", "88.26 ± 0.33", "3"], ["0.2", "88.48", "1"]
    assert accuracy._best([one, three]) == "88.26 ± 0.33 % (88.48 with rate 0.2, one seed)"
    assert accuracy._best([three, one]) == "88.26 ± 0.33 %"
    assert accuracy._best([one]) == "88.48 % (one seed)"


def test_a_best_rate_at_an_end_of_those_of_its_schedule_is_told() -> None:
    def rows(*tried: tuple[str, str]) -> list[list[str]]:
        return [[schedule, rate, "90.00", "3"] for schedule, rate in tried]

    high = rows(("once", "0.8"), ("once", "0.4"), ("cosine", "1.6"))
    low = rows(("once", "0.1"), ("once", "0.2"), ("cosine", "0.05"))
    inside = rows(("once", "0.4"), ("once", "0.2"), ("once", "0.8"))
    assert accuracy._edges({EARLY: high, "dense": inside, tuned.TOPK: low}) == (
        " (not tried in its schedule: ours above 0.8, TopK-SGD below 0.1)"
    )
    assert accuracy._edges({"dense": inside}) == ""


class Stored:
    """Results of ``beyond/accuracy`` with these tables."""

    def __init__(self, *tables: Table) -> None:
        self.tables = tables

    def item(self, name: str) -> SimpleNamespace:
        return SimpleNamespace(result=Result(self.tables))


def test_a_best_rate_at_the_edge_of_its_search_is_told() -> None:
    caption, headings = "The search for rates: LSTM-PTB, 330 steps, one seed", ["training", "rate 1", "rate 2"]
    inside = Table(caption, headings, [Row(["dense", "9.00", "8.00 *"])])
    assert accuracy.edges(Stored(inside)) == "No best rate stands at the edge of its search."
    edge = Table(caption, headings, [Row(["dense", "9.00", "8.00 *"]), Row(["DGC", "7.00 * edge", "8.00"])])
    assert accuracy.edges(Stored(edge)).endswith("beyond: DGC (`dgc`), nothing dense: LSTM-PTB, rate 1.")


def test_rates_that_differ_by_length_are_told() -> None:
    def scores(steps: str, rate: str) -> Table:
        rows = [Row(["dense", "90.00", "–", "3", "0.4"]), Row(["DGC", "80.00", "-10.00", "1", rate])]
        headings = ["training", "accuracy, %", "to dense", "seeds", "rate"]
        return Table(f"ResNet-20 on CIFAR-10, 16 workers of 32, {steps} steps", headings, rows)

    told = (
        "Rates that are not the same at all lengths: DGC (`dgc`), nothing dense 0.05 (1,400 steps), 0.1 (3,500 steps)."
    )
    assert accuracy.by_length(Stored(scores("1,400", "0.05"), scores("3,500", "0.1"))).endswith(told)
    assert "Rates" not in accuracy.by_length(Stored(scores("1,400", "0.1"), scores("3,500", "0.1")))


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
