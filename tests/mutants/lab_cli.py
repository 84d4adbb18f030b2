"""Seeded defects in lab_cli."""

from tests.mutants import Mutant

MUTANTS = [
    Mutant(
        "any launch goes on with a run",
        "lab/src/sparsync_lab/cli/checked_training.py",
        "if launch == begun_by:",
        "if launch:",
        "tests/lab/test_run_folders.py::test_only_the_launch_that_began_a_run_goes_on_with_it",
    ),
]
