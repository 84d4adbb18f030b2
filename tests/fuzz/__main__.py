"""Tests of hostile messages, fed by atheris, which looks for bytes that reach new code: ``make fuzz``.

    python -m tests.fuzz TARGET [libFuzzer's options] [folder of the corpus]

What hypothesis would draw is read from the bytes. An input that fails is written to a file, and is run again by naming
it in place of the corpus.
"""

from __future__ import annotations

import sys

TARGETS = {
    "messages": "test_any_message_is_read_alike_by_loops_and_without",
    "owners": "test_owners_read_any_message_alike",
    "peer": "test_a_hostile_peer_ends_in_our_error_and_changes_nothing",
    "parts": "test_sums_in_parts_with_a_hostile_peer",
    "lengths": "test_a_message_of_another_length_is_refused",
}


def main() -> None:
    import atheris

    if len(sys.argv) < 2 or sys.argv[1] not in TARGETS:
        sys.exit(f"python -m tests.fuzz {{{','.join(TARGETS)}}} [libFuzzer's options]")
    with atheris.instrument_imports(include=["sparsync"]):
        from tests import test_hostile_messages as tests

    with tests.bounds_checked():
        test = getattr(tests, TARGETS[sys.argv.pop(1)])
        atheris.Setup(sys.argv, test.hypothesis.fuzz_one_input)
        atheris.Fuzz()


main()
