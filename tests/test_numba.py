"""The compiled loops of the CPU against the specification: the same residual, velocity, peaks and indices."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from sparsync.compressors.base import Context
from sparsync.compressors.selecting import send_chosen
from sparsync.feedback.residual import Correction
from sparsync.kernels import KernelPath, Memory, Update, Velocity, choose_path, cpu
from sparsync.kernels.accumulate import Rows, accumulate
from sparsync.kernels.accumulate import reference as accumulate_reference
from sparsync.kernels.precondition import precondition
from sparsync.kernels.precondition import reference as precondition_reference
from sparsync.kernels.threshold import candidates
from sparsync.kernels.threshold import reference as threshold_reference
from sparsync.kernels.topk import above, largest
from sparsync.kernels.topk import reference as topk_reference
from sparsync.layout import Layout, Span
from sparsync.wire.values import CODECS
from sparsync.workspace import Workspace
from tests.methods import DTYPES, KINDS, SIZES, gradient, worker
from tests.tensors import TENSORS, numel_of, sketched, tables_of

BAD = (float("nan"), float("inf"), -float("inf"))
seeds = st.integers(0, 2**31)
layouts = st.lists(st.tuples(st.sampled_from([0, 1, 64, 129]), st.sampled_from([*SIZES, 64, 256, 5000])), max_size=4)
thresholds = st.sampled_from([-1.0, 0.0, 1e-46, 1e-40, 0.3, 1.0, 2.9, 1e30, 1e39, float("inf"), float("nan")])


@pytest.fixture(autouse=True, scope="module")
def small_ones_too():
    """Every size is compiled here, and a few rows are worth a thread."""
    pytest.importorskip("numba")
    assert cpu.available()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu, "LEAST", 1)
        patch.setattr(cpu, "SHARE", 100)
        yield


@dataclass
class Calls:
    """How often each version ran."""

    numba: int = 0
    pytorch: int = 0


@pytest.fixture
def calls(monkeypatch):
    count = Calls()

    def counted(name, real):
        def call(*args):
            setattr(count, name, getattr(count, name) + 1)
            return real(*args)

        return call

    from sparsync.kernels.accumulate import cpu as accumulate_cpu
    from sparsync.kernels.topk import cpu as topk_cpu

    for name, ways in {
        "numba": (accumulate_cpu, topk_cpu),
        "pytorch": (accumulate_reference, topk_reference),
    }.items():
        for version, function in zip((ways[0], ways[1], ways[1]), ("accumulate", "above", "largest"), strict=True):
            monkeypatch.setattr(version, function, counted(name, getattr(version, function)))
    return count


@dataclass
class Case:
    """One pass, set up anew for each version."""

    runs: list[tuple[int, int]]
    dtype: torch.dtype = torch.float32
    kind: str = "normal"
    scale: float = 1.0
    beta: float | None = None
    undoable: bool = False
    bad: tuple[float, ...] = ()
    seed: int = 0
    grad: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.numel = (self.runs[-1][1] if self.runs else 0) + 3
        self.grad = gradient(self.kind, self.numel, self.dtype, self.seed)
        rng = torch.Generator().manual_seed(self.seed)
        for value in self.bad:
            self.grad[torch.randint(self.numel, (2,), generator=rng)] = value

    def memory(self) -> Memory:
        before, slow = (gradient(self.kind, self.numel, torch.float32, self.seed + i) for i in (1, 2))
        velocity = None if self.beta is None else Velocity(slow, self.written(slow), self.beta, True)
        return Memory(before, self.written(before), velocity)

    def written(self, before: Tensor) -> Tensor:
        return torch.full_like(before, float("nan")) if self.undoable else before

    def assert_same(self) -> tuple[Tensor, Rows]:
        one, two = self.memory(), self.memory()
        for _ in range(2):  # the second time with the rows of the first
            energy = one.energy
            rows, bad = accumulate(self.grad, one, self.runs, self.scale, KernelPath.NUMBA)
            expected, first = accumulate(self.grad, two, self.runs, self.scale, KernelPath.PYTORCH)
            assert bad == first
            assert_equal(one.after, two.after)
            if one.velocity:
                assert_equal(one.velocity.after, two.velocity.after)
            for name in ("start", "stop", "peak"):
                assert_equal(getattr(rows, name), getattr(expected, name))
            true = sum(one.after[a:b].double().square().sum().item() for a, b in self.runs)
            assert one.energy - energy == pytest.approx(true, rel=1e-12)
        return one.after, rows


def assert_equal(one: Tensor, two: Tensor) -> None:
    """Every bit, the sign of zero and NaN included."""
    bits = torch.int32 if one.dtype == torch.float32 else one.dtype
    assert torch.equal(one.view(bits), two.view(bits))


def runs_of(layout: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Runs of certain sizes after holes of certain sizes."""
    runs, at = [], 0
    for hole, size in layout:
        runs.append((at + hole, at + hole + size))
        at = runs[-1][1]
    return runs


