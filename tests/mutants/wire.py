"""Seeded defects in wire."""

from tests.mutants import Mutant

RANGE = "tests/failures/test_value_range.py"

MUTANTS = [
    Mutant(
        "two of four levels look alike on the wire",
        "src/sparsync/wire/values.py",
        "(exponent >> plane & 1)",
        "(exponent & 1)",
        "tests/test_host_messages.py::test_messages_and_their_mean_are_the_same[levels-int]",
    ),
    Mutant(
        "a block may start anywhere",
        "src/sparsync/wire/indices.py",
        " - known.offset) % known.length",
        " - known.offset)",
        "tests/test_hostile_messages.py::test_any_message_is_read_alike_by_loops_and_without",
    ),
    Mutant(
        "a block does not wrap round",
        "src/sparsync/wire/indices.py",
        "        position -= torch.where(position >= length, length, 0)",
        "        pass",
        "tests/test_wire.py::test_of_a_block_only_the_start_travels[fp32-layer]",
    ),
    Mutant(
        "indices pass through a float",
        "src/sparsync/wire/indices.py",
        "sent.indices.to(torch.int32)",
        "sent.indices.float().to(torch.int32)",
        "tests/failures/test_wire_bits.py::test_indices_beyond_2_24_are_not_rounded",
    ),
    Mutant(
        "an index outside the gradient is followed",
        "src/sparsync/wire/message.py",
        "if numbers.numel() and int(",
        "if False and int(",
        "tests/failures/test_damaged_messages.py::test_a_count_or_index_that_does_not_fit_is_named",
    ),
    Mutant(
        "on a device, an index outside the gradient is followed",
        "src/sparsync/wire/message.py",
        "return numbers.masked_fill(outside, 0), outside",
        "return numbers, outside",
        "tests/failures/test_damaged_messages.py::test_no_flipped_bit_leads_outside_the_gradient[device-int-fp32]",
    ),
    Mutant(
        "only the header of a message is summed up",
        "src/sparsync/wire/message.py",
        "headers, sums = messages.numpy()[:, :HEADER].copy(), checksum_on_host(messages.numpy())",
        "headers, sums = messages.numpy()[:, :HEADER].copy(), messages[:, SUM : SUM + 2].clone().numpy()",
        "tests/failures/test_damaged_messages.py::test_every_flipped_bit_is_an_error[int-fp32]",
    ),
    Mutant(
        "a codec rounds beyond the range of the bucket",
        "src/sparsync/wire/values.py",
        "values, min(most, top))",
        "values, top)",
        f"{RANGE}::test_half_precision_means_stay_in_range[topk-allgather-bf16-all]",
    ),
    Mutant(
        "a scale of signs is beyond the range",
        "src/sparsync/wire/values.py",
        ".clamp(max=power_below(most))",
        "",
        f"{RANGE}::test_sums_of_the_largest_numbers_saturate[topk-allgather-sign-all-torch.float32]",
    ),
    Mutant(
        "levels are beyond the range",
        "src/sparsync/wire/values.py",
        ".clamp(max=power_below(most) / 4)",
        ".clamp(max=power_below(most))",
        f"{RANGE}::test_half_precision_means_stay_in_range[topk-allgather-levels-signs]",
    ),
    Mutant(
        "marks that are missing are taken for the first",
        "src/sparsync/wire/bits.py",
        "places = np.full((len(rows), size), -1)",
        "places = np.zeros((len(rows), size), np.int64)",
        "tests/test_host_messages.py::test_a_message_without_marks_is_refused",
    ),
    Mutant(
        "what lies behind the last entry of a message is added",
        "src/sparsync/wire/values.py",
        "return clear_from(count, own[..., : shape.capacity].to(shape.dtype).contiguous())",
        "return own[..., : shape.capacity].to(shape.dtype)",
        "tests/test_host_messages.py::test_a_flipped_bit_leads_nowhere_and_means_the_same[fp32-int-2]",
    ),
    Mutant(
        "a compiled loop trusts the number of entries",
        "src/sparsync/wire/host.py",
        "if (counts > shape.capacity).any():",
        "if False:",
        "tests/test_host_messages.py::test_a_value_that_a_count_makes_an_index_is_refused",
    ),
    Mutant(
        "a compiled loop forgets entries behind the gradient",
        "src/sparsync/wire/host.py",
        " or (readers[:, 0] < counts).any()",
        "",
        "tests/test_host_messages.py::test_a_flipped_bit_leads_nowhere_and_means_the_same[fp32-int-2]",
    ),
    Mutant(
        "a message of another length is read",
        "src/sparsync/wire/message.py",
        "    if messages.shape[-1] != words:\n",
        "    if False:\n",
        "tests/test_hostile_messages.py::test_a_message_of_another_length_is_refused",
    ),
    Mutant(
        "loops read messages of another length",
        "src/sparsync/wire/host.py",
        "    if rows.shape[-1] != wire.bytes(shape) // WORD:",
        "    if False:",
        "tests/test_hostile_messages.py::test_a_message_of_another_length_is_refused",
    ),
]
