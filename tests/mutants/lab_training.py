"""Seeded defects in lab_training."""

from tests.mutants import Mutant

MUTANTS = [
    Mutant(
        "a method that misses dense is not shown so",
        "lab/src/sparsync_lab/training/compare.py",
        "return self.gap > TOLERANCE",
        "return False",
        "tests/lab/test_compare.py::test_more_than_a_point_under_dense_misses_it[0.0101-True]",
    ),
]
