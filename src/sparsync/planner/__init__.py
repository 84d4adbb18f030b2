"""How long a step takes with each method, before anything is trained: a cost model of networks and exchanges.

``links`` (latency and bandwidth), ``costs`` (what choosing and coding entries takes) and ``overlap`` (exchanges beside
backward) know nothing of one another; ``forecast`` brings them together with the bytes that ``engine/traffic.py``
predicts for the very plan that ``attach`` would make.
"""

from sparsync.planner.costs import CostBook, FixedCosts, LocalCost, MethodCost
from sparsync.planner.forecast import ForecastRow, Planner, StepForecast
from sparsync.planner.links import Link, Network
from sparsync.planner.methods import METHODS, Method
from sparsync.planner.model import ModelShape
from sparsync.planner.report import Plan
from sparsync.planner.stored_costs import ForeignCosts, StoredCosts

__all__ = [
    "METHODS",
    "CostBook",
    "FixedCosts",
    "ForecastRow",
    "ForeignCosts",
    "Link",
    "LocalCost",
    "Method",
    "MethodCost",
    "ModelShape",
    "Network",
    "Plan",
    "Planner",
    "StepForecast",
    "StoredCosts",
]
