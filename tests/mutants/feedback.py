"""Seeded defects in feedback."""

from tests.mutants import Mutant

PRECONDITIONED = "tests/test_preconditioned.py"

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
    Mutant(
        "dampening forgotten",
        "src/sparsync/feedback/momentum.py",
        "(1 - beta) * (1 - dampening) / (1 - momentum)",
        "(1 - beta) / (1 - momentum)",
        "tests/test_honest_optimizers.py::test_in_the_long_run_updates_are_the_optimizers_own[0.0-dampening]",
    ),
    Mutant(
        "weight decay weakened by corrected momentum",
        "src/sparsync/feedback/momentum.py",
        'group["weight_decay"] / (1 - self.beta)',
        'group["weight_decay"]',
        "tests/test_honest_optimizers.py::test_in_the_long_run_updates_are_the_optimizers_own[0.9-decay]",
    ),
    Mutant(
        "groups changed instead of copied",
        "src/sparsync/feedback/momentum.py",
        '{**group, "lr": group["lr"] * factor, "weight_decay": group["weight_decay"] / (1 - self.beta)} | PLAIN',
        'group.update(PLAIN, lr=group["lr"] * factor) or group',
        "tests/failures/test_optimizer_steps.py::test_a_step_that_raises_leaves_nothing_changed[sgd-move]",
    ),
    Mutant(
        "betas lowered in the user's groups",
        "src/sparsync/feedback/momentum.py",
        '[{**group, "betas": _lowered(group["betas"])} for',
        '[group.update(betas=_lowered(group["betas"])) or group for',
        "tests/test_honest_optimizers.py::test_a_scheduler_may_cycle_betas",
    ),
    Mutant(
        "a rule that is overridden is taken for known",
        "src/sparsync/feedback/momentum.py",
        "if rule is inspect.unwrap(known.step)",
        "if isinstance(optimizer, known)",
        "tests/test_honest_optimizers.py::test_only_known_rules_are_known",
    ),
    Mutant(
        "momentum buffers out of date",
        "src/sparsync/feedback/momentum.py",
        '                state.pop("momentum_buffer", None)',
        "                pass",
        "tests/test_honest_optimizers.py::test_momentum_buffers_stay_until_a_step_makes_them_out_of_date",
    ),
    Mutant(
        "an optimizer of another model",
        "src/sparsync/feedback/momentum.py",
        "    if not any(id(parameter) in own for",
        "    if not any(True for",
        "tests/test_honest_optimizers.py::test_an_optimizer_of_another_model_is_refused_and_one_of_more_or_less_is_not",
    ),
    Mutant(
        "state of before a checkpoint",
        "src/sparsync/feedback/shadow_optimizer.py",
        "shadow.state, shadow.param_groups = self._optimizer.state, groups",
        "shadow.param_groups = groups",
        "tests/test_honest_optimizers.py::test_a_checkpoint_while_attached_brings_adams_state",
    ),
    Mutant(
        "a fused step knows no loss scale",
        "src/sparsync/feedback/shadow_optimizer.py",
        'for name in ("grad_scale", "found_inf"):',
        'for name in ("found_inf",):',
        "tests/test_honest_optimizers.py::test_a_loss_scaler_unscales_and_skips[True]",
    ),
    Mutant(
        "hooks of all optimizers run twice",
        "src/sparsync/feedback/shadow_optimizer.py",
        "type(optimizer).step.__wrapped__",
        "type(optimizer).step",
        "tests/test_honest_optimizers.py::test_hooks_of_all_optimizers_run_once_a_step",
    ),
    Mutant(
        "updates that wait are gradients",
        "src/sparsync/feedback/adam.py",
        "                grad.sub_(kept.view(own.shape))",
        "                pass",
        f"{PRECONDITIONED}::test_two_backwards_before_a_step",
    ),
    Mutant(
        "the same signs in every step",
        "src/sparsync/feedback/second_moment.py",
        "begin_step(self.moments, self.seed, self.draws)",
        "begin_step(self.moments, self.seed, 0)",
        f"{PRECONDITIONED}::test_signs_are_others_in_every_step",
    ),
    Mutant(
        "residuals that keep the rate they came with",
        "src/sparsync/feedback/second_moment.py",
        "ratio = min(1.0, rule.rate / last[name]) if rule.rate and last.get(name) else 1.0",
        "ratio = 1.0",
        f"{PRECONDITIONED}::test_residuals_shrink_with_the_rate",
    ),
    Mutant(
        "Adam's decay beside its update",
        "src/sparsync/feedback/adam.py",
        "    return isinstance(optimizer, torch.optim.AdamW) or ",
        "    return True or ",
        f"{PRECONDITIONED}::test_everything_sent_with_exact_moments_is_dense_training[Adam-loop]",
    ),
]
