"""What others published for AdamW at few bytes: each against its definition, step by step, and the control."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sparsync_lab.baselines import DeMo, FactoredAdamW, SparseLoCo
from sparsync_lab.baselines.blocks import block_side, groups_of, index_bits, largest, mean_of, message_bytes
from sparsync_lab.baselines.demo import cosines
from sparsync_lab.baselines.sparse_loco import two_bits
from sparsync_lab.models import ViT
from sparsync_lab.virtual import BatchedPasses, SequentialPasses
from sparsync_lab.virtual.outer_workers import OuterWorkers

CPU = torch.device("cpu")


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 128), nn.ReLU(), nn.Linear(128, 6))


def loss(model: nn.Module, batch: tuple[Tensor, ...], carried: tuple[Tensor, ...]) -> tuple[Tensor, tuple[Tensor, ...]]:
    return nn.functional.cross_entropy(model(batch[0]), batch[1]), carried


def batches(step: int, workers: int) -> list[tuple[Tensor, ...]]:
    drawn = torch.Generator().manual_seed(step)
    return [(torch.randn(8, 12, generator=drawn), torch.randint(6, (8,), generator=drawn)) for _ in range(workers)]


def train(workers: Any, steps: int, begin: int = 0) -> list[float]:
    losses = []
    for step in range(begin, begin + steps):
        losses.append(workers.backward(batches(step, 3)).item())
        workers.optimizer.step()
    return losses


def weights(of: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in of.parameters()])


def own_gradient(model: nn.Module, batch: tuple[Tensor, ...]) -> list[Tensor]:
    return list(torch.autograd.grad(loss(model, batch, ())[0], list(model.parameters())))


# ---- blocks ---------------------------------------------------------------------------------------------------------


def test_blocks_hold_every_entry_once() -> None:
    shapes = [torch.Size(s) for s in ((128, 192), (100, 7, 3), (50,), (130,), (64, 64))]
    groups = groups_of(shapes, CPU)
    assert [group.shape for group in groups] == [(64, 64), (50, 21), (1, 50), (1, 26)]
    places = torch.cat([group.places for group in groups])
    assert places.sort().values.tolist() == list(range(sum(math.prod(shape) for shape in shapes)))
    matrix = torch.arange(128 * 192.0)
    rows = torch.cat([matrix, torch.zeros(len(places) - len(matrix))]).repeat(2, 1)
    second = groups[0].of(rows)[1, 1].view(64, 64)  # beside the first, in the same rows
    assert torch.equal(second, matrix.view(128, 192)[:64, 64:128])
    back = torch.zeros(len(places))
    groups[0].put(groups[0].of(rows)[0], back)
    assert torch.equal(back[: len(matrix)], matrix)


def test_sizes_of_messages() -> None:
    assert (block_side(10_000), block_side(50_257), block_side(7)) == (50, 29, 7)
    assert (index_bits(14, 4096), index_bits(1, 4096), index_bits(1024, 4096), index_bits(1, 1)) == (11, 12, 4, 0)
    groups = groups_of([torch.Size((64, 128)), torch.Size((64,))], CPU)
    assert message_bytes(groups, 14 / 4096, 16) == math.ceil((2 * 14 * (16 + 11) + (16 + 6)) / 8)
    assert message_bytes(groups, 1024 / 4096, 2, 32) == math.ceil((2 * (1024 * 6 + 32) + 16 * 6 + 32) / 8)


def test_the_mean_of_what_was_sent() -> None:
    blocks = torch.tensor([[[3.0, -4, 1, 0]], [[0.0, 2, -5, 1]]])
    values, places = largest(blocks, 2)
    assert mean_of(values, places, 4).tolist() == [[1.5, -1.0, -2.5, 0.0]]


# ---- DeMo -----------------------------------------------------------------------------------------------------------


def test_the_cosine_transform_is_orthonormal() -> None:
    for length in (1, 6, 64):
        matrix = cosines(length)
        assert torch.allclose(matrix @ matrix.T, torch.eye(length), atol=1e-5)
    wave = torch.cos(math.pi / 8 * (torch.arange(8) + 0.5) * 3)
    assert (cosines(8) @ wave).abs().argmax() == 3


def test_demo_is_its_definition() -> None:
    """Two steps of the method as the paper has it: momentum outside the transform."""
    ours, plain = model(), model()
    demo = DeMo(ours, loss, 3, rate=0.01, weight_decay=0.1, decay=0.9, budget=1 / 4, clip=0.5)
    sizes = [p.numel() for p in plain.parameters()]
    groups = groups_of([p.shape for p in plain.parameters()], CPU)
    momenta = torch.zeros(3, sum(sizes))
    for step in range(2):
        train(demo, 1, step)
        sent = torch.zeros(3, sum(sizes))
        for rank, batch in enumerate(batches(step, 3)):
            gradient = torch.cat([grad.flatten() for grad in own_gradient(plain, batch)])
            momenta[rank] = 0.9 * momenta[rank] + gradient * min(1, 0.5 / gradient.norm().item())
        for group in groups:
            down, right = (cosines(side) for side in group.shape)
            coefficients = down @ group.of(momenta).view(3, group.count, *group.shape) @ right.T
            flat = coefficients.flatten(2)
            k = max(1, int(demo.share * group.area))
            kept = torch.zeros_like(flat).scatter(2, flat.abs().topk(k).indices, 1.0) * flat.bfloat16().float()
            back = (down.T @ kept.view_as(coefficients) @ right).flatten(2)
            for rank in range(3):
                group.put(back[rank], sent[rank])
        momenta -= sent
        with torch.no_grad():
            for p, move in zip(plain.parameters(), sent.mean(0).split(sizes), strict=True):
                p.sub_(0.01 * (move.sign().view_as(p) + 0.1 * p))
    assert torch.allclose(weights(ours), weights(plain), atol=1e-5)


# ---- SparseLoCo -----------------------------------------------------------------------------------------------------


def test_two_bits_keep_signs_and_the_mean_of_both_kinds() -> None:
    values = torch.tensor([[1.0, -1, 2, 8], [3, 3, -3, 3]])
    expected = torch.tensor([[4 / 3, -4 / 3, 4 / 3, 8], [3, 3, -3, 3]])
    assert torch.allclose(two_bits(values), expected, rtol=0.005)


def test_sparse_loco_with_all_entries_averages_local_adamw() -> None:
    """At a budget that allows everything, what is lost is only what two bits cannot say, and that is kept."""
    common = model()
    loco = SparseLoCo(common, loss, 3, rate=0.01, weight_decay=0.1, local_steps=2, budget=10, clip=0.5)
    assert loco.share == 1
    alone = [model() for _ in range(3)]
    optimizers = [torch.optim.AdamW(m.parameters(), 0.01, weight_decay=0.1) for m in alone]
    before = weights(common)
    train(loco, 1)
    assert torch.equal(weights(common), before)
    assert loco.tally.bytes == 0
    train(loco, 1, 1)
    for step in range(2):
        for local, optimizer, batch in zip(alone, optimizers, batches(step, 3), strict=True):
            for p, grad in zip(local.parameters(), own_gradient(local, batch), strict=True):
                p.grad = grad
            nn.utils.clip_grad_norm_(local.parameters(), 0.5)
            optimizer.step()
    went = torch.stack([before - weights(local) for local in alone])
    sent = went - loco.errors
    assert torch.allclose(weights(common), before - sent.mean(0), atol=1e-6)
    assert loco.errors.norm() < 0.6 * went.norm()
    assert torch.equal(loco.weights, weights(common).expand(3, -1))


def test_workers_with_weights_of_their_own_take_no_buffers() -> None:
    normed = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    with pytest.raises(ValueError, match="no model with buffers"):
        SparseLoCo(normed, loss, 2, rate=0.1, weight_decay=0, budget=1)


# ---- both -----------------------------------------------------------------------------------------------------------

KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "demo": (DeMo, {"rate": 0.002}),
    "sparse-loco": (SparseLoCo, {"rate": 0.01, "local_steps": 3}),
}
OURS = {"outer-loop": (OuterWorkers, {"rate": 0.01, "every": 3, "fragments": 2, "overlap": 1, "share_moments": True,
                                      "outer_momentum": 0.5})}  # fmt: skip


@pytest.mark.parametrize("name", KINDS)
def test_budgets_hold_and_are_used(name: str) -> None:
    kind, own = KINDS[name]
    workers = kind(model(), loss, 3, weight_decay=0.0, budget=1 / 50, **own)
    train(workers, 6)
    dense = 6 * 2 * 2 / 3 * 4 * weights(workers.model).numel()
    assert 0.9 / 50 * dense < workers.tally.bytes <= dense / 50
    with pytest.raises(ValueError, match="budget must allow messages of"):
        kind(model(), loss, 3, weight_decay=0.0, budget=1e-5, **own)


@pytest.mark.parametrize("name", KINDS | OURS)
def test_training_goes_on_from_a_checkpoint(name: str) -> None:
    kind, own = (KINDS | OURS)[name]
    made = [kind(model(), loss, 3, weight_decay=0.1, budget=1 / 10, clip=1.0, **own) for _ in range(2)]
    train(made[0], 4)
    made[1].load_state_dict(made[0].state_dict())
    assert train(made[0], 4, 4) == train(made[1], 4, 4)
    assert torch.equal(weights(made[0].model), weights(made[1].model))
    assert made[0].tally == made[1].tally
    assert made[0].step == 8


@pytest.mark.parametrize("name", KINDS)
def test_they_learn(name: str) -> None:
    kind, own = KINDS[name]
    workers = kind(model(), loss, 3, weight_decay=0.0, budget=1 / 5, clip=1.0, **own)
    fixed = batches(0, 3)
    losses = []
    for _ in range(60):
        losses.append(workers.backward(fixed).item())
        workers.optimizer.step()
    assert losses[-1] < losses[0] / 2


# ---- the control ----------------------------------------------------------------------------------------------------


def test_factored_adamw_equals_adamw_where_v_has_rank_one() -> None:
    """The squared gradient of an outer product is one, and that of a vector is exact."""
    torch.manual_seed(0)
    shapes = [(5, 7), (9,), (3, 2, 4)]
    ours, theirs = ([nn.Parameter(torch.ones(shape)) for shape in shapes] for _ in range(2))
    how = {"lr": 0.1, "betas": (0.5, 0.9), "weight_decay": 0.1}
    pair = FactoredAdamW(ours, **how, rise=None), torch.optim.AdamW(theirs, **how)  # type: ignore[arg-type]
    rows, columns, vector, tall, wide = (torch.rand(n) + 0.5 for n in (5, 7, 9, 3, 8))
    for step in range(4):
        scale = 1.0 + step
        grads = [scale * torch.outer(rows, columns), torch.randn(9) * vector, scale * torch.outer(tall, wide)]
        for parameters, optimizer in zip((ours, theirs), pair, strict=True):
            for p, grad in zip(parameters, grads, strict=True):
                p.grad = grad.view_as(p).clone()
            optimizer.step()
    for one, other in zip(ours, theirs, strict=True):
        assert torch.allclose(one, other, atol=1e-5)


def test_the_floor_holds_v_up() -> None:
    parameter = nn.Parameter(torch.zeros(2, 2))
    parameter.grad = torch.tensor([[1.0, 1e-9], [1e-9, 1e-9]])
    FactoredAdamW([parameter], lr=1.0, weight_decay=0.0).step()
    assert parameter[0, 0].item() == pytest.approx(-1, rel=0.01)
    assert parameter[1, 1].abs().item() < 1e-6


# ---- the vision transformer -----------------------------------------------------------------------------------------


def test_the_vision_transformer_goes_through_batched_passes() -> None:
    torch.manual_seed(0)
    net = ViT(layers=1, width=16, heads=2)
    given = [(torch.randn(2, 3, 32, 32), torch.randint(10, (2,))) for _ in range(3)]
    found = []
    for passes in (SequentialPasses, BatchedPasses):
        demo = DeMo(net, loss, 3, rate=0.0, weight_decay=0.0, budget=1, passes=passes)
        demo.backward(given)
        found.append(demo.rows.clone())
    assert torch.allclose(found[0], found[1], atol=1e-5)
