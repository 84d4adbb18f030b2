"""What the papers claim, and whether it holds here: every claim is judged by the numbers of stored results."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple, NoReturn

from sparsync_lab.papers.item import Result
from sparsync_lab.report import Row, Table

REPRODUCED, PARTLY, NOT, MISSING = "reproduced", "partly", "not", "not run"
HEADINGS = ("claim", "published", "here", "verdict", "command")
POINT = 1.0  # points of accuracy: so near to dense is "like dense"
MODELS = ("LeNet-5", "ResNet-20", "VGG-16")
SHAPES = ("p1/fig2", "p1/fig7", "p1/fig8")
BELOW = "0.6 to 0.8 points below"
FIRST, SCORE, TO_DENSE = "Test accuracy in %", "accuracy, %, last", "to dense"
ALONE = "The same without momentum"


class Stored:
    """The tables of stored results, by their captions, rows and headings. What is not there is a ``LookupError``."""

    def __init__(self, results: Mapping[str, Result]) -> None:
        self.results = results

    def table(self, item: str, caption: str) -> Table:
        """Return the first table of an item whose caption begins so."""
        return next((t for t in self.results[item].tables if t.caption.startswith(caption)), None) or _none(caption)

    def cell(self, item: str, caption: str, row: str, heading: str) -> str:
        found = self.table(item, caption)
        at = {cells.cells[0]: cells.cells for cells in found.rows}[row]
        return at[list(found.headings).index(heading)] if heading in found.headings else _none(heading)

    def number(self, item: str, caption: str, row: str, heading: str) -> float:
        """Return a cell's first number."""
        return first_number(self.cell(item, caption, row, heading))


class Verdict(NamedTuple):
    """A claim, and what became of it."""

    item: str
    claim: str
    published: str
    here: str
    word: str

    @property
    def sentence(self) -> str:
        """Return it in a sentence, with the two numbers."""
        return f"{self.word.capitalize()}: {self.claim}. Published: {self.published}. Here: {self.here}."

    @property
    def cells(self) -> list[str]:
        command = f"sparsync papers run {self.item}"
        return [f"{self.item}: {self.claim}", self.published, self.here, self.word, command]


Judge = Callable[[Stored], tuple[str, str]]  # what is so here, and the verdict


@dataclass(frozen=True)
class Claim:
    """What a paper says, and how that is judged."""

    item: str
    text: str
    published: str
    judge: Judge

    def verdict(self, stored: Stored) -> Verdict:
        try:
            here, word = self.judge(stored)
        except LookupError:
            here, word = "trainings are missing", MISSING
        return Verdict(self.item, self.text, self.published, here, word)


def verdicts(results: Mapping[str, Result]) -> list[Verdict]:
    """Return what became of every claim.

    Args:
        results: by key of their item; items may be missing.
    """
    stored = Stored(results)
    return [claim.verdict(stored) for claim in CLAIMS]


def verdict_table(found: Sequence[Verdict]) -> Table:
    """Return all verdicts in a table."""
    count = {word: sum(one.word == word for one in found) for word in (REPRODUCED, PARTLY, NOT, MISSING)}
    caption = "Verdicts: " + ", ".join(f"{number} {word}" for word, number in count.items() if number)
    return Table(caption, list(HEADINGS), [Row(one.cells) for one in found])


def first_number(text: str) -> float:
    """Return the first number of a text."""
    found = re.search(r"[-+−]?\d[\d,]*\.?\d*(?:e[-+]?\d+)?", text)
    return float(found[0].replace(",", "").replace("−", "-")) if found else _none(text)


def _none(what: str) -> NoReturn:
    raise LookupError(what)


def _share(held: int, of: int) -> str:
    return REPRODUCED if held == of else PARTLY if held else NOT


# ---- P1 ---------------------------------------------------------------------------------------------------------


def _bells(stored: Stored) -> tuple[str, str]:
    rows = [row for item in SHAPES for table in stored.results[item].tables[:1] for row in table.rows]
    held = sum(row.cells[-1] == "yes" for row in rows)
    return f"{held} of {len(rows)} looks at six models and three methods", _share(held, len(rows))


def _gaussian_shape(stored: Stored) -> tuple[str, str]:
    """Compare the deviation of what Gaussian-k leaves with Top-k's, at each model's last look."""
    last: list[dict[str, float]] = []
    for item in ("p1/fig2", "p1/fig8"):
        rows = stored.results[item].tables[0].rows
        last.append({row.cells[0].rsplit(" ", 2)[0]: float(row.cells[1]) for row in rows})
    ratios = [last[1][model] / last[0][model] for model in last[0] if model in last[1]]
    if not ratios:
        raise LookupError("no model has both")
    return f"its deviation is {min(ratios):.1f} to {max(ratios):.1f} times Top-k's", _share(max(ratios) < 1.5, True)


