"""Seeded defects of sparsync_lab.chaos."""

from __future__ import annotations

from tests.mutants import Mutant

CONDUCTOR, TESTS = "lab/src/sparsync_lab/chaos/conductor.py", "tests/lab/test_chaos.py"

MUTANTS = [
    Mutant(
        "a deadline that is missed on an idle machine is none",
        CONDUCTOR,
        "    if evidence is not None and not evidence.busy:",
        "    if False:",
        f"{TESTS}::test_a_deadline_that_is_missed_again_is_a_hang[idle]",
    ),
    Mutant(
        "a deadline that is missed again is none",
        CONDUCTOR,
        "    if evidence is not None and again:",
        "    if False:",
        f"{TESTS}::test_a_deadline_that_is_missed_again_is_a_hang[busy]",
    ),
    Mutant(
        "any number of deadlines may be missed",
        CONDUCTOR,
        "    if evidence is not None and missed > TOLERATED:",
        "    if False:",
        f"{TESTS}::test_a_deadline_that_a_busy_machine_misses_is_counted",
    ),
    Mutant(
        "lives that come no further go on for ever",
        CONDUCTOR,
        "    if still >= STUCK:",
        "    if False:",
        f"{TESTS}::test_a_deadline_that_a_busy_machine_misses_is_counted",
    ),
    Mutant(
        "a life may take any time",
        CONDUCTOR,
        "        if now - heard > patience or now - began > longest:",
        "        if now - heard > patience:",
        f"{TESTS}::test_a_life_without_end_ends_with_an_error",
    ),
]
