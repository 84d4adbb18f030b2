"""Our kernels for small convolutions give what torch's convolutions do."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from sparsync_lab.virtual import BatchedPasses, SequentialPasses, VirtualWorkers, layers
from tests.pairs import DEVICE, MARKS, within_bounds  # noqa: F401

pytestmark = MARKS
Batch = tuple[Tensor, ...]
WORKERS, EXAMPLES = 3, 2
# Channels in and out, stride, side.
CASES = [(3, 16, 1, 8), (16, 16, 1, 8), (16, 32, 2, 8), (32, 32, 1, 4), (20, 24, 1, 7), (5, 7, 2, 7)]


def made(inputs: int, outputs: int, stride: int, side: int) -> tuple[Tensor, Tensor, Tensor]:
    """What goes in, weights, and a gradient of what comes out."""
    rng = torch.Generator().manual_seed(1)
    x = torch.randn(WORKERS * EXAMPLES, inputs, side, side, generator=rng)
    weight = torch.randn(outputs, inputs, 3, 3, generator=rng)
    grad = torch.randn(nn.functional.conv2d(x, weight, None, stride, 1).shape, generator=rng)
    return x, weight, grad


def assert_near(found: Tensor, exact: Tensor) -> None:
    """On a GPU factors have 10 bits after the point."""
    assert (found.cpu() - exact).abs().max() < (3e-3 if DEVICE == "cuda" else 3e-6) * exact.abs().max()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_forward_and_both_gradients_are_those_of_torch(case: tuple[int, int, int, int]) -> None:
    from sparsync_lab.virtual import convolve

    (x, weight, grad), stride = made(*case), case[2]
    x.requires_grad_()
    y = nn.functional.conv2d(x, weight, None, stride, 1)
    (to_x,) = torch.autograd.grad(y, x, grad)
    here = [t.detach().to(DEVICE) for t in (x, weight, grad)]
    assert_near(convolve.convolve(here[0], here[1], stride), y.detach())
    if stride == 1:
        assert_near(convolve.to_input(here[2], here[1]), to_x)
    by_worker = convolve.to_weights(here[0], here[2], WORKERS, stride)
    for rank, own in enumerate(by_worker):
        theirs = weight.clone().requires_grad_()
        nn.functional.conv2d(x[rank::WORKERS].detach(), theirs, None, stride, 1).backward(grad[rank::WORKERS])
        assert theirs.grad is not None
        assert_near(own, theirs.grad)


class Small(nn.Module):
    """Three convolutions for the kernels, and a fourth that is not for them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1, bias=False),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.Conv2d(8, 16, 3, stride=2, padding=1, bias=False),
            nn.ReLU(),
            nn.Conv2d(16, 4, 3, padding=1, bias=False),
            nn.Conv2d(4, 4, 4, bias=False),
            nn.Flatten(),
        )

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.layers(x)
        return scores


def test_batched_passes_have_the_same_gradients_with_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[bool] = []
    whether = layers.takes_small

    def takes_small(*args: object) -> bool:
        used.append(whether(*args))  # type: ignore[arg-type]
        return used[-1]

    rng = torch.Generator().manual_seed(3)
    batches = [
        (torch.randn(EXAMPLES, 3, 8, 8, generator=rng), torch.randint(4, (EXAMPLES,), generator=rng))
        for _ in range(WORKERS)
    ]

    def gradients(passes: type) -> dict[str, Tensor]:
        torch.manual_seed(0)
        model = Small().to(DEVICE)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        virtual_workers = VirtualWorkers(
            model, loss_of, optimizer, WORKERS, compressor="none", graph=False, passes=passes
        )
        virtual_workers.backward([tuple(t.to(DEVICE) for t in batch) for batch in batches])
        names = [(name, rank) for name, _ in model.named_parameters() for rank in range(WORKERS)]
        return {f"{name} of {rank}": virtual_workers.gradient(rank, name).cpu() for name, rank in names}

    monkeypatch.setattr(layers, "takes_small", takes_small)
    ours = gradients(BatchedPasses)
    assert used == [True, True, True, False]
    for name, exact in gradients(SequentialPasses).items():
        assert_near(ours[name], exact)


def loss_of(model: nn.Module, batch: Batch, carried: Batch) -> tuple[Tensor, Batch]:
    return nn.functional.cross_entropy(model(batch[0]), batch[1]), carried
