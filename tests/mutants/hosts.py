"""Seeded defects in hosts."""

from tests.mutants import Mutant

MUTANTS = [
    Mutant(
        "a loss scaler that was forgotten goes unnoticed",
        "src/sparsync/hosts/scaler_check.py",
        "            return caller.is_enabled()",
        "            return False",
        "tests/test_honest_optimizers.py::test_a_loss_scaler_that_was_forgotten_is_noticed[False-keep]",
    ),
    Mutant(
        "a loss scaler that does nothing is told of",
        "src/sparsync/hosts/scaler_check.py",
        "            return caller.is_enabled()",
        "            return True",
        "tests/test_honest_optimizers.py::test_a_loss_scaler_that_was_forgotten_is_noticed[False-move]",
    ),
    Mutant(
        "a forgotten loss scaler is told of at every step",
        "src/sparsync/hosts/scaler_check.py",
        "            found = True",
        "            found = False",
        "tests/test_honest_optimizers.py::test_a_loss_scaler_that_was_forgotten_is_noticed[True-move]",
    ),
    Mutant(
        "a changed update is not announced",
        "src/sparsync/hosts/handle.py",
        "        if told:\n            self._tell(told)",
        "        if told and self._taken is None:\n            self._tell(told)",
        "tests/test_honest_optimizers.py::test_changes_and_what_is_not_known_are_told_once",
    ),
]
