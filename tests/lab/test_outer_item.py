"""Local steps within a budget of bytes: notes say what the stored trainings say."""

from __future__ import annotations

from pathlib import Path

from sparsync_lab.docs.outer import FILE, SCORES, best_of_each
from sparsync_lab.docs.sources import Sources
from sparsync_lab.papers.adamw_tables import fraction
from sparsync_lab.papers.outer import OUTER_SETTINGS, begun_of
from sparsync_lab.papers.tables import NOT_RUN
from sparsync_lab.report import LineChart

SOURCES = Sources(Path(__file__).parents[2] / "results", "../results")


def test_notes_tell_what_was_sent_and_no_row_that_is_not_trained() -> None:
    result = SOURCES.item(FILE).result
    about = " ".join(note for note in result.notes if "searches that are not done" not in note)
    for table in (own for own in result.tables if SCORES in own.headings):
        sent = table.headings.index("sent, of dense")
        trained = [row.cells for row in table.rows if NOT_RUN not in row.cells and row.cells[0] != "dense"]
        shares = sorted((cells[sent] for cells in trained), key=lambda share: float(share.removeprefix("1/")))
        (note,) = (note for note in result.notes if note.startswith(f"{table.caption}: rows but dense"))
        assert f"from {shares[-1]} to {shares[0]} of dense's bytes" in note
        for row in table.rows:
            if NOT_RUN in row.cells:
                assert row.cells[0] not in about


def test_perplexities_are_drawn_over_what_was_sent() -> None:
    for figure, name in zip(SOURCES.item(FILE).result.figures, OUTER_SETTINGS, strict=True):
        chart = figure.chart
        assert isinstance(chart, LineChart)
        assert chart.title == f"Perplexity, {OUTER_SETTINGS[name].workers} workers"
        done = begun_of(SOURCES.item(FILE).result, name)[0]
        assert [curve.label for curve in chart.curves] == list(done)
        for curve in chart.curves:
            share = curve.x[-1] / chart.curves[0].x[-1]
            assert done[curve.label]["sent, of dense"] == fraction(share)
            assert f"{curve.y[-1]:.2f}" == done[curve.label]["score"].split(" ")[0]


def test_the_best_of_each_kind_is_the_best_of_its_rows() -> None:
    shown = best_of_each(SOURCES)
    for table in (own for own in SOURCES.item(FILE).result.tables if SCORES in own.headings):
        scores = {row.cells[0]: row.cells[1] for row in table.rows if NOT_RUN not in row.cells}
        for kind in ("SparseLoCo", "OuterLoop", "DiLoCo"):
            own = {label: score for label, score in scores.items() if label.startswith(kind)}
            best = min(own, key=lambda label: float(own[label].split()[0]), default=None)
            assert best is None or f"| {best} | {own[best]} |" in shown


def test_a_single_training_below_the_best_is_shown_as_one_of_a_search_that_is_not_finished() -> None:
    shown = best_of_each(SOURCES)
    for name in OUTER_SETTINGS:
        done, begun = begun_of(SOURCES.item(FILE).result, name)
        assert done.keys().isdisjoint(one.label for one in begun)
        for kind in ("SparseLoCo", "OuterLoop", "DiLoCo"):
            own = [float(cells["score"].split()[0]) for label, cells in done.items() if label.startswith(kind)]
            low = min((one for one in begun if one.label.startswith(kind)), key=lambda one: one.score, default=None)
            if low is not None:
                row = f"| {low.label} | {low.score:.2f} (one seed, rate {low.rate:g}, search not finished) |"
                assert (row in shown) == (low.score < min(own, default=float("inf"))), (name, kind)
