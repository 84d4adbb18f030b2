"""Seeded defects in schedule."""

from tests.mutants import Mutant

MUTANTS = [
    Mutant(
        "a schedule may say any density",
        "src/sparsync/schedule.py",
        "        if not (is_number(now) and 0 < now <= 1):",
        "        if False:",
        "tests/failures/test_number_of_entries.py::test_a_density_out_of_range_is_refused",
    ),
    Mutant(
        "a front-loaded density takes any number of steps",
        "src/sparsync/schedule.py",
        "if not (isinstance(self.steps, int) and self.steps >= 1):",
        "if False:",
        "tests/test_options.py::test_a_front_loaded_density_begins_high_and_ends_low",
    ),
]
