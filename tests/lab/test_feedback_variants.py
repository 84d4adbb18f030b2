"""Every variant of preconditioned feedback computes what its name says, and goes on from a checkpoint."""

from __future__ import annotations

import io
import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sparsync.simulate.virtual_workers import VirtualWorkers
from sparsync_lab.papers.adamw_sweep import ABLATIONS, VARIANTS
from sparsync_lab.virtual.feedback_variants import (
    ENTRY,
    ROW_COLUMN,
    TENSOR,
    CommonPreconditioner,
    FeedbackVariant,
    VariantExchange,
)

WORKERS, RATE, BETA2, EPS = 3, 0.01, 0.99, 1e-8
MATRICES = ("0.weight", "2.weight")
Batches = list[tuple[Tensor, ...]]


def make_model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(40, 48), nn.ReLU(), nn.Linear(48, 36))


def loss_fn(model: nn.Module, batch: tuple[Tensor, ...], carried: Any) -> tuple[Tensor, Any]:
    return (model(batch[0]) - batch[1]).square().mean(), carried


def make_workers(variant: FeedbackVariant | None, rate: float = RATE, **options: Any) -> VirtualWorkers:
    """Return workers that have this variant; without one, the library's own."""
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), rate, (0.9, BETA2), eps=EPS, weight_decay=0.0)
    given: dict[str, Any] = {"density": 0.05, "scope": "global", "precondition": True, "beta": 0.5, **options}
    if variant is not None:
        given["exchange"] = partial(VariantExchange, variant)
    return VirtualWorkers(model, loss_fn, optimizer, WORKERS, compressor="threshold", **given)


def batches(step: int) -> Batches:
    generator = torch.Generator().manual_seed(step)
    made: Batches = []
    for rank in range(WORKERS):
        x = torch.randn(6, 40, generator=generator) * (1 + rank)
        x[:, 7] *= 0.01  # a column with hardly a gradient
        made.append((x, torch.randn(6, 36, generator=generator)))
    return made


def gradients(model: nn.Module, step: int, name: str) -> list[Tensor]:
    """Return every worker's gradient of a parameter."""
    losses = [loss_fn(model, batch, ())[0] for batch in batches(step)]
    return [torch.autograd.grad(loss, [model.get_parameter(name)])[0] for loss in losses]


def moment_of(virtual: VirtualWorkers, rank: int = 0) -> Any:
    preconditioner = virtual._exchange.workers[rank].preconditioner
    assert preconditioner is not None
    return preconditioner.moment


def sizes_of(virtual: VirtualWorkers, name: str, rank: int = 0) -> Tensor:
    """Return the second moment of every entry, as it is kept."""
    shape = virtual.model.get_parameter(name).shape
    sizes: Tensor = moment_of(virtual, rank).sizes_of(name).view(shape)
    return sizes


def factored_mean(values: list[Tensor]) -> Tensor:
    """Return r cᵀ / sum of the exponential means of rows' and columns' squares."""
    kept = entry_mean(values)
    return kept.sum(1, keepdim=True) * kept.sum(0, keepdim=True) / kept.sum()


def entry_mean(values: list[Tensor], rise: float | None = 0.6) -> Tensor:
    """Return the exponential mean of the squares, from zero, of a matrix: its beta2 rises."""
    kept = torch.zeros_like(values[0])
    for step, value in enumerate(values, 1):
        beta = BETA2 if rise is None else min(BETA2, 1 - step**-rise)
        kept = beta * kept + (1 - beta) * value.square()
    return kept


@pytest.mark.parametrize(("kind", "expected"), [(ROW_COLUMN, factored_mean), (ENTRY, entry_mean)])
def test_exact_moments_are_those_of_the_mean_gradient(kind: str, expected: Any) -> None:
    virtual = make_workers(FeedbackVariant(kind))
    means: dict[str, list[Tensor]] = {name: [] for name in MATRICES}
    for step in range(3):
        for name in MATRICES:
            means[name].append(torch.stack(gradients(virtual.model, step, name)).mean(0))
        virtual.advance(batches(step))
        for name in MATRICES:
            torch.testing.assert_close(sizes_of(virtual, name), expected(means[name]), rtol=1e-4, atol=1e-10)


@pytest.mark.parametrize("rise", [None, 0.8])
@pytest.mark.parametrize("kind", [ROW_COLUMN, ENTRY])
def test_beta2_rises_as_it_is_told_to(kind: str, rise: float | None) -> None:
    virtual, means = make_workers(FeedbackVariant(kind, rise=rise)), list[Tensor]()
    for step in range(4):
        means.append(torch.stack(gradients(virtual.model, step, "2.weight")).mean(0))
        virtual.advance(batches(step))
    expected = entry_mean(means, rise)
    if kind == ROW_COLUMN:
        expected = expected.sum(1, keepdim=True) * expected.sum(0, keepdim=True) / expected.sum()
    torch.testing.assert_close(sizes_of(virtual, "2.weight"), expected, rtol=1e-4, atol=1e-10)


