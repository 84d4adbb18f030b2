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
    Mutant(
        "a batch more than there are workers is left out",
        "src/sparsync/simulate/sequential.py",
        "if len(batches) != len(self.models):",
        "if len(batches) < len(self.models):",
        "tests/test_virtual.py::test_what_is_asked_wrongly_is_refused",
    ),
    Mutant(
        "virtual workers take options that they ignore",
        "src/sparsync/simulate/virtual_workers.py",
        "            if name in options:\n",
        "            if False:\n",
        "tests/test_virtual.py::test_what_is_asked_wrongly_is_refused",
    ),
    Mutant(
        "a state of another number of virtual workers is loaded",
        "src/sparsync/simulate/virtual_workers.py",
        'if state["workers"] != self.workers:',
        "if False:",
        "tests/test_virtual.py::test_what_is_asked_wrongly_is_refused",
    ),
]
