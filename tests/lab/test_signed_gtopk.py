"""Signs in gTop-k, among virtual workers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from sparsync.compressors import TopK
from sparsync.layout import Layout, Span
from sparsync.sparse import SparseGrad
from sparsync.wire import Wire
from sparsync_lab.papers import evidence
from sparsync_lab.papers.trainings import run_options
from sparsync_lab.virtual.signed_gtopk import SignedGTopK

NUMEL = 400


def signs_of(layout: Layout, wire: Wire, seed: int) -> SparseGrad:
    """Return what a worker sends: the largest entries of a normal vector, as signs."""
    u = torch.randn(NUMEL, generator=torch.Generator().manual_seed(seed))
    own = [torch.cat([torch.arange(*run) for run in segment.runs()]) for segment in layout.segments]
    chosen = [at[u[at].abs().topk(segment.k).indices] for at, segment in zip(own, layout.segments, strict=True)]
    indices = torch.cat(chosen).sort().values
    assert wire.codec.round is not None
    values = wire.codec.round(u[indices], layout.segment_of(indices), len(layout.segments), torch.inf)
    zero, none = torch.zeros((), dtype=torch.int32), torch.full((), -1, dtype=torch.int32)
    return SparseGrad(indices, values, torch.tensor(indices.numel()), NUMEL, zero, none)


@pytest.mark.parametrize("values", ["sign", "levels"])
@pytest.mark.parametrize("scope", ["global", "layer"])
@pytest.mark.parametrize("workers", [1, 2, 3, 5, 8])
def test_nothing_is_lost_and_signs_travel(values: str, scope: str, workers: int) -> None:
    spans = [Span("a", 0, 300), Span("b", 300, 100)]
    layout = Layout.cut(spans, numel=NUMEL, scope=scope, density=0.05)
    wire = Wire(values, "ef")
    sents = [signs_of(layout, wire, seed) for seed in range(workers)]
    results = SignedGTopK().reduce_local(sents, layout, wire)
    mean = torch.zeros(NUMEL)
    results[0].mean.write(mean)
    kept = [one.rejected.densify() for one in results if one.rejected is not None]
    came_in = torch.stack([sent.densify() for sent in sents]).sum(0)
    assert torch.allclose(workers * mean + sum(kept, torch.zeros(NUMEL)), came_in, atol=1e-5)
    for segment in layout.segments:
        own = torch.cat([mean[start:stop] for start, stop in segment.runs()])
        sizes = own[own != 0].abs().unique()
        assert 0 < int((own != 0).sum()) <= segment.k
        assert len(sizes) <= (1 if values == "sign" else 4)  # one scale: what a message can hold


def test_it_is_no_collective_of_real_processes() -> None:
    SignedGTopK().check(Wire("sign"), False, False)
    with pytest.raises(ValueError, match="collective='dense'"):
        SignedGTopK().check(Wire("sign"), True, False)


def test_trainings_can_ask_for_it() -> None:
    run = evidence.gtopk_in_fewer_bits("sign", 0.0062)
    options = run_options(replace(run, steps=10))
    assert isinstance(options["collective"], SignedGTopK)
    assert options["compressor"] == "topk" or isinstance(options["compressor"], TopK)
    assert run_options(replace(evidence.gtopk_in_fewer_bits("bf16", 0.0024), steps=10))["collective"] == "gtopk"
