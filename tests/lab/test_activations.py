"""The activations of the models, by what they make of numbers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from sparsync_lab.models import GPT, LSTMAN4, LSTMPTB
from sparsync_lab.models.convolutional import ResidualBlock
from tests.lab.test_models import INPUTS, layers, made

POOLED = {"fnn3": (), "lenet5": (0, 1), "vgg16": (1, 3, 6, 9, 12)}  # the convolutions that max pooling comes after


def plain(name: str, x: Tensor) -> Tensor:
    """FNN-3, LeNet-5 or VGG-16 by hand: ReLU after all but the last layer."""
    norms = layers(made(name), nn.BatchNorm2d)
    for i, convolution in enumerate(layers(made(name), nn.Conv2d)):
        x = convolution(x)
        x = (norms[i](x) if norms else x).relu()
        x = functional.max_pool2d(x, 2) if i in POOLED[name] else x
    x = x.flatten(1)
    *hidden, last = layers(made(name), nn.Linear)
    for layer in hidden:
        x = layer(x).relu()
    return last(x)


def residual(name: str, x: Tensor) -> Tensor:
    """ResNet-20 or ResNet-18 by hand: ReLU after the first layer, inside a block and after its sum."""
    convolution, norm, *_, classifier = made(name).children()
    x = norm(convolution(x)).relu()
    for block in layers(made(name), ResidualBlock):
        half = block.new_channels // 2
        kept = functional.pad(x[:, :, :: block.stride, :: block.stride], (0, 0, 0, 0, half, half))
        kept = kept if block.shortcut is None else block.shortcut(x)
        inner = block.first_norm(block.first(x)).relu()
        x = (block.second_norm(block.second(inner)) + kept).relu()
    return classifier(x.mean((2, 3)))


@pytest.mark.parametrize("name", INPUTS)
def test_models_of_images_have_relu(name: str) -> None:
    channels, side = INPUTS[name]
    x = torch.randn(2, channels, side, side, generator=torch.Generator().manual_seed(0))
    by_hand = plain if name in POOLED else residual
    assert torch.allclose(made(name)(x), by_hand(name, x), rtol=1e-4, atol=1e-5)


def first_step(lstm: nn.Module, x: Tensor) -> Tensor:
    """What an LSTM of one layer makes of first frames, ``(batch, width)``, by hand."""
    gates = functional.linear(x, lstm.weight_ih_l0, lstm.bias_ih_l0 + lstm.bias_hh_l0)
    enter, _, new, leave = gates.chunk(4, 1)
    return leave.sigmoid() * (enter.sigmoid() * new.tanh()).tanh()


def test_lstm_ptb_has_tanh_and_no_other() -> None:
    torch.manual_seed(0)
    model = LSTMPTB(words=50, width=16, layers=1, dropout=0.0)
    for parameter in model.parameters():
        nn.init.normal_(parameter)  # far from 0, where tanh is no straight line
    words = torch.randint(50, (3, 1))
    scores, _ = model(words)
    expected = model.decoder(first_step(model.lstm, model.embedding(words[:, 0])))
    assert torch.allclose(scores[:, 0], expected, rtol=1e-4, atol=1e-5)


def watched(model: nn.Module, *inputs: Tensor) -> tuple[dict[nn.Module, Tensor], dict[nn.Module, Tensor]]:
    """What came into every layer of a model, and what the layer gave."""
    came, gave = {}, {}

    def watch(layer: nn.Module, given: tuple[Tensor, ...], output: Tensor | tuple[Tensor, ...]) -> None:
        came[layer] = given[0].clone()
        gave[layer] = (output[0] if isinstance(output, tuple) else output).clone()

    for layer in model.modules():
        layer.register_forward_hook(watch)
    model(*inputs)
    return came, gave


def test_lstm_an4_has_tanh_and_relu_cut_off_at_20_round_it() -> None:
    torch.manual_seed(0)
    model = LSTMAN4(width=24, layers=2).double().eval()
    for layer in (*model.convolution_norms, model.look_ahead):
        layer.weight.data.mul_(100)  # beyond 20
    came, gave = watched(model, torch.randn(2, 161, 60, dtype=torch.float64), torch.tensor([60, 60]))
    first, second = model.convolution_norms
    between, last = model.norms
    cut = {
        model.convolutions[1]: gave[first],
        model.lstms[0]: gave[second].flatten(1, 2).transpose(1, 2),
        last: gave[model.look_ahead],
    }
    for layer, before in cut.items():
        assert before.min() < 0
        assert before.max() > 20
        assert torch.equal(came[layer], before.clamp(0, 20))
    bare = {
        first: gave[model.convolutions[0]],
        second: gave[model.convolutions[1]],
        between: gave[model.lstms[0]].transpose(1, 2),
        model.lstms[1]: gave[between].transpose(1, 2),
        model.look_ahead: functional.pad(gave[model.lstms[1]].transpose(1, 2), (0, 20)),
        model.labels: gave[last].transpose(1, 2),
    }
    for layer, before in bare.items():
        assert torch.equal(came[layer], before)
    assert torch.equal(gave[model], gave[model.labels])
    for lstm in model.lstms:
        assert torch.allclose(gave[lstm][:, 0], first_step(lstm, came[lstm][:, 0]))


def test_gpt_has_gelu() -> None:
    torch.manual_seed(0)
    model = GPT(words=50, layers=2, width=16, heads=2, context=12)
    for block in model.blocks:
        nn.init.normal_(block.widen.weight)  # far from 0, where GELU and those like it are apart
    came, gave = watched(model, torch.randint(50, (3, 12)))
    for block in model.blocks:
        wide = gave[block.widen]
        assert torch.allclose(came[block.narrow], wide / 2 * (1 + (wide / 2**0.5).erf()), atol=1e-5)
