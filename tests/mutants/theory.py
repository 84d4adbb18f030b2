"""Seeded defects in theory."""

from tests.mutants import Mutant

MUTANTS = [
    Mutant(
        "a bound after fewer than no steps",
        "src/sparsync/theory.py",
        "    if steps < 0:\n",
        "    if False:\n",
        "tests/test_theory.py::test_what_makes_no_sense_is_refused",
    ),
    Mutant(
        "a gradient of zeros has a shape",
        "src/sparsync/theory.py",
        " or not bool(u.any()):",
        ":",
        "tests/test_theory.py::test_what_makes_no_sense_is_refused",
    ),
]
