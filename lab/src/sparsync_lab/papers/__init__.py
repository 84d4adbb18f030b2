"""Every figure and table of the papers, by one command: ``sparsync papers``.

``p1.py``, ``p2.py``, ``p3.py``, ``beyond.py``, ``adamw.py``, ``outer.py`` and ``evidence.py`` hold the items;
``item.py`` says what an item is, ``run.py`` what a training is and holds its history, ``trainings.py`` makes it, in
pieces, ``run_queue.py`` shares them between processes. ``sweep.py`` lists what is compared at equal bytes,
``equal_bytes.py`` finds the densities for that, ``lr_search.py`` searches learning rates, and ``tables.py`` shows the
results; ``adamw_sweep.py`` and ``adamw_tables.py`` do so for AdamW. ``differences.py`` says when one training ends
like another; ``claims/`` judges what the papers claim.
"""

from sparsync_lab.papers import adamw, beyond, evidence, outer, p1, p2, p3
from sparsync_lab.papers.item import Item, Result, RunContext

__all__ = ["ITEMS", "Item", "Result", "RunContext", "chosen"]

ITEMS: dict[str, Item] = {
    item.key: item for module in (p1, p2, p3, beyond, adamw, outer, evidence) for item in module.ITEMS
}


def chosen(key: str) -> list[Item]:
    """Return the items that a key names: one, all of a paper (``"p1"``), or ``"all"``."""
    found = [item for item in ITEMS.values() if key in ("all", item.key, item.key.split("/")[0])]
    if not found:
        raise ValueError(f"item must be 'all', a paper or one of {', '.join(ITEMS)}, got {key!r}")
    return found
