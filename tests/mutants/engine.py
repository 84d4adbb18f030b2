"""Seeded defects in engine."""

from tests.mutants import Mutant

TRAINING = "tests/test_training.py::test_laws_1_and_2_hold_in_training"
DEFERRED = "tests/test_deferred.py"
BUDGET = "tests/test_budget.py"

MUTANTS = [
    Mutant(
        "rejected entries dropped",
        "src/sparsync/engine/unit_step.py",
        "worker.ledger.restore_rejected(unit, result.rejected)",
        "pass",
        f"{TRAINING}[topk-every other-3]",
    ),
    Mutant(
        "a non-finite step is committed",
        "src/sparsync/engine/reducer.py",
        "(undo or self.completion.bad or self.error is not None)",
        "(undo or self.error is not None)",
        "tests/failures/test_loss_scaling.py::test_an_overflow_rolls_the_whole_step_back",
    ),
    Mutant(
        "loss scale ignored",
        "src/sparsync/engine/worker.py",
        "self._follow_loss_scale(loss_scale / self.loss_scale)",
        "self._follow_loss_scale(1.0)",
        "tests/failures/test_loss_scaling.py::test_the_residual_follows_the_loss_scale",
    ),
    Mutant(
        "unused parameters are sent from",
        "src/sparsync/engine/bucketing.py",
        "        if self.may_skip:\n",
        "        if False:\n",
        "tests/failures/test_unused_parameters.py::test_a_parameter_unused_on_every_rank_keeps_its_residual",
    ),
    Mutant(
        "exchange on backward's thread",
        "src/sparsync/engine/reducer.py",
        "CommThread(threaded=channel.group is not None and self.completion.waits)",
        "CommThread(threaded=False)",
        "tests/test_training.py::test_an_exchange_starts_before_backward_ends",
    ),
    Mutant(
        "thresholds not in the checkpoint",
        "src/sparsync/engine/checkpoint.py",
        " for n, bag in worker.compressor_state.items()}",
        " for n, bag in ()}",
        "tests/test_training.py::test_kill_and_resume_gives_the_same_weights[threshold-layer]",
    ),
    Mutant(
        "sent entries of a non-finite step are not restored on the device",
        "src/sparsync/engine/ledger.py",
        "status.restore(residual, entry.owed(), entry.exchange)",
        "pass",
        "tests/test_deferred.py::test_what_is_sent_comes_home_when_a_gradient_is_not_finite",
        interpreted=True,
    ),
    Mutant(
        "the optimizer does not see a non-finite step on the device",
        "src/sparsync/engine/completion.py",
        "status.poison(unit.grad, positions.starts, self.plan.transactional)",
        "pass",
        "tests/test_deferred.py::test_the_same_steps[plain-('a', nan)]",
        interpreted=True,
    ),
    Mutant(
        "rejected entries of a failed exchange are restored twice",
        "src/sparsync/engine/ledger.py",
        "self._in_flight.insert(-1, InFlight(unit, rejected, returned=True))",
        "pass",
        f"{DEFERRED}::test_what_a_failed_exchange_sent_comes_home_bit_for_bit_and_once[None-rejected]",
        interpreted=True,
    ),
    Mutant(
        "the first rank to learn of a failure does not broadcast it",
        "src/sparsync/engine/reducer.py",
        "told = self.channel.monitor.broadcast_error(error)",
        "told = error",
        f"{DEFERRED}::test_a_rank_that_hears_of_a_failure_first_tells_the_others",
        interpreted=True,
    ),
    Mutant(
        "sent entries are restored before rejected ones are taken out again",
        "src/sparsync/engine/ledger.py",
        "self._in_flight.insert(-1, InFlight(",
        "self._in_flight.insert(len(self._in_flight), InFlight(",
        f"{DEFERRED}::test_what_a_failed_exchange_sent_comes_home_bit_for_bit_and_once[None-rejected]",
        interpreted=True,
    ),
    Mutant(
        "the mean over a training may exceed its budget",
        "src/sparsync/engine/budget.py",
        "max(mean / allowed, ",
        "max(0.0, ",
        f"{BUDGET}::test_a_budget_holds_and_is_used_up",
    ),
    Mutant(
        "a step may send more than dense",
        "src/sparsync/engine/budget.py",
        "/ min(MOST * allowed, self.dense)",
        "/ (MOST * allowed)",
        f"{BUDGET}::test_no_step_sends_more_than_dense",
    ),
    Mutant(
        "small tensors travel dense whatever they take",
        "src/sparsync/engine/budget.py",
        "if parameter.name in small and left >= 0:",
        "if parameter.name in small:",
        f"{BUDGET}::test_small_tensors_travel_dense_as_far_as_a_fifth_of_the_budget_goes",
    ),
    Mutant(
        "balanced sums counted as if they took nothing more",
        "src/sparsync/engine/budget.py",
        "lambda workers: 2.0 / 1.25",
        "lambda workers: 3.0",
        f"{BUDGET}::test_collective_and_values_follow_from_workers_and_budget",
    ),
    Mutant(
        "values that are given are chosen anew",
        "src/sparsync/engine/budget.py",
        'VALUES if budget.follows("values") and not draws else',
        "VALUES if not draws else",
        f"{BUDGET}::test_what_is_given_wins_and_the_rest_follows",
    ),
    Mutant(
        "a budget that cannot be reached is raised in silence",
        "src/sparsync/engine/budget.py",
        "if plan.budget.asked or share == 1:",
        "if share == 1:",
        f"{BUDGET}::test_a_budget_that_cannot_be_reached_is_refused_with_the_smallest_that_can",
    ),
    Mutant(
        "traffic is predicted without what travels dense",
        "src/sparsync/engine/traffic.py",
        "total += unit.traffic(layout, plan.wire, workers, dtype).mean_bytes",
        "total += 0 if unit.compressor.dense else unit.traffic(layout, plan.wire, workers, dtype).mean_bytes",
        f"{BUDGET}::test_virtual_workers_send_what_was_predicted_and_stay_within[layers-3-sgd]",
    ),
    Mutant(
        "moments that are not undone",
        "src/sparsync/engine/worker.py",
        "            self.preconditioner.undo()",
        "            pass",
        "tests/test_preconditioned.py::test_a_scaler_and_steps_it_skips_change_nothing[loop]",
    ),
]
