"""LSTM-PTB, a language model, and LSTM-AN4, which transcribes speech."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from sparsync_lab.models.fnn_lenet import xavier
from sparsync_lab.models.masked_batch_norm import MaskedBatchNorm

State = tuple[Tensor, Tensor]  # of an LSTM: hidden and cell, each (layers, batch, width)
CONTEXT = 20  # frames that the look-ahead convolution sees of the future


class LSTMPTB(nn.Module):
    """Two LSTM layers of 1,500 between an embedding and a decoder of their own for 10,000 words: 66,034,000 parameters;
    uniform, tanh.

    The paper does not print the ranges: here ±0.1 for embedding and decoder, whose bias is 0, and torch's ±1/√width for
    the LSTM. Words go in as ``(batch, time)``, scores come out as ``(batch, time, words)`` with the state.

    Args:
        dropout: before, between and after the LSTM layers.
    """

    def __init__(self, words: int = 10_000, width: int = 1500, layers: int = 2, dropout: float = 0.65) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.embedding = nn.Embedding(words, width)
        self.lstm = nn.LSTM(width, width, layers, dropout=dropout, batch_first=True)
        self.decoder = nn.Linear(width, words)
        nn.init.uniform_(self.embedding.weight, -0.1, 0.1)
        nn.init.uniform_(self.decoder.weight, -0.1, 0.1)
        nn.init.zeros_(self.decoder.bias)

    def forward(self, words: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        hidden, state = self.lstm(self.dropout(self.embedding(words)), state)
        return self.decoder(self.dropout(hidden)), state


class LSTMAN4(nn.Module):
    """Two convolutions, five LSTM layers of 800, a look-ahead convolution and a linear layer, for CTC over 29
    characters: 27,569,568 parameters; Xavier, tanh (the convolutions: ReLU cut off at 20).

    Spectrograms go in as ``(batch, bins, frames)``, 0 beyond their ends, with their lengths; scores come out as
    ``(batch, frames, labels)`` with theirs, which are half. How many frames there are beyond a length changes nothing.
    """

    def __init__(self, labels: int = 29, bins: int = 161, width: int = 800, layers: int = 5) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList(
            [
                nn.Conv2d(1, 32, (41, 11), stride=(2, 2), padding=(20, 5)),
                nn.Conv2d(32, 32, (21, 11), stride=(2, 1), padding=(10, 5)),
            ]
        )
        self.convolution_norms = nn.ModuleList([MaskedBatchNorm(32), MaskedBatchNorm(32)])
        for _ in self.convolutions:
            bins = (bins - 1) // 2 + 1
        sizes = [32 * bins, *[width] * (layers - 1)]
        self.lstms = nn.ModuleList([nn.LSTM(size, width, batch_first=True) for size in sizes])
        self.norms = nn.ModuleList([MaskedBatchNorm(width) for _ in range(layers)])  # the last is before the labels
        self.look_ahead = nn.Conv1d(width, width, CONTEXT + 1, groups=width, bias=False)
        self.labels = nn.Linear(width, labels, bias=False)
        self.apply(xavier)
        bound = (3 / (CONTEXT + 1)) ** 0.5  # every channel is looked at alone: fan in and fan out are its 21 weights
        nn.init.uniform_(self.look_ahead.weight, -bound, bound)
        for lstm in self.lstms:
            _xavier_lstm(lstm)

    def forward(self, spectrograms: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        lengths = (lengths - 1) // 2 + 1  # the first convolution's stride
        frames = torch.arange((spectrograms.shape[-1] - 1) // 2 + 1, device=spectrograms.device)
        real = frames < lengths.to(frames.device).unsqueeze(1)
        x = spectrograms.unsqueeze(1)
        for convolution, norm in zip(self.convolutions, self.convolution_norms, strict=True):
            x = norm(convolution(x), real).clamp(0, 20)
        x = x.flatten(1, 2).transpose(1, 2)
        for i, lstm in enumerate(self.lstms):
            if i:
                x = self.norms[i - 1](x.transpose(1, 2), real).transpose(1, 2)
            x, _ = lstm(x)
        ahead = nn.functional.pad((x * real.unsqueeze(2)).transpose(1, 2), (0, CONTEXT))
        x = self.norms[-1](self.look_ahead(ahead).clamp(0, 20), real)
        return self.labels(x.transpose(1, 2)), lengths


def _xavier_lstm(lstm: nn.Module) -> None:
    """Draw each gate's matrix by Xavier, biases 0."""
    for name, parameter in lstm.named_parameters():
        if name.startswith("bias"):
            nn.init.zeros_(parameter)
        else:
            for gate in parameter.data.chunk(4):
                nn.init.xavier_uniform_(gate)
