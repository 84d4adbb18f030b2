"""The models of the papers: their sizes and first weights. Their activations: ``test_activations.py``."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from functools import cache

import pytest
import torch
from torch import Tensor, nn

from sparsync_lab import models
from sparsync_lab.data import Images
from sparsync_lab.models import CATALOGUE, GPT, IMAGENET, LSTMAN4, LSTMPTB
from sparsync_lab.models.masked_batch_norm import MaskedBatchNorm

SIZES = {
    "fnn3": 199_210,
    "lenet5": 61_706,
    "resnet20": 269_722,
    "vgg16": 14_728_266,
    "lstm-ptb": 66_034_000,
    "lstm-an4": 27_569_568,
    "resnet18": 11_173_962,
    "gpt": 5_752_320,
    "gpt-dropout": 5_752_320,
    "gpt2": 124_439_808,
    "vit": 2_693_194,
}
INPUTS = {"fnn3": (1, 28), "lenet5": (1, 28), "resnet20": (3, 32), "vgg16": (3, 32), "resnet18": (3, 32)}
# Batch and learning rate as Table 1 of Understanding Top-k Sparsification prints them.
SETTINGS = {
    "fnn3": (128, 0.01),
    "lenet5": (128, 0.01),
    "resnet20": (32, 0.1),
    "vgg16": (128, 0.1),
    "lstm-ptb": (20, 22),
    "lstm-an4": (4, 0.0002),
}


@cache
def made(name: str) -> nn.Module:
    torch.manual_seed(0)
    return models.build(name).eval()


def layers(model: nn.Module, *kinds: type[nn.Module]) -> list[nn.Module]:
    return [layer for layer in model.modules() if isinstance(layer, kinds)]


def is_uniform(weight: Tensor, bound: float) -> bool:
    """Fills ±bound evenly, as far as its number of entries can tell."""
    slack = 6 / math.sqrt(weight.numel())
    spread = weight.std().item() / (bound / math.sqrt(3))
    return weight.abs().max().item() <= bound * (1 + 1e-6) and abs(spread - 1) < slack


def is_normal(weight: Tensor, deviation: float) -> bool:
    slack = 6 / math.sqrt(weight.numel())
    tails = (weight.abs() > 2 * deviation).float().mean().item()
    return abs(weight.std().item() / deviation - 1) < slack and abs(tails - 0.0455) < slack


def xavier_bound(weight: Tensor) -> float:
    field = weight[0, 0].numel()
    return math.sqrt(6 / (field * (weight.shape[0] + weight.shape[1])))


# ---- sizes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SIZES)
def test_every_model_has_its_published_size(name: str) -> None:
    spec = CATALOGUE[name]
    assert models.count_parameters(spec.make) == spec.parameters == SIZES[name]
    if name in SETTINGS:
        assert (spec.batch, spec.rate) == SETTINGS[name]


@pytest.mark.parametrize("name", INPUTS)
def test_images_become_ten_scores(name: str) -> None:
    channels, side = INPUTS[name]
    scores = made(name)(torch.randn(2, channels, side, side))
    assert scores.shape == (2, 10)
    assert torch.isfinite(scores).all()
    blank = torch.zeros(4, channels, side, side)
    labels = torch.zeros(4, dtype=torch.int64)
    assert models.parameter_count(name, Images(blank, labels, blank, labels, 10)) == SIZES[name]


def test_a_model_for_other_images_is_refused() -> None:
    blank, labels = torch.zeros(4, 1, 8, 8), torch.zeros(4, dtype=torch.int64)
    with pytest.raises(ValueError, match="resnet20 is for images of 3 x 32 x 32 in 10 classes, got 1 x 8 x 8 in 10"):
        models.make_image_model("resnet20", Images(blank, labels, blank, labels, 10))
    with pytest.raises(ValueError, match=r"name must be one of fnn3, .*inception4, got 'resnet9'"):
        models.build("resnet9")


# ---- first weights --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["fnn3", "lenet5"])
def test_xavier(name: str) -> None:
    for layer in layers(made(name), nn.Conv2d, nn.Linear):
        assert is_uniform(layer.weight, xavier_bound(layer.weight))
        assert not layer.bias.any()


@pytest.mark.parametrize("name", ["resnet20", "resnet18", "vgg16"])
def test_kaiming(name: str) -> None:
    for layer in layers(made(name), nn.Conv2d):
        assert is_normal(layer.weight, math.sqrt(2 / layer.weight[0].numel())), layer
        assert layer.bias is None or not layer.bias.any()
    (classifier,) = layers(made(name), nn.Linear)
    if name == "vgg16":
        assert is_normal(classifier.weight, math.sqrt(2 / 512))
    else:  # the paper names both
        assert is_uniform(classifier.weight, xavier_bound(classifier.weight))
    assert not classifier.bias.any()


def test_the_shortcuts_of_resnet20_carry_what_came_in() -> None:
    block = next(layer for layer in layers(made("resnet20"), nn.Module) if getattr(layer, "new_channels", 0) == 16)
    block.second_norm.weight.data.zero_()
    x = torch.randn(2, 16, 8, 8)
    out = block(x)
    assert out.shape == (2, 32, 4, 4)
    assert torch.equal(out[:, 8:24], x[:, :, ::2, ::2].relu())
    assert not out[:, :8].any()
    assert not out[:, 24:].any()
    block.second_norm.weight.data.fill_(1)


def test_lstm_ptb_is_uniform() -> None:
    torch.manual_seed(0)
    model = LSTMPTB(words=500, width=150)
    for layer in (model.embedding, model.decoder):
        assert is_uniform(layer.weight, 0.1)
    assert not model.decoder.bias.any()
    for name, parameter in model.lstm.named_parameters():
        assert is_uniform(parameter, 1 / math.sqrt(150)), name
    assert model.dropout.p == model.lstm.dropout == 0.65
    assert model.decoder.weight.data_ptr() != model.embedding.weight.data_ptr()


def test_lstm_an4_is_xavier() -> None:
    model = made("lstm-an4")
    for layer in layers(model, nn.Conv2d, nn.Linear):
        assert is_uniform(layer.weight, xavier_bound(layer.weight))
    for lstm in layers(model, nn.LSTM):
        assert is_uniform(lstm.weight_ih_l0, math.sqrt(6 / (lstm.input_size + 800)))
        assert is_uniform(lstm.weight_hh_l0, math.sqrt(6 / 1600))
        assert not lstm.bias_ih_l0.any()


def test_gpt_is_normal() -> None:
    model = made("gpt")
    assert is_normal(model.embedding.weight, 0.02)
    for block in model.blocks:
        assert is_normal(block.project.weight, 0.02)
        assert is_normal(block.merge.weight, 0.02 / math.sqrt(8))
        assert is_normal(block.narrow.weight, 0.02 / math.sqrt(8))


def test_dropout_is_of_training_alone_and_draws_nothing_where_there_is_none() -> None:
    words = torch.arange(12).view(1, 12)
    model = GPT(50, 2, 16, 2, 12, dropout=0.2)
    assert not torch.equal(model(words), model(words))
    model.eval()
    assert torch.equal(model(words), model(words))
    with torch.device("meta"):
        assert [d.p for d in made("gpt-dropout").modules() if isinstance(d, nn.Dropout)] == 5 * [0.2]
    plain, before = GPT(50, 2, 16, 2, 12), torch.get_rng_state()
    assert torch.equal(plain(words), plain(words))
    assert torch.equal(before, torch.get_rng_state())


# ---- sequences ------------------------------------------------------------------------------------------------------


def ptb_scores(model: nn.Module) -> Callable[[Tensor], Tensor]:
    return lambda words: model(words)[0] if isinstance(model, LSTMPTB) else model(words)


@pytest.mark.parametrize("make", [lambda: LSTMPTB(50, 16), lambda: GPT(50, 2, 16, 2, 12)], ids=["lstm", "gpt"])
def test_a_word_does_not_see_those_that_follow(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    scores = ptb_scores(make().eval())
    words = torch.randint(50, (3, 12))
    other = words.clone()
    other[:, 7:] = (other[:, 7:] + 1) % 50
    before, after = scores(words), scores(other)
    assert before.shape == (3, 12, 50)
    assert torch.allclose(before[:, :7], after[:, :7], atol=1e-6)
    assert not torch.allclose(before[:, 7], after[:, 7], atol=1e-4)


def test_the_state_of_lstm_ptb_goes_on() -> None:
    torch.manual_seed(0)
    model = LSTMPTB(50, 16).eval()
    words = torch.randint(50, (3, 12))
    whole, _ = model(words)
    first, state = model(words[:, :5])
    second, _ = model(words[:, 5:], state)
    assert torch.allclose(torch.cat([first, second], 1), whole, atol=1e-6)


def test_gpt_ties_output_and_embedding_and_refuses_odd_heads() -> None:
    model = GPT(50, 1, 16, 2, 12)
    assert [name for name, parameter in model.named_parameters() if parameter.shape == (50, 16)] == ["embedding.weight"]
    with pytest.raises(ValueError, match="width must be a multiple of heads = 3, got 16"):
        GPT(50, 1, 16, 3)


def spoken(frames: int) -> tuple[Tensor, Tensor]:
    """Spectrograms of two utterances, 0 beyond their ends."""
    x = torch.randn(2, 161, 60, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    x[0, :, 37:] = 0
    return nn.functional.pad(x, (0, frames - 60)), torch.tensor([37, 60])


@pytest.mark.parametrize("training", [False, True])
def test_frames_beyond_a_length_change_nothing(training: bool) -> None:
    results = []
    for frames in (60, 61, 97):
        torch.manual_seed(0)
        model = LSTMAN4(width=24, layers=2).double().train(training)
        scores, short = model(*spoken(frames))
        assert scores.shape == (2, (frames + 1) // 2, 29)
        assert short.tolist() == [19, 30]
        labels = nn.functional.pad(torch.arange(1, 13).view(2, 6), (0, frames - 60))  # and so with those beyond a count
        loss = nn.functional.ctc_loss(scores.log_softmax(2).transpose(0, 1), labels, short, torch.tensor([6, 4]))
        loss.backward()
        given = {"scores": torch.cat([scores[0, :19], scores[1, :30]]), "loss": loss, **dict(model.named_buffers())}
        results.append(given | {name: p.grad for name, p in model.named_parameters()})
        assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in model.parameters())
    for name, expected in results[0].items():
        for other in results[1:]:
            assert torch.allclose(other[name], expected, rtol=1e-9, atol=1e-12), name


@pytest.mark.parametrize(("bins", "twin"), [((), nn.BatchNorm1d), ((4,), nn.BatchNorm2d)])
def test_a_masked_batch_norm_is_one_of_real_frames(bins: tuple[int, ...], twin: type[nn.Module]) -> None:
    torch.manual_seed(0)
    own, plain = MaskedBatchNorm(5).double(), twin(5).double()
    for norm in (own, plain):
        nn.init.normal_(norm.weight, generator=torch.Generator().manual_seed(1))
        nn.init.normal_(norm.bias, generator=torch.Generator().manual_seed(2))
    assert own.state_dict().keys() == plain.state_dict().keys()
    real = torch.arange(7) < torch.tensor([3, 7, 1]).unsqueeze(1)
    mask = real.view(3, 1, *[1] * len(bins), 7).expand(3, 5, *bins, 7)
    kept = real.view(3, *[1] * len(bins), 7).expand(3, *bins, 7)
    for step in range(3):
        for training in (True, False):
            x = 3 + torch.randn(3, 5, *bins, 7, dtype=torch.float64) * (step + 1)
            x.requires_grad_()
            given = own.train(training)(x, real)
            assert not given[~mask].any()
            # The real ones alone, side by side, are a picture of one row.
            alone = x.movedim(1, -1)[kept].T.view(1, 5, *[1] * len(bins), -1)
            expected = plain.train(training)(alone)
            shown = given.movedim(1, -1)[kept].T.view_as(expected)
            assert torch.allclose(shown, expected, rtol=1e-10)
            weights = torch.randn_like(shown)
            for ours, theirs in zip(
                torch.autograd.grad((shown * weights).sum(), [x, own.weight, own.bias], retain_graph=True),
                torch.autograd.grad((expected * weights).sum(), [x, plain.weight, plain.bias]),
                strict=True,
            ):
                assert torch.allclose(ours, theirs, rtol=1e-9, atol=1e-12)
            for name, tensor in plain.state_dict().items():
                assert torch.allclose(own.state_dict()[name], tensor, rtol=1e-12), name


# ---- ImageNet -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", IMAGENET)
def test_imagenet_models_say_what_to_install(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    package = IMAGENET[name][0]
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ValueError, match=f"{name} comes with {package}: pip install {package}"):
        models.build(name)


@pytest.mark.parametrize("name", IMAGENET)
def test_imagenet_models_have_their_sizes(name: str) -> None:
    package, _, parameters = IMAGENET[name]
    pytest.importorskip(package)
    assert models.count_parameters(lambda: models.build(name)) == parameters
