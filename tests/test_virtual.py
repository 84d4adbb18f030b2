"""Virtual workers: equal to real processes, resumable, and counted."""

from __future__ import annotations

import gc
import math
import warnings
from dataclasses import replace
from itertools import islice
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import sparsync
from sparsync.collectives import Balanced, DenseAllReduce, Reduced, SharedIndexAllReduce
from sparsync.collectives.base import MeanOf, bad_ranks_of
from sparsync.engine.traffic import bytes_per_step
from sparsync.schedule import ExponentialWarmup
from sparsync.sparse import SparseGrad
from sparsync.wire import Wire
from sparsync_lab.data import Images, step_generator
from sparsync_lab.models.gpt import GPT
from sparsync_lab.training.loop import batch_indices
from sparsync_lab.virtual import (
    VirtualWorkers,
    accuracy,
    epoch_steps,
    image_batches,
    perplexity,
    random_windows,
    token_batches,
)
from tests.models import net

STEPS = 16
ALL_SPARSE = {"dense_below": 0, "dense_1d": False}


class Speller(nn.Module):
    """A recurrent model that carries its hidden state on."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.lstm, self.out = nn.Embedding(11, 24), nn.LSTM(24, 32, batch_first=True), nn.Linear(32, 11)

    def forward(self, tokens: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, (h, c) = self.lstm(self.embedding(tokens), (h, c))
        return self.out(x), h, c


def make(kind: str) -> nn.Module:
    torch.manual_seed(0)
    if kind == "speller":
        return Speller()
    if kind == "conv":
        return nn.Sequential(
            nn.Conv2d(1, 12, 3), nn.BatchNorm2d(12), nn.ReLU(), nn.Conv2d(12, 16, 3), nn.BatchNorm2d(16), nn.ReLU(),
            nn.Flatten(), nn.Linear(16 * 16, 5),
        )  # fmt: skip
    if kind == "gpt":
        return GPT(words=11, layers=2, width=16, heads=2, context=8)
    if kind == "dropout":
        return nn.Sequential(nn.Linear(20, 64), nn.Dropout(0.3), nn.Linear(64, 5))
    return net()


def batch_of(kind: str, rank: int, step: int) -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(1000 * rank + step)
    if kind in ("speller", "gpt"):
        tokens = torch.randint(11, (4, 9), generator=rng)
        return tokens[:, :-1], tokens[:, 1:]
    shape = (16, 1, 8, 8) if kind == "conv" else (16, 20)
    x = torch.randn(shape, generator=rng)
    return x, x.flatten(1)[:, :5].argmax(1)


def loss_fn(model: nn.Module, batch: tuple[Tensor, ...], carried: tuple[Tensor, ...]) -> Any:
    x, y = batch
    if not carried:
        return nn.functional.cross_entropy(model(x).flatten(0, y.dim() - 1), y.flatten()), ()
    logits, h, c = model(x, *(tensor.detach() for tensor in carried))
    return nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten()), (h, c)


def first_of(kind: str) -> tuple[Tensor, ...]:
    return (torch.zeros(1, 4, 32), torch.zeros(1, 4, 32)) if kind == "speller" else ()


def optimizer_of(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    if kind == "gpt":
        return torch.optim.AdamW(model.parameters(), lr=0.05)
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def adjust(optimizer: torch.optim.Optimizer, step: int) -> None:
    """The learning rate falls on the way."""
    for group in optimizer.param_groups:
        group["lr"] = 0.05 if step < 12 else 0.02


def case_real(
    rank: int, size: int, kind: str, options: dict[str, Any], steps: int = STEPS, bad: int = -1
) -> dict[str, Any]:
    ddp = DistributedDataParallel(make(kind))
    optimizer = optimizer_of(kind, ddp)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        handle = sparsync.attach(ddp, optimizer=optimizer, **options)
    carried = first_of(kind)
    for step in range(steps):
        adjust(optimizer, step)
        optimizer.zero_grad()
        loss, carried = loss_fn(ddp, batch_of(kind, rank, step), carried)
        (loss * (math.nan if (rank, step) == (1, bad) else 1.0)).backward()
        if step != bad:
            optimizer.step()
    named = list(ddp.module.named_parameters())
    outcome = {
        "model": {name: tensor.clone() for name, tensor in ddp.module.state_dict().items()},
        "grads": {name: p.grad.clone() for name, p in named},
        "residuals": {name: kept.clone() for name, _ in named if (kept := handle.residual(name)) is not None},
        "traffic": handle.stats().total.traffic,
        "density": handle.stats().total.density,
    }
    handle.detach()
    del ddp
    gc.collect()
    return outcome


def team_of(kind: str, workers: int, options: dict[str, Any], loss: Any = loss_fn) -> VirtualWorkers:
    model = make(kind)
    optimizer = optimizer_of(kind, model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return VirtualWorkers(model, loss, optimizer, workers, carried=first_of(kind), **options)


def advance(team: VirtualWorkers, kind: str, start: int, stop: int) -> VirtualWorkers:
    for step in range(start, stop):
        adjust(team.optimizer, step)
        team.advance([batch_of(kind, rank, step) for rank in range(team.workers)])
    return team


def assert_equal(team: VirtualWorkers, real: list[dict[str, Any]]) -> None:
    """Every rank's weights, buffers and residuals, the bytes and the density are those of the real processes."""
    for rank, one in enumerate(real):
        ours = team.models[rank].state_dict()
        for name, tensor in one["model"].items():
            assert torch.equal(ours[name], tensor), (rank, name)
        for name, kept in one["residuals"].items():
            mine = team.residual(rank, name)
            assert mine is not None
            assert torch.equal(mine, kept), (rank, name)
    # Buckets have headers of their own; here there is one message for all of them.
    assert team.tally.bytes == pytest.approx(real[0]["traffic"], rel=0.1)
    assert team.tally.density == pytest.approx(sum(one["density"] for one in real) / len(real))