def test_one_number_a_tensor_is_the_mean_of_what_the_sketches_say() -> None:
    sketched, level = make_workers(None), make_workers(FeedbackVariant(TENSOR))
    for virtual in (sketched, level):
        virtual.advance(batches(0))
    for name in MATRICES:
        flat = sizes_of(level, name)
        torch.testing.assert_close(flat, flat.mean().expand_as(flat))
        torch.testing.assert_close(flat.mean(), sizes_of(sketched, name).mean())
    for name in ("0.bias", "2.bias"):
        assert torch.equal(moment_of(level).sizes_of(name), moment_of(sketched).sizes_of(name))


@pytest.mark.parametrize(("kind", "expected"), [(ROW_COLUMN, factored_mean), (ENTRY, entry_mean)])
def test_own_moments_are_those_of_each_worker_s_gradient(kind: str, expected: Any) -> None:
    virtual = make_workers(FeedbackVariant(kind, own=True, limit=None))
    seen: dict[str, list[list[Tensor]]] = {name: [] for name in MATRICES}
    for step in range(3):
        for name in MATRICES:
            seen[name].append(gradients(virtual.model, step, name))
        virtual.advance(batches(step))
    for name in MATRICES:
        for rank in range(WORKERS):
            own = expected([of_step[rank] for of_step in seen[name]])
            torch.testing.assert_close(sizes_of(virtual, name, rank), own, rtol=1e-4, atol=1e-10)
        assert not torch.allclose(sizes_of(virtual, name, 0), sizes_of(virtual, name, 1), rtol=0.1)


def test_what_a_worker_keeps_was_divided_by_its_own_moment() -> None:
    """In the first step every entry's update is its sign times the rate, whatever the others' gradients are."""
    virtual = make_workers(FeedbackVariant(ENTRY, own=True))
    grads = gradients(virtual.model, 0, "2.weight")
    virtual.backward(batches(0))
    for rank, grad in enumerate(grads):
        kept = virtual.residual(rank, "2.weight")
        assert kept is not None
        waits = (kept != 0) & (grad.abs() > 1e-3)
        assert waits.sum() > 1000
        torch.testing.assert_close(kept[waits], RATE * grad[waits].sign(), rtol=1e-3, atol=0)
    shared = make_workers(FeedbackVariant(ENTRY))
    shared.backward(batches(0))
    kept = shared.residual(0, "2.weight")
    assert kept is not None
    assert (kept.abs() > 2 * RATE).any()  # one worker's gradient, over the mean's size


def test_each_worker_clips_its_own_where_nothing_is_shared() -> None:
    virtual = make_workers(FeedbackVariant(ROW_COLUMN, own=True), clip=0.5)
    grads = {name: gradients(virtual.model, 0, name) for name in MATRICES}
    virtual.advance(batches(0))
    for rank in range(WORKERS):
        norm = math.sqrt(sum(float(own[rank].square().sum()) for own in grads.values()))
        for name, own in grads.items():
            clipped = own[rank] * min(1.0, 0.5 / norm)
            expected = factored_mean([clipped])
            torch.testing.assert_close(sizes_of(virtual, name, rank), expected, rtol=1e-3, atol=1e-12)


def test_one_step_old_is_what_the_library_had_in_the_step_before() -> None:
    """With a rate of 0 both see the same gradients."""
    old, usual = make_workers(FeedbackVariant(old=True), rate=0.0), make_workers(None, rate=0.0)
    matrices = old._exchange.preconditioner.matrices  # type: ignore[union-attr]
    before: Tensor | None = None
    for step in range(4):
        for virtual in (old, usual):
            virtual.advance(batches(step))
        sizes, now = moment_of(old).tables.sizes, moment_of(usual).tables.sizes.clone()
        assert torch.equal(sizes[matrices], (now if before is None else before)[matrices])
        assert before is None or not torch.equal(sizes[matrices], now[matrices])
        dense = torch.ones_like(now, dtype=torch.bool).index_fill_(0, matrices, False)
        assert dense.sum() == 48 + 36
        assert torch.equal(sizes[dense], now[dense])  # biases have this step's
        before = now


@pytest.mark.parametrize("limit", [0.01, 2.5, None])
def test_no_update_is_above_the_limit(limit: float | None) -> None:
    virtual = make_workers(FeedbackVariant(limit=limit))
    virtual.backward(batches(0))
    largest = RATE / (1 - 0.5) * (math.inf if limit is None else limit * math.sqrt(WORKERS))
    for rank in range(WORKERS):
        kept = [virtual.residual(rank, name) for name in MATRICES]
        found = max(float(own.abs().max()) for own in kept if own is not None)
        assert found <= largest * 1.0001
        if limit == 0.01:
            assert found == pytest.approx(largest)


