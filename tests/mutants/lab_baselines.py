"""Seeded defects in lab_baselines."""

from tests.mutants import Mutant

TESTS = "tests/lab/test_baselines.py"

MUTANTS = [
    Mutant(
        "DeMo keeps what it has sent",
        "lab/src/sparsync_lab/baselines/demo.py",
        "momentum.scatter_add_(-1, places, -values)",
        "momentum.scatter_add_(-1, places, 0 * values)",
        f"{TESTS}::test_demo_is_its_definition",
    ),
    Mutant(
        "DeMo's transform back is the one there",
        "lab/src/sparsync_lab/baselines/demo.py",
        "(down.T @ mean @ right)",
        "(down @ mean @ right.T)",
        f"{TESTS}::test_demo_is_its_definition",
    ),
    Mutant(
        "SparseLoCo forgets its error",
        "lab/src/sparsync_lab/baselines/sparse_loco.py",
        "-values.flatten(1))",
        "values.flatten(1))",
        f"{TESTS}::test_sparse_loco_with_all_entries_averages_local_adamw",
    ),
    Mutant(
        "SparseLoCo's workers share their weights",
        "lab/src/sparsync_lab/baselines/local_step_workers.py",
        "self.models = [deepcopy(model) for _ in self.models]",
        "self.models = [model for _ in self.models]",
        f"{TESTS}::test_sparse_loco_with_all_entries_averages_local_adamw",
    ),
    Mutant(
        "baselines count one message",
        "lab/src/sparsync_lab/baselines/base.py",
        "(self.workers - 1) * message",
        "message",
        f"{TESTS}::test_budgets_hold_and_are_used[demo]",
    ),
    Mutant(
        "the control's second moment is not corrected for its start",
        "lab/src/sparsync_lab/baselines/factored_adamw.py",
        "(v / correction)",
        "(v / 1)",
        f"{TESTS}::test_factored_adamw_equals_adamw_where_v_has_rank_one",
    ),
    Mutant(
        "the control has no floor",
        "lab/src/sparsync_lab/baselines/factored_adamw.py",
        'group["floor"] * mean',
        "0 * mean",
        f"{TESTS}::test_the_floor_holds_v_up",
    ),
]
