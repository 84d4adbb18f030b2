"""Seeded defects in hosts."""

from tests.mutants import Mutant

BYPASS = "tests/failures/test_what_bypasses_the_hook.py"
RESTARTS = "tests/failures/test_restarts.py"
SHARDED = "tests/failures/test_distributed_checkpoints.py"
ZERO_GRAD = (
    "tests/failures/test_clipping_and_accumulation.py::test_backward_without_zero_grad_loses_nothing_and_is_told_once"
)
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
        "        if told and not self._told:\n",
        "        if told and not self._told and self._taken is None:\n",
        "tests/test_honest_optimizers.py::test_changes_and_what_is_not_known_are_told_once",
    ),
    Mutant(
        "a joined rank's residual is not frozen",
        "src/sparsync/hosts/handle.py",
        'joined and self.plan.joined == "freeze"',
        "False",
        "tests/failures/test_join.py::test_the_residual_of_a_joined_rank_may_be_frozen[layer]",
    ),
    Mutant(
        "every joined rank's residual is frozen",
        "src/sparsync/hosts/handle.py",
        'joined and self.plan.joined == "freeze"',
        "joined",
        "tests/failures/test_join.py::test_a_joined_rank_goes_on_sending_what_it_kept[2]",
    ),
    Mutant(
        "gradients that were not zeroed go unnoticed",
        "src/sparsync/hosts/zero_grad_check.py",
        "                tell(SENTENCE)",
        "                pass",
        f"{ZERO_GRAD}[never]",
    ),
    Mutant(
        "gradients that were zeroed are told of",
        "src/sparsync/hosts/zero_grad_check.py",
        "bool(parameter.grad.any())",
        "True",
        f"{ZERO_GRAD}[after forward]",
    ),
    Mutant(
        "sparse gradients are let in",
        "src/sparsync/hosts/coverage.py",
        "        if sparse and name not in left_out:",
        "        if False:",
        f"{BYPASS}::test_sparse_gradients_are_refused_in_one_sentence",
    ),
    Mutant(
        "gradients that were cast are let in",
        "src/sparsync/hosts/ddp.py",
        "    if came != own and not own.is_complex:",
        "    if False:",
        f"{BYPASS}::test_a_wrapper_that_casts_gradients_is_noticed[fp16]",
    ),
    Mutant(
        "DDP's mixed precision is not told from other hooks",
        "src/sparsync/hosts/ddp.py",
        '    if getattr(ddp, "mixed_precision", None) is not None:',
        "    if False:",
        f"{BYPASS}::test_ddps_own_mixed_precision_is_explained",
    ),
    Mutant(
        "what never comes in a bucket is taken for compressed",
        "src/sparsync/hosts/handle.py",
        "for name, p in named if name not in self.left_out}",
        "for name, p in named}",
        f"{BYPASS}::test_parameters_that_ddp_ignores_or_reduces_later_are_listed[layer-keep]",
    ),
    Mutant(
        "a restart without residuals goes unnoticed",
        "src/sparsync/hosts/handle.py",
        "        if self._restarts:",
        "        if False:",
        f"{RESTARTS}::test_a_restart_without_a_checkpoint_is_told_once[2-False-1]",
    ),
    Mutant(
        "a restart is told of though residuals were loaded",
        "src/sparsync/hosts/handle.py",
        "        self._restarts = 0  # and nothing is lost by them",
        "        pass",
        f"{RESTARTS}::test_a_restart_without_a_checkpoint_is_told_once[2-True-0]",
    ),
    Mutant(
        "a new process group begins with nothing",
        "src/sparsync/hosts/handle.py",
        "        self._load(share_of([state], state, ",
        "        str(share_of([state], state, ",
        f"{RESTARTS}::test_a_process_group_may_be_replaced[keep]",
    ),
    Mutant(
        "a rank that goes on for several takes the first for all",
        "src/sparsync/hosts/sharded_checkpoint.py",
        "value.to_local()[number - first]",
        "value.to_local()[0]",
        f"{SHARDED}::test_a_distributed_checkpoint_loads_on_any_world_size[5-2]",
    ),
    Mutant(
        "a distributed checkpoint takes rank 0's state for all",
        "src/sparsync/hosts/sharded_checkpoint.py",
        'if caller.startswith("torch.distributed.checkpoint"):',
        "if False:",
        f"{SHARDED}::test_a_handle_is_stateful[2-2]",
    ),
    Mutant(
        "a distributed checkpoint is loaded that nobody has looked at",
        "src/sparsync/hosts/sharded_checkpoint.py",
        """        if self._make_room is None:
            raise""",
        """        if False:
            raise""",
        f"{SHARDED}::test_a_distributed_checkpoint_that_does_not_fit_is_refused",
    ),
    Mutant(
        "distributed checkpoints of different steps are loaded",
        "src/sparsync/hosts/sharded_checkpoint.py",
        "    if len(set(steps)) > 1:",
        "    if False:",
        f"{SHARDED}::test_a_distributed_checkpoint_that_does_not_fit_is_refused",
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
