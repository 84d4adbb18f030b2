"""Virtual workers: P workers in one process, on the engine that real processes run."""

from sparsync.simulate.exchange import VirtualExchange
from sparsync.simulate.sequential import SequentialPasses
from sparsync.simulate.virtual_units import Tally
from sparsync.simulate.virtual_workers import VirtualWorkers

__all__ = ["SequentialPasses", "Tally", "VirtualExchange", "VirtualWorkers"]