METHODS: dict[str, dict[str, Any]] = {
    "topk": {"compressor": "topk", "density": 0.02, "scope": "layer"},
    "default": {"recipe": "default"},
    "paper": {"recipe": "paper", "density": 0.01},
    "gtopk": {"compressor": "topk", "collective": "gtopk", "density": 0.02, "scope": "global"},
    "gtopk-bf16": {"compressor": "threshold", "collective": "gtopk", "density": 0.05, "values": "bf16"},
    "gtopk-levels": {"compressor": "topk", "collective": "gtopk", "density": 0.05, "values": "levels", "indices": "ef"},
    "balanced": {"compressor": "topk", "collective": "balanced", "density": 0.05, "scope": "global"},
    "balanced-sign": {"recipe": "default", "collective": "balanced", "density": 0.05},
    "balanced-recipe": {"recipe": "balanced"},
    "dgc": {"recipe": "dgc", "density": ExponentialWarmup(0.01, 3, 5)},
    "gaussian": {"compressor": "gaussian", "density": 0.02, "values": "fp16"},
    "random": {"compressor": "random", "density": 0.05, "seed": 7, "momentum": "correct"},
    "block": {"compressor": "block", "density": 0.05, "scope": "global"},
    "follow": {"compressor": "trimmed", "density": 0.02, "follow_lr": True, "clip": 0.05},
}


# The others differ from these in their options alone.
OWN_WAYS = ("topk", "default", "gtopk", "gtopk-levels", "balanced", "balanced-recipe", "dgc", "random", "follow")


@pytest.mark.parametrize(
    "name", [name if name in OWN_WAYS else pytest.param(name, marks=pytest.mark.slow) for name in METHODS]
)
def test_three_virtual_workers_are_three_processes(worlds, name):
    """Where every sum runs in rank order: bit for bit."""
    options = METHODS[name] | ALL_SPARSE
    real = worlds[3].run(case_real, kind="net", options=options)
    assert_equal(advance(team_of("net", 3, options), "net", 0, STEPS), real)


