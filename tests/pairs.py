"""Kernels against the specification: the same worker twice, and what must be the same of the two.

On the CPU kernels are run by Triton's interpreter, in a run of its own (``TRITON_INTERPRET=1``); on a GPU as they are.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from sparsync.compressors import Compressor
from sparsync.layout import Layout
from sparsync.sparse import SparseGrad
from tests.fence import fenced
from tests.methods import Worker, gradient, place

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
MARKS = [
    pytest.mark.gpu,
    pytest.mark.skipif(not (INTERPRETED or torch.cuda.is_available()), reason="needs TRITON_INTERPRET=1 or a GPU"),
]


@pytest.fixture(autouse=True)
def within_bounds() -> Iterator[None]:
    """In files that import it: the interpreter's kernels touch nothing beside their tensors."""
    if not INTERPRETED:
        yield
        return
    with fenced() as fence:
        yield
    assert fence.looks


def specified(compressor: Compressor) -> Compressor:
    """The same compressor by the specification, whatever the device."""
    kind = type("Plain", (type(compressor),), {"kernel_limit": 0})
    return kind(**{field.name: getattr(compressor, field.name) for field in fields(compressor)})  # type: ignore[arg-type]


def layout_of(
    sizes: Sequence[int],
    compressor: Compressor,
    scope: str = "layer",
    hole: int = 3,
    dtype: torch.dtype = torch.float32,
) -> Layout:
    spans, numel = place(sizes, hole)
    cut = {"scope": scope, "density": compressor.density, "capacity": compressor.capacity, "name": "all"}
    return Layout.cut(spans, numel=numel, dtype=dtype, **cut)  # type: ignore[arg-type]


def pair_of(
    compressor: Compressor,
    sizes: Sequence[int],
    *,
    scope: str = "layer",
    dtype: torch.dtype = torch.float32,
    values: str = "fp32",
    hole: int = 3,
    **options: Any,
) -> tuple[Worker, Worker]:
    """The same worker twice: with the kernels on the device, and the specification on the CPU."""
    layout = layout_of(sizes, compressor, scope, hole, dtype)
    fused = Worker(compressor, layout, dtype, values, device=DEVICE, **options)
    return fused, Worker(specified(compressor), replace(layout, _tables={}), dtype, values, **options)


def numbered(number: int) -> Tensor:
    """The number of an exchange, where kernels look it up."""
    return torch.tensor(number, dtype=torch.int32, device=DEVICE)


def entries(sent: SparseGrad) -> tuple[Tensor, Tensor]:
    """What was sent, in the order of its indices; nothing lies behind it."""
    count = int(sent.count)
    order = sent.indices[:count].sort().indices
    assert not sent.indices[count:].any()
    assert not sent.values[count:].any()
    return sent.indices[:count][order].cpu(), sent.values[:count][order].cpu()


def compare(fused: Worker, plain: Worker, one: SparseGrad, two: SparseGrad) -> None:
    """Both sent the same and keep the same, bit for bit."""
    for a, b in zip(entries(one), entries(two), strict=True):
        assert torch.equal(a, b)
    for a, b in ((fused.residual, plain.residual), (fused.velocity, plain.velocity)):
        assert all(torch.equal(a[s.start : s.stop].cpu(), b[s.start : s.stop]) for s in plain.layout.spans)
    assert int(one.flags) == int(two.flags)


def assert_same(fused: Worker, plain: Worker, grad: Tensor) -> SparseGrad:
    """One step of both, and the same of both."""
    one, two = fused.send(grad.to(DEVICE)), plain.send(grad)
    compare(fused, plain, one, two)
    return one


def assert_nothing_is_lost(fused: Worker, grad: Tensor) -> SparseGrad:
    """One step of which entries go is left open; how many at most, and that none is lost, is not."""
    mine = torch.zeros(fused.layout.numel, dtype=torch.bool)
    for span in fused.layout.spans:
        mine[span.start : span.stop] = True
    before = fused.residual.clone().cpu()
    sent = fused.send(grad.to(DEVICE))
    indices, _ = entries(sent)
    assert indices.numel() <= fused.layout.capacity
    assert indices.unique().numel() == indices.numel()
    assert mine[indices].all()
    assert torch.equal((sent.densify() + fused.residual).cpu(), torch.where(mine, before + grad, before))
    return sent


def fading(layout: Layout, steps: int) -> Iterator[Tensor]:
    """Gradients, each half as large as the one before."""
    for step in range(steps):
        yield gradient("normal", layout.numel, torch.float32, step) * 0.5**step


def assert_told(fused: Worker, sent: SparseGrad, where: Sequence[int]) -> None:
    """What is not finite is told, with one of the places ``where`` it is; it never stays."""
    assert int(sent.flags) == bool(where)
    assert int(sent.where) in (where or (-1,))
    assert torch.isfinite(fused.residual).all()


@contextmanager
def nothing_waited_for_nor_allocated(by: str) -> Iterator[None]:
    """On a GPU: what runs meanwhile neither waits for the device nor asks for memory."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before, by
