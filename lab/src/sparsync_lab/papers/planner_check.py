"""The planner against P1's table 2: published times of a cluster that nobody here has seen."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from sparsync.planner import METHODS, FixedCosts, Link, LocalCost, MethodCost, ModelShape, Network, Planner
from sparsync.planner.links import fit_link
from sparsync.planner.measure_link import all_reduce_transfer
from sparsync_lab.models import IMAGENET
from sparsync_lab.papers.item import Result, RunContext
from sparsync_lab.papers.published import P1_STEP_TIMES
from sparsync_lab.report import Row, Table

WORKERS = 16
ONE_BUCKET = (2**62, 2**62)  # P1 exchanges after backward, all at once
TOPK_SECONDS, TOPK_ENTRIES = 0.4, 25_557_032  # "the Top_k operator ... consumes 0.4 seconds"
SPARSE = ("TopK", "DGC", "Gaussian")


class PublishedModel(NamedTuple):
    """A row of P1's table 2.

    Args:
        compute: seconds of a single GPU: dense's iteration time times its scaling efficiency.
        seconds: published, by method.
    """

    title: str
    numel: int
    compute: float
    seconds: dict[str, float]


class CheckedCell(NamedTuple):
    """An iteration time, predicted and published; ``cost``: where its selection's time is from."""

    model: str
    method: str
    cost: str
    predicted: float
    published: float

    @property
    def error(self) -> float:
        return self.predicted / self.published - 1


def published_models() -> list[PublishedModel]:
    """Return the rows of P1's table 2."""
    return [
        PublishedModel(
            title, IMAGENET[name][2], times[0] * shares[0] / 100, dict(zip(("Dense", *SPARSE), times, strict=True))
        )
        for name, title, _, times, shares in P1_STEP_TIMES
    ]


def fitted_link(models: Sequence[PublishedModel]) -> Link:
    """Return latency and bandwidth that explain what the dense column takes beside compute: the only fit."""
    transfers = [all_reduce_transfer(model.numel, WORKERS) for model in models]
    return fit_link(transfers, [model.seconds["Dense"] - model.compute for model in models])


def predict(model: PublishedModel, link: Link, method: str, per_entry: float = 0.0) -> float:
    """Return the planner's iteration time; ``per_entry``: seconds that selection takes for an entry."""
    shape = ModelShape.of_size(model.numel)
    shape = ModelShape(model.title, shape.tensors, shape.work, ONE_BUCKET)
    costs = FixedCosts(MethodCost(select=LocalCost(per_entry=per_entry)))
    (row,) = Planner(shape, WORKERS, model.compute, costs, methods={method: METHODS[method]}).rows(Network(link))
    return row.seconds


def cost_elsewhere(models: Sequence[PublishedModel], held_out: PublishedModel, link: Link, method: str) -> float:
    """Return the seconds an entry that a method's selection takes on the other models: what their published times
    leave beside compute and the predicted exchange, by least squares."""
    others = [model for model in models if model is not held_out]
    left = [model.seconds[method] - predict(model, link, "paper") for model in others]
    squares = sum(model.numel**2 for model in others)
    return max(0.0, sum(model.numel * seconds for model, seconds in zip(others, left, strict=True)) / squares)


def stated_topk(model: PublishedModel, link: Link, cost: str) -> CheckedCell:
    """Return TopK's cell with P1's 0.4 s of selection, scaled with the entries."""
    predicted = predict(model, link, "paper", TOPK_SECONDS / TOPK_ENTRIES)
    return CheckedCell(model.title, "TopK", cost, predicted, model.seconds["TopK"])


def stated_table(link: Link) -> Table:
    """Return TopK's column with P1's own cost of selection, on a network of which nothing is fitted."""
    rows, errors = [], []
    for model in published_models():
        dense, cell = predict(model, link, "dense fp32"), stated_topk(model, link, "stated")
        errors.append(cell.error)
        own = f"{model.compute:.3f} s", f"{TOPK_SECONDS * model.numel / TOPK_ENTRIES:.3f} s"
        pair = f"{dense:.3f} s ({model.seconds['Dense']:.3f})", f"{cell.predicted:.3f} s ({cell.published:.3f})"
        slower = "yes" if cell.predicted > dense else "no"
        rows.append(Row([model.title, *own, *pair, f"{100 * cell.error:+.1f} %", slower]))
    headings = ["model", "compute, P1", "selection, P1's", "Dense", "TopK", "error of TopK", "slower than dense"]
    mean = sum(map(abs, errors)) / len(errors)
    return Table(
        "TopK-SGD with P1's 0.4 s of selection for ResNet-50, scaled with the entries; published in brackets",
        headings,
        rows,
        [
            "By the model of sparsync plan, at 10 Gbit/s and 50 µs a round, of which nothing is fitted: "
            f"{100 * mean:.1f} % off on average. p1/table2-model fits the network, and predicts the other columns."
        ],
    )