@pytest.mark.parametrize("threads", [1, 3])
@given(
    layouts,
    st.sampled_from(DTYPES[:1] + DTYPES[2:]),
    st.sampled_from(KINDS),
    st.sampled_from([1.0, 0.3]),
    st.sampled_from([None, 0.0, 0.9]),
    st.booleans(),
    st.lists(st.sampled_from(BAD), max_size=2),
    seeds,
)
@example([], torch.float32, "normal", 1.0, None, False, [], 0)
@example([(1, 100_003)], torch.bfloat16, "heavy", 0.3, 0.9, True, list(BAD), 1)
def test_accumulate(threads, layout, dtype, kind, scale, beta, undoable, bad, seed):
    torch.set_num_threads(threads)
    try:
        Case(runs_of(layout), dtype, kind, scale, beta, undoable, tuple(bad), seed).assert_same()
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize("beta", [None, 0.5])
@pytest.mark.parametrize("undoable", [False, True])
@pytest.mark.parametrize("at", [0, 63, 255, 256, 700])
def test_a_sum_that_overflows_stays_out(at, undoable, beta):
    """Gradient and residual are finite, their sum is not; neighbours keep theirs."""
    case = Case([(0, 701)], beta=beta, undoable=undoable)
    case.memory = lambda made=case.memory: _full(made(), at)
    case.grad[at] = 3e38
    after, _ = case.assert_same()
    assert after[at] == torch.tensor(3e38)
    assert torch.isfinite(after[:701]).all()


def _full(memory: Memory, at: int) -> Memory:
    memory.before[at] = 3e38
    return memory


