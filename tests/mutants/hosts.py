"""Seeded defects in hosts."""

from tests.mutants import Mutant

BYPASSED = "tests/failures/test_bypassed_hook.py"

MUTANTS = [
    Mutant(
        "a loss scaler that was forgotten goes unnoticed",
        "src/sparsync/hosts/scaler_check.py",
        "            return caller.is_enabled()",
        "            return False",
        "tests/test_honest_optimizers.py::test_a_loss_scaler_that_was_forgotten_is_noticed[False-keep]",
    ),
    Mutant(
        "a loss scaler that does nothing is told of",
        "src/sparsync/hosts/scaler_check.py",
        "            return caller.is_enabled()",
        "            return True",
        "tests/test_honest_optimizers.py::test_a_loss_scaler_that_was_forgotten_is_noticed[False-move]",
    ),
    Mutant(
        "a forgotten loss scaler is told of at every step",
        "src/sparsync/hosts/scaler_check.py",
        "            found = True",
        "            found = False",
        "tests/test_honest_optimizers.py::test_a_loss_scaler_that_was_forgotten_is_noticed[True-move]",
    ),
    Mutant(
        "a changed update is not announced",
        "src/sparsync/hosts/handle.py",
        "        if told:\n            self._tell(told)",
        "        if told and self._taken is None:\n            self._tell(told)",
        "tests/test_honest_optimizers.py::test_changes_and_what_is_not_known_are_told_once",
    ),
    Mutant(
        "a model that was wrapped for the Python reducer is attached to",
        "src/sparsync/hosts/ddp.py",
        """if getattr(ddp, "_use_python_reducer", False):""",
        "if False:",
        f"{BYPASSED}::test_the_python_reducer_of_a_compiled_model_is_refused[eager]",
    ),
    Mutant(
        "the hook takes what is no bucket",
        "src/sparsync/hosts/ddp.py",
        "        raise SparsyncError(PYTHON_REDUCER)",
        "        return Future()",
        f"{BYPASSED}::test_the_python_reducer_of_a_compiled_model_is_refused[eager]",
    ),
    Mutant(
        "a step without any bucket goes unnoticed at the optimizer's step",
        "src/sparsync/hosts/ddp.py",
        "register_step_pre_hook(lambda *_: look())",
        "register_step_pre_hook(lambda *_: None)",
        f"{BYPASSED}::test_a_step_without_any_bucket_is_noticed_on_every_rank[optimizer-0-2]",
    ),
    Mutant(
        "a step without any bucket goes unnoticed once one has come",
        "src/sparsync/hosts/bucket_check.py",
        "self._synchronised, self._accumulated, self.came = synchronised, False, False",
        "self._synchronised, self._accumulated = synchronised, False",
        f"{BYPASSED}::test_a_step_without_any_bucket_is_noticed_on_every_rank[forward-3-2]",
    ),
    Mutant(
        "gradients under no_sync are missed in buckets",
        "src/sparsync/hosts/bucket_check.py",
        "self._accumulated = self._synchronised",
        "self._accumulated = True",
        f"{BYPASSED}::test_steps_that_need_no_bucket_raise_no_alarm[2]",
    ),
]
