"""Seeded defects in compressors."""

from tests.mutants import Mutant

LAW_1 = "tests/test_laws.py::test_law_1_nothing_is_lost_on_one_worker"
VELOCITY = "tests/test_laws.py::test_law_1_under_momentum_correction_and_clipping"

UNUSED = (
    "tests/failures/test_unused_parameters.py::"
    "test_kinds_that_send_zeros_send_them_from_a_parameter_unused_on_every_rank"
)
RANGE = "tests/failures/test_value_range.py"

MUTANTS = [
    Mutant(
        "a threshold beyond 32 bits is loaded",
        "src/sparsync/compressors/carried_threshold.py",
        'return int(bag["floor"]) < 2**31 and all(',
        "return all(",
        "tests/test_hostile_checkpoints.py::test_thresholds_that_no_magnitude_has_are_refused",
    ),
    Mutant(
        "what was taken out is lost where there is no memory for its message",
        "src/sparsync/compressors/selecting.py",
        "        residual.index_add_(0, indices, sent)\n",
        "",
        "tests/test_fault_matrix.py::test_every_fault_ends_as_expected[shared-raise-before-first-fill_message-at-last-of-2]",
    ),
    Mutant(
        "kinds with shared indices send from unused parameters",
        "src/sparsync/compressors/selecting.py",
        "if span.name in ctx.unused] if ctx.whole else []",
        "if span.name in ctx.unused] if ctx.whole and not ctx.shared else []",
        f"{UNUSED}[layer-shared]",
    ),
    Mutant(
        "blocks are sent from unused parameters",
        "src/sparsync/compressors/selecting.py",
        "if span.name in ctx.unused] if ctx.whole else []",
        "if span.name in ctx.unused] if ctx.shared else []",
        f"{UNUSED}[layer-block]",
    ),
    Mutant(
        "the velocity is not cleared where sent",
        "src/sparsync/compressors/selecting.py",
        "speed.index_copy_(0, indices, torch.where(goes, 0, speed.index_select(0, indices)))",
        "pass",
        f"{VELOCITY}[topk]",
    ),
    Mutant(
        "all ranks draw alike",
        "src/sparsync/compressors/random.py",
        "0 if ctx.shared else ctx.rank",
        "0",
        "tests/test_random_indices.py::test_only_what_is_shared_is_drawn_alike[random]",
    ),
    Mutant(
        "a graph draws in every step what it drew in the first",
        "src/sparsync/compressors/random.py",
        "key_of(ctx) if ctx.key is None else ctx.key",
        "key_of(ctx)",
        "tests/test_virtual_random.py::test_the_same_operators_on_the_same_tensors_exchange_the_same_bits[random]",
    ),
    Mutant(
        "entries beyond the capacity are dropped",
        "src/sparsync/compressors/threshold.py",
        "        return sent\n",
        "        import torch\n        u[found._found[~torch.isin(found._found, sent)]] = 0\n        return sent\n",
        f"{LAW_1}[float32-threshold]",
    ),
    Mutant(
        "stale threshold",
        "src/sparsync/compressors/threshold.py",
        "            own[name].fill_(value)\n",
        "            own[name].fill_(value if own[name] == 0 else own[name].item())\n",
        "tests/test_laws.py::test_threshold_holds_the_count_near_k[0.01-normal]",
    ),
    Mutant(
        "a whole gradient is sent beyond the range on a CPU",
        "src/sparsync/compressors/none.py",
        "sent = limit(total, total, most) if ctx.rounding is None else",
        "sent = total if ctx.rounding is None else",
        f"{RANGE}::test_half_precision_gradients_that_add_up_beyond_their_range[topk-allgather-fp32-corrected-2]",
    ),
    Mutant(
        "a compressor of one's own never sees the gradient that its base adds in parts",
        "src/sparsync/compressors/selecting.py",
        'vouches(self, "takes_parts", "compress")',
        "self.takes_parts",
        "tests/test_added_parts.py::test_a_compressor_of_ones_own_is_given_the_gradient",
    ),
    Mutant(
        "a class vouches for what another defines anew",
        "src/sparsync/compressors/base.py",
        "at < 0 or first[0] <= at for at",
        "True for at",
        "tests/test_added_parts.py::test_who_vouches_for_a_method",
    ),
    Mutant(
        "a rank without data forgets what its threshold expects",
        "src/sparsync/compressors/threshold.py",
        "if segment.k >= segment.numel or not runs:",
        "if segment.k >= segment.numel or not rows.peak.numel():",
        "tests/test_added_parts.py::test_what_nobody_used_leaves_thresholds_alone",
    ),
    Mutant(
        "kernels stand for a choice of one's own",
        "src/sparsync/compressors/selecting.py",
        'known and vouches(self, "launch", "choose")',
        "known",
        "tests/test_selection.py::test_kernels_do_not_stand_for_a_choice_of_ones_own",
    ),
    Mutant(
        "a bucket is copied before it is compressed",
        "src/sparsync/compressors/selecting.py",
        "grad = came_in(grad, memory, ctx.workspace)",
        "grad = came_in(grad, memory, ctx.workspace).clone()",
        "tests/failures/test_bucket_rebuilds.py::test_a_bucket_that_holds_the_whole_model_is_not_copied",
    ),
    Mutant(
        "a message without entries says that it has one",
        "src/sparsync/compressors/selecting.py",
        "count = number[-1:].sum()",
        "count = number[-1:].sum().clamp(min=1)",
        "tests/failures/test_number_of_entries.py::test_a_zero_gradient_sends_nothing",
    ),
    Mutant(
        "trimmed top-k asks for a quantile",
        "src/sparsync/compressors/trimmed.py",
        "mean = sum(torch.linalg.vector_norm(u[start:stop], 1).item() for start, stop in runs) / numel",
        "mean = torch.quantile(u.abs(), 0.5).item()",
        "tests/failures/test_number_of_entries.py::test_more_than_2_24_entries_are_compressed[TrimmedK]",
    ),
    Mutant(
        "a sample of nothing is taken",
        "src/sparsync/compressors/dgc.py",
        "if not (isinstance(self.sample, int | float) and 0 < self.sample <= 1):",
        "if False:",
        "tests/test_selection.py::test_a_wrong_sample_is_named",
    ),
    Mutant(
        "any word goes for refine",
        "src/sparsync/compressors/gaussian.py",
        "if self.refine not in (False, True, CARRIED):",
        "if False:",
        "tests/test_selection.py::test_other_words_for_refine_and_masks_are_refused",
    ),
    Mutant(
        "any number of masks goes",
        "src/sparsync/compressors/gaussian.py",
        "if self.masks not in (MASKS - 1, MASKS):",
        "if False:",
        "tests/test_selection.py::test_other_words_for_refine_and_masks_are_refused",
    ),
]
