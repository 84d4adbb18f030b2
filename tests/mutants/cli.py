"""Defects of the command line."""

from __future__ import annotations

from tests.mutants import Mutant

MUTANTS = [
    Mutant(
        "a script that attaches ends with a traceback",
        "src/sparsync/cli/plan_script.py",
        "if _keep.__qualname__ not in str(error):",
        "if True:",
        "tests/test_plan_cli.py::test_the_model_of_a_users_own_script_is_measured[attached]",
    ),
    Mutant(
        "a plan of no model, or of two",
        "src/sparsync/cli/plan.py",
        "if (given.model is None) == (given.params is None):",
        "if False:",
        "tests/test_plan_cli.py::test_bad_input_is_one_sentence_and_code_2",
    ),
]