@pytest.mark.each_value
@pytest.mark.parametrize("kind", ["conv", "speller", "gpt"])
@pytest.mark.parametrize("name", ["topk", "default"])
def test_batch_statistics_and_hidden_states_are_those_of_processes(worlds, kind, name):
    options = METHODS[name] | ALL_SPARSE
    real = worlds[3].run(case_real, kind=kind, options=options)
    assert_equal(advance(team_of(kind, 3, options), kind, 0, STEPS), real)


def ring_sum(rows: list[Tensor]) -> Tensor:
    """The sum as Gloo's ring makes it: chunk c ends on rank c, having come from rank c - 1 all the way round."""
    workers, numel = len(rows), rows[0].numel()
    size = numel * rows[0].element_size()
    # At least two segments a rank, of at most 1 MiB each.
    segments = workers * max(2, math.ceil(math.ceil(size / 2**20) / workers))
    chunk = segments // workers * math.ceil(math.ceil(size / segments) / rows[0].element_size())
    out = torch.empty_like(rows[0])
    for c in range(workers):
        place = slice(c * chunk, (c + 1) * chunk)
        total = rows[c - 1][place]
        for i in range(2, workers + 1):
            total = rows[(c - i) % workers][place] + total
        out[place] = total
    return out


def ring_dense(self, sents, layout, wire):
    total = ring_sum([sent.densify() * (1 / len(sents)) for sent in sents])
    return [
        Reduced(MeanOf([SparseGrad.dense(total, s.flags, s.where)], 1), bad_ranks=bad_ranks_of(sents)) for s in sents
    ]


def ring_shared(self, sents, layout, wire):
    values = ring_sum([sent.values for sent in sents])
    return [Reduced(MeanOf([replace(s, values=values)], len(sents)), bad_ranks=bad_ranks_of(sents)) for s in sents]


BACKEND_SUMS = {
    "topk": METHODS["topk"] | {"dense_below": 200},
    "default": METHODS["default"],
    "dgc": METHODS["dgc"],
    "gtopk": METHODS["gtopk"],
    "shared": {"compressor": "random", "collective": "shared", "density": 0.05, "scope": "global", "seed": 3},
    "shared-block": {"compressor": "block", "collective": "shared", "density": 0.05, "scope": "global"} | ALL_SPARSE,
}


@pytest.mark.parametrize("name", BACKEND_SUMS)
def test_with_the_backends_order_of_sums_dense_tensors_are_equal_too(worlds, monkeypatch, name):
    """The backend's own sums over 3 ranks differ from ours in their order alone: put in their order, bit for bit."""
    monkeypatch.setattr(DenseAllReduce, "reduce_local", ring_dense)
    monkeypatch.setattr(SharedIndexAllReduce, "reduce_local", ring_shared)
    real = worlds[3].run(case_real, kind="net", options=BACKEND_SUMS[name])
    assert_equal(advance(team_of("net", 3, BACKEND_SUMS[name]), "net", 0, STEPS), real)


IN_BF16 = {
    "shared-bf16": BACKEND_SUMS["shared"] | {"values": "bf16"},
    "none-bf16": {"compressor": "none", "values": "bf16"},
}


@pytest.mark.parametrize("name", [*BACKEND_SUMS, *IN_BF16, "none"])
def test_two_workers_are_two_processes(worlds, name):
    """Two numbers have one sum, whoever adds them."""
    options = (BACKEND_SUMS | IN_BF16).get(name, {"compressor": "none"})
    real = worlds[2].run(case_real, kind="conv", options=options)
    assert_equal(advance(team_of("conv", 2, options), "conv", 0, STEPS), real)


@pytest.mark.parametrize("name", ["shared", "none"])
def test_three_workers_with_the_backends_sums_are_close(worlds, name):
    options = BACKEND_SUMS.get(name, {"compressor": "none"})
    real = worlds[3].run(case_real, kind="net", options=options)
    team = advance(team_of("net", 3, options), "net", 0, STEPS)
    for key, tensor in real[0]["model"].items():
        assert torch.allclose(team.model.state_dict()[key], tensor, rtol=1e-4, atol=1e-6), key


