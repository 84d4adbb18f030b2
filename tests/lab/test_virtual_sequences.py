"""All workers in one pass through networks for language and speech: it computes what one pass after another does."""

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

from sparsync_lab.data import PennTreebank, Speech
from sparsync_lab.data.an4 import Utterance
from sparsync_lab.models import GPT, LSTMAN4, LSTMPTB
from sparsync_lab.models.masked_batch_norm import MaskedBatchNorm
from sparsync_lab.papers import tasks
from sparsync_lab.virtual import BatchedPasses, SequentialPasses, VirtualWorkers, can_be_batched
from tests.lab.test_virtual_batched import TOPK, Batch, assert_close

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


class Stacked(nn.Module):
    """An LSTM without bias, used twice with its state, beside one that begins anew; some of its weights are fixed."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.out = nn.Embedding(WORDS, 6), nn.Linear(4, WORDS)
        self.bare, self.fresh = nn.LSTM(6, 4, 2, bias=False, batch_first=True), nn.LSTM(4, 4, batch_first=True)
        self.fresh.weight_ih_l0.requires_grad_(False)

    def forward(self, words: Tensor) -> Tensor:
        x = self.embedding(words)
        first, state = self.bare(x[:, :3])
        second, _ = self.bare(x[:, 3:], state)
        return self.out(self.fresh(torch.cat([first, second], 1))[0])


def predict(model: nn.Module, batch: Batch, carried: Batch) -> tuple[Tensor, Batch]:
    return nn.functional.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten()), carried


def read_on(model: nn.Module, batch: Batch, carried: Batch) -> tuple[Tensor, Batch]:
    """An LSTM's; what it carries has a row for each example."""
    scores, state = model(batch[0], tuple(tensor.transpose(0, 1).contiguous() for tensor in carried))
    return nn.functional.cross_entropy(scores.flatten(0, 1), batch[1].flatten()), tuple(
        s.transpose(0, 1) for s in state
    )


def words_of(step: int, workers: int = WORKERS) -> list[Batch]:
    rng = torch.Generator().manual_seed(step)
    return [tuple(torch.randint(WORDS, (2, BATCH, TIME), generator=rng)) for _ in range(workers)]


