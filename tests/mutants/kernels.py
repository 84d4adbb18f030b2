"""Seeded defects in kernels."""

from tests.mutants import Mutant

LAW_1 = "tests/test_laws.py::test_law_1_nothing_is_lost_on_one_worker"
VELOCITY = "tests/test_laws.py::test_law_1_under_momentum_correction_and_clipping"
DEFERRED = "tests/test_deferred.py"
FROM_A_FAILURE_ON = f"{DEFERRED}::test_from_a_failed_exchange_on_nothing_is_applied_and_all_is_kept[header]"

MUTANTS = [
    Mutant(
        "the largest level is forgotten on the device",
        "src/sparsync/kernels/candidates/triton.py",
        "level = tl.where(size > 3.0 * scale, 4 * scale, level)",
        "level = level",
        "tests/test_kernel_topk.py::test_half_precision[topk-torch.float32-levels]",
        interpreted=True,
    ),
    Mutant(
<<<<<<< HEAD
        "a last row that is not full is turned as a full one",
=======
        "a last row that is not full is rotated as a full one",
>>>>>>> h/failures
        "src/sparsync/kernels/random_indices/reference.py",
        "height - (torch.arange(width) >= last).long()",
        "height - (torch.arange(width) > last).long()",
        "tests/test_random_indices.py::test_entries_are_distinct_and_of_their_segment",
    ),
    Mutant(
<<<<<<< HEAD
        "rows are turned once only",
=======
        "rows are rotated once only",
>>>>>>> h/failures
        "src/sparsync/kernels/random_indices/reference.py",
        "TURNS = 4",
        "TURNS = 1",
        "tests/test_random_indices.py::test_every_set_of_a_few_is_drawn_equally_often[17-2]",
    ),
    Mutant(
<<<<<<< HEAD
        "what belongs to nobody is added",
=======
        "entries of no segment are added",
>>>>>>> h/failures
        "src/sparsync/kernels/accumulate/reference.py",
        "            good &= mine[a:b]\n",
        "",
        "tests/test_random_indices.py::test_a_pass_that_waits_for_nothing_is_the_same_pass",
    ),
    Mutant(
<<<<<<< HEAD
        "gradient not clipped",
=======
        "the gradient is not clipped",
>>>>>>> h/failures
        "src/sparsync/kernels/clip/reference.py",
        "return clip / norm if norm > clip else 1.0",
        "return 1.0",
        f"{VELOCITY}[topk]",
    ),
    Mutant(
<<<<<<< HEAD
        "on the device, what is not finite counts in the norm",
=======
        "non-finite entries count in the norm on the device",
>>>>>>> h/failures
        "src/sparsync/kernels/clip/triton.py",
        "wide = tl.where(nonfinite, 0.0, g).to(tl.float64)",
        "wide = g.to(tl.float64)",
        "tests/test_kernel_clip.py::test_what_is_not_finite_is_left_out[inf]",
        interpreted=True,
    ),
    Mutant(
        "carried threshold never follows",
        "src/sparsync/kernels/threshold/reference.py",
        "down = min(missing * (NEAR << FINE) // near, OCTAVE // 4)",
        "down = 0",
        "tests/test_laws.py::test_threshold_holds_the_count_near_k[0.001-normal]",
    ),
    Mutant(
<<<<<<< HEAD
        "residual not added",
=======
        "the residual is not added",
>>>>>>> h/failures
        "src/sparsync/kernels/accumulate/reference.py",
        "torch.add(old, came, out=u)",
        "u.copy_(came)",
        f"{LAW_1}[float32-topk]",
    ),
    Mutant(
<<<<<<< HEAD
        "residual not cleared",
=======
        "the residual is not cleared where sent",
>>>>>>> h/failures
        "src/sparsync/kernels/accumulate/reference.py",
        "    after.index_copy_(0, indices, values - sent)\n",
        "",
        f"{LAW_1}[float32-topk]",
    ),
    Mutant(
        "numba: a non-finite entry enters the residual",
        "src/sparsync/kernels/accumulate/cpu.py",
        "            u[i] = before[i]\n",
        "",
        "tests/test_numba.py::test_accumulate[1]",
    ),
    Mutant(
        "numba: of equals, the higher index wins",
        "src/sparsync/kernels/topk/cpu.py",
        "equal = size[i] == kth and ties > 0",
        "equal = size[i] == kth and ties > 0 and i > 2",
        "tests/test_numba.py::test_above_and_largest[1]",
    ),
    Mutant(
<<<<<<< HEAD
        "rounding error not kept",
=======
        "the rounding error is not kept",
>>>>>>> h/failures
        "src/sparsync/kernels/accumulate/reference.py",
        "rest = values - sent",
        "rest = values * 0",
        "tests/test_laws.py::test_rounding_keeps_hardly_anything_from_being_sent[fp16-topk]",
    ),
    Mutant(
        "inexact entries sent",
        "src/sparsync/kernels/accumulate/reference.py",
        "stays = (rest + sent != values) | (values - rest != sent)",
        "stays = rest != rest",
        "tests/test_laws.py::test_law_1_beyond_the_range_of_the_wire[10000000000000.0-fp16-topk]",
    ),
    Mutant(
        "non-finite entries enter the residual",
        "src/sparsync/kernels/accumulate/reference.py",
        "torch.where(bad, old, u, out=u)",
        "pass",
        "tests/test_laws.py::test_law_5_a_bad_gradient_never_enters_the_residual[float32-topk]",
    ),
    Mutant(
        "mask off by one",
        "src/sparsync/kernels/topk/reference.py",
        "(index < stop[row])",
        "(index < stop[row] - 1)",
        "tests/test_laws.py::test_topk_is_torch_topk[float32]",
    ),
    Mutant(
        "overflow favours low indices",
        "src/sparsync/kernels/topk/reference.py",
        "found.roll(-start)[:capacity]",
        "found[:capacity]",
        "tests/test_laws.py::test_threshold_overflow_favours_no_index",
    ),
    Mutant(
        "sums on the device not divided",
        "src/sparsync/kernels/message/triton.py",
        "mean = tl.div_rn(total, divisor)",
        "mean = total",
        "tests/test_kernel_message.py::test_the_mean_is_that_of_the_wire[fp32-torch.float32-int-3]",
        interpreted=True,
    ),
    Mutant(
        "messages that disagree are applied",
        "src/sparsync/kernels/message/triton.py",
        "count = tl.where(tl.load(failed_exchange) == 0, count, 0)",
        "count += 0",
        "tests/test_kernel_message.py::test_the_mean_is_that_of_the_wire[fp32-torch.float32-int-3]",
        interpreted=True,
    ),
    Mutant(
        "marks of a message stay for the next",
        "src/sparsync/kernels/message/triton.py",
        "tl.store(bitmap + (index >> 5), tl.zeros([BLOCK], tl.int32), mask=real)",
        "tl.store(bitmap + (index >> 5), tl.zeros([BLOCK], tl.int32), mask=real & (index < 0))",
        "tests/test_kernel_message.py::test_the_message_is_that_of_the_wire[fp32-global-int-odd]",
        interpreted=True,
    ),
    Mutant(
        "a failed exchange is forgotten by the next on the device",
        "src/sparsync/kernels/status/triton.py",
        "tl.where(first_wrong != 0, first_wrong, tl.where(wrong > 0, number, 0))",
        "tl.where(wrong > 0, number, 0)",
        FROM_A_FAILURE_ON,
        interpreted=True,
    ),
    Mutant(
<<<<<<< HEAD
        "what a failed exchange sent is lost on the device",
=======
        "entries sent in a failed exchange are lost on the device",
>>>>>>> h/failures
        "src/sparsync/kernels/status/triton.py",
        "return (tl.load(nonfinite_step) != 0) | ((first_wrong != 0) & (first_wrong <= number))",
        "return tl.load(nonfinite_step) != 0",
        FROM_A_FAILURE_ON,
        interpreted=True,
    ),
    Mutant(
<<<<<<< HEAD
        "what was applied before a failed exchange comes home too",
=======
        "entries applied before a failed exchange are restored too",
>>>>>>> h/failures
        "src/sparsync/kernels/status/triton.py",
        "(first_wrong != 0) & (first_wrong <= number)",
        "first_wrong != 0",
        FROM_A_FAILURE_ON,
        interpreted=True,
    ),
    Mutant(
<<<<<<< HEAD
        "a failed exchange hides that the step is bad",
=======
        "a failed exchange hides that the step is non-finite",
>>>>>>> h/failures
        "src/sparsync/kernels/status/triton.py",
        "tl.load(nonfinite_step) + UNDONE != 0",
        "UNDONE != 0",
        f"{DEFERRED}::test_a_step_that_fails_and_is_not_finite_is_not_applied_at_all[a]",
        interpreted=True,
    ),
    Mutant(
        "the optimizer does not see that a failed step is undone",
        "src/sparsync/kernels/status/triton.py",
        "tl.load(nonfinite_step) + UNDONE != 0",
        "tl.load(nonfinite_step) != 0",
        f"{DEFERRED}::test_a_failed_step_that_can_be_undone_is_undone_as_a_whole[header]",
        interpreted=True,
    ),
    Mutant(
        "Gaussian-k's loop accepts too few on the device",
        "src/sparsync/kernels/gaussian/triton.py",
        "few2 = 3 * at2 < 2 * k",
        "few2 = 3 * at2 < k",
        "tests/test_kernel_gaussian.py",
        interpreted=True,
    ),
    Mutant(
        "a list that is too long is refined only when it is much too long",
        "src/sparsync/kernels/gaussian/triton.py",
        "(many > capacity)",
        "(many > 2 * capacity)",
        "tests/test_kernel_gaussian_refine.py::test_at_the_edges_of_what_is_right",
        interpreted=True,
    ),
    Mutant(
<<<<<<< HEAD
        "once a list is full nobody counts on",
=======
        "counting stops once a list is full",
>>>>>>> h/failures
        "src/sparsync/kernels/gaussian/triton.py",
        'sem="relaxed") <= capacity',
        'sem="relaxed") < capacity',
        "tests/test_kernel_gaussian_refine.py::test_a_full_list_is_not_all_there_is",
        interpreted=True,
    ),
    Mutant(
        "none of the next bin fills up on the device",
        "src/sparsync/kernels/threshold/triton.py",
        "(in_line <= free)",
        "(in_line < 0)",
        "tests/test_kernel_threshold.py::test_the_same_entries_step_after_step",
        interpreted=True,
    ),
]