def _bounds(stored: Stored) -> tuple[str, str]:
    rows = [[float(cell) for cell in row.cells[1:]] for row in stored.table("p1/fig5", "A normal vector").rows]
    held = sum(exact <= ours <= before for exact, ours, before in rows)
    exact, ours, before = rows[0]
    return f"holds at {held} of {len(rows)} densities; at the lowest {exact:.4f} ≤ {ours:.4f} ≤ {before:.4f}", _share(
        held, len(rows)
    )


def _selection(stored: Stored) -> tuple[str, str]:
    caption, row = "Time of selection", "100 M"
    top, gauss, own = (
        stored.number("p1/fig4", caption, row, name)
        for name in ("Top_k (torch.topk)", "Gaussian_k (PyTorch)", "ours: gaussian")
    )
    word = REPRODUCED if gauss < top else PARTLY if own < top else NOT
    return f"H200, 100 M entries: torch.topk {top:.2f} ms, Gaussian-k in PyTorch {gauss:.2f}, ours {own:.2f}", word


def _to_dense(item: str, method: str) -> Judge:
    def judge(stored: Stored) -> tuple[str, str]:
        gaps = {model: stored.number(item, f"{model}: test", method, TO_DENSE) for model in MODELS}
        near = sum(gap > -POINT for gap in gaps.values())
        return ", ".join(f"{model} {gap:+.2f}" for model, gap in gaps.items()) + " points to dense", _share(
            near, len(gaps)
        )

    return judge


def _random_is_slower(stored: Stored) -> tuple[str, str]:
    scores = {
        model: [stored.number("p1/fig1", f"{model}: test", method, SCORE) for method in ("topk", "randk")]
        for model in MODELS
    }
    told = ", ".join(f"{model} {rand:.1f} against {top:.1f}" for model, (top, rand) in scores.items())
    learns = sum(rand > 20 for _, rand in scores.values())  # 10 is chance
    return f"{told}; it learns in {learns} of {len(scores)}", _share(learns, len(scores))


def _printed_form(stored: Stored) -> tuple[str, str]:
    sent = {model: stored.cell("p1/fig6", f"{model}: test", "gaussiank", "density") for model in MODELS}
    near = sum(0.05 < first_number(share) < 0.2 for share in sent.values())
    return "sends " + ", ".join(f"{share} ({model})" for model, share in sent.items()), _share(near, len(sent))


def _order_of_times(stored: Stored) -> tuple[str, str]:
    caption, rows = "Iteration time with P1's compute", ("AlexNet", "VGG-16", "ResNet-50", "Inception-V4")
    slower = sum(
        stored.number("p1/table2", caption, row, "TopK") > stored.number("p1/table2", caption, row, "Dense")
        for row in rows
    )
    top, dense = (stored.cell("p1/table2", caption, "ResNet-50", name) for name in ("TopK", "Dense"))
    return f"slower for {slower} of {len(rows)}; ResNet-50 {top} against dense {dense}", _share(slower, len(rows))


def _model_of_times(stored: Stored) -> tuple[str, str]:
    errors = "Errors by column"
    error = stored.number("p1/table2-model", errors, "TopK, stated", "mean absolute error")
    right = stored.cell("p1/table2-model", errors, "TopK, stated", "faster than dense")
    return f"TopK's column {error:.1f} % off on average, faster or slower than dense {right}", _share(
        right == "right for 4 of 4" and error < 15, True
    )


# ---- P2 and P3 --------------------------------------------------------------------------------------------------


def _layers(stored: Stored) -> tuple[str, str]:
    rows = [row.cells for row in stored.table("p2/table1", ALONE).rows[1:]]
    pairs = [(cells[0], first_number(cells[1]), first_number(cells[2])) for cells in rows]
    held = sum(layer > whole for _, layer, whole in pairs)
    return ", ".join(f"{name} {layer:.1f} and {whole:.1f}" for name, layer, whole in pairs), _share(held, len(pairs))


def _block_sums(stored: Stored) -> tuple[str, str]:
    scores = [stored.number("p2/table1", FIRST, "Block-random-k (allReduce)", f"layer, W = {w}") for w in (1, 2, 4, 8)]
    told = ", ".join(f"{score:.1f}" for score in scores)
    if max(scores) < 20:
        return f"{told}: at chance, which tests nothing", MISSING
    return told, _share(all(a >= b for a, b in pairwise(scores)), True)