@pytest.mark.parametrize("threads", [1, 3])
@given(layouts, st.sampled_from(KINDS), thresholds, st.sampled_from([1, 2, 70, 5000, 10**6]), seeds)
def test_above_and_largest(threads, layout, kind, threshold, k, seed):
    case = Case(runs_of(layout), kind=kind, seed=seed)
    u, rows = case.assert_same()
    torch.set_num_threads(threads)
    try:
        for start, stop in ((0, rows.peak.numel()), (1, rows.peak.numel() // 2)):  # all of them, and some
            some = rows.subset(slice(start, stop))
            assert some.path is KernelPath.NUMBA
            assert torch.equal(above(u, some, threshold), topk_reference.above(u, some, threshold))
            if some.peak.numel():
                assert torch.equal(largest(u, some, k), topk_reference.largest(u, some, k))
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize("threads", [1, 3])
@given(layouts, st.sampled_from(KINDS), st.sampled_from([0, 1, 0x00800000, 0x3E99999A]), st.booleans(), seeds)
@example([(1, 5000)], "normal", 0, True, 0)
def test_candidates(threads, layout, kind, low, collect, seed):
    """From a threshold below all magnitudes, which fills the last bin, to the largest of them (for 0); those that the
    pass has collected, and those that it did not, or gave up as they were too many."""
    case = Case(runs_of(layout), kind=kind, seed=seed)
    memory = case.memory()
    low = low or max(1, int(threshold_reference.bits_of(memory.before + case.grad).max()))
    torch.set_num_threads(threads)
    try:
        rows, _ = accumulate(case.grad, memory, case.runs, path=KernelPath.NUMBA, low=low if collect else 0)
    finally:
        torch.set_num_threads(1)
    ours, theirs = candidates(memory.after, rows, low), threshold_reference.Candidates(memory.after, rows, low)
    assert torch.equal(ours.reached, theirs.reached)
    found = int(ours.reached[0])
    for edge in {0, 17, 300, 511, int((ours.reached >= found // 2).sum()) - 1}:
        for capacity in {int(ours.reached[edge]) if edge < 511 else found, found, found // 2 + 1}:
            if edge == 511 or capacity >= int(ours.reached[edge + 1]):
                for step in (0, 1, 5):
                    assert torch.equal(ours.pick(edge, capacity, step), theirs.pick(edge, capacity, step))


def test_what_a_pass_collects_is_used():
    """Nobody looks into rows again, unless half of a piece and more would have to be kept."""
    case = Case([(0, 5000)])
    few, many = 0x3F800000, 1
    for low, collected in ((few, True), (many, False)):
        memory = case.memory()
        rows, _ = accumulate(case.grad, memory, case.runs, path=KernelPath.NUMBA, low=low)
        assert (None not in rows.collected.parts) is collected
        rows.peak.zero_()
        assert bool(candidates(memory.after, rows, low).reached[0]) is collected
        assert not candidates(memory.after, rows, low + 1).reached[0]


@pytest.mark.parametrize("values", ["fp32", "fp16", "bf16", "sign", "levels"])
def test_take(values):
    """Entries of every size, among them many that rounding would not leave exact: the same goes, the same stays."""
    numel, rng = 5000, torch.Generator().manual_seed(0)
    sizes = torch.randn(numel, generator=rng) * 2.0 ** torch.randint(-30, 60, (numel,), generator=rng)
    layout = Layout.cut([Span("p", 0, numel)], numel=numel, scope="global", density=0.5, dtype=torch.float16)
    indices = torch.arange(0, numel, 2)
    ctx, sent = Context(rounding=CODECS[values].round, values=values), []
    memories = [Case([(0, numel)], beta=0.5).memory() for _ in range(2)]
    for memory, path in zip(memories, (KernelPath.NUMBA, KernelPath.PYTORCH), strict=True):
        memory.after[:numel] = sizes
        about = torch.zeros((), dtype=torch.int32), torch.full((), -1, dtype=torch.int32)
        sent.append(send_chosen(memory, indices, torch.zeros_like(indices), layout, ctx, *about, path))
    assert 0 < sent[0].count < indices.numel()
    for part in ("indices", "values", "count"):
        assert torch.equal(getattr(sent[0], part), getattr(sent[1], part))
    assert_equal(memories[0].after, memories[1].after)
    assert_equal(memories[0].velocity.after, memories[1].velocity.after)


@given(
    st.sampled_from([1, 2, 63, 5000]),
    st.sampled_from(KINDS),
    st.sampled_from([-140, -126, -20, 0, 100]),
    st.sampled_from([float("inf"), 2.0**104, 65504.0, 1.0]),
    st.sampled_from([(), (0.0, -0.0), BAD]),
    seeds,
)
def test_signs(numel, kind, exponent, most, among, seed):
    """From denormal numbers to large ones, zeros among them; what is not finite is left to the specification."""
    values = gradient(kind, numel, torch.float32, seed) * 2.0**exponent
    for i, value in enumerate(among):
        values[i :: 2 + i] = value
    rounded = CODECS["sign"].round(values, torch.zeros(numel, dtype=torch.int64), 1, most)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu, "available", lambda: False)
        patch.setattr(cpu, "loaded", lambda: False)
        assert_equal(rounded, CODECS["sign"].round(values, torch.zeros(numel, dtype=torch.int64), 1, most))


def test_what_was_nan_already_is_not_found():
    u = gradient("normal", 640, torch.float32, 0)
    u[[3, 200]] = float("nan")
    u[400] = float("inf")
    rows, _ = accumulate(torch.zeros(640), Memory(u, u), [(0, 640)], path=KernelPath.NUMBA)
    found = above(u, rows, 0.5)
    assert torch.equal(found, topk_reference.above(u, rows, 0.5))
    assert 400 in found


@pytest.mark.parametrize("name", ["topk", "threshold", "gaussian", "dgc", "trimmed"])
@pytest.mark.parametrize("scope", ["layer", "global"])
def test_compressors_send_the_same(name, scope, calls, monkeypatch):
    """Step after step, with momentum, a hole and half precision on the wire: entries, residual and state."""
    how = {"scope": scope, "values": "bf16", "hole": 3, "correction": Correction(0.5, True)}
    one, two = (worker(name, [5000, 63, 1023], **how) for _ in range(2))
    for step in range(4):
        grad = gradient("heavy", one.layout.numel, torch.float32, step)
        sent = one.send(grad)
        ran = calls.numba
        with monkeypatch.context() as patch:
            patch.setattr(cpu, "available", lambda: False)
            expected = two.send(grad)
        assert calls.numba == ran > 0
        for part in ("indices", "values", "count", "flags"):
            assert torch.equal(getattr(sent, part), getattr(expected, part))
        assert_equal(one.residual, two.residual)
        assert_equal(one.velocity, two.velocity)
        assert one.state == two.state
    assert calls.pytorch > 0


@pytest.mark.parametrize(
    ("change", "which"),
    [
        ("none", "numba"),
        ("half precision", "numba"),
        ("double precision", "pytorch"),
        ("every other entry", "pytorch"),
        ("small", "pytorch"),
        ("switched off", "pytorch"),
    ],
)
def test_which_version_runs(change, which, calls, monkeypatch):
    grad = gradient("normal", 70_000, torch.bfloat16 if change == "half precision" else torch.float32, 0)
    residual = torch.zeros(70_000, dtype=torch.float64 if change == "double precision" else torch.float32)
    if change == "every other entry":
        grad = torch.zeros(140_000)[::2]
    if change == "small":
        monkeypatch.setattr(cpu, "LEAST", 70_001)
    if change == "switched off":
        monkeypatch.setenv(cpu.SWITCH, "0")
        monkeypatch.setattr(cpu, "available", cpu.available.__wrapped__)
    memory = Memory(residual, residual)
    path = choose_path(grad, memory, 0)
    assert path == which
    rows, _ = accumulate(grad, memory, [(0, 70_000)], path=path)
    above(residual, rows, 0.5)
    largest(residual, rows, 5)
    assert getattr(calls, which) >= 3
    assert not calls.numba or not calls.pytorch


ALONE = """
import sys
import torch
import sparsync
from sparsync.compressors import Context, TopK
from sparsync.kernels import Memory, cpu
from sparsync.layout import Layout, Span

def path_of(numel):
    grad, memory = torch.ones(numel), Memory(torch.zeros(numel), torch.zeros(numel))
    layout = Layout.cut([Span("p", 0, numel)], numel=numel, scope="layer", density=0.01)
    ctx = Context()
    TopK(0.01).compress(grad, memory, layout, ctx, {{}})
    return TopK(0.01).path(grad, memory, layout, ctx)

assert path_of(cpu.LEAST - 1) == "pytorch"
assert "numba" not in sys.modules  # it takes a while to import
if {missing}:
    sys.modules["numba"] = None
assert path_of(cpu.LEAST) == ("pytorch" if {missing} else "numba")
"""


@pytest.mark.parametrize("missing", [False, True])
def test_numba_is_loaded_when_it_is_worth_it(missing):
    subprocess.run([sys.executable, "-c", ALONE.format(missing=missing)], check=True, timeout=120)


def test_compiled_without_a_place_to_keep_it(monkeypatch):
    from numba.core.caching import CacheImpl

    monkeypatch.setattr(CacheImpl, "_locator_classes", [])
    assert cpu.compiled("int64(int64)")(abs_of)(-3) == 3


def abs_of(number):
    return number if number > 0 else -number


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shapes", TENSORS.values(), ids=TENSORS)
def test_precondition(shapes, dtype, threads, monkeypatch):
    """The same bits, whatever is not finite; in the gradient's own place where it is fp32."""
    from sparsync.kernels.precondition import cpu as loops

    calls, real = [], loops.precondition
    monkeypatch.setattr(loops, "threads_for", lambda numel: threads)
    monkeypatch.setattr(loops, "precondition", lambda *a: calls.append(1) or real(*a))
    tensors = sketched(shapes)
    tables, numel = tables_of(tensors), numel_of(tensors)
    velocities = [torch.zeros(numel), torch.zeros(numel)]
    for step in range(3):
        grad = gradient("heavy", numel, dtype, step)
        if step == 1:
            grad[:: max(7, numel // 50)] = BAD[step]
        outs = [torch.zeros(numel), torch.zeros(numel)] if dtype != torch.float32 else [grad, grad.clone()]
        mine = outs[1] if dtype == torch.float32 else grad
        updates = [Update(v, v.clone() if step == 2 else v, tensors, tables) for v in velocities]
        precondition_reference.precondition(grad, updates[0], outs[0])
        precondition(mine, updates[1], outs[1], Workspace())
        velocities = [update.after for update in updates]
        for a, b in (velocities, outs):
            torch.testing.assert_close(b, a, rtol=0, atol=0, equal_nan=True)
    assert len(calls) == 3
