"""Tests of hostile messages and checkpoints, fed by atheris, which looks for bytes that reach new code: ``make fuzz``.

    python -m tests.fuzz TARGET [libFuzzer's options] [folder of the corpus]
    python -m tests.fuzz MINUTES TARGET...

What hypothesis would draw is read from the bytes. An input that fails is written to a file, and is run again by naming
it in place of the corpus. The second form runs targets one after another, with a corpus of each that is kept, and adds
a row for each to ``results/fuzz.csv``.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

CHECKPOINTS = "checkpoints"
TARGETS = {
    "messages": "test_any_message_is_read_alike_by_loops_and_without",
    "owners": "test_owners_read_any_message_alike",
    "peer": "test_a_hostile_peer_ends_in_our_error_and_changes_nothing",
    "parts": "test_sums_in_parts_with_a_hostile_peer",
    "lengths": "test_a_message_of_another_length_is_refused",
    CHECKPOINTS: "",
}


def checkpoints(stack: ExitStack) -> Any:
    """Return what loads any state, and any file of a rank, into trainings that are made here."""
    from hypothesis import given
    from hypothesis import strategies as st

    from tests import test_hostile_checkpoints as tests

    runs, folder = stack.enter_context(tests.trainings()), Path(stack.enter_context(TemporaryDirectory()))

    @tests.quiet
    @given(st.sampled_from([*runs, "file"]), st.data())
    def load(what: str, data: st.DataObject) -> None:
        if what == "file":
            tests.load_torn_file(runs["threshold"], folder, data)
        else:
            tests.load_damaged(runs[what], data)

    return load


def fuzz(target: str, options: list[str]) -> None:
    import atheris

    with ExitStack() as stack:
        with atheris.instrument_imports(include=["sparsync"]):
            from tests import test_hostile_messages as tests
        test = checkpoints(stack) if target == CHECKPOINTS else getattr(tests, TARGETS[target])
        stack.enter_context(tests.bounds_checked())
        atheris.Setup([sys.argv[0], *options], test.hypothesis.fuzz_one_input)
        atheris.Fuzz()


def main(arguments: list[str]) -> int:
    first, *rest = arguments or [""]
    if first in TARGETS:
        fuzz(first, rest)
    elif first.isdigit() and {*rest} <= {*TARGETS}:
        from tests.fuzz.campaign import run_targets  # which imports what is to be instrumented

        return run_targets(int(first), rest or [*TARGETS])
    else:
        print(f"python -m tests.fuzz {{{','.join(TARGETS)}}} [libFuzzer's options], or MINUTES TARGET...")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