@pytest.mark.parametrize("name", ["topk", "default", "gtopk"])
def test_a_gradient_that_is_not_finite_comes_home_as_in_processes(worlds, name):
    options, at = METHODS[name] | {"dense_below": 0, "dense_1d": False}, 5
    real = worlds[3].run(case_real, kind="net", options=options, steps=at + 1, bad=at)

    def losing(model, batch, carried):
        loss, carried = loss_fn(model, batch, carried)
        one = torch.equal(batch[0], batch_of("net", 1, at)[0])
        return loss * (math.nan if one else 1.0), carried

    team = advance(team_of("net", 3, options, losing), "net", 0, at)
    adjust(team.optimizer, at)
    team.backward([batch_of("net", rank, at) for rank in range(3)])
    assert_equal(team, real)
    assert team.tally.bad_steps == 1
    for key, parameter in team.model.named_parameters():
        assert torch.equal(parameter.grad.isnan(), real[0]["grads"][key].isnan()), key


def test_what_was_sent_before_a_bad_unit_comes_home_too():
    """Only a small tensor's gradient is not finite, and those travel last."""
    team = advance(team_of("net", 2, METHODS["default"] | {"momentum": "move"}), "net", 0, 3)
    exchange = team._exchange
    sparse, small = exchange.units
    assert not sparse.unit.compressor.dense
    before = [{s.name: team.residual(rank, s.name).clone() for s in sparse.unit.spans} for rank in range(2)]
    for part in exchange.units:
        part.rows.normal_()
    small.rows[1, 0] = math.nan
    with torch.no_grad():
        exchange.reduce()
    assert sparse.mean.isfinite().all()
    assert small.mean[[span.start for span in small.unit.spans]].isnan().all()
    for rank in range(2):
        for span in sparse.unit.spans:
            came = sparse.rows[rank, span.start : span.stop].view_as(before[rank][span.name])
            assert torch.allclose(team.residual(rank, span.name), before[rank][span.name] + came, atol=1e-5), span
    assert team.tally.bad_steps == 1


RESUMED = [("conv", "default"), ("speller", "dgc"), ("dropout", "gtopk")]
RESUMED += [("net", "follow"), ("net", "dgc"), ("net", "random")]


@pytest.mark.parametrize(("kind", "name"), RESUMED)
def test_a_resumed_training_is_one_that_never_stopped(tmp_path, kind, name):
    options = METHODS[name]
    straight = advance(team_of(kind, 3, options), kind, 0, STEPS)
    torch.save(advance(team_of(kind, 3, options), kind, 0, 10).state_dict(), tmp_path / "team.pt")
    resumed = team_of(kind, 3, options)
    resumed.load_state_dict(torch.load(tmp_path / "team.pt", weights_only=True))
    assert resumed.step == 10
    advance(resumed, kind, 10, STEPS)
    for key, tensor in straight.model.state_dict().items():
        assert torch.equal(resumed.model.state_dict()[key], tensor), key
    assert resumed.tally.bytes == straight.tally.bytes
    assert resumed.tally.density == straight.tally.density


def case_go_on(rank: int, size: int, saved: dict[str, Any], options: dict[str, Any]) -> dict[str, Tensor]:
    ddp = DistributedDataParallel(make("net"))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9)
    handle = sparsync.attach(ddp, optimizer=optimizer, **options)
    ddp.module.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    handle.load_state_dict(saved["ranks"][rank])
    for step in range(10, STEPS):
        adjust(optimizer, step)
        optimizer.zero_grad()
        loss_fn(ddp, batch_of("net", rank, step), ())[0].backward()
        optimizer.step()
    outcome = {name: tensor.clone() for name, tensor in ddp.module.state_dict().items()}
    handle.detach()
    del ddp
    gc.collect()
    return outcome


