"""Seeded defects in simulate."""

from tests.mutants import Mutant

MUTANTS = [
    Mutant(
        "what virtual workers sent in a non-finite step is lost",
        "src/sparsync/simulate/exchange.py",
        "worker.ledger.restore(Cause.NON_FINITE)",
        "pass",
        "tests/test_virtual.py::test_a_gradient_that_is_not_finite_comes_home_as_in_processes[gtopk]",
    ),
    Mutant(
        "sums of virtual nodes are divided by the nodes",
        "src/sparsync/simulate/exchange.py",
        "        divisor = (len(self.workers),) if self.nodes else ()",
        "        divisor = ()",
        "tests/test_hierarchy.py::test_virtual_workers_in_nodes_of_two_are_processes[net-topk]",
    ),
]
