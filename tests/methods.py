"""The one table of compressors and collectives that every law is tested over: a new method joins by a row here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from examples.every_other import EveryOther
from examples.round_robin import RoundRobin
from torch import Tensor

from sparsync import (
    DGCK,
    AllGather,
    Balanced,
    BlockRandomK,
    DenseAllReduce,
    GaussianK,
    GTopK,
    NoCompression,
    RandomK,
    Selecting,
    SharedIndexAllReduce,
    ThresholdK,
    TopK,
    TrimmedK,
)
from sparsync.collectives import Channel, Collective
from sparsync.compressors import Compressor, Context, State
from sparsync.config import resolve
from sparsync.engine.reducer import Reducer
from sparsync.feedback import Correction, accumulation_dtype
from sparsync.kernels import Memory, Update, Velocity
from sparsync.kernels.precondition import Tables
from sparsync.kernels.sketch import Sketched
from sparsync.layout import Layout, Parameter, Span
from sparsync.sparse import SparseGrad
from sparsync.wire import CODECS
from sparsync.workspace import Workspace


@dataclass(frozen=True)
class Odd(Selecting):
    """A third party's compressor that defines nothing but ``select``: the last k entries."""

    def select(self, u: Tensor, k: int) -> Tensor:
        return torch.arange(u.numel() - k, u.numel())


# name -> compressor of a density; those that send every entry are in the next table.
SPARSE: dict[str, Callable[[float], Compressor]] = {
    "topk": TopK,
    "threshold": ThresholdK,
    "gaussian": GaussianK,
    "dgc": DGCK,
    "trimmed": TrimmedK,
    "random": RandomK,
    "block": BlockRandomK,
    "odd": Odd,
    "round robin": RoundRobin,
}
DENSE: dict[str, Callable[[], Compressor]] = {"none": NoCompression}
COLLECTIVES: dict[str, Collective] = {
    "allgather": AllGather(),
    "dense": DenseAllReduce(),
    "gtopk": GTopK(),
    "balanced": Balanced(),
    "shared": SharedIndexAllReduce(),
    "every other": EveryOther(),
}

# (compressor, collective, value codecs the pair carries)
PAIRS = [
    *[(name, "allgather", ("fp32", "fp16", "bf16", "sign", "levels")) for name in SPARSE],
    *[(name, "dense", ("fp32", "bf16")) for name in ("topk", "threshold", "odd", *DENSE)],
    *[(name, "shared", ("fp32", "bf16")) for name in ("random", "block")],
    *[(name, "gtopk", ("fp32", "fp16", "bf16", "sign", "levels")) for name in ("topk", "threshold", "random")],
    *[
        (name, "balanced", ("fp32", "fp16", "bf16", "sign", "levels"))
        for name in ("topk", "threshold", "random", "dgc")
    ],
    ("topk", "every other", ("fp32",)),
]
# Every way through the library in every world; what differs from these only in its choice of entries, in one.
EVERYWHERE = {("topk", "allgather"), ("threshold", "allgather"), ("topk", "gtopk"), ("threshold", "balanced")}
PAIRS_AND_WORLDS = [(*pair, size) for pair in PAIRS for size in (1, 2, 3, 4, 5) if size == 3 or pair[:2] in EVERYWHERE]
WORLD_IDS = [f"{name}-{collective}-{size}" for name, collective, _, size in PAIRS_AND_WORLDS]
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
SIZES = (1, 2, 63, 1023, 100_003)
KINDS = ("normal", "heavy", "integers", "mostly zero", "zero", "huge")


def make(name: str, density: float) -> Compressor:
    return SPARSE[name](density) if name in SPARSE else DENSE[name]()


def gradient(kind: str, numel: int, dtype: torch.dtype, seed: int) -> Tensor:
    """A gradient of a certain character; ``integers`` has many ties, ``huge`` lies beyond fp16's range."""
    rng = torch.Generator().manual_seed(seed)
    normal = torch.randn(numel, generator=rng, dtype=torch.float64)
    match kind:
        case "heavy":
            normal = normal / torch.rand(numel, generator=rng, dtype=torch.float64).clamp(min=1e-3)
        case "integers":
            normal = (2 * normal).round()
        case "mostly zero":
            normal = normal * (torch.rand(numel, generator=rng) < 0.01)
        case "zero":
            normal = normal * 0
        case "huge" if dtype != torch.float16:
            normal = normal * 7e8  # where fp16's largest value is not a multiple of an entry's last bit
    return normal.to(dtype)