def test_a_state_stays_what_it_was_while_the_training_goes_on():
    options = METHODS["topk"]
    team = advance(team_of("net", 2, options), "net", 0, 5)
    state = team.state_dict()
    advance(team, "net", 5, 10)
    resumed = team_of("net", 2, options)
    resumed.load_state_dict(state)
    advance(resumed, "net", 5, 10)
    for key, tensor in team.model.state_dict().items():
        assert torch.equal(resumed.model.state_dict()[key], tensor), key


def test_processes_go_on_where_virtual_workers_stopped(worlds):
    options = METHODS["default"] | ALL_SPARSE
    team = advance(team_of("net", 3, options), "net", 0, 10)
    real = worlds[3].run(case_go_on, saved=team.state_dict(), options=options)
    advance(team, "net", 10, STEPS)
    for key, tensor in real[0].items():
        assert torch.equal(team.model.state_dict()[key], tensor), key


def test_without_a_graph_batches_may_differ_in_shape():
    team = team_of("net", 3, {"compressor": "none"})
    batches = [tuple(tensor[: 3 + rank] for tensor in batch_of("net", rank, 0)) for rank in range(3)]
    loss = team.backward(batches)
    alone = make("net")
    expected = sum(loss_fn(alone, batch, ())[0] for batch in batches) / 3
    expected.backward()
    assert torch.allclose(loss, expected)
    for ours, theirs in zip(team.model.parameters(), alone.parameters(), strict=True):
        assert torch.allclose(ours.grad, theirs.grad, atol=1e-6)


def test_what_is_asked_wrongly_is_refused():
    with pytest.raises(ValueError, match="scope must be 'layer' or 'global'"):
        team_of("net", 2, {"compressor": "topk", "scope": "bucket"})
    with pytest.raises(ValueError, match="do not take scaler="):
        team_of("net", 2, {"scaler": object()})
    with pytest.raises(ValueError, match="workers must be 1 or more, got 0"):
        team_of("net", 0, {})
    with pytest.raises(ValueError, match="graph=True needs the model on a GPU"):
        team_of("net", 2, {"graph": True})
    with pytest.raises(ValueError, match="streams must be 1 or more, got 0"):
        team_of("net", 2, {"streams": 0})
    team = team_of("net", 2, {})
    with pytest.raises(ValueError, match=r"not a state of virtual workers of schema .*: None"):
        team.load_state_dict(team.model.state_dict())
    with pytest.raises(ValueError, match=r"tensor 1 of a batch must be \(4, 3\) torch.float32, .* got \(4, 2\)"):
        team._passes._match(1, torch.zeros(4, 3), torch.zeros(4, 2))
    with pytest.raises(ValueError, match="batches must be 2, one a worker, got 3"):
        team.advance([batch_of("net", rank, 0) for rank in range(3)])
    with pytest.raises(ValueError, match="the state of 3 workers, and here are 2"):
        team.load_state_dict(team_of("net", 3, {}).state_dict())


def test_detach_gives_the_optimizer_its_own_update_back():
    team = team_of("net", 2, {"recipe": "default"})
    batches = [batch_of("net", rank, 0) for rank in range(2)]
    team.advance(batches)
    assert team.optimizer.param_groups[0]["momentum"] == 0.9
    assert not any(team.optimizer.state.values())
    team.detach()
    team.advance(batches)
    assert all("momentum_buffer" in state for state in team.optimizer.state.values())
    assert team.optimizer.state


def test_image_batches_are_those_of_real_workers():
    """Shards, order, crops and mirrors, from any step on."""
    rng = torch.Generator().manual_seed(0)
    x, y = torch.randint(256, (103, 3, 8, 8), generator=rng, dtype=torch.uint8), torch.arange(103)
    images = Images(x, y, x, y, 10, torch.full((3, 1, 1), 120.0), torch.full((3, 1, 1), 60.0))
    for start in (0, 6):  # an epoch has four steps
        ours = image_batches(images, workers=3, batch=8, seed=5, start=start)
        theirs = [batch_indices(34, 8, torch.Generator().manual_seed(5000 + rank)) for rank in range(3)]
        expected = [[next(order) for _ in range(11)] for order in theirs]
        for step in range(start, 11):
            for rank, (got_x, got_y) in enumerate(next(ours)):
                own_x, own_y = images.shard(rank, 3)
                chosen = expected[rank][step]
                assert torch.equal(got_x, images.inputs(own_x[chosen], step_generator(5, rank, step)))
                assert torch.equal(got_y, own_y[chosen])