def checked_cells(models: Sequence[PublishedModel], link: Link) -> list[CheckedCell]:
    """Return every cell of the table, predicted and published."""
    cells = []
    for model in models:
        cells.append(
            CheckedCell(model.title, "Dense", "fitted", predict(model, link, "dense fp32"), model.seconds["Dense"])
        )
        cells.append(stated_topk(model, link, "stated"))
        for method in SPARSE:
            predicted = predict(model, link, "paper", cost_elsewhere(models, model, link, method))
            cells.append(CheckedCell(model.title, method, "other models", predicted, model.seconds[method]))
    return cells


def table_2_predicted(context: RunContext) -> Result:
    """Predict P1's table 2 by the planner, and hold it against what is printed."""
    models = published_models()
    link = fitted_link(models)
    cells = checked_cells(models, link)
    kinds = list(dict.fromkeys((cell.method, cell.cost) for cell in cells))
    found = {(cell.model, cell.method, cell.cost): cell for cell in cells}
    rows = [
        Row([model.title, f"{model.compute:.4f} s", *(_text(found[model.title, *kind]) for kind in kinds)])
        for model in models
    ]
    headings = ["model", "compute, P1", *(f"{method}, {cost}" for method, cost in kinds)]
    mean = {kind: _mean_error([found[model.title, *kind] for model in models]) for kind in kinds}
    errors = [Row([f"{method}, {cost}", f"{100 * mean[method, cost]:.1f} %", _order(models, found, (method, cost))])
              for method, cost in kinds]  # fmt: skip
    return Result(
        [
            Table("Iteration time, predicted; in brackets published, then the error", headings, rows),
            Table("Errors by column", ["column", "mean absolute error", "faster than dense"], errors),
        ],
        notes=[
            f"Fitted on the dense column: {link.bandwidth / 1e9:.2f} Gbit/s (P1 has Ethernet of 10) and "
            f"{1e3 * link.latency:.2f} ms for each of a ring's rounds, of which a dense sum has 30 and an all-gather "
            "15. Nothing of the sparse columns is in these two constants.",
            "Compute is P1's: dense's iteration time times the efficiency printed beside it. The dense sum is one "
            "message after backward: what it adds to compute grows with the parameters and not with compute, as if "
            "nothing were hidden.",
            "This is the only structure of the exchange that was tried.",
            "TopK, stated, is the test as it was planned: the text gives 0.4 s for the 25.6 million entries of "
            "ResNet-50, scaled with the number of entries. Predictions are "
            f"{_range(found[model.title, 'TopK', 'stated'] for model in models)} off. That cost is more than the table "
            "has room for: ResNet-50's TopK iteration is 0.35 s longer than its compute, exchange included.",
            "Other models: added once that was seen, and because the text gives no times of DGC's and Gaussian-k's "
            "selection. The cost of an entry is what the three other models' published times leave, so that no cell is "
            "used to predict itself; but sparse cells are. TopK is then "
            f"{_range(found[model.title, 'TopK', 'other models'] for model in models)} off, DGC "
            f"{_range(found[model.title, 'DGC', 'other models'] for model in models)}, Gaussian-k "
            f"{_range(found[model.title, 'Gaussian', 'other models'] for model in models)}.",
            "Faster than dense: whether it is, is predicted rightly; as most methods are far from dense, that is a "
            "weak test.",
            "Every method sends k entries here. What DGC and Gaussian-k take does not grow in proportion to the "
            "entries in P1's table (Gaussian-k adds 0.126 s to ResNet-50 and 0.097 s to Inception-V4, which has 1.7 "
            "times as many), and what P1 does beside selection is not printed: there the model is as far off as the "
            "table says.",
        ],
        rows={
            "model": [cell.model for cell in cells],
            "method": [cell.method for cell in cells],
            "selection_cost": [cell.cost for cell in cells],
            "predicted_s": [cell.predicted for cell in cells],
            "published_s": [cell.published for cell in cells],
            "error": [cell.error for cell in cells],
        },
    )


def _text(cell: CheckedCell) -> str:
    return f"{cell.predicted:.3f} s ({cell.published:.3f}), {100 * cell.error:+.1f} %"


def _range(cells: Iterable[CheckedCell]) -> str:
    errors = sorted(100 * cell.error for cell in cells)
    return f"{errors[0]:+.1f} to {errors[-1]:+.1f} %"


def _mean_error(cells: Sequence[CheckedCell]) -> float:
    return sum(abs(cell.error) for cell in cells) / len(cells)


def _order(
    models: Sequence[PublishedModel], found: dict[tuple[str, str, str], CheckedCell], kind: tuple[str, str]
) -> str:
    """Return for how many models it was predicted rightly whether a column is faster than dense."""
    if kind[0] == "Dense":
        return "–"
    right = 0
    for model in models:
        dense, own = found[model.title, "Dense", "fitted"], found[model.title, *kind]
        right += (own.predicted < dense.predicted) == (own.published < dense.published)
    return f"right for {right} of {len(models)}"