def _only_blocks_are_faster(stored: Stored) -> tuple[str, str]:
    rows = stored.table("p2/table2", "A step").rows
    steps = {row.cells[0]: first_number(row.cells[-1]) for row in rows}
    dense = steps.pop("Standard SGD")
    faster = [name for name, ms in steps.items() if ms < dense]
    told = f"{len(faster)} of {len(steps)} are: the fastest {min(steps.values()):.1f} ms against {dense:.1f} dense"
    return told, _share(all(name.startswith("Block") for name in faster) and bool(faster), True)


def _condition(stored: Stored) -> tuple[str, str]:
    rows = stored.table("p3/density", "P3's condition").rows
    looks, above = (sum(int(first_number(row.cells[at])) for row in rows) for at in (1, 4))
    worst = max(first_number(row.cells[2]) for row in rows)
    return f"holds at {looks - above} of {looks} looks, the largest ratio {worst:.4f}", _share(looks - above, looks)


def _like_dense(stored: Stored) -> tuple[str, str]:
    gaps = {
        density: stored.number("p3/density", "gTop-k", f"gTop-k, {density}", TO_DENSE)
        for density in ("0.001", "0.005", "0.01")
    }
    near = sum(gap > -POINT for gap in gaps.values())
    return ", ".join(f"{gap:+.2f} at {density}" for density, gap in gaps.items()) + " points to dense", _share(
        near, len(gaps)
    )


def _more_is_better(stored: Stored) -> tuple[str, str]:
    scores = [stored.number("p3/density", "gTop-k", f"gTop-k, {d}", SCORE) for d in ("0.001", "0.005", "0.01")]
    told = ", ".join(f"{score:.2f}" for score in scores) + " % at 0.1, 0.5 and 1 %"
    return told, _share(scores == sorted(scores), True)


def _growth(stored: Stored) -> tuple[str, str]:
    rows = {row.cells[0].split(" (")[0]: row.cells for row in stored.table("p3/traffic", "Bytes a worker").rows}
    top, tree = (first_number(rows["0.001, 128 workers"][at]) for at in (3, 5))
    return f"128 workers: {top:.0f} k and, at the root, {tree:.0f} k entries", _share(top == 127 and tree == 7, True)


CLAIMS = (
    Claim(SHAPES[0], "gradient plus residual is bell-shaped (Theorem 1's conditions)", "every model, by eye", _bells),
    Claim("p1/fig8", "with Gaussian-k it is distributed as with Top-k", "by eye", _gaussian_shape),
    Claim("p1/fig5", "(1 − k/d)² is a tighter bound than 1 − k/d, and holds", "every k", _bounds),
    Claim(
        "p1/fig4", "top-k selection is slow on GPUs, Gaussian-k nearly free", "V100: top-k 0.4 s at 25.6 M", _selection
    ),
    Claim("p1/fig1", "TopK-SGD ends like dense (16 workers, 0.1 %)", BELOW, _to_dense("p1/fig1", "topk")),
    Claim("p1/fig1", "RandK-SGD learns, but slower", "by eye", _random_is_slower),
    Claim("p1/fig6", "GaussianK-SGD as printed ends like dense", BELOW, _to_dense("p1/fig6", "gaussiank")),
    Claim("p1/fig6", "it sends about k entries", "k = 0.1 % is what it is made for", _printed_form),
    Claim(
        "p1/table2", "at 10 Gbit/s TopK-SGD is slower than dense", "4 of 4; ResNet-50 0.810 s against 0.699",
        _order_of_times,
    ),
    Claim(
        "p1/table2-model", "the published times follow from P1's own top-k cost and two network constants",
        "Table 2", _model_of_times,
    ),
    Claim("p2/table1", "layer by layer is better than globally (no momentum, W = 1)", "93.6 and 91.5 (Top-k)", _layers),
    Claim("p2/table1", "block-random-k by all-reduce degrades with W", "93.2, 92.5, 90.8, 90.6", _block_sums),
    Claim("p2/table2", "only block-random-k is faster than dense", "K80, by eye", _only_blocks_are_faster),
    Claim("p3/density", "gTop-k is no worse than random-k on the sum", "assumed", _condition),
    Claim("p3/density", "so it converges like dense SGD", "in the abstract", _like_dense),
    Claim("p3/density", "more entries, faster convergence", "in the abstract", _more_is_better),
    Claim("p3/traffic", "O(k log P) against O(k P) entries", "the orders", _growth),
)  # fmt: skip
