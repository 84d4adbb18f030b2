"""Messages: what is encoded comes back bit for bit, in the size that was promised."""

import csv
import gc

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.parallel import DistributedDataParallel

import sparsync
from sparsync.collectives.base import shape_of
from sparsync.layout import Layout, Span
from sparsync.sparse import SparseGrad
from sparsync.wire import CODECS, HEADER, INDEX_CODECS, MAGIC, VERSION, Shape, Wire, read_headers
from sparsync.wire.bits import gather, pack_bits, spread, unpack_bits
from sparsync.wire.values import QUEUES, _bins
from sparsync_lab.bench.wire import fewest_bits
from sparsync_lab.cli.app import run
from tests.methods import KINDS, SIZES, gradient, worker
from tests.models import loss_of, net


@pytest.mark.parametrize("indices", ["int", "ef"])
@pytest.mark.parametrize("values", CODECS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@given(st.lists(st.sampled_from(SIZES), min_size=1, max_size=3), st.sampled_from(KINDS), st.integers(0, 99))
def test_round_trip(values, indices, dtype, sizes, kind, seed):
    one = worker("threshold", sizes, density=0.03, dtype=dtype, values=values)
    sent = one.send(gradient(kind, one.layout.numel, dtype, seed))
    wire, shape = Wire(values, indices), shape_of(one.layout, sent.values.dtype)
    header = wire.header(sent, sequence=7, unit=one.layout.id, digest=one.layout.digest)
    message = wire.encode(sent, one.layout.segment_of, shape, header)
    assert message.dtype == torch.int32
    assert message.nbytes == wire.bytes(shape)
    back = wire.decode(message, one.layout.segment_of, shape)
    assert torch.equal(back.indices, sent.indices)
    assert torch.equal(back.values, sent.values)
    assert torch.equal(back.count, sent.count)
    (told,) = read_headers(message.unsqueeze(0))
    assert told == (MAGIC << 16 | VERSION, 7, one.layout.id, one.layout.digest, int(sent.count), 0, -1, 0, 0, 0)


@pytest.mark.parametrize(("values", "bits"), [("fp32", 64), ("fp16", 48), ("bf16", 48), ("sign", 33), ("levels", 35)])
def test_bits_per_entry(values, bits):
    one = worker("topk", [100_003], density=0.01)
    size = Wire(values).bytes(shape_of(one.layout, torch.float32)) - 4 * HEADER
    assert bits <= 8 * size / one.layout.k < bits + 0.2


def sent_and_meant(values, kind, seed):
    """Of each segment what was sent, and what the gradient has there; the signs are the same."""
    one = worker("topk", [1023, 63], density=0.1, values=values)
    grad = gradient(kind, one.layout.numel, torch.float32, seed)
    sent = one.send(grad)
    segment = one.layout.segment_of(sent.indices)
    for i in range(2):
        mine = (segment == i) & (sent.values != 0)
        own, was = sent.values[mine], grad[sent.indices[mine]]
        assert (torch.sign(own) == torch.sign(was)).all()
        yield own.abs(), was.abs()


@given(st.sampled_from(KINDS), st.integers(0, 99))
def test_sign_sends_one_magnitude_per_segment(kind, seed):
    for own, _ in sent_and_meant("sign", kind, seed):
        assert own.unique().numel() <= 1


@given(st.sampled_from(KINDS), st.integers(0, 99))
def test_levels_are_the_nearest_of_four(kind, seed):
    for own, was in sent_and_meant("levels", kind, seed):
        if own.numel():
            steps = own / own.min()
            assert torch.isin(steps, torch.tensor([1.0, 2.0, 4.0, 8.0])).all()
            between = steps < steps.max()  # what lies beyond the last level is sent bit by bit
            assert (own - was)[between].abs().le(0.5 * own[between]).all()


@pytest.mark.parametrize(("size", "goes"), [(2.0**-99, True), (2.0**-101, False)])
def test_levels_of_hardly_anything_wait(size, goes):
    """Their exponents could not tell them apart."""
    one = worker("topk", [1000], density=0.01, values="levels")
    grad = torch.zeros(1000)
    grad[:10] = size
    sent = one.send(grad)
    assert bool(sent.values.count_nonzero()) == goes
    assert torch.equal(sent.densify() + one.residual, grad)


def test_unknown_values_are_refused():
    with pytest.raises(ValueError, match="values must be one of fp32, fp16, bf16, sign, levels, got 'int8'"):
        Wire("int8")


def test_unknown_indices_are_refused():
    with pytest.raises(ValueError, match="indices must be one of int, ef, block, got 'gaps'"):
        Wire(indices="gaps")


# ---- coded indices ------------------------------------------------------------------------------------------------


def entries(picked: torch.Tensor, capacity: int, layout: Layout, seed: int) -> SparseGrad:
    """Entries at ``picked`` and padding up to ``capacity``; values that every codec carries as they are."""
    rng = torch.Generator().manual_seed(seed)
    indices, values = torch.zeros(capacity, dtype=torch.int64), torch.zeros(capacity)
    indices[: picked.numel()] = picked
    sign = 1.0 - 2 * torch.randint(2, picked.shape, generator=rng)
    values[: picked.numel()] = sign * (1 + layout.segment_of(picked))
    words = torch.tensor([0, -1], dtype=torch.int32)
    return SparseGrad(indices, values, torch.tensor(picked.numel()), layout.numel, words[0], words[1])


def there_and_back(sent: SparseGrad, layout: Layout, wire: Wire) -> SparseGrad:
    shape = Shape(layout.numel, sent.values.numel(), len(layout.segments), torch.float32, layout.slots)
    message = wire.encode(sent, layout.segment_of, shape, wire.header(sent, 0, 0, 0))
    assert message.nbytes == wire.bytes(shape)
    return wire.decode(message, layout.segment_of, shape)


def two_halves(numel: int) -> Layout:
    half = numel // 2
    return Layout.cut([Span("a", 0, half), Span("b", half, numel - half)], numel=numel, scope="layer", density=0.5)


@pytest.mark.parametrize("indices", ["int", "ef"])
@pytest.mark.parametrize("values", CODECS)
@given(st.data())
def test_any_order_and_any_count_comes_back(values, indices, data):
    numel = data.draw(st.sampled_from(SIZES), label="numel")
    capacity = data.draw(st.integers(0, min(numel, 2000)), label="capacity")
    count = data.draw(st.sampled_from([0, min(1, capacity), capacity // 2, capacity]), label="count")
    seed = data.draw(st.integers(0, 99), label="seed")
    picked = torch.randperm(numel, generator=torch.Generator().manual_seed(seed))[:count]
    layout = two_halves(numel)
    sent = entries(picked, capacity, layout, seed)
    before = sent.indices.clone(), sent.values.clone()
    back = there_and_back(sent, layout, Wire(values, indices))
    assert torch.equal(sent.indices, before[0])
    assert torch.equal(sent.values, before[1])
    order = picked.argsort() if indices == "ef" else torch.arange(count)
    assert torch.equal(back.indices[:count], picked[order])
    assert torch.equal(back.values[:count], sent.values[:count][order])
    assert back.count == count
    assert not back.indices[count:].any()
    assert not back.values[count:].any()


@pytest.mark.parametrize("scope", ["layer", "bucket"])
@pytest.mark.parametrize("values", ["fp32", "fp16", "bf16"])
@given(st.lists(st.sampled_from(SIZES), min_size=1, max_size=4), st.sampled_from([0.001, 0.1, 1.0]), st.integers(0, 99))
def test_of_a_block_only_the_start_travels(values, scope, sizes, density, seed):
    one = worker("block", sizes, scope=scope, density=density, values=values, hole=5, rank=seed, whole=True)
    sent = one.send(gradient("mostly zero", one.layout.numel, torch.float32, seed))
    wire = Wire(values, "block")
    back = there_and_back(sent, one.layout, wire)
    assert torch.equal(back.indices, sent.indices)
    assert torch.equal(back.values, sent.values)
    assert sent.count == one.layout.capacity == one.layout.k
    room = CODECS[values].words(one.layout.k, len(one.layout.segments), torch.float32)
    assert wire.bytes(shape_of(one.layout, torch.float32)) == 4 * (HEADER + 2 * len(one.layout.segments) + room)


def test_blocks_are_refused_where_they_cannot_be_told():
    with pytest.raises(ValueError, match="values='sign' cannot tell"):
        Wire("sign", "block")
    for options in ({"compressor": "topk"}, {"compressor": "block", "collective": "gtopk"}):
        with pytest.raises(ValueError, match="needs a compressor that sends blocks"):
            sparsync.comm_hook(net(), **options, indices="block")
    assert sparsync.comm_hook(net(), "block")[0].plan.wire.indices == "block"
    assert sparsync.comm_hook(net(), "block", values="sign")[0].plan.wire.indices == "int"
    assert sparsync.comm_hook(net(), "block", indices="ef")[0].plan.wire.indices == "ef"


@pytest.mark.parametrize("values", CODECS)
@pytest.mark.parametrize("capacity", [1, 7, 8, 40])
@pytest.mark.parametrize("numel", [2**31 - 1, 2**31 + 10, 2**33, 2**45])
def test_coded_indices_of_more_than_2_31_entries(values, capacity, numel):
    picked = torch.tensor([numel - 1, 2**31 - 2, 0, 2**24 + 1, 77, numel - 3, numel * 2 // 3])[:capacity]
    layout = two_halves(numel)
    sent = entries(picked, capacity, layout, 0)
    back = there_and_back(sent, layout, Wire(values, "ef"))
    count, order = picked.numel(), picked.argsort()
    assert back.indices.tolist() == [*picked[order].tolist(), *[0] * (capacity - count)]
    assert torch.equal(back.values[:count], sent.values[:count][order])


@pytest.mark.parametrize("picked", [range(300), range(100_003 - 300, 100_003), range(0, 300 * 333, 333)], ids=str)
def test_coded_indices_in_a_heap_or_spread_out(picked):
    layout = two_halves(100_003)
    sent = entries(torch.tensor(picked), 300, layout, 0)
    back = there_and_back(sent, layout, Wire("sign", "ef"))
    assert torch.equal(back.indices, sent.indices)
    assert torch.equal(back.values, sent.values)


# Worked out by hand: low bits, then capacity + (numel - 1 >> width) high bits, each in whole words.
@pytest.mark.parametrize(
    ("numel", "capacity", "words"),
    [
        (1_000_000, 1000, 282 + 93),  # 9 low bits each; 1000 + 1953 high bits
        (100_000, 1000, 188 + 81),  # 6 low bits each; 1000 + 1562 high bits
        (1024, 1024, 0 + 64),  # no low bits; 1024 + 1023 high bits
        (64, 33, 0 + 3),  # no low bits; 33 + 63 high bits
        (2**31 + 10, 1, 1 + 1),  # 31 low bits; 1 + 1 high bits
        (1, 1, 0 + 1),
        (7, 0, 0),
    ],
)
def test_words_of_coded_indices(numel, capacity, words):
    assert INDEX_CODECS["ef"].words(Shape(numel, capacity, 1, torch.float32)) == words


@given(st.integers(1, 2**33), st.floats(0, 1))
def test_coded_indices_are_as_small_as_promised(numel, share):
    capacity = max(1, int(numel**share))
    bits = 32 * INDEX_CODECS["ef"].words(Shape(numel, capacity, 1, torch.float32))
    log2 = (-(-numel // capacity) - 1).bit_length()  # of numel / capacity, rounded up
    assert bits < capacity * (2 + log2) + 2 * 32
    if capacity < 10**6:  # above, lgamma has too few digits
        assert bits >= fewest_bits(numel, capacity) - 1e-3


@pytest.mark.parametrize("density", [0.001, 0.0065, 0.01])
def test_coded_indices_come_near_the_entropy(density):
    numel = 1_000_000
    capacity = int(density * numel)
    assert 32 * INDEX_CODECS["ef"].words(Shape(numel, capacity, 1, torch.float32)) <= 1.1 * fewest_bits(numel, capacity)


def case_attach(rank: int, size: int) -> list[tuple[str, list[torch.Tensor], int]]:
    """The same two steps with either codec: what is described, the gradients, and the bytes of a step."""
    answers = []
    for indices in ("int", "ef"):
        ddp = DistributedDataParallel(net())
        sync = sparsync.attach(ddp, "topk", density=0.05, indices=indices)
        for step in range(2):
            ddp.zero_grad()
            loss_of(ddp, rank, step).backward()
        answers.append((sync.describe(), [p.grad for p in ddp.parameters()], sync.stats().step.bytes))
        sync.detach()
        del ddp
        gc.collect()
    return answers


def test_attach_codes_indices(worlds):
    for (_, plain, plain_bytes), (said, coded, coded_bytes) in worlds[2].run(case_attach):
        assert "indices as ef" in said
        assert all(torch.equal(a, b) for a, b in zip(plain, coded, strict=True))
        assert coded_bytes < plain_bytes


def case_attach_apart(rank: int, size: int) -> str:
    ddp = DistributedDataParallel(net())
    with pytest.raises(sparsync.SparsyncError) as raised:
        sparsync.attach(ddp, "topk", indices="ef" if rank else "int")
    del ddp
    gc.collect()
    return str(raised.value)


def test_ranks_that_code_differently_are_told(worlds):
    for said in worlds[2].run(case_attach_apart):
        assert "indices=ef" in said


def test_bench_wire_writes_its_columns(tmp_path):
    out = tmp_path / "wire.csv"
    arguments = ["--entries", "20000", "--entries", "50000", "--density", "0.01", "--rounds", "3", "--out", str(out)]
    assert run(["bench", "wire", *arguments, "--workers", "2", "--workers", "5"]) == 0
    with out.open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["entries"], row["indices"], row["values"], row["workers"]) for row in rows] == [
        (n, *how, p) for n in ("20000", "50000") for how in (("int", "fp32"), ("ef", "sign")) for p in ("2", "5")
    ]
    assert all(float(row["bits_per_index"]) == 32 for row in rows if row["indices"] == "int")
    assert all(1 <= float(row["ratio_to_bound"]) <= 1.1 for row in rows if row["indices"] == "ef")
    for key in ("encode_ms", "plain_encode_ms", "read_ms", "plain_read_ms", "clear_ms", "checksum_ms", "select_ms"):
        assert all(float(row[key]) > 0 for row in rows), key
    for key in ("device", "cpus", "python", "torch", "sparsync", "date", "rounds", "threads", "density", "sent"):
        assert all(row[key] for row in rows), key


def test_bench_wire_refuses_bad_input(tmp_path, capsys):
    for option, sentence in [
        ("--entries", "entries must be"),
        ("--density", "density must be"),
        ("--rounds", "rounds"),
        ("--workers", "workers must be"),
    ]:
        assert run(["bench", "wire", option, "0", "--out", str(tmp_path / "never.csv")]) == 2
        assert sentence in capsys.readouterr().err


# ---- several messages at once, and other ways to the same bits ------------------------------------------------------


@pytest.mark.parametrize("way", ["host", "device"])
@pytest.mark.parametrize("indices", ["int", "ef"])
@pytest.mark.parametrize("values", CODECS)
@pytest.mark.parametrize(("numel", "capacity"), [(1, 1), (63, 5), (100_003, 1000), (3_000_000_000, 40)])
def test_rows_are_messages_of_their_own(monkeypatch, way, values, indices, numel, capacity):
    """Also as a device makes them, where nothing may wait for the host."""
    layout = Layout.cut([Span("a", 0, numel // 2), Span("b", numel // 2, numel)], numel=numel, scope="layer", density=1)
    rng, wire = torch.Generator().manual_seed(numel), Wire(values, indices)
    rows = []
    for number in (0, 1, capacity // 2, capacity):
        picked = torch.randint(numel, (min(number, capacity),), generator=rng).unique()
        rows.append(entries(picked, capacity, layout, number))
    shape = Shape(numel, capacity, len(layout.segments), torch.float32, layout.slots)
    alone = [wire.encode(row, layout.segment_of, shape, wire.header(row, 3, 1, 5)) for row in rows]
    if way == "device":
        monkeypatch.setattr("sparsync.wire.bits.on_host", lambda tensor: False)
    stack = [torch.stack([getattr(row, name) for row in rows]) for name in ("indices", "values", "count")]
    many = SparseGrad(*stack, numel, rows[0].flags, rows[0].where)
    messages = wire.encode(many, layout.segment_of, shape, wire.header(many, 3, 1, 5))
    assert torch.equal(messages, torch.stack(alone))
    back = wire.decode(messages, layout.segment_of, shape)
    for i, row in enumerate(rows):
        assert torch.equal(back.indices[i], row.indices)
        assert torch.equal(back.values[i], row.values)
        one = wire.decode(alone[i], layout.segment_of, shape)
        assert torch.equal(one.indices, row.indices)
        assert torch.equal(one.values, row.values)


@pytest.mark.parametrize("way", ["host", "device"])
@pytest.mark.parametrize("width", [1, 7, 8, 9, 15, 16, 17, 31, 32])
@pytest.mark.parametrize("count", [0, 1, 33])
def test_numbers_of_any_width_come_back(monkeypatch, width, count, way):
    if way == "device":
        monkeypatch.setattr("sparsync.wire.bits.on_host", lambda tensor: False)
    numbers = torch.randint(2**width, (3, count), generator=torch.Generator().manual_seed(width))
    bits = spread(numbers + (5 << width), width)  # of which only the lowest count
    assert torch.equal(gather(unpack_bits(pack_bits(bits))[:, : count * width], width), numbers)


@pytest.mark.parametrize("count", [0, 1, 63, 1000])
def test_entries_that_are_added_in_several_queues_have_the_same_sums(count):
    rng = torch.Generator().manual_seed(count)
    segments, values = torch.randint(3, (count,), generator=rng), torch.randint(100, (count,), generator=rng)
    bins, shape = _bins(segments, 3, QUEUES)
    table = torch.zeros(shape, dtype=torch.int64).view(-1).index_add_(0, bins, values).view(shape)
    assert torch.equal(table.sum(0), torch.zeros(3, dtype=torch.int64).index_add_(0, segments, values))
    assert (table > 0).sum(1).max() <= max(1, -(-count // QUEUES))  # neighbours are in other rows