def test_random_windows_are_drawn_alike_by_any_number_of_workers():
    tokens = torch.arange(200)
    first, second = islice(random_windows(tokens, 2, 3, 4, seed=5), 2)
    for here, after in first + second:
        assert here.shape == after.shape == (3, 4)
        assert torch.equal(here + 1, after)  # the words that follow
    drawn = torch.cat([here for here, _ in first])
    assert not torch.equal(drawn, torch.cat([here for here, _ in second]))
    six = next(random_windows(tokens, 6, 1, 4, seed=5))
    assert torch.equal(drawn, torch.cat([here for here, _ in six]))
    assert torch.equal(next(random_windows(tokens, 2, 3, 4, seed=5, start=1))[0][0], second[0][0])
    assert not torch.equal(drawn, torch.cat([here for here, _ in next(random_windows(tokens, 2, 3, 4, seed=6))]))
    many = torch.cat([after for step in islice(random_windows(tokens, 2, 3, 4), 300) for _, after in step])
    assert (many.min(), many.max()) == (1, 199)  # from end to end
    with pytest.raises(ValueError, match="text must have 30 words or more"):
        next(random_windows(tokens[:20], 2, 3, 4))


def test_token_batches_read_on_and_begin_again():
    tokens = torch.arange(2 * 3 * 11 + 5)
    assert epoch_steps(tokens, workers=2, batch=3, length=4) == 2
    read = token_batches(tokens, workers=2, batch=3, length=4)
    first, second, again = next(read), next(read), next(read)
    assert first[1][0].tolist() == [[33, 34, 35, 36], [44, 45, 46, 47], [55, 56, 57, 58]]
    assert torch.equal(first[1][1], first[1][0] + 1)
    assert torch.equal(second[0][0], first[0][0] + 4)
    assert torch.equal(again[1][0], first[1][0])
    assert torch.equal(next(token_batches(tokens, 2, 3, 4, start=1))[0][0], second[0][0])
    assert epoch_steps(tokens, 2, 3, 10) == 1
    with pytest.raises(ValueError, match="text must have 72 words or more for 2 x 3 streams, got 71"):
        epoch_steps(tokens, 2, 3, 11)


def train(team, batches, steps):
    """The mean losses of so many steps."""
    return [team.advance(batch).item() for batch in islice(batches, steps)]


def test_a_training_learns():
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(600, 20, generator=rng)
    y = x[:, :5].argmax(1)
    images = Images(x, y, x, y, 5)
    team = team_of("net", 4, {"recipe": "default"})
    data = image_batches(images, workers=4, batch=16)
    losses = train(team, data, 20)
    sent = team.tally.bytes
    losses += train(team, data, 40)
    assert team.step == 60
    assert accuracy(team.model, images) > 0.6
    assert team.model.training
    assert sum(losses[40:]) < 0.9 * sum(losses[:20])
    assert sent == 20 * team.plan.spending.first
    cost = bytes_per_step(team.plan, dict(team.model.named_parameters()), 4)
    assert team.tally.bytes == sum(cost(team.plan.density(step)) for step in range(60)) < 3 * sent
    assert 0 < team.tally.density < 0.3


