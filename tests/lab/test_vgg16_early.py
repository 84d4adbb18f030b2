"""What the first losses of VGG-16's short trainings say of where they end."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from sparsync_lab.papers import RunContext, evidence
from sparsync_lab.papers.run import History, file_of, write
from sparsync_lab.papers.vgg16_early import early_cells, early_words, rank_correlation
from sparsync_lab.papers.vgg16_gap import cause
from sparsync_lab.papers.vgg16_notes import change_tables, early_note, gap_note


def losses_of(peak: float, high: int, steps: int = 200, after: float = 1.0) -> list[float]:
    """Return losses that begin at 2.4, jump at step 30, stay at 2.3 until a step and then fall."""
    losses = [2.4, *[2.3] * (high - 1), *[after] * (steps - high)]
    losses[29] = peak
    return losses


def history_of(losses: Sequence[float], last: float = 0.5, method: str = "topk", what: str = "rate 1") -> History:
    about = {"name": "cifar10", "size": "1", "sha256": "0"}
    run = cause(method, what)
    steps = len(losses)
    return History(run, "accuracy", [steps], [last], [1.0], losses, [1.0] * steps, 0.001, 1.0, 24, [], about)


@pytest.mark.parametrize(
    ("losses", "cells"),
    [
        # The mean of a window falls below 2 with its fifth loss of 1.0: 15 * 2.3 + 5 * 1.0 = 39.5.
        (losses_of(9.876, 100), ["9.88", "86"]),
        ([1.0] * 20, ["1.00", "1"]),
        ([1.0] * 19, ["1.00", "never"]),
        ([2.0] * 200, ["2.00", "never"]),
        ([*losses_of(5.0, 200), 1.0], ["5.00", "never"]),
        ([*losses_of(5.0, 40, 100), 50.0, *[1.0] * 100], ["5.00", "102"]),  # jumps again, after 100 steps
        ([*[1.0] * 30, 60.0, *[1.0] * 100], ["60.00", "32"]),  # low before it jumps
        ([*[1.0] * 99, 7.0, 8.0, *[1.0] * 9], ["7.00", "1"]),  # the last step that counts for the highest
        ([math.nan, *[1.0] * 100], ["diverged", "2"]),
        ([*[1.0] * 10, math.inf, *[math.nan] * 100], ["diverged", "never"]),
        ([*[1.0] * 150, *[math.nan] * 50], ["1.00", "never"]),
        ([*[3.0] * 50, *[1.0] * 100, math.nan], ["3.00", "never"]),
    ],
)
def test_how_high_a_loss_jumps_and_how_long_it_stays(losses: Sequence[float], cells: list[str]) -> None:
    assert early_cells(history_of(losses)) == cells


def test_what_was_not_trained_has_no_losses() -> None:
    assert early_cells(None) == ["–", "–"]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([1, 10, 100, 1000], 1.0),
        ([4, 3, 2, -5], -1.0),
        ([1, 3, 2, 4], 0.8),
        ([1, 2, 2, 3], 3 / math.sqrt(10)),  # ranks 1, 2.5, 2.5, 4
        ([1, 2, math.inf, math.inf], 3 / math.sqrt(10)),
        ([7, 7, 7, 7], 0.0),
    ],
)
def test_ranks_are_correlated(values: Sequence[float], expected: float) -> None:
    assert rank_correlation(values, [0.1, 0.2, 0.3, 0.4]) == pytest.approx(expected)


def early(method: str, ends: Sequence[float], peaks: Sequence[float], highs: Sequence[int]) -> dict[str, History]:
    found = [
        history_of(losses_of(peak, high), end, method, f"rate {number}")
        for number, (end, peak, high) in enumerate(zip(ends, peaks, highs, strict=True))
    ]
    return {history.run.label: history for history in found}


FALLING, PEAKS, HIGHS = [0.8, 0.7, 0.6, 0.5, 0.4, 0.3], [3, 4, 5, 6, 7, 8], [40, 50, 60, 70, 80, 90]
MIXED = [0.5, 0.8, 0.3, 0.7, 0.4, 0.6]  # a rank correlation of -0.09


def test_a_strong_correlation_is_told_with_its_number_of_trainings() -> None:
    told = early_words(early("topk", FALLING, PEAKS, HIGHS))
    assert "accuracy of -1.00 and -1.00 over 6 of TopK-SGD (both order them). A correlation is no cause." in told
    assert "40 epochs, one seed each" in told
    assert "dense" not in told
    seven = early("topk", [*FALLING, 0.2], [*PEAKS, math.nan], [*HIGHS, 200])  # diverged, never: after all others
    assert "of -1.00 and -1.00 over 7 of TopK-SGD (both order them)" in early_words(seven)


def test_a_weak_correlation_orders_nothing() -> None:
    assert "-0.09 and -0.09 over 6 of TopK-SGD (neither orders them)" in early_words(early("topk", MIXED, PEAKS, HIGHS))
    order = [HIGHS[i] for i in (3, 0, 5, 1, 4, 2)]
    assert "-0.09 and -1.00 over 6 of TopK-SGD (only the second orders them)" in early_words(
        early("topk", MIXED, PEAKS, order)
    )
    assert "-1.00 and +0.00 over 6 of TopK-SGD (only the first orders them)" in early_words(
        early("topk", FALLING, PEAKS, [50] * 6)
    )
    nearly = [0.7, 0.8, 0.5, 0.6, 0.3, 0.4]
    assert "-0.83 and -0.83 over 6 of TopK-SGD (both" in early_words(early("topk", nearly, PEAKS, HIGHS))
    less = [0.7, 0.8, 0.6, 0.3, 0.5, 0.4]
    assert "-0.77 and -0.77 over 6 of TopK-SGD (neither" in early_words(early("topk", less, PEAKS, HIGHS))


def test_a_few_trainings_say_nothing() -> None:
    five = early("topk", FALLING[:5], PEAKS[:5], HIGHS[:5])
    dense = early("dense", MIXED, PEAKS, HIGHS)
    assert early_words({}) == early_words(five) == early_words({**five, **dense}) == ""
    other = {"cause: gaussiank, count carried, as in figure 6": history_of(losses_of(3, 40))}
    assert early_words({**five, **other}) == ""
    six = early("topk", FALLING, PEAKS, HIGHS)
    beside = "of TopK-SGD (both order them), and of -0.09 and -0.09 over 6 of dense (neither orders them). A"
    assert beside in early_words({**six, **dense})
    few = {label: history for label, history in dense.items() if "rate 0" not in label}
    assert early_words({**six, **few}) == early_words(six) != ""


def test_the_sentence_is_in_the_notes_and_the_losses_are_in_the_table(tmp_path: Path) -> None:
    context = RunContext(output=tmp_path, scratch=tmp_path)

    def store(method: str, what: str, losses: Sequence[float], last: float) -> None:
        run = cause(method, what) if what == "as in figure 6" else cause(method, what, rate=float(what.split()[1]))
        write(file_of(context, run), replace(history_of(losses, last), run=run))

    store("dense", "as in figure 6", losses_of(3, 40), 0.84)
    store("topk", "as in figure 6", losses_of(9.5, 150), 0.25)
    for number, (end, peak, high) in enumerate(zip(FALLING[:4], PEAKS, HIGHS, strict=False)):
        store("topk", f"rate 0.0{number + 1}", losses_of(peak, high), end)
    assert early_note(context) == []
    assert "correlation" not in gap_note(context)[-1]
    store("topk", "rate 0.09", [*losses_of(9.0, 50)[:60], *[math.nan] * 140], 0.1)
    (told,) = early_note(context)
    assert "-1.00 and -1.00 over 6 of TopK-SGD (both order them)" in told
    assert gap_note(context)[-1].endswith(told)
    assert told in evidence.evidence(context.read_only()).notes
    (table,) = change_tables(context)
    assert [(row.cells[0], *row.cells[5:]) for row in table.rows] == [
        ("none: 8 steps of warm-up", "9.50", "136"),
        ("rate 0.01", "3.00", "27"),  # its first mean has the jump in it, too
        ("rate 0.02", "4.00", "36"),
        ("rate 0.03", "5.00", "46"),
        ("rate 0.04", "6.00", "56"),
        ("rate 0.09", "diverged", "never"),
    ]
    assert early_note(replace(context, quick=True)) == early_note(replace(context, seed=1)) == []
