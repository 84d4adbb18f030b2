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
]
