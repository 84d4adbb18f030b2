"""The first losses of the short trainings of VGG-16, and whether they go with where these trainings end."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

from sparsync_lab.papers.differences import DIVERGED
from sparsync_lab.papers.run import History
from sparsync_lab.papers.vgg16_gap import SHORT, TITLES, cause_label

FIRST, WINDOW = 100, 20  # steps: of the highest loss, and of a mean
LOW = 2.0  # a loss; that of chance is ln 10, 2.30
STRONG = 0.8  # a correlation, whatever its sign
FEWEST = 6  # trainings; among so many one order in 17 is so strong by chance, among fewer more
HEADINGS = ["TopK-SGD's highest loss", f"its {WINDOW}-step mean below {LOW:g} from step"]
WHAT_THEY_ARE = (
    f"The highest loss is that of the first {FIRST} steps; from the step beside it on, to the end, every {WINDOW} "
    f"successive steps have a mean loss below {LOW:g} (chance: ln 10, {math.log(10):.2f}). The later that step is, the "
    "less it tells in advance."
)
ORDERS = {(True, True): "both order them", (True, False): "only the first orders them",
          (False, True): "only the second orders them", (False, False): "neither orders them"}  # fmt: skip


def highest(losses: Sequence[float]) -> float:
    """Return the highest of the first losses; infinite if one of them is not finite."""
    first = losses[:FIRST]
    return max(first) if all(map(math.isfinite, first)) else math.inf


def low_from(losses: Sequence[float]) -> float:
    """Return the step from which on every mean of so many losses is low; infinite if there is none."""
    means = [sum(losses[i : i + WINDOW]) / WINDOW for i in range(len(losses) - WINDOW + 1)]
    step = 1 + max((i for i, mean in enumerate(means, 1) if not mean < LOW), default=0)  # NaN is not low
    return step if step <= len(means) else math.inf


def early_cells(history: History | None) -> list[str]:
    """Return both of a training in words."""
    if history is None:
        return ["–", "–"]
    top, step = highest(history.losses), low_from(history.losses)
    return [f"{top:.2f}" if top < math.inf else DIVERGED, f"{step}" if step < math.inf else "never"]


def rank_correlation(values: Sequence[float], others: Sequence[float]) -> float:
    """Return Spearman's, where equal values share their rank; 0 where all are equal."""
    ranks = [[sum((each < one) + (each <= one) for each in own) for one in own] for own in (values, others)]
    return statistics.correlation(*ranks) if all(len({*own}) > 1 for own in ranks) else 0.0


def early_words(done: Mapping[str, History]) -> str:
    """Return whether the first losses order where TopK-SGD ends, and dense beside it, in a sentence; empty where too
    few trainings of TopK-SGD are there.

    Args:
        done: the short trainings, by label.
    """
    told = {name: words for method, name in TITLES.items() if (words := _order(method, name, done))}
    if TITLES["topk"] not in told:
        return ""
    return (
        f"In VGG-16's trainings of {SHORT} epochs, one seed each, the highest loss of the first {FIRST} steps and the "
        f"step from which on {WINDOW}-step means of the loss are below {LOW:g} have rank correlations with the last "
        f"accuracy of {', and of '.join(told.values())}. A correlation is no cause."
    )


def _order(method: str, name: str, done: Mapping[str, History]) -> str:
    """Return both correlations of a method, and what they order; empty where too few of its trainings are there."""
    own = [history for label, history in done.items() if label.startswith(cause_label(method, ""))]
    if len(own) < FEWEST:
        return ""
    ends = [history.last for history in own]
    found = [rank_correlation([of(history.losses) for history in own], ends) for of in (highest, low_from)]
    first, second = (abs(each) >= STRONG for each in found)
    return f"{' and '.join(f'{each:+.2f}' for each in found)} over {len(own)} of {name} ({ORDERS[first, second]})"