def test_the_floor_is_of_what_has_hardly_a_gradient() -> None:
    sizes = []
    for floor in (0.02, 0.08):
        virtual = make_workers(FeedbackVariant(ROW_COLUMN, floor=floor), rate=0.0)
        for step in range(6):  # in the first ones it is more
            virtual.advance(batches(step))
        tensor = moment_of(virtual).tensors["0.weight"]
        sizes.append(moment_of(virtual).tables.sizes[tensor.place + 48 + 7])  # of the column with hardly a gradient
    assert sizes[1] / sizes[0] == pytest.approx(2.0, rel=1e-4)


@pytest.mark.parametrize("shrink", [True, False])
def test_residuals_follow_a_falling_rate_or_do_not(shrink: bool) -> None:
    virtual = make_workers(FeedbackVariant(shrink=shrink))
    virtual.advance(batches(0))
    before = torch.stack([virtual.residual(rank, "0.weight").norm() for rank in range(WORKERS)])  # type: ignore[union-attr]
    for group in virtual.optimizer.param_groups:
        group["lr"] = RATE * 1e-6
    virtual.advance(batches(1))
    after = torch.stack([virtual.residual(rank, "0.weight").norm() for rank in range(WORKERS)])  # type: ignore[union-attr]
    assert (after < 1e-5 * before).all() if shrink else (after > 0.3 * before).all()


def test_nothing_changed_is_the_library_bit_for_bit() -> None:
    ours, usual = make_workers(FeedbackVariant(), clip=1.0), make_workers(None, clip=1.0)
    for step in range(4):
        for virtual in (ours, usual):
            virtual.advance(batches(step))
    for mine, theirs in zip(ours.model.parameters(), usual.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    assert ours.tally == usual.tally


FIELDS = {method.label: dict(method.changes["variant"]) for method in VARIANTS if method.changes["beta2"] == 0.999}


@pytest.mark.parametrize("label", FIELDS)
def test_an_ablation_differs_sends_the_same_bytes_and_goes_on_from_a_checkpoint(label: str) -> None:
    variant = FeedbackVariant(**FIELDS[label])
    straight, usual = make_workers(variant, clip=1.0), make_workers(None, clip=1.0)
    half = make_workers(variant, clip=1.0)

    def advance(virtual: VirtualWorkers, steps: range) -> None:
        for step in steps:
            for group in virtual.optimizer.param_groups:
                group["lr"] = RATE * (1 - step / 16)
            virtual.advance(batches(step))

    for virtual in (straight, usual):
        advance(virtual, range(10))
    advance(half, range(5))
    file = io.BytesIO()
    torch.save(half.state_dict(), file)
    file.seek(0)
    resumed = make_workers(variant, clip=1.0)
    resumed.load_state_dict(torch.load(file, weights_only=True))
    advance(resumed, range(5, 10))
    for mine, again in zip(straight.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.isfinite(mine).all()
        assert torch.equal(mine, again)
    assert straight.tally.bytes == usual.tally.bytes
    kept = ([virtual.residual(0, name) for name in MATRICES] for virtual in (straight, usual))
    assert not all(torch.equal(mine, theirs) for mine, theirs in zip(*kept, strict=True))  # type: ignore[arg-type]


def test_what_makes_no_sense_is_refused() -> None:
    with pytest.raises(ValueError, match="second_moment must be one of sketch, tensor, row x column, entry, got 'x'"):
        FeedbackVariant("x")
    with pytest.raises(ValueError, match="own=True is of exact moments"):
        FeedbackVariant(own=True)
    with pytest.raises(ValueError, match="own=True is of exact moments"):
        FeedbackVariant(ENTRY, own=True, old=True)
    with pytest.raises(ValueError, match="needs precondition=True"):
        make_workers(FeedbackVariant(), precondition=False, beta=None)


def test_every_variant_is_a_row() -> None:
    assert {method.label for method in VARIANTS} <= set(ABLATIONS)
    made = [FeedbackVariant(**fields) for fields in FIELDS.values()]
    assert len(set(made)) == len(made)
    assert FeedbackVariant() not in made
    assert all(method.options == {"budget": 1 / 40} for method in VARIANTS)


def test_tensors_that_travel_dense_have_one_moment_for_all() -> None:
    virtual = make_workers(FeedbackVariant(ENTRY, own=True))
    common = virtual._exchange.preconditioner
    assert isinstance(common, CommonPreconditioner)
    means: list[Tensor] = []
    for step in range(3):
        means.append(torch.stack(gradients(virtual.model, step, "0.bias")).mean(0))
        virtual.advance(batches(step))
    torch.testing.assert_close(common.moment.sizes_of("0.bias"), entry_mean(means, None), rtol=1e-2, atol=1e-8)  # bf16
