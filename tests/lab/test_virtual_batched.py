"""All workers in one pass: gradients, losses and statistics are those of one pass after another."""

from __future__ import annotations

import copy
import itertools
import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sparsync.simulate.sequential import SequentialPasses
from sparsync_lab.models import CATALOGUE, build
from sparsync_lab.virtual import BatchedPasses, VirtualWorkers, can_be_batched, layers

Batch = tuple[Tensor, ...]
TOPK = {"compressor": "topk", "density": 0.05, "values": "fp32", "momentum": "keep"}


class Odd(nn.Module):
    """Steps, margins, a bias and sizes that fit nowhere; one convolution is used twice, one stays as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(2, 5, (3, 2), stride=2, padding=(1, 2)), nn.BatchNorm2d(5, momentum=0.3)
        self.again = nn.Conv2d(5, 5, 3, padding=1)
        self.fixed = nn.Conv2d(5, 7, 2, stride=(1, 3), bias=False).requires_grad_(False)
        self.last = nn.Linear(7, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.first(x)).relu()
        x = self.norm(self.again(self.again(x).tanh()))
        return self.last(self.fixed(x).mean((2, 3)))


def small() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, stride=2, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 6, 3), nn.Flatten(),
        nn.Linear(6 * 9, 5),
    )  # fmt: skip


CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int, int]] = {  # images, workers, batch
    "resnet20": (lambda: build("resnet20"), (3, 32, 32), 3, 2),
    "lenet5": (lambda: build("lenet5"), (1, 28, 28), 3, 6),
    "odd": (Odd, (2, 11, 13), 5, 7),
    "small": (small, (3, 9, 9), 4, 8),
    "one worker": (small, (3, 9, 9), 1, 3),
}


def loss_fn(model: nn.Module, batch: Batch, carried: Batch) -> tuple[Tensor, Batch]:
    return nn.functional.cross_entropy(model(batch[0]), batch[1]), carried


def batches_of(shape: tuple[int, ...], workers: int, batch: int, step: int, dtype: torch.dtype) -> list[Batch]:
    rng = torch.Generator().manual_seed(step)
    return [
        (torch.randn(batch, *shape, generator=rng).to(dtype), torch.randint(4, (batch,), generator=rng))
        for _ in range(workers)
    ]


def virtual_workers_of(model: nn.Module, workers: int, **options: Any) -> VirtualWorkers:
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.01, momentum=0.9)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return VirtualWorkers(model, loss_fn, optimizer, workers, **options)


def assert_close(ours: Tensor, theirs: Tensor, name: str, rtol: float = 1e-9) -> None:
    scale = theirs.abs().max().item()
    # A bias before a batch norm has a gradient of 0, but for rounding.
    assert torch.allclose(ours, theirs, rtol=rtol, atol=max(rtol * scale, 1e-13)), name


@pytest.mark.parametrize("options", [{"compressor": "none"}, TOPK], ids=["dense", "topk"])
@pytest.mark.parametrize("name", CASES)
def test_batched_passes_equal_sequential_ones(name, options):
    make, shape, workers, batch = CASES[name]
    torch.manual_seed(0)
    model = make().double()
    asked = copy.deepcopy(model)
    sequential, batched = (
        virtual_workers_of(model, workers, **options),
        virtual_workers_of(asked, workers, passes=BatchedPasses, **options),
    )
    for step in range(3):
        given = batches_of(shape, workers, batch, step, torch.float64)
        ours, theirs = batched.advance(given), sequential.advance(given)
        assert ours.item() == pytest.approx(theirs.item(), rel=1e-6)  # losses are kept in single precision
        for rank, (key, parameter) in itertools.product(range(workers), model.named_parameters()):
            if parameter.requires_grad:
                assert_close(batched.gradient(rank, key), sequential.gradient(rank, key), f"{step} {rank} {key}")
    for key, tensor in model.state_dict().items():
        assert_close(asked.state_dict()[key], tensor, key)
    assert [type(m) for m in asked.modules()] == [type(m) for m in model.modules()]


def test_a_large_model_has_the_same_gradients_and_statistics():
    """VGG-16: the passes alone, which is quicker."""
    torch.manual_seed(0)
    model = build("vgg16").double()
    asked, given = copy.deepcopy(model), batches_of((3, 32, 32), 2, 2, 0, torch.float64)
    views = [[[torch.full_like(p, math.nan) for p in model.parameters()] for _ in range(2)] for _ in range(2)]
    losses = [
        SequentialPasses(model, loss_fn, list(model.parameters()), views[0], (), False, 1).run(given),
        BatchedPasses(asked, loss_fn, list(asked.parameters()), views[1], (), False).run(given),
    ]
    assert losses[1].mean().item() == pytest.approx(losses[0].mean().item(), rel=1e-6)
    for rank, (number, name) in itertools.product(range(2), enumerate(dict(model.named_parameters()))):
        assert_close(views[1][rank][number], views[0][rank][number], f"{rank} {name}")
    for name, tensor in model.named_buffers():
        assert_close(asked.get_buffer(name), tensor, name)


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("stride", [1, 2, 3])
@pytest.mark.parametrize("padding", [(0, 0), (1, 2)])
@pytest.mark.parametrize("batch", [1, 6])
def test_weight_gradients_are_those_of_every_worker_alone(batch, padding, stride, groups):
    torch.manual_seed(0)
    workers, inputs, outputs = 5, 4, 8
    weight = torch.randn(outputs, inputs // groups, 3, 2, dtype=torch.float64, requires_grad=True)
    x = torch.randn(batch * workers, inputs, 8, 7, dtype=torch.float64)
    y = nn.functional.conv2d(x, weight, stride=stride, padding=padding, groups=groups)
    grad = torch.randn_like(y)
    given = layers.weight_gradients(x, grad, torch.Size((workers, *weight.shape)), (stride, stride), padding, groups)
    for rank in range(workers):
        own = nn.functional.conv2d(x[rank::workers], weight, stride=stride, padding=padding, groups=groups)
        (expected,) = torch.autograd.grad(own, weight, grad[rank::workers])
        assert torch.allclose(given[rank], expected, rtol=1e-10, atol=1e-10), rank


def test_dropout_draws_for_every_worker():
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 64), nn.Dropout(0.5), nn.Linear(64, 4))
    virtual_workers = virtual_workers_of(model, 3, compressor="none", passes=BatchedPasses)
    x, y = batches_of((4,), 1, 2, 0, torch.float32)[0]
    virtual_workers.advance([(x, y)] * 3)
    grads = [virtual_workers.gradient(rank, "1.weight").clone() for rank in range(3)]
    assert not torch.equal(grads[0], grads[1])
    assert not torch.equal(grads[1], grads[2])


def test_a_training_goes_on_either_way():
    """A state of one kind is taken by the other."""
    make, shape, workers, batch = CASES["small"]
    torch.manual_seed(0)
    model = make().double()
    straight = virtual_workers_of(copy.deepcopy(model), workers, **TOPK)
    begun = virtual_workers_of(copy.deepcopy(model), workers, passes=BatchedPasses, **TOPK)
    ended = virtual_workers_of(model, workers, **TOPK)
    for step in range(4):
        straight.advance(batches_of(shape, workers, batch, step, torch.float64))
    for step in range(2):
        begun.advance(batches_of(shape, workers, batch, step, torch.float64))
    begun.forget()
    ended.load_state_dict(begun.state_dict())
    for step in range(2, 4):
        ended.advance(batches_of(shape, workers, batch, step, torch.float64))
    for key, tensor in straight.model.state_dict().items():
        assert_close(model.state_dict()[key], tensor, key)
    begun.load_state_dict(straight.state_dict())
    assert begun.step == 4


class Mine(nn.Conv2d):
    pass


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "another layer": (lambda: nn.Sequential(nn.Linear(4, 4), nn.GroupNorm(2, 4)), "'1' .GroupNorm"),
    "a subclass": (lambda: Mine(3, 4, 3), "'the model' .Mine"),
    "dilation": (lambda: nn.Conv2d(4, 4, 3, dilation=2), "dilation"),
    "reflection": (lambda: nn.Conv2d(4, 4, 3, padding=1, padding_mode="reflect"), "zeros"),
    "same": (lambda: nn.Conv2d(4, 4, 3, padding="same"), "by name"),
    "no statistics": (lambda: nn.BatchNorm2d(4, track_running_stats=False), "track_running_stats"),
    "no weights": (lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm2d(4, affine=False)), "'1' .*affine"),
    "a mean of all": (lambda: nn.BatchNorm2d(4, momentum=None), "momentum"),
    "in one dimension": (
        lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, affine=False, track_running_stats=False)),
        "'1' .BatchNorm1d",
    ),
    "a parametrisation": (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)), "ParametrizedLinear"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_batched_is_named(name):
    make, message = REFUSED[name]
    model = make()
    assert not can_be_batched(model)
    with pytest.raises(ValueError, match=message):
        virtual_workers_of(model, 2, passes=BatchedPasses)


def test_all_models_can_be_batched():
    with torch.device("meta"):
        assert all(can_be_batched(spec.make()) for spec in CATALOGUE.values())


def test_what_is_asked_wrongly_is_refused():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4 * 49, 5))
    assert can_be_batched(model)
    given = batches_of((3, 9, 9), 3, 4, 0, torch.float32)
    with pytest.raises(ValueError, match=r"a row for each example, got \[\(4, 1\), \(\)\]"):
        virtual_workers_of(model, 3, passes=BatchedPasses, carried=(torch.zeros(4, 1), torch.zeros(())))
    with pytest.raises(ValueError, match="must have 3 examples, as what is carried has rows, got 4"):
        virtual_workers_of(model, 3, compressor="none", passes=BatchedPasses, carried=(torch.zeros(3, 1),)).advance(
            given
        )
    with pytest.raises(ValueError, match="training mode"):
        virtual_workers_of(copy.deepcopy(model).eval(), 3, passes=BatchedPasses)
    virtual_workers = virtual_workers_of(model, 3, compressor="none", passes=BatchedPasses)
    with pytest.raises(ValueError, match="batches must be 3"):
        virtual_workers.advance(given[:2])
    with pytest.raises(ValueError, match="rank 2"):
        virtual_workers.advance([*given[:2], tuple(t[:3] for t in given[2])])
    with pytest.raises(ValueError, match="as many examples"):
        virtual_workers.advance([(x, y[:3]) for x, y in given])
    mixing = virtual_workers_of(
        nn.Sequential(nn.Flatten(0, 1), nn.Linear(4, 4)), 2, compressor="none", passes=BatchedPasses
    )
    with pytest.raises(ValueError, match="all 4 examples"):
        mixing.advance([(torch.randn(2, 3, 4), torch.zeros(2, dtype=torch.long))] * 2)
    virtual_workers.advance(given)  # and goes on
