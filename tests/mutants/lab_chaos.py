"""Seeded defects of sparsync_lab.chaos."""

from __future__ import annotations

from tests.mutants import Mutant

CONDUCTOR, TESTS = "lab/src/sparsync_lab/chaos/conductor.py", "tests/lab/test_chaos.py"
TOLD = "lab/src/sparsync_lab/chaos/told.py"

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
        "a survivor may have any error",
        CONDUCTOR,
        '        if isinstance(answer, Outcome) and answer.end == "failed" and not answer.expected:',
        "        if False:",
        f"{TESTS}::test_a_survivor_has_to_be_told_by_the_library",
    ),
    Mutant(
        "an error of torch that the library lets through is excused",
        TOLD,
        " or any(file.is_relative_to(OURS) for file, _ in frames):",
        ":",
        f"{TESTS}::test_no_other_error_than_that_of_torchs_own_exchange_is_excused",
    ),
    Mutant(
        "any error under join is excused",
        TOLD,
        "    return joining and not ASKS.isdisjoint(of_ddp)",
        "    return joining",
        f"{TESTS}::test_no_other_error_than_that_of_torchs_own_exchange_is_excused",
    ),
    Mutant(
        "DDP's own exchanges are excused in every step",
        TOLD,
        "    return joining and not ASKS.isdisjoint(of_ddp)",
        "    return not ASKS.isdisjoint(of_ddp)",
        f"{TESTS}::test_no_other_error_than_that_of_torchs_own_exchange_is_excused",
    ),
    Mutant(
        "a survivor need not be told whom it happened to",
        CONDUCTOR,
        "{fault.rank, *left} and not names_the_cause(life, told, left):",
        "{fault.rank, *left} and False:",
        f"{TESTS}::test_the_library_has_to_name_whom_it_happened_to_and_what",
    ),
    Mutant(
        "a group that is made anew waits for half an hour",
        "lab/src/sparsync_lab/chaos/events.py",
        "dist.new_group(timeout=limit)",
        "dist.new_group()",
        f"{TESTS}::test_a_rank_that_waits_for_a_stopped_one_under_join_is_told",
    ),
    Mutant(
        "some methods never have their turn",
        "lab/src/sparsync_lab/chaos/schedule.py",
        ".sample([*METHODS], len(METHODS))[place]",
        ".choices([*METHODS], k=len(METHODS))[place]",
        f"{TESTS}::test_every_method_has_its_turn_before_one_comes_again",
    ),
    Mutant(
        "a life may take any time",
        CONDUCTOR,
        "        if now - heard > patience or now - began > longest:",
        "        if now - heard > patience:",
        f"{TESTS}::test_a_life_without_end_ends_with_an_error",
    ),
]
