"""Seeded defects in collectives."""

from tests.mutants import Mutant

WORKERS = "tests/test_laws.py::test_law_1_nothing_is_lost_over_the_workers"
EXCHANGES = "tests/failures/test_ranks_that_disagree.py::test_another_number_of_exchanges_on_one_rank_is_an_error"
TRAINING = "tests/test_training.py::test_laws_1_and_2_hold_in_training"
FROZEN = "tests/failures/test_frozen_ranks.py"

MUTANTS = [
    Mutant(
        "an owner loses the sums it leaves out",
        "src/sparsync/collectives/partition.py",
        "(self.place(rows, owner)[None], left[None])",
        "(self.place(rows, owner)[None], 0 * left[None])",
        f"{WORKERS}[topk-balanced]",
    ),
    Mutant(
        "entries that a message has no room for are lost",
        "src/sparsync/collectives/partition.py",
        "torch.from_numpy(values[stay]), torch",
        "torch.from_numpy(0 * values[stay]), torch",
        f"{WORKERS}[topk-balanced]",
    ),
    Mutant(
        "neighbours have one owner",
        "src/sparsync/collectives/partition.py",
        "return (rows * MIXER & 0xFFFFFFFF) >> SHIFT",
        "return 0 * rows",
        "tests/test_collectives.py::test_balanced_messages_are_of_one_size_whatever_the_order_of_the_tensors[16-IndexPartition]",
    ),
    Mutant(
        "neighbours have other owners on the host",
        "src/sparsync/collectives/partition.py",
        "turn >>= np.uint32(SHIFT)",
        "turn >>= np.uint32(SHIFT - 1)",
        "tests/test_collectives.py::test_balanced_the_host_cuts_as_a_device_does[100003-3]",
    ),
    Mutant(
        "messages from owners are not counted as traffic",
        "src/sparsync/collectives/balanced.py",
        ", Transfer(RING, others, others * wire.bytes(back))",
        "",
        "tests/test_virtual.py::test_every_message_of_balanced_sums_is_encoded_and_compared[balanced-recipe-3]",
    ),
    Mutant(
        "entries restored twice may be added in any order on a GPU",
        "src/sparsync/collectives/partition.py",
        "return replace(stays, indices=indices, values=values, count=torch.tensor(indices.numel()))\n\n    def _turn(",
        "return replace(stays, indices=indices.view(-1), values=values.view(-1))\n\n    def _turn(",
        "tests/test_collectives.py::test_balanced_what_comes_home_twice_does_so_in_one_order[IndexPartition]",
    ),
    Mutant(
        "a single worker rounds its sums again",
        "src/sparsync/collectives/partition.py",
        "return sums if self.workers == 1 else round_sums",
        "return round_sums",
        "tests/failures/test_world_size.py::test_one_worker_is_not_rounded_twice[levels]",
    ),
    Mutant(
        "a thread for every message between two ranks",
        "src/sparsync/collectives/comm/channel.py",
        "self._messages = self._messages or CommThread(",
        "self._messages = CommThread(",
        "tests/failures/test_communication_thread.py::test_messages_between_two_ranks_leave_nothing_behind[1500]",
    ),
    Mutant(
        "a deadline may be infinite",
        "src/sparsync/collectives/comm/channel.py",
        "and 0 < deadline <= LONGEST)",
        "and 0 < deadline)",
        "tests/failures/test_lost_ranks.py::test_a_deadline_that_is_no_time_to_wait_is_refused[inf]",
    ),
    Mutant(
        "gTop-k loses the entries it drops",
        "src/sparsync/collectives/gtopk.py",
        "left = torch.where(sums.isfinite(), sums - sent, 0)",
        "left = 0 * sums",
        f"{WORKERS}[topk-gtopk]",
    ),
    Mutant(
        "of equals, gTop-k takes the higher index",
        "src/sparsync/collectives/gtopk.py",
        "order = torch.sort(size, dim=1, descending=True, stable=True).indices",
        "order = torch.sort(size.flip(1), dim=1, descending=True, stable=True).indices.neg().add(size.shape[1] - 1)",
        "tests/test_gtopk.py::test_a_merge_is_the_slow_one",
    ),
    Mutant(
        "order of the sum depends on the rank",
        "src/sparsync/collectives/allgather.py",
        "for row in rows]",
        "for row in rows.roll(-channel.rank, 0)]",
        "tests/test_collectives.py::test_law_2_reduce_is_reduce_local_bit_for_bit[topk-allgather-3]",
    ),
    Mutant(
        "header ignored",
        "src/sparsync/collectives/comm/header_checks.py",
        "if len(set(said)) > 1:",
        "if False:",
        "tests/test_collectives.py::test_law_4_ranks_at_different_buckets_all_raise",
    ),
    Mutant(
        "the sequence number is not compared",
        "src/sparsync/collectives/comm/header_checks.py",
        '("version", "sequence", "unit", "digest")',
        '("version", "unit", "digest")',
        f"{EXCHANGES}[allgather]",
    ),
    Mutant(
        "the sequence number of a pair is not compared",
        "src/sparsync/collectives/comm/channel.py",
        "        for field in SAME:",
        '        for field in set(SAME) - {"sequence"}:',
        f"{EXCHANGES}[gtopk]",
    ),
    Mutant(
        "failure of a rank ignored",
        "src/sparsync/collectives/comm/header_checks.py",
        "if header.flags & FAILED:",
        "if False:",
        "tests/failures/test_errors_reach_every_rank.py::test_one_rank_fails_to_compress_and_all_raise_the_same",
    ),
    Mutant(
        "non-finite flag ignored",
        "src/sparsync/collectives/base.py",
        "if header.flags & NONFINITE]",
        "if False]",
        "tests/failures/test_non_finite_gradients.py::test_nan_on_one_rank_is_named_on_all",
    ),
    Mutant(
        "wrong divisor",
        "src/sparsync/collectives/allgather.py",
        "MeanOf(terms, len(rows))",
        "MeanOf(terms, max(1, len(rows) - 1))",
        f"{TRAINING}[topk-allgather-3]",
    ),
    Mutant(
        "a question to the store has no time limit",
        "src/sparsync/collectives/comm/bounded_store.py",
        "return answer.result(seconds)",
        "return answer.result()",
        f"{FROZEN}::test_survivors_raise_when_the_host_of_the_store_is_frozen[allgather-between steps]",
    ),
    Mutant(
        "a store that is silent for a while ends a wait",
        "src/sparsync/collectives/comm/store_monitor.py",
        "with suppress(StoreSilent):  # the ranks may answer all the same",
        "with suppress():",
        f"{FROZEN}::test_a_short_freeze_ends_nothing",
    ),
    Mutant(
        "a rank's cause is waited for as long as the store is silent",
        "src/sparsync/collectives/comm/store_monitor.py",
        "while time.monotonic() < until:\n                if self.store.appear",
        "while True:\n                if self.store.appear",
        f"{FROZEN}::test_a_cause_that_the_frozen_store_holds_is_not_waited_for",
    ),
    Mutant(
        "a damaged message is applied",
        "src/sparsync/collectives/comm/header_checks.py",
        "if header.damaged:",
        "if False:",
        "tests/failures/test_damaged_messages.py::test_a_message_that_is_damaged_on_its_way_ends_all_ranks[allgather-10]",
    ),
    Mutant(
        "a damaged message between two ranks is applied",
        "src/sparsync/collectives/comm/channel.py",
        "check_intact([other], [source], self.monitor)",
        "pass",
        "tests/failures/test_damaged_messages.py::test_a_message_that_is_damaged_on_its_way_ends_all_ranks[gtopk-10]",
    ),
    Mutant(
        "a sum behind the gradient's end is written",
        "src/sparsync/collectives/partition.py",
        "if self.rows * self.workers > self.layout.numel:",
        "if False:",
        "tests/failures/test_damaged_messages.py::test_a_sum_behind_the_gradients_end_is_not_written",
    ),
]
