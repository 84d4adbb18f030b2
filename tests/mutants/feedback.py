"""Seeded defects in feedback."""

from tests.mutants import Mutant

MUTANTS = [
    Mutant(
        "residuals keyed by bucket index",
        "src/sparsync/feedback/residual.py",
        "self.flat[key].spans != spans",
        "self.flat[key].committed.numel() != numel",
        "tests/failures/test_bucket_rebuilds.py::test_residuals_follow_their_parameters_when_equal_sizes_are_reversed",
    ),
    Mutant(
        "residuals lost at a rebuild",
        "src/sparsync/feedback/residual.py",
        "place.copy_(self._view(span.name))",
        "pass",
        "tests/failures/test_bucket_rebuilds.py::test_residuals_survive_a_rebuild_into_buckets_of_other_sizes",
    ),
    Mutant(
        "rollback keeps the step",
        "src/sparsync/feedback/residual.py",
        "            buffer.rollback()",
        "            buffer.commit()",
        "tests/failures/test_loss_scaling.py::test_a_step_that_the_user_skips_leaves_no_trace",
    ),
    Mutant(
        "half-precision residual",
        "src/sparsync/feedback/residual.py",
        "return torch.float64 if dtype == torch.float64 else torch.float32",
        "return dtype",
        "tests/failures/test_dtypes_and_layouts.py::test_bf16_training_keeps_an_fp32_residual",
    ),
]
