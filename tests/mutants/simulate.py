"""Seeded defects in simulate."""

from tests.mutants import Mutant

MUTANTS = [
    Mutant(
        "of a spoilt step what was sent comes home before what was dropped leaves",
        "src/sparsync/simulate/exchange.py",
        "                if result.rejected is not None:  # first",
        "                worker.feedback.restore_to_residual(part.unit.key, sent)\n"
        "                sent = replace(sent, values=0 * sent.values)\n"
        "                if result.rejected is not None:  # first",
        "tests/test_virtual.py::test_a_gradient_that_is_not_finite_comes_home_as_in_processes[gtopk]",
    ),
]
