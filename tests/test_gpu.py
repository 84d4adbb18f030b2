"""The path on a GPU: run by hand (`make test-gpu`), skipped where there is none."""

from __future__ import annotations

import gc
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import sparsync
from sparsync.collectives import Channel
from sparsync.compressors import Context, GaussianK
from sparsync.engine.bucketing import Bucket
from sparsync.engine.completion import Deferred
from sparsync.kernels import Memory, Update, Velocity
from sparsync.kernels.apply_update import ParameterChange, apply_update
from sparsync.kernels.precondition import reference
from sparsync.kernels.sketch import draw_signs, sketch
from sparsync.layout import Parameter
from sparsync.schedule import Constant
from sparsync.wire import CODECS, Wire
from sparsync.workspace import Workspace
from tests.methods import COLLECTIVES, SPARSE, Worker, gradient, make, reducer_of, worker
from tests.models import net, weights
from tests.pairs import layout_of, nothing_waited_for_nor_allocated
from tests.tensors import moved, sketched, tables_of
from tests.test_auto import assert_law, law_case
from tests.test_hierarchy import LAYOUTS, WAYS, case_laws
from tests.world import World

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("name", SPARSE)
@pytest.mark.parametrize("values", CODECS)
def test_law_1_on_the_device(name, values):
    one = worker(name, [63, 1023, 100_003], density=0.01, values=values)
    residual, workspace = torch.zeros(one.layout.numel, device="cuda"), Workspace()
    for step, kind in enumerate(("normal", "heavy", "mostly zero", "zero")):
        grad = gradient(kind, one.layout.numel, torch.float32, step).cuda()
        before, memory = residual.clone(), Memory(residual, residual, workspace=workspace)
        ctx = Context(step, rounding=CODECS[values].round, values=values)
        sent = one.compressor.compress(grad, memory, one.layout, ctx, one.state)
        assert sent.values.is_cuda
        assert torch.equal(sent.densify() + residual, before + grad)


@pytest.mark.parametrize("name", ["threshold", "topk", "trimmed", "dgc", "gaussian", "refined"])
@pytest.mark.parametrize("values", ["fp32", "sign", "levels"])
@pytest.mark.parametrize("scope", ["layer", "global"])
@pytest.mark.parametrize("clip", [None, 1e9])
def test_once_settled_compress_waits_for_nothing_and_allocates_nothing(name, values, scope, clip):
    compressor = GaussianK(0.001, refine=True) if name == "refined" else make(name, 0.001)
    layout = layout_of([1_000_003, 700, 250_000], compressor, scope, hole=0)
    one = Worker(compressor, layout, torch.float32, values, device="cuda")
    grads = [torch.randn(one.layout.numel, device="cuda") for _ in range(2)]
    memory = Memory(one.residual, one.residual)
    ctx = Context(rounding=CODECS[values].round, values=values, clip=clip)  # nothing is clipped, but looked at

    def compress(step):
        return one.compressor.compress(grads[step % 2], memory, one.layout, ctx, one.state)

    for step in range(25):
        compress(step)
    with nothing_waited_for_nor_allocated(name):
        for step in range(5):
            sent = compress(step)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        sent = compress(0)
    kept = one.residual.clone()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(sent.densify() + one.residual, kept + grads[0])
    least = 0.5 * one.layout.k if name != "gaussian" else 0  # its count is anything
    assert least < int(sent.count) <= one.layout.capacity


