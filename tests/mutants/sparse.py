"""Seeded defects in sparse."""

from tests.mutants import Mutant

RANGE = "tests/failures/test_value_range.py"

MUTANTS = [
    Mutant(
        "the mean of one term loses the sign of a 0",
        "src/sparsync/sparse.py",
        'if len(terms) == 1 and out.device.type != "cpu":',
        "if len(terms) == 1:",
        "tests/test_host_messages.py::test_messages_and_their_mean_are_the_same[fp32-int]",
    ),
    Mutant(
        "divided by a little more",
        "src/sparsync/sparse.py",
        "out[touched] = quotients = out[touched] / divisor",
        "out[touched] = quotients = out[touched] / (divisor * 1.0000001)",
        "tests/test_laws.py::test_law_3_density_1_is_dense[topk-allgather]",
    ),
    Mutant(
        "a mean is given a norm beyond fp16",
        "src/sparsync/sparse.py",
        "HALF / peak, factor)",
        "factor, factor)",
        f"{RANGE}::test_preconditioned_means_in_half_precision_stay_in_range[2]",
    ),
    Mutant(
        "a mean that was rounded beyond fp16 is infinite",
        "src/sparsync/sparse.py",
        "quotients = cast_finite(sums / divisor, out.dtype)",
        "quotients = (sums / divisor).to(out.dtype)",
        "tests/test_kernel_value_range.py::test_a_mean_that_was_rounded_beyond_its_range_is_finite[65536.0]",
        interpreted=True,
    ),
    Mutant(
        "an index that stands twice hides an overflow",
        "src/sparsync/sparse.py",
        "return out[term.indices]",
        "return term.values / divisor",
        "tests/test_hostile_messages.py::test_an_index_that_stands_twice_hides_no_overflow",
    ),
    Mutant(
        "of several ranks that send an index the last counts",
        "src/sparsync/sparse.py",
        "return out.index_add_(0, self.indices, values)",
        "return out.index_copy_(0, self.indices, values)",
        "tests/failures/test_sums_and_ties.py::test_an_index_sent_by_several_ranks_is_summed[torch.float64]",
    ),
]