class Waves(nn.Module):
    """Convolutions in one dimension: apart by channel, in groups, with steps, margins and a bias; a norm used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.depthwise, self.groups = (
            nn.Conv1d(6, 6, 3, groups=6, bias=False),
            nn.Conv1d(6, 4, 2, 2, padding=1, groups=2),
        )
        self.norm, self.last = MaskedBatchNorm(4, momentum=0.3), nn.Linear(4, WORDS)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        x = self.groups(self.depthwise(x).tanh())
        real = torch.arange(x.shape[-1], device=x.device) < (lengths + 1).unsqueeze(1) // 2
        return self.last(self.norm(self.norm(x, real), real).sum(2))


def classify(model: nn.Module, batch: Batch, carried: Batch) -> tuple[Tensor, Batch]:
    return nn.functional.cross_entropy(model(*batch[:2]), batch[2]), carried


def waves_of(step: int) -> list[Batch]:
    rng = torch.Generator().manual_seed(step)
    return [
        (
            torch.randn(BATCH, 6, 13, generator=rng, dtype=torch.float64),
            torch.randint(2, 13, (BATCH,), generator=rng),
            torch.randint(WORDS, (BATCH,), generator=rng),
        )
        for _ in range(WORKERS)
    ]


def write_down(model: nn.Module, batch: Batch, carried: Batch) -> tuple[Tensor, Batch]:
    spectrograms, frames, labels, counts = batch
    scores, lengths = model(spectrograms, frames)
    logs = scores.log_softmax(2).transpose(0, 1)
    total = nn.functional.ctc_loss(logs, labels, lengths, counts, reduction="sum", zero_infinity=True)
    return total / len(frames), carried


def speech_of(step: int) -> list[Batch]:
    """Utterances of all lengths, 0 beyond their ends."""
    rng = torch.Generator().manual_seed(step)
    made = []
    for _ in range(WORKERS):
        frames, counts = torch.randint(20, 42, (BATCH,), generator=rng), torch.randint(1, 4, (BATCH,), generator=rng)
        spectrograms = torch.randn(BATCH, 9, 41, generator=rng, dtype=torch.float64)
        spectrograms *= (torch.arange(41) < frames.unsqueeze(1)).unsqueeze(1)
        labels = torch.randint(1, 5, (BATCH, 4), generator=rng) * (torch.arange(4) < counts.unsqueeze(1))
        made.append((spectrograms, frames, labels, counts))
    return made


@dataclass(frozen=True)
class Case:
    make: Callable[[], nn.Module]
    loss: Callable[[nn.Module, Batch, Batch], tuple[Tensor, Batch]] = predict
    batches: Callable[[int], list[Batch]] = words_of
    carried: Batch = ()
    graph: bool = True  # can be captured


def start(layers: int, width: int = 6) -> Batch:
    return tuple(torch.randn(2, BATCH, layers, width, dtype=torch.float64, generator=torch.Generator().manual_seed(0)))


CASES = {
    "gpt": Case(lambda: GPT(WORDS, layers=2, width=6, heads=2, context=TIME + 2)),
    "twice": Case(Twice),
    "lstm": Case(lambda: LSTMPTB(WORDS, 6, layers=2, dropout=0.0), read_on, carried=start(2)),
    "three layers": Case(lambda: LSTMPTB(WORDS, 5, layers=3, dropout=0.0), read_on, carried=start(3, 5)),
    "stacked": Case(Stacked),
    "waves": Case(Waves, classify, waves_of),
    "speech": Case(lambda: LSTMAN4(5, bins=9, width=6, layers=3), write_down, speech_of, graph=False),
}


def virtual_workers_of(case: Case, model: nn.Module, workers: int = WORKERS, **options: Any) -> VirtualWorkers:
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
def test_batched_passes_equal_sequential_ones(name, options):
    case = CASES[name]
    torch.manual_seed(0)
    model = case.make().double()
    asked = copy.deepcopy(model)
    sequential, batched = (
        virtual_workers_of(case, model, **options),
        virtual_workers_of(case, asked, passes=BatchedPasses, **options),
    )
    for step in range(3):
        given = case.batches(step)
        assert batched.advance(given).item() == pytest.approx(sequential.advance(given).item(), rel=1e-6)
        assert_alike(batched, sequential)


@pytest.mark.parametrize("name", CASES)
def test_one_worker_alone_can_be_batched(name):
    case = CASES[name]
    torch.manual_seed(0)
    model = case.make().double()
    both = [
        virtual_workers_of(case, copy.deepcopy(model), 1, passes=how, **DENSE)
        for how in (BatchedPasses, SequentialPasses)
    ]
    for virtual_workers in both:
        virtual_workers.advance(case.batches(0)[:1])
    assert_alike(*both)


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


def test_what_is_carried_goes_on_either_way():
    """A state of one kind is taken by the other; and what is forgotten is where all began."""
    case = CASES["lstm"]
    torch.manual_seed(0)
    model = case.make().double()
    straight, sequential = (virtual_workers_of(case, copy.deepcopy(model), **TOPK) for _ in range(2))
    batched, again = (virtual_workers_of(case, copy.deepcopy(model), passes=BatchedPasses, **TOPK) for _ in range(2))
    for step in range(6):
        straight.advance(case.batches(step))
    for virtual_workers, steps, following in (
        (batched, (0, 1), sequential),
        (sequential, (2, 3), again),
        (again, (4, 5), straight),
    ):
        for step in steps:
            virtual_workers.advance(case.batches(step))
        if following is not straight:
            following.load_state_dict(virtual_workers.state_dict())
    assert_alike(again, straight)
    assert not torch.equal(again.state_dict()["carried"][0][0], again.state_dict()["carried"][1][0])
    again.forget()
    for state in again.state_dict()["carried"]:
        assert all(torch.equal(a, b) for a, b in zip(state, case.carried, strict=True))


def test_dropout_between_layers_draws_for_every_example_and_it_learns():
    torch.manual_seed(0)
    model = LSTMPTB(WORDS, 24, layers=2, dropout=0.3)
    case = Case(lambda: model, read_on, carried=tuple(tensor.float() for tensor in start(2, 24)))
    virtual_workers = virtual_workers_of(case, model, passes=BatchedPasses, **DENSE)
    words = torch.arange(TIME + 1).expand(BATCH, -1) + torch.arange(BATCH).unsqueeze(1)
    same = [(words[:, :-1] % WORDS, words[:, 1:] % WORDS)] * WORKERS  # they count
    first = virtual_workers.advance(same).item()
    grads = [virtual_workers.gradient(rank, "lstm.weight_hh_l1").clone() for rank in range(WORKERS)]
    assert not any(torch.equal(a, b) for a, b in itertools.combinations(grads, 2))
    for _ in range(150):
        last = virtual_workers.advance(same).item()
    assert last < 0.6 < 2 < first
    cut = LSTMPTB(WORDS, 24, layers=2, dropout=1.0)
    cut.dropout = nn.Identity()  # only from layer to layer nothing gets through
    virtual_workers = virtual_workers_of(case, cut, passes=BatchedPasses, **DENSE)
    virtual_workers.advance(same)
    assert not virtual_workers.gradient(0, "lstm.weight_ih_l1").any()
    assert virtual_workers.gradient(0, "lstm.weight_hh_l1").any()


def test_nothing_is_drawn_when_virtual_workers_are_made():
    torch.manual_seed(0)
    model = CASES["lstm"].make()
    before = torch.get_rng_state()
    virtual_workers_of(CASES["lstm"], model, passes=BatchedPasses, **DENSE)
    assert torch.equal(torch.get_rng_state(), before)


def sounds() -> Speech:
    """Noise of all lengths."""
    rng = torch.Generator().manual_seed(0)
    sizes = torch.randint(3000, 5000, (26,), generator=rng).tolist()
    noise = [torch.randint(-9999, 9999, (size,), generator=rng, dtype=torch.int16) for size in sizes]
    made = [Utterance(sound, text) for sound, text in zip(noise, itertools.cycle(("GO", "YES NO", "A")), strict=False)]
    return Speech(made[:20], made[20:])


@pytest.mark.parametrize("name", ["gpt", "lstm-ptb", "lstm-an4"])
def test_tasks_can_be_batched(name, monkeypatch):
    words = torch.randint(50, (400,), generator=torch.Generator().manual_seed(0))
    monkeypatch.setattr(tasks.data, "load_ptb", lambda folder: PennTreebank(words, words, words, ("a",)))
    monkeypatch.setattr(tasks.data, "load_an4", lambda folder: sounds())
    task = tasks.make_task(name, None, torch.device("cpu"), workers=WORKERS, batch=2, seed=0, limit=30)
    assert task.mean
    for module in task.model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if isinstance(module, nn.LSTM):
            module.dropout = 0.0
    before = task.evaluate()
    model = task.model.double()
    case = Case(lambda: model, task.loss, carried=tuple(tensor.double() for tensor in task.carried))
    sequential = virtual_workers_of(case, copy.deepcopy(model), **DENSE)
    batched = virtual_workers_of(case, model, passes=BatchedPasses, **DENSE)
    stream = task.batches(0)
    for _ in range(2):
        given = [tuple(t.double() if t.is_floating_point() else t for t in batch) for batch in next(stream)]
        for virtual_workers in (sequential, batched):
            virtual_workers.optimizer.param_groups[0]["lr"] = 0.001 if name == "lstm-an4" else 0.5
            virtual_workers.advance(given)
        assert_alike(batched, sequential)
    model.float()
    assert task.evaluate() < before or name == "lstm-an4"  # which takes longer to get a word right


def test_batches_of_speech_are_padded_alike(monkeypatch):
    monkeypatch.setattr(tasks.data, "load_an4", lambda folder: sounds())
    task = tasks.make_task("lstm-an4", None, torch.device("cpu"), workers=3, batch=2, seed=0, limit=30)
    assert task.mean
    assert not task.graph  # CTC waits for the host
    given = next(task.batches(0))
    assert len(given) == 3
    frames = max(batch[1].max().item() for batch in given)
    assert {tuple(batch[0].shape) for batch in given} == {(2, 161, frames)}
    assert len({tuple(batch[2].shape) for batch in given}) == 1
    assert len({tuple(batch[1].tolist()) for batch in given}) == 3  # yet everyone has its own


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "padding_idx": (lambda: nn.Embedding(4, 4, padding_idx=0), "Embedding: padding_idx"),
    "max_norm": (lambda: nn.Embedding(4, 4, max_norm=1.0), "max_norm"),
    "frequencies": (lambda: nn.Embedding(4, 4, scale_grad_by_freq=True), "scale_grad_by_freq"),
    "sparse": (lambda: nn.Embedding(4, 4, sparse=True), "sparse"),
    "time first": (lambda: nn.LSTM(4, 4), "LSTM: needs batch_first=True"),
    "both directions": (lambda: nn.LSTM(4, 4, batch_first=True, bidirectional=True), "one direction"),
    "projections": (lambda: nn.LSTM(4, 4, batch_first=True, proj_size=2), "no projections"),
    "a GRU": (lambda: nn.GRU(4, 4, batch_first=True), "GRU: parameters or buffers of a layer that is none of .*LSTM"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_batched_is_named(name):
    make, message = REFUSED[name]
    model = nn.Sequential(make(), nn.Linear(4, 4))
    assert not can_be_batched(model)
    with pytest.raises(ValueError, match=f"'0' .*{message}"):
        virtual_workers_of(CASES["gpt"], model, passes=BatchedPasses)


class Places(nn.Module):
    """Looks up what has no examples."""

    def __init__(self) -> None:
        super().__init__()
        self.places, self.out = nn.Embedding(TIME, 4), nn.Linear(4, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        return self.out(self.places(torch.arange(TIME)).expand(len(words), -1, -1))


def losing(model: nn.Module, batch: Batch, carried: Batch) -> tuple[Tensor, Batch]:
    loss, (h, c) = read_on(model, batch, carried)
    return loss, (h[:1], c)


def test_what_is_not_carried_on_is_said():
    case = Case(CASES["lstm"].make, losing, carried=CASES["lstm"].carried)
    virtual_workers = virtual_workers_of(case, case.make().double(), passes=BatchedPasses, **DENSE)
    with pytest.raises(ValueError, match=r"tensors of \[.15, 2, 6.*, which are carried on, got \[\(\), .1, 2, 6"):
        virtual_workers.advance(words_of(0))


def test_what_has_no_examples_is_refused():
    virtual_workers = virtual_workers_of(CASES["gpt"], Places(), passes=BatchedPasses, **DENSE)
    with pytest.raises(ValueError, match=r"Embedding must .* 1 dimensions or more and all 15 examples, got .7"):
        virtual_workers.advance(words_of(0))


class TiedByHand(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.mix = nn.Embedding(7, 4), nn.Linear(4, 4)

    def forward(self, words: Tensor) -> Tensor:
        return nn.functional.linear(self.mix(self.words(words)).mean(1), self.words.weight)


def small_workers(model: nn.Module, loss_fn: Any) -> VirtualWorkers:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return VirtualWorkers(model, loss_fn, optimizer, 2, compressor="none", passes=BatchedPasses)


def test_a_parameter_used_beside_its_layer_is_refused():
    """Its gradient could not be told apart, and would be lost."""

    def loss_fn(model: nn.Module, batch: Any, carried: Any) -> Any:
        return nn.functional.cross_entropy(model(batch[0]), batch[1]), carried

    virtual_workers = small_workers(TiedByHand(), loss_fn)
    batch = [(torch.randint(7, (3, 5)), torch.randint(7, (3,))) for _ in range(2)]
    with pytest.raises(ValueError, match=r"'words.weight' is used beside its layer.* sequential passes take it"):
        virtual_workers.advance(batch)


def test_what_cannot_be_batched_is_said_in_the_first_step():
    def half(model: nn.Module, batch: Any, carried: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return model(batch[0]).float().square().mean(), carried

    def packed(model: nn.Module, batch: Any, carried: Any) -> Any:
        sequence = nn.utils.rnn.pack_sequence(list(batch[0]))
        return model(sequence)[0].data.square().mean(), carried

    batch = [(torch.randn(3, 4, 2),) for _ in range(2)]
    with pytest.raises(ValueError, match="take no autocast"):
        small_workers(nn.Linear(2, 2), half).advance(batch)
    with pytest.raises(ValueError, match="LSTM takes tensors, got PackedSequence"):
        small_workers(nn.LSTM(2, 3, batch_first=True), packed).advance(batch)
    norm = MaskedBatchNorm(3)
    norm.momentum = None
    assert not can_be_batched(norm)


def test_a_state_of_another_shape_is_refused():
    def loss_fn(model: nn.Module, batch: Any, carried: Any) -> Any:
        y = model(batch[0])
        return y.square().mean(), (y.detach(),)

    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    virtual_workers = VirtualWorkers(model, loss_fn, optimizer, 2, compressor="none", carried=(torch.zeros(3, 2),))
    state = virtual_workers.state_dict()
    state["carried"] = [(torch.zeros(2, 3),) for _ in range(2)]
    with pytest.raises(ValueError, match=r"must have the shapes \[\(3, 2\)\], got \[\(2, 3\)\]"):
        virtual_workers.load_state_dict(state)