@pytest.mark.parametrize("name", ["threshold", "topk", "dgc"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_once_settled_preconditioning_waits_for_nothing_and_allocates_nothing(name, dtype):
    """Sketch, the one pass, and the update of parameters; and all of it from a graph."""
    tensors = sketched([(1, 1024, 1000), (3, 300, 401), 70_000], hole=0)
    compressor = make(name, 0.001)
    layout = layout_of([tensor.numel for tensor in tensors], compressor, "global", hole=0)
    spare, tables = torch.zeros(layout.numel, device="cuda"), moved(tables_of(tensors), "cuda")
    one = Worker(compressor, layout, dtype, device="cuda")
    update = Update(one.velocity, one.velocity, tensors, tables)
    memory, ctx = Memory(one.residual, one.residual), Context()
    grads = [torch.randn(layout.numel, device="cuda").to(dtype) for _ in range(2)]
    signs = draw_signs(tables.sizes.numel(), 0, 0, torch.device("cuda"))
    out, parameters = torch.zeros(tensors[-1].at + tensors[-1].size, device="cuda"), torch.ones_like(spare)
    one_number = torch.ones((), device="cuda")
    changes = [ParameterChange(parameters, spare, 0.99, one_number)]

    def act(step):
        sketch(grads[step % 2], tensors, signs, out, ctx.workspace)
        memory.update = update
        sent = one.compressor.compress(grads[step % 2], memory, layout, ctx, one.state)
        apply_update(changes, one_number, None, ctx.workspace)
        return sent

    for step in range(25):
        act(step)
    with nothing_waited_for_nor_allocated(name):
        for step in range(5):
            act(step)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        sent = act(0)
    before, came = one.residual.clone(), torch.zeros_like(spare)
    reference.precondition(grads[0], replace(update, after=one.velocity.clone()), came)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(sent.densify() + one.residual, before + came)


@pytest.mark.parametrize("scope", ["layer", "global"])
@pytest.mark.parametrize("falls", [False, True])
def test_once_settled_hook_and_update_wait_for_nothing_and_allocate_nothing(scope, falls):
    """All of a step beside backward, from the bucket to the parameters; a changed rate takes a small copy."""
    shapes = [(1024, 1000), (300,), (3, 300, 401), (64, 3, 3, 3)]
    model = torch.nn.ParameterList([torch.randn(shape, device="cuda") for shape in shapes])
    parameters = list(model.parameters())
    bucket = torch.randn(sum(p.numel() for p in parameters), device="cuda")
    for parameter, part in zip(parameters, bucket.split([p.numel() for p in parameters]), strict=True):
        parameter.grad = part.view_as(parameter)
    optimizer = torch.optim.AdamW(parameters, lr=1e-3)
    handle, _ = sparsync.comm_hook(
        model, "threshold", density=0.01, scope=scope, optimizer=optimizer, precondition=True
    )
    handle._may_skip = False  # of DDP's options, which nobody asked here

    def act():
        bucket.normal_()
        if falls:
            optimizer.param_groups[0]["lr"] *= 0.99
        handle.push(0, bucket, parameters, last=True).wait()
        optimizer.step()

    for _ in range(25):
        act()
    assert isinstance(handle._running().completion, Deferred)
    before = [p.detach().clone() for p in parameters]
    with nothing_waited_for_nor_allocated(scope):
        for _ in range(5):
            act()
    assert all(p.isfinite().all() and not torch.equal(p, old) for p, old in zip(parameters, before, strict=True))
    handle.detach()


@pytest.mark.parametrize("name", ["random", "block"])
@pytest.mark.parametrize("values", CODECS)
@pytest.mark.parametrize("scope", ["layer", "global"])
@pytest.mark.parametrize("whole", [False, True])
def test_random_kinds_draw_as_on_the_cpu_and_wait_for_nothing(name, values, scope, whole):
    compressor = make(name, 0.01)
    layout = layout_of([100_003, 700, 1, 250_000], compressor, scope, hole=5)
    moments = {device: Context(rounding=CODECS[values].round, values=values, whole=whole) for device in ("cpu", "cuda")}
    memories = {}
    for device in moments:
        residual, velocity = (torch.zeros(layout.numel, device=device) for _ in range(2))
        memories[device] = Memory(residual, residual, Velocity(velocity, velocity, 0.5, True))

    def compress(step, device, grad):
        ctx = replace(moments[device], step=step)
        return compressor.compress(grad, memories[device], layout, ctx, {})

    for step in range(4):
        grad = gradient("normal", layout.numel, torch.float32, step)
        grad[[100_003, 100_010]] = float("nan")  # of nobody, and of the second parameter
        here, there = grad.cuda(), compress(step, "cpu", grad)
        torch.cuda.set_sync_debug_mode("error" if step else "default")  # the first step makes the tables
        try:
            sent = compress(step, "cuda", here)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        for field in ("indices", "values", "count", "flags", "where"):
            assert torch.equal(getattr(sent, field).cpu(), getattr(there, field)), field
        assert torch.equal(memories["cuda"].after.cpu(), memories["cpu"].after)
        assert torch.equal(memories["cuda"].velocity.after.cpu(), memories["cpu"].velocity.after)


def test_what_is_clipped_on_the_device_is_clipped_as_on_the_cpu():
    """Dense, and in every dtype that waits for nothing: the gradient is multiplied by what brings its norm down."""
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        one = worker("none", [100_003, 700], scope="bucket", dtype=dtype, clip=0.5)
        grad = gradient("normal", one.layout.numel, dtype, 0)
        expected, ctx = one.send(grad).values, Context(clip=0.5)
        for _ in range(2):
            row = grad.cuda()
            sent = one.compressor.compress(row, None, one.layout, ctx, one.state)
            assert torch.equal(sent.values.cpu(), expected)
        with nothing_waited_for_nor_allocated(str(dtype)):
            one.compressor.compress(row, None, one.layout, ctx, one.state)


def case_settled(rank: int, size: int, cases: list[tuple[str, str, str, str, float | None]]) -> list[tuple[int, int]]:
    """Whole steps (compress, exchange over NCCL, decode) watched for waiting and for allocations."""
    torch.cuda.set_device(0)
    group = dist.new_group(backend="nccl")
    return [settled(group, *case) for case in cases]


def settled(
    group: dist.ProcessGroup, name: str, scope: str, values: str, indices: str, clip: float | None, collective: str
) -> tuple[int, int]:
    device = torch.device("cuda", 0)
    sizes = {"a": 1_000_003, "small": 700, "b": 250_000}
    channel = Channel(group, Wire(values, indices), 60.0, device)
    parameters = [Parameter.of(name, torch.zeros(size)) for name, size in sizes.items()]
    reducer = reducer_of(
        parameters, make(name, 0.001), COLLECTIVES[collective], channel, scope=scope, density=Constant(0.001),
        dense_names=frozenset({"small"}), clip=clip,
    )  # fmt: skip
    assert isinstance(reducer.completion, Deferred)
    assert channel.backend == "nccl"
    bank = torch.randn(8, 1_250_703, device=device)
    buffers = [torch.zeros(250_000, device=device), torch.zeros(1_000_703, device=device)]

    def step(number: int) -> None:
        parts, futures = bank[number % 8].split([250_000, 1_000_703]), []
        for i, names in enumerate((("b",), ("a", "small"))):
            buffers[i].copy_(parts[i])
            futures.append(reducer.push(Bucket(i, buffers[i], names, i == 1)))
        for future in futures:  # in scope "global" even the first is there only after the last bucket came
            future.wait()

    for number in range(25):
        step(number)
    with nothing_waited_for_nor_allocated(name):
        for number in range(5):
            step(number)
    kept = {name: reducer.residual(name).clone() for name in ("a", "b")}
    step(5)
    for name, here, part in (("b", buffers[0], slice(0, 250_000)), ("a", buffers[1], slice(250_000, 1_250_003))):
        torch.cuda.synchronize()
        assert torch.equal(here[: sizes[name]] + reducer.residual(name), kept[name] + bank[5][part])
    total = reducer.newest_stats().total
    reducer.close()
    return total.entries, total.steps


def test_once_settled_a_whole_step_waits_for_nothing_and_allocates_nothing():
    plain, short = ("layer", "fp32", "int"), ("global", "sign", "ef")
    cases = [("threshold", *plain), ("threshold", *short), ("topk", *plain), ("gaussian", *short), ("dgc", *plain)]
    cases = [(*case, None) for case in cases] + [("topk", *plain, 1e9), ("threshold", *short, 1e9)]
    cases = [(*case, "allgather") for case in cases] + [("threshold", *short, None, "balanced")]
    ((finished, answer),) = World.once(1, case_settled, timeout=170, cases=cases)
    assert finished, answer
    for (name, *_), (entries, steps) in zip(cases, answer, strict=True):
        assert steps == 31
        assert entries >= 31 * 700 + (31 * 600 if name != "gaussian" else 0)


def case_train(rank: int, size: int, backend: str, name: str, values: str, scope: str) -> tuple[torch.Tensor, float]:
    """Eight steps on the GPU; ranks may share it over Gloo."""
    group = dist.new_group(backend=backend)
    torch.cuda.set_device(0)
    ddp = DistributedDataParallel(net().cuda(), bucket_cap_mb=0.01, process_group=group)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    if name in ("default", "balanced", "auto"):
        handle = sparsync.attach(ddp, recipe=name, optimizer=optimizer, scope=scope, dense_below=100)
    else:
        pairs = {"collective": "gtopk"} if name == "gtopk" else {}
        compressor = make("topk" if pairs else name, 0.02)
        handle = sparsync.attach(ddp, compressor, values=values, scope=scope, dense_below=100, **pairs)
    rng = torch.Generator(device="cuda").manual_seed(rank)
    for _ in range(60 if name == "auto" else 8):  # until its trial is over
        x = torch.randn(16, 20, device="cuda", generator=rng)
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(ddp(x), x[:, :5].argmax(1))
        loss.backward()
        optimizer.step()
    result = weights(ddp.module).cpu(), loss.item()
    handle.detach()
    del ddp
    gc.collect()
    return result


def case_shards(rank: int, size: int, scope: str) -> bool:
    """FSDP2 on one rank, whose streams are those of many: compare what comes out and stays with what came in."""
    torch.cuda.set_device(0)
    group = dist.new_group(backend="nccl")
    mesh = DeviceMesh.from_group(group, "cuda")
    model, twin = net().cuda(), net().cuda()
    for part in (model[0], model[2]):
        fully_shard(part, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    handle = sparsync.attach(model, make("topk", 0.02), replicate=group, optimizer=optimizer, scope=scope)
    deferred = isinstance(handle._running().completion, Deferred)
    before = dict[str, torch.Tensor]()
    for step in range(8):
        x = torch.randn(16, 20, device="cuda", generator=torch.Generator("cuda").manual_seed(step))
        for one in (model, twin):
            one.zero_grad()
            torch.nn.functional.cross_entropy(one(x), x[:, :5].argmax(1)).backward()
        for (name, p), came in zip(model.named_parameters(), twin.parameters(), strict=True):
            kept, due = handle.residual(name), came.grad + before.get(name, 0)
            out = p.grad.to_local() if kept is None else p.grad.to_local() + kept
            assert torch.allclose(out, due, atol=1e-6), (step, name)
            before |= {} if kept is None else {name: kept.clone()}
        optimizer.step()
        with torch.no_grad():
            for p, other in zip(model.parameters(), twin.parameters(), strict=True):
                other.copy_(p.to_local())
    handle.detach()
    del model
    gc.collect()
    return deferred


@pytest.mark.parametrize("scope", ["layer", "global"])
def test_shards_lose_nothing_on_the_device(scope):
    assert World.once(1, case_shards, timeout=120, scope=scope) == [(True, True)]


@pytest.mark.parametrize(("backend", "size"), [("nccl", 1), ("gloo", 2), ("gloo", 3)])
@pytest.mark.parametrize("scope", ["layer", "global"])
@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("topk", "fp32"),
        ("threshold", "fp32"),
        ("default", "sign"),
        ("balanced", "sign"),
        ("auto", "sign"),
        ("gtopk", "fp32"),
        ("gtopk", "levels"),
    ],
)
def test_training_on_the_device(backend, size, scope, name, values):
    answers = World.once(size, case_train, timeout=120, backend=backend, name=name, values=values, scope=scope)
    assert all(finished for finished, _ in answers), answers
    assert all(torch.equal(answer[0], answers[0][1][0]) for _, answer in answers)
    assert torch.isfinite(answers[0][1][0]).all()


@pytest.mark.parametrize(("size", "momentum", "way"), [(2, 0.0, "default"), (3, 0.9, "default in buckets")])
def test_nothing_is_lost_between_dense_and_sparse_steps_on_the_device(size, momentum, way):
    answers = World.once(size, law_case, momentum=momentum, way=way, device="cuda:0")
    assert all(finished for finished, _ in answers), answers
    assert_law([answer for _, answer in answers], momentum, way)


@pytest.mark.parametrize("way", ["allgather", "signs", "gtopk", "signs in gtopk", "balanced"])
def test_laws_1_and_2_hold_for_nodes_on_the_device(way):
    size, per_node = LAYOUTS["2x2"]
    arguments = {"per_node": per_node, "options": WAYS[way], "dtype": torch.float32, "device": "cuda:0"}
    answers = World.once(size, case_laws, **arguments)
    assert all(finished for finished, _ in answers), answers
    assert [bool(kept) for _, (kept, _, _) in answers] == [True, False, True, False]
