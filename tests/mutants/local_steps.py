"""Seeded defects in local steps."""

from tests.mutants import Mutant

FRAGMENT, LOOP = "src/sparsync/local_steps/fragment.py", "src/sparsync/local_steps/outer_loop.py"
MOMENTS = "src/sparsync/local_steps/shared_moments.py"
OUTER_TESTS = "tests/test_outer_loop.py"
OUTER_LAWS = f"{OUTER_TESTS}::test_nothing_is_lost_and_shared_weights_are_equal"
OUTER_RESUMED = f"{OUTER_TESTS}::test_a_resumed_training_repeats_the_bits"
OUTER_WORKERS = f"{OUTER_TESTS}::test_another_number_of_workers_keeps_the_means"

MUTANTS = [
    Mutant(
        "workers of local steps begin different",
        LOOP,
        "            copy_first_replica(self._model, channel)\n",
        "",
        f"{OUTER_LAWS}[2-whole]",
    ),
    Mutant(
        "what was learned beside a round is lost",
        FRAGMENT,
        "        if overlap or (miss and not bad):",
        "        if miss and not bad:",
        f"{OUTER_RESUMED}[streams]",
    ),
    Mutant(
        "who misses a round does not hear what the others did",
        FRAGMENT,
        "[t.clone() for t in (start if",
        "[t for t in (start if",
        f"{OUTER_TESTS}::test_who_misses_a_round_is_given_what_the_others_did",
    ),
    Mutant(
        "who misses a round sends all the same",
        FRAGMENT,
        "            self.buffer.zero_()\n",
        "            pass\n",
        f"{OUTER_LAWS}[2-missed]",
    ),
    Mutant(
        "what a cast cut off is taken for learned",
        FRAGMENT,
        "p.to(w.dtype).float()",
        "p.clone()",
        f"{OUTER_LAWS}[2-bf16]",
    ),
    Mutant(
        "weights that are not finite are sent",
        FRAGMENT,
        "bad = not bool(self.buffer.isfinite().all())",
        "bad = False",
        f"{OUTER_TESTS}::test_weights_that_are_not_finite_miss_the_round",
    ),
    Mutant(
        "other workers keep what was learned as it was, and not its mean",
        FRAGMENT,
        "alpha=workers / old",
        "alpha=1",
        f"{OUTER_WORKERS}[whole-5-2]",
    ),
    Mutant(
        "the outer momentum begins anew with a checkpoint",
        FRAGMENT,
        """self.optimizer.state[parameter]["momentum_buffer"] = """,
        """_ = """,
        f"{OUTER_RESUMED}[sign]",
    ),
    Mutant(
        "an error before a round is not told to the others",
        LOOP,
        "                fragment.handle.fail(error)\n",
        "",
        f"{OUTER_TESTS}::test_all_hear_of_an_error_on_one_rank",
    ),
    Mutant(
        "a round on its way is forgotten when the next one leaves",
        LOOP,
        "(leaves or fragment.due == self.steps)",
        "fragment.due == self.steps",
        f"{OUTER_TESTS}::test_a_round_on_its_way_is_applied_with_another_every",
    ),
    Mutant(
        "a round on its way writes over a state that is loaded",
        LOOP,
        "                fragment.wait()  # or",
        "                pass  # or",
        f"{OUTER_TESTS}::test_a_round_on_its_way_does_not_write_over_what_is_loaded",
    ),
    Mutant(
        "the outer momentum outlives a state that has none",
        FRAGMENT,
        "        self.optimizer.state.clear()\n",
        "",
        f"{OUTER_TESTS}::test_a_state_holds_all_that_a_training_goes_on_from",
    ),
    Mutant(
        "a round that the device decides is waited for without a limit",
        FRAGMENT,
        "        self.handle.check()\n",
        "",
        "tests/test_deferred.py::test_local_steps_are_told_of_a_silent_device_before_the_deadline[False]",
        interpreted=True,
    ),
    Mutant(
        "a bad state of local steps is loaded by half",
        LOOP,
        "            fragment.check_state(part)\n",
        "            fragment.load_state_dict(part)\n",
        f"{OUTER_TESTS}::test_a_state_that_is_refused_changes_nothing",
    ),
    Mutant(
        "local steps go on from different steps",
        LOOP,
        '            fragment.channel.assert_consistent("loaded state", f"local steps {loaded}")\n',
        "            pass\n",
        f"{OUTER_TESTS}::test_ranks_that_go_on_from_different_local_steps_are_told",
    ),
    Mutant(
        "a parameter that is trained later is not noticed",
        LOOP,
        "if p.requires_grad and self._own.get(plain_name(name)) is not p:",
        "if False:",
        f"{OUTER_TESTS}::test_a_parameter_that_is_trained_later_is_named",
    ),
    Mutant(
        "buffers are not loaded",
        LOOP,
        "                buffer.copy_(saved[name])",
        "                pass",
        f"{OUTER_TESTS}::test_a_state_holds_all_that_a_training_goes_on_from",
    ),
    Mutant(
        "moments that are not finite become everybody's",
        MOMENTS,
        "                self.flat.zero_()\n",
        "                pass\n",
        f"{OUTER_TESTS}::test_moments_that_are_not_finite_are_not_shared",
    ),
    Mutant(
        "shared moments are a sum, not a mean",
        MOMENTS,
        "        self.flat.div_(max(1, workers))\n",
        "",
        f"{OUTER_TESTS}::test_virtual_workers_train_as_processes_do[moments]",
    ),
    Mutant(
        "local steps take a model that DDP sums, too",
        "src/sparsync/local_steps/round_plan.py",
        'if type(model).__name__ in ("DistributedDataParallel", "FullyShardedDataParallel"):',
        "if False:",
        "tests/test_outer_loop.py::test_a_rank_outside_of_the_group_is_told",
    ),
    Mutant(
        "a state of local steps may be of another form",
        "src/sparsync/local_steps/state.py",
        "        if schema != SCHEMA:\n",
        "        if False:\n",
        "tests/test_outer_loop.py::test_a_state_that_is_refused_changes_nothing",
    ),
    Mutant(
        "shared weights that are not finite are loaded",
        "src/sparsync/local_steps/state.py",
        "if kind in FINITE and not all(",
        "if False and not all(",
        "tests/test_outer_loop.py::test_a_state_that_is_refused_changes_nothing",
    ),
]
