"""The README's tables of accuracy against the results they are taken from."""

from __future__ import annotations

import re
from decimal import Decimal
from pathlib import Path

import pytest

from sparsync_lab.papers.store import load
from sparsync_lab.papers.sweep import BALANCED, BASE, CORRECTED, EARLY, LEVELS, WARM

ROOT = Path(__file__).parent.parent
# Rows of the two tables, by how they begin in the README; the tables' columns as the captions of the results begin.
OF_RESNET = {
    "dense": "dense",
    '`recipe="default"`, nothing dense, momentum corrected, bytes spent early': EARLY,
    '`recipe="default"`, nothing dense (': BASE,
    '`recipe="default"`': "recipe default",
    '`recipe="balanced"`, nothing dense': BALANCED,
    "the same, bytes spent early": WARM,
    'the same, `values="levels"` instead': LEVELS,
    "GaussianK-SGD": "GaussianK-SGD",
    '`recipe="paper"`: TopK-SGD': "TopK-SGD",
    '`recipe="dgc"`, nothing dense': "DGC",
}
OF_OTHERS = {
    "dense": "dense",
    "`default`, momentum corrected, bytes spent early": EARLY,
    "`default`": BASE,
    "`balanced`": BALANCED,
    "`balanced`, bytes spent early": WARM,
    '`balanced`, `values="levels"`': LEVELS,
    "GaussianK-SGD": "GaussianK-SGD",
    "TopK-SGD": "TopK-SGD",
    "DGC": "DGC",
}
# By what they change.
OF_ABLATIONS = {
    BASE: (
        ("**of `default`", BASE),
        ("bytes spent early", "recipe default, density warm-up, nothing dense"),
        ("rate inside", "ablation: rate inside the residual"),
        ("layer by layer", "ablation: scope layer"),
        ("momentum of 0.5 corrected", CORRECTED),
        ('`values="levels"`', "ablation: values levels"),
        ("the 1-D tensors", "recipe default"),
        ('`values="fp16"`', "ablation: values fp16"),
        ('`values="fp32"`', "ablation: values fp32"),
        ("momentum kept", "ablation: momentum kept"),
    ),
    BALANCED: (
        ("**of `balanced`", BALANCED),
        ("bytes spent early", WARM),
        ('`values="levels"`', LEVELS),
        ("momentum moved", "ablation: balanced, momentum moved"),
        ("momentum kept", "ablation: balanced, momentum kept"),
        ("the 1-D tensors", "ablation: balanced, 1-D dense"),
        ('`values="fp16"`', "ablation: balanced, values fp16"),
    ),
    "DGC": (
        ("**of `dgc`", "DGC"),
        ("the 1-D tensors dense", "ablation: DGC, 1-D dense"),
        ("bytes spent early", "ablation: DGC, density warm-up"),
        ("both", "ablation: DGC, density warm-up, 1-D dense"),
    ),
    EARLY: (
        ("**of the second row", EARLY),
        ("nothing spent early", CORRECTED),
        ("momentum moved", "ablation: warm-up from 8 times, moved"),
        ("16 times", "ablation: warm-up from 16 times, corrected, 0.5"),
        ("4 times", "ablation: warm-up from 4 times, corrected, 0.5"),
        ("momentum of 0.7", "ablation: warm-up from 8 times, corrected, 0.7"),
        ("momentum of 0.3", "ablation: warm-up from 8 times, corrected, 0.3"),
    ),
}
LENGTHS = tuple(f"ResNet-20 on CIFAR-10, 16 workers of 32, {steps} steps" for steps in ("1,400", "3,500", "11,700"))
MODELS = ("LeNet-5 on MNIST, 16", "VGG-16 on CIFAR-10, 16", "LSTM-PTB, 4", "LSTM-AN4, 4", "GPT on PTB, AdamW, 16")
NUMBER = re.compile(r"\d+(?:\.\d+)?")


def standings() -> dict[str, dict[str, str]]:
    """Of every table of the result: what each method reached, as it is printed there."""
    tables = load(ROOT / "results" / "papers" / "beyond-accuracy.json").result.tables
    return {table.caption: {row.cells[0]: row.cells[1] for row in table.rows} for table in tables}


def rows_below(heading: str) -> list[list[str]]:
    """The cells of a table."""
    lines = (ROOT / "README.md").read_text().partition(heading)[2].partition("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


@pytest.mark.parametrize(
    ("heading", "labels", "columns"),
    [("| | 1,400 steps |", OF_RESNET, LENGTHS), ("| | LeNet-5 on MNIST,", OF_OTHERS, MODELS)],
)
def test_accuracies_are_those_of_the_results(heading: str, labels: dict[str, str], columns: tuple[str, ...]) -> None:
    found = standings()
    of_column = [next(own for caption, own in found.items() if caption.startswith(column)) for column in columns]
    rows = rows_below(heading)
    assert [len(row) for row in rows] == [1 + len(columns)] * len(labels)
    for (begin, label), (name, *cells) in zip(labels.items(), rows, strict=True):
        assert name.startswith(begin)
        for cell, own in zip(cells, of_column, strict=True):
            assert agree(cell.partition("(")[0], own.get(label, "–")), f"{label}: {cell} is not {own.get(label)}"


def test_ablations_are_those_of_the_results() -> None:
    found = standings()
    stored = [
        (begin, found[f"Ablations: ResNet-20 on CIFAR-10, 1,400 steps, {base}"][label])
        for base, rows in OF_ABLATIONS.items()
        for begin, label in rows
    ]
    for (name, cell), (begin, own) in zip(rows_below("| one change |"), stored, strict=True):
        assert name.startswith(begin)
        assert agree(cell.partition("(")[0], own), f"{name}: {cell} is not {own}"


def agree(shown: str, stored: str) -> bool:
    """The same numbers, rounded; or none in both."""
    ours, theirs = NUMBER.findall(shown), NUMBER.findall(stored)
    if len(ours) != len(theirs):
        return False
    half = [Decimal(10) ** Decimal(number).as_tuple().exponent / 2 for number in ours]
    return all(abs(Decimal(a) - Decimal(b)) <= h for a, b, h in zip(ours, theirs, half, strict=True))


def test_numbers_agree_when_they_are_rounded() -> None:
    assert agree("84.9 ± 0.5", "84.86 ± 0.48")
    assert not agree("84.8 ± 0.5", "84.86 ± 0.48")
    assert not agree("84.9", "84.86 ± 0.48")
    assert agree("not run", "–")