def test_a_language_model_carries_its_state_and_forgets_it():
    tokens = torch.arange(600) * 7 % 11
    team = team_of("speller", 2, {"compressor": "topk", "density": 0.05, "momentum": "move"})
    first = first_of("speller")
    held_out = [b for _, (b, *_) in zip(range(4), token_batches(tokens, 1, 4, 8), strict=False)]
    before = perplexity(team.model, loss_fn, held_out, first)
    per_epoch = epoch_steps(tokens, 2, 4, 8)
    for epoch in range(60 // per_epoch):
        team.forget()
        train(team, token_batches(tokens, 2, 4, 8, start=epoch * per_epoch), per_epoch)
    assert perplexity(team.model, loss_fn, held_out, first) < 0.7 * before
    assert team.state_dict()["carried"][0][0].abs().sum() > 0
    team.forget()
    assert team.state_dict()["carried"][0][0].abs().sum() == 0


def test_workers_carry_on_until_they_forget():
    def counting(model, batch, carried):
        return loss_fn(model, batch, ())[0], (carried[0] + 1,)

    team = VirtualWorkers(
        model := net(), counting, torch.optim.SGD(model.parameters(), lr=0.01), 2, carried=(torch.zeros(()),)
    )
    data = ([batch_of("net", rank, step) for rank in range(2)] for step in range(10))
    train(team, data, 4)
    assert [carried[0].item() for carried in team.state_dict()["carried"]] == [4, 4]
    team.forget()
    train(team, data, 2)
    assert [carried[0].item() for carried in team.state_dict()["carried"]] == [2, 2]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("streams", [1, 3])
@pytest.mark.parametrize(
    ("kind", "name"), [("conv", "default"), ("speller", "paper"), ("conv", "none"), ("gpt", "topk")]
)
def test_a_graph_does_what_one_pass_after_another_does(kind, name, streams):
    options = METHODS.get(name, {"compressor": "none"})
    ended = []
    for graph in (False, True):
        model = make(kind).cuda()
        optimizer = optimizer_of(kind, model)
        first = first_of(kind)
        team = VirtualWorkers(model, loss_fn, optimizer, 4, carried=first, graph=graph, streams=streams, **options)
        for step in range(6):
            team.advance([tuple(t.cuda() for t in batch_of(kind, rank, step)) for rank in range(4)])
        ended.append(team.state_dict())
    eager, graphed = ended
    for key, tensor in eager["model"].items():
        assert torch.allclose(graphed["model"][key].double(), tensor.double(), rtol=1e-3, atol=1e-4), key
    for one, other in zip(eager["carried"], graphed["carried"], strict=True):
        assert all(torch.allclose(a, b, atol=1e-4) for a, b in zip(one, other, strict=True))
    with pytest.raises(ValueError, match="as in the captured graph"):
        team.advance([tuple(t.cuda()[:2] for t in batch_of(kind, rank, 0)) for rank in range(4)])


@pytest.mark.parametrize("workers", [1, 2, 3, 5])
@pytest.mark.parametrize("name", ["balanced", "balanced-sign", "balanced-recipe"])
def test_every_message_of_balanced_sums_is_encoded_and_compared(monkeypatch, name, workers):
    """Both rounds of every worker, now and then and when the cut changes; what is not as counted ends the training."""
    rehearsed, rehearse = [], Balanced.encoded_bytes

    def noted(self, sents, layout, wire):
        rehearsed.append(rehearse(self, sents, layout, wire))
        return rehearsed[-1]

    monkeypatch.setattr(Balanced, "encoded_bytes", noted)
    monkeypatch.setattr("sparsync.simulate.exchange.COUNT_EVERY", 3)
    team = advance(team_of("net", workers, METHODS[name] | ALL_SPARSE), "net", 0, 7)
    assert len(rehearsed) == 3
    assert [sum(sizes) for sizes in rehearsed] == [pytest.approx(workers * team.tally.bytes / 7)] * 3
    assert [len(sizes) for sizes in rehearsed] == [workers] * 3
    if workers == 1:  # which sends nothing
        assert team.tally.bytes == 0
        return
    encode = Wire.encode

    def longer(self, sent, segment_of, shape, header):
        message = encode(self, sent, segment_of, shape, header)
        more = message.new_zeros(*message.shape[:-1], 1 if message.dim() == 1 else 0)  # what owners send, by a word
        return torch.cat([message, more], -1)

    monkeypatch.setattr(Wire, "encode", longer)
    with pytest.raises(AssertionError, match="bytes a worker"):
        advance(team, "net", 7, 10)
