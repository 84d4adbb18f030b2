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
]
