"""All workers in one pass through networks for language: what they compute is that of one pass after another."""

from __future__ import annotations

import copy
import itertools
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sparsync.experiments.models import GPT
from sparsync.experiments.virtual import VirtualWorkers, can_go_together
from tests.test_virtual_together import TOPK, Batch, assert_close

WORKERS, BATCH, TIME, WORDS = 3, 5, 7, 11
DENSE: dict[str, Any] = {"compressor": "none"}
OPTIONS = {"dense": DENSE, "topk": TOPK, "clip": DENSE | {"clip": 0.1}, "topk-clip": TOPK | {"clip": 0.1}}


class Twice(nn.Module):
    """Embeddings, norms and products of several shapes, some used twice, some fixed, some without weights or bias."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.fixed = nn.Embedding(WORDS, 6), nn.Embedding(WORDS, 6).requires_grad_(False)
        self.whole, self.plain = nn.LayerNorm((TIME, 6)), nn.LayerNorm(6, elementwise_affine=False)
        self.norm = nn.LayerNorm(6, bias=False)
        self.wide, self.narrow = nn.Linear(6, 6), nn.Linear(6, WORDS, bias=False)
        nn.init.normal_(self.norm.weight)
        nn.init.normal_(self.whole.weight)

    def forward(self, words: Tensor) -> Tensor:
        x = self.whole(self.embedding(words) + self.fixed(words) * self.embedding(words[:, 0]).unsqueeze(1))
        x = self.wide(self.norm(self.wide(x.view(-1, TIME, 2, 3).flatten(2))).tanh())
        return self.narrow(self.norm(self.plain(x)).unsqueeze(2)).squeeze(2)


def predict(model: nn.Module, batch: Batch, carried: Batch) -> tuple[Tensor, Batch]:
    return nn.functional.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten()), carried


def words_of(step: int, workers: int = WORKERS) -> list[Batch]:
    rng = torch.Generator().manual_seed(step)
    return [tuple(torch.randint(WORDS, (2, BATCH, TIME), generator=rng)) for _ in range(workers)]


@dataclass(frozen=True)
class Case:
    make: Callable[[], nn.Module]
    loss: Callable[[nn.Module, Batch, Batch], tuple[Tensor, Batch]] = predict
    batches: Callable[[int], list[Batch]] = words_of
    carried: Batch = ()


CASES = {
    "gpt": Case(lambda: GPT(WORDS, layers=2, width=6, heads=2, context=TIME + 2)),
    "twice": Case(Twice),
}


def team_of(case: Case, model: nn.Module, workers: int = WORKERS, **options: Any) -> VirtualWorkers:
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5, momentum=0.9)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return VirtualWorkers(model, case.loss, optimizer, workers, carried=case.carried, **options)


def assert_alike(ours: VirtualWorkers, theirs: VirtualWorkers) -> None:
    """Gradients, weights, running statistics and what is carried on."""
    for rank, (key, parameter) in itertools.product(range(theirs.workers), theirs.model.named_parameters()):
        if parameter.requires_grad:
            assert_close(ours.gradient(rank, key), theirs.gradient(rank, key), f"{rank} {key}")
    one, other = ours.state_dict(), theirs.state_dict()
    assert one["model"].keys() == other["model"].keys()
    for key, tensor in other["model"].items():
        assert_close(one["model"][key], tensor, key)
    for rank, states in enumerate(zip(one["carried"], other["carried"], strict=True)):
        for a, b in zip(*states, strict=True):
            assert a.shape == b.shape
            assert_close(a, b, f"carried by {rank}")


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("name", CASES)
def test_together_is_one_after_another(name, options):
    case = CASES[name]
    torch.manual_seed(0)
    model = case.make().double()
    asked = copy.deepcopy(model)
    apart, together = team_of(case, model, **options), team_of(case, asked, together=True, **options)
    for step in range(3):
        given = case.batches(step)
        assert together.advance(given).item() == pytest.approx(apart.advance(given).item(), rel=1e-6)
        assert_alike(together, apart)


@pytest.mark.parametrize("name", CASES)
def test_one_worker_alone_goes_together(name):
    case = CASES[name]
    torch.manual_seed(0)
    model = case.make().double()
    teams = [team_of(case, copy.deepcopy(model), 1, together=how, **DENSE) for how in (True, False)]
    for team in teams:
        team.advance(case.batches(0)[:1])
    assert_alike(*teams)


def test_the_output_of_gpt_has_no_weights_of_its_own():
    torch.manual_seed(0)
    model = GPT(WORDS, 1, 6, 2, TIME)
    assert list(model.state_dict()) == [name for name, _ in model.named_parameters()]
    assert "scores" not in "".join(model.state_dict())
    words = words_of(0, 1)[0][0]
    hidden: list[Tensor] = []
    model.norm.register_forward_hook(lambda module, inputs, output: hidden.append(output))
    scores = model(words)
    assert torch.equal(scores, hidden[0] @ model.embedding.weight.T)
    twin = copy.deepcopy(model)
    twin.embedding.weight.data.zero_()
    assert not twin(words).any()
    assert torch.equal(model(words), scores)


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "padding_idx": (lambda: nn.Embedding(4, 4, padding_idx=0), "Embedding: padding_idx"),
    "max_norm": (lambda: nn.Embedding(4, 4, max_norm=1.0), "max_norm"),
    "frequencies": (lambda: nn.Embedding(4, 4, scale_grad_by_freq=True), "scale_grad_by_freq"),
    "sparse": (lambda: nn.Embedding(4, 4, sparse=True), "sparse"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_go_together_is_named(name):
    make, message = REFUSED[name]
    model = nn.Sequential(make(), nn.Linear(4, 4))
    assert not can_go_together(model)
    with pytest.raises(ValueError, match=f"'0' .*{message}"):
        team_of(CASES["gpt"], model, together=True)


class Places(nn.Module):
    """Looks up what has no examples."""

    def __init__(self) -> None:
        super().__init__()
        self.places, self.out = nn.Embedding(TIME, 4), nn.Linear(4, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        return self.out(self.places(torch.arange(TIME)).expand(len(words), -1, -1))


def test_what_has_no_examples_is_refused():
    team = team_of(CASES["gpt"], Places(), together=True, **DENSE)
    with pytest.raises(ValueError, match=r"Embedding must .* 1 dimensions or more and all 15 examples, got .7"):
        team.advance(words_of(0))
