"""Methods that others published for AdamW-like training at few bytes, written from their papers, on virtual workers.

``demo.py``: DeMo; ``sparse_loco.py``: SparseLoCo; ``blocks.py``: what both choose from and what it costs to send;
``factored_adamw.py``: dense AdamW with the row x column second moment, the control of preconditioned feedback.
"""

from sparsync_lab.baselines.base import BaselineWorkers
from sparsync_lab.baselines.demo import DeMo
from sparsync_lab.baselines.factored_adamw import FactoredAdamW
from sparsync_lab.baselines.sparse_loco import SparseLoCo

__all__ = ["BASELINES", "BaselineWorkers", "DeMo", "FactoredAdamW", "SparseLoCo"]

BASELINES: dict[str, type[BaselineWorkers]] = {"demo": DeMo, "sparse-loco": SparseLoCo}