def place(sizes: Sequence[int], hole: int = 0) -> tuple[list[Span], int]:
    """Spans one after another, each followed by ``hole`` entries that belong to nobody."""
    spans, start = [], 0
    for i, size in enumerate(sizes):
        spans.append(Span(f"p{i}", start, size))
        start += size + hole
    return spans, start


@dataclass
class Worker:
    """One virtual worker: a compressor with its memory and state, step by step."""

    compressor: Compressor
    layout: Layout
    dtype: torch.dtype = torch.float32
    values: str = "fp32"
    transactional: bool = False
    shared: bool = False
    rank: int = 0
    whole: bool = False
    correction: Correction | None = None
    clip: float | None = None
    step: int = 0
    device: str = "cpu"
    update: tuple[Sequence[Sketched], Tables] | None = None  # preconditioning: tensors and tables
    workspace: Workspace = field(default_factory=Workspace)
    residual: Tensor = field(init=False)
    velocity: Tensor = field(init=False)
    state: State = field(init=False)

    def __post_init__(self) -> None:
        self.residual = torch.zeros(self.layout.numel, dtype=accumulation_dtype(self.dtype), device=self.device)
        self.velocity = torch.zeros_like(self.residual)
        self.state = self.compressor.init(self.layout)

    def send(self, grad: Tensor, unused: frozenset[str] = frozenset()) -> SparseGrad:
        after = torch.full_like(self.residual, float("nan")) if self.transactional else self.residual
        ctx = Context(
            self.step,
            self.rank,
            rounding=CODECS[self.values].round,
            shared=self.shared,
            whole=self.shared or self.whole,
            clip=self.clip,
            unused=unused,
            values=self.values,
        )
        velocity = None
        if self.correction is not None:
            faster = torch.full_like(self.velocity, float("nan")) if self.transactional else self.velocity
            velocity = Velocity(self.velocity, faster, self.correction.beta, self.correction.masking)
        keeps = not self.compressor.dense or ctx.rounding is not None or velocity is not None
        memory = Memory(self.residual, after, velocity, workspace=self.workspace) if keeps else None
        if self.update is not None:
            assert memory is not None
            faster = torch.full_like(self.velocity, float("nan")) if self.transactional else self.velocity
            memory.update = Update(self.velocity, faster, *self.update)
        sent = self.compressor.compress(grad.clone(), memory, self.layout, ctx, self.state)
        self.step += 1
        if self.transactional:
            for span in self.layout.spans:
                self.residual[span.start : span.stop] = after[span.start : span.stop]
                if velocity is not None or self.update is not None:
                    self.velocity[span.start : span.stop] = faster[span.start : span.stop]
        return sent


def worker(
    name: str,
    sizes: Sequence[int],
    *,
    scope: str = "layer",
    density: float = 0.01,
    dtype: torch.dtype = torch.float32,
    values: str = "fp32",
    hole: int = 0,
    transactional: bool = False,
    shared: bool = False,
    rank: int = 0,
    whole: bool = False,
    correction: Correction | None = None,
    clip: float | None = None,
) -> Worker:
    compressor = make(name, density)
    spans, numel = place(sizes, hole)
    layout = Layout.cut(
        spans, numel=numel, scope=scope, density=compressor.density, capacity=compressor.capacity, name="all"
    )
    return Worker(compressor, layout, dtype, values, transactional, shared, rank, whole, correction, clip)


class Scale:
    """A loss scaler as far as a reducer knows it."""

    def __init__(self, get_scale: Callable[[], float]) -> None:
        self.get_scale = get_scale


def reducer_of(
    parameters: Sequence[Parameter],
    compressor: Compressor,
    collective: Collective,
    channel: Channel,
    *,
    dense_names: frozenset[str] = frozenset(),
    may_skip: bool = False,
    rates: Callable[[], dict[str, float]] | None = None,
    correction: Correction | None = None,
    loss_scale: Callable[[], float] | None = None,
    **options: Any,
) -> Reducer:
    """Return a reducer of its own, to be fed with buckets; ``options``: those of ``attach``."""
    if correction is not None:
        options |= {"momentum": "correct", "beta": correction.beta, "masking": correction.masking}
    if loss_scale is not None:
        options |= {"scaler": Scale(loss_scale)}
    wire = {"values": channel.wire.values, "indices": channel.wire.indices}
    plan = resolve(compressor=compressor, collective=collective, **wire, **options)
    return Reducer(parameters, plan, channel, dense_names=dense_names, may_skip=may_skip, rates=rates)
