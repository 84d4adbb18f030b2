"""P3: A Convergence Analysis of Distributed SGD with Communication-Efficient Gradient Sparsification (Shi, 2019)."""

from __future__ import annotations

from sparsync.experiments.papers import timing
from sparsync.experiments.papers.item import Item

ITEMS = (
    Item(
        "p3/traffic",
        "traffic of gTop-k",
        "What a worker sends grows with P for Top-k over all-gather, with log P for gTop-k, and hardly for dense.",
        timing.traffic,
    ),
)
