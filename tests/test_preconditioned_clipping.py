"""Preconditioned feedback to the end of a training in which the user's own ``clip_grad_norm_`` cuts most steps."""

from __future__ import annotations

import gc
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import sparsync
from tests.world import World

WORDS, WIDTH = 64, 128
STEPS, WARM_UP, ROWS, RATE = 150, 20, 64, 4e-3
BUDGET = 1 / 40
MAX_NORM = 1.0  # the default of Transformers' Trainer
HELD_OUT = 10**9  # the seed of a text that nobody trains on


class NextWord(nn.Module):
    """Guesses a word from the two before it: an embedding, a norm, and layers with a shortcut around them."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.words = nn.Embedding(WORDS, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(2 * WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.out = nn.Linear(WIDTH, WORDS)

    def forward(self, pairs: Tensor) -> Tensor:
        h = self.norm(self.words(pairs)).flatten(1)
        guess: Tensor = self.out(h[:, :WIDTH] + self.down(self.up(h).relu()))
        return guess


def text(seed: int, rows: int) -> tuple[Tensor, Tensor]:
    """Return pairs of words and what follows each, which the language leaves partly to chance."""
    language = torch.Generator().manual_seed(7)
    first, second = (2 * torch.randn(WORDS, WORDS, generator=language) for _ in range(2))
    rng = torch.Generator().manual_seed(seed)
    pairs = torch.randint(WORDS, (rows, 2), generator=rng)
    chances = (first[pairs[:, 0]] + second[pairs[:, 1]]).softmax(1)
    return pairs, torch.multinomial(chances, 1, generator=rng)[:, 0]


@dataclass
class Trained:
    """What came of a training; ``cut``: the share of its steps in which gradients were clipped."""

    loss: float
    cut: float
    norm: float
    sent: float = 1.0
    learned: float = MAX_NORM


def case_train(rank: int, size: int, seed: int, sparse: bool) -> Trained:
    """Train to the end as users do, but for the one line that attaches; return the loss on a held-out text."""
    model = NextWord(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    ddp = DistributedDataParallel(model)
    handle = sparsync.attach(ddp, optimizer=optimizer, budget=BUDGET, total_steps=STEPS) if sparse else None
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: min(1.0, (t + 1) / WARM_UP) * (1 - t / STEPS))
    norms = []
    for step in range(STEPS):
        pairs, following = text(STEPS * size * seed + size * step + rank, ROWS)
        optimizer.zero_grad()
        nn.functional.cross_entropy(ddp(pairs), following).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM))
        optimizer.step()
        schedule.step()
    shown = torch.stack(norms)
    trained = Trained(0.0, float((shown > MAX_NORM).float().mean()), float(shown.median()))
    if handle is not None:
        preconditioner = handle._running().worker.preconditioner
        assert preconditioner is not None
        trained.learned = float(preconditioner.moment.max_norm)
        numel = sum(parameter.numel() for parameter in model.parameters())
        trained.sent = handle.stats().total.traffic / STEPS / (2 * (size - 1) / size * 4 * numel)
        handle.detach()
    del ddp
    gc.collect()
    with torch.no_grad():
        pairs, following = text(HELD_OUT, 4096)
        trained.loss = float(nn.functional.cross_entropy(model(pairs), following))
    return trained


def test_a_clip_that_is_active_in_most_steps_ends_where_dense_does(worlds: dict[int, World]) -> None:
    dense, sparse = (worlds[2].run(case_train, seed=0, sparse=flag)[0] for flag in (False, True))
    assert min(dense.cut, sparse.cut) > 0.9
    assert abs(sparse.norm / dense.norm - 1) < 0.1  # what is logged means the same
    assert abs(sparse.learned / MAX_NORM - 1) < 1e-3
    assert sparse.sent <= BUDGET
    assert abs(sparse.loss / dense.loss - 1) < 0.01, (sparse.loss, dense.loss)


def case_falling_rate(rank: int, size: int) -> tuple[list[int], list[float]]:
    """Divide the rate by ten in the last step; return entries sent, and shown norms over the mean gradient's."""
    model = NextWord(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    ddp = DistributedDataParallel(model)
    handle = sparsync.attach(ddp, optimizer=optimizer, budget=BUDGET)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 9, 0.1)
    entries, norms = [], []
    for step in range(10):
        pairs, following = text(size * step + rank, ROWS)
        optimizer.zero_grad()
        nn.functional.cross_entropy(ddp(pairs), following).backward()
        preconditioner = handle._running().worker.preconditioner
        assert preconditioner is not None
        norms.append(float(nn.utils.get_total_norm([p.grad for p in model.parameters()]) / preconditioner.moment.norm))
        entries.append(handle.stats().step.entries)
        optimizer.step()
        schedule.step()
    handle.detach()
    del ddp
    gc.collect()
    return entries, norms


def test_a_rate_that_falls_at_once_sends_as_much_and_shows_the_same_norm(worlds: dict[int, World]) -> None:
    for entries, norms in worlds[2].run(case_falling_rate):
        assert entries[-1] > 0.5 * entries[-2]
        assert abs(norms[-1] - 1) < 0.01
