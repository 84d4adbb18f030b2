"""Seeded defects in lab_virtual."""

from tests.mutants import Mutant

TESTS = "tests/lab/test_feedback_variants.py"
FILE = "lab/src/sparsync_lab/virtual/feedback_variants.py"

MUTANTS = [
    Mutant(
        "the exact second moment is that of the sum over the workers",
        FILE,
        "self._sums.pop(first) / self.workers",
        "self._sums.pop(first)",
        f"{TESTS}::test_exact_moments_are_those_of_the_mean_gradient",
    ),
    Mutant(
        "one step old is this step's",
        FILE,
        "sizes[self.matrices] = self.newest",
        "sizes[self.matrices] = newest",
        f"{TESTS}::test_one_step_old_is_what_the_library_had_in_the_step_before",
    ),
    Mutant(
        "own moments are not in use",
        FILE,
        "owned = made.owned if isinstance(made, CommonPreconditioner) else [made] * workers",
        "owned = [made] * workers",
        f"{TESTS}::test_what_a_worker_keeps_was_divided_by_its_own_moment",
    ),
    Mutant(
        "a checkpoint forgets the moments that workers have in common",
        FILE,
        'self.load_state_dict(state["moments"])',
        "pass",
        f"{TESTS}::test_an_ablation_differs_sends_the_same_bytes_and_goes_on_from_a_checkpoint",
    ),
]
