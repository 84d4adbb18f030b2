"""Seeded defects in feedback."""

from tests.mutants import Mutant

DDP = "tests/test_failures_ddp.py"
DATA = "tests/test_failures_data.py"

MUTANTS = [
    Mutant(
        "residuals keyed by bucket index",
        "src/sparsync/feedback/residual.py",
        "self.arenas[key].spans != spans",
        "self._arenas[key].committed.numel() != numel",
        f"{DDP}::test_02_rebuild_with_equal_sizes_reversed",
    ),
    Mutant(
        "residuals lost at a rebuild",
        "src/sparsync/feedback/residual.py",
        "place.copy_(self._view(span.name))",
        "pass",
        f"{DDP}::test_01_rebuild_keeps_residuals",
    ),
    Mutant(
        "rollback keeps the step",
        "src/sparsync/feedback/residual.py",
        "            arena.rollback()",
        "            arena.commit()",
        f"{DDP}::test_18_skipped_step_is_rolled_back",
    ),
    Mutant(
        "half-precision residual",
        "src/sparsync/feedback/residual.py",
        "return torch.float64 if dtype == torch.float64 else torch.float32",
        "return dtype",
        f"{DATA}::test_27_bf16_training",
    ),
]
