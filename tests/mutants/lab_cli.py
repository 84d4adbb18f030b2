"""Seeded defects in lab_cli."""

from tests.mutants import Mutant

MUTANTS = [
    Mutant(
        "a training that ends in NaN ends well",
        "lab/src/sparsync_lab/cli/train.py",
        "        refuse_diverged(outcome)",
        "        pass",
        "tests/lab/test_train.py::test_a_training_that_ends_in_nan_fails_and_says_so",
    ),
    Mutant(
        "the fewest bytes are crowned, whatever they learn",
        "lab/src/sparsync_lab/cli/compare_report.py",
        "best = max(near, key=lambda line: line.accuracy)",
        "best = max(near, key=lambda line: line.ratio)",
        "tests/lab/test_compare.py::test_of_two_that_send_about_as_little_the_more_accurate_is_named",
    ),
    Mutant(
        "any launch goes on with a run",
        "lab/src/sparsync_lab/cli/checked_training.py",
        "if launch == begun_by:",
        "if launch:",
        "tests/lab/test_run_folders.py::test_only_the_launch_that_began_a_run_goes_on_with_it",
    ),
]
