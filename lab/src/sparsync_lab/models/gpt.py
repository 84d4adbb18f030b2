"""Transformers: for language, and a small one for images."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

DROPOUT = 0.2  # of the GPT that is trained for many epochs


class GPT(nn.Module):
    """A decoder-only transformer whose output is tied to its embedding: 5,752,320 parameters as it stands here.

    Weights are normal with deviation 0.02, those that end a residual branch with 0.02 / √(2 layers); GELU. Words go in
    as ``(batch, time)``, at most ``context`` of them, scores come out as ``(batch, time, words)``.

    Args:
        dropout: share of what enters the first block, and of what each residual branch adds, that training drops.
    """

    def __init__(
        self,
        words: int = 10_000,
        layers: int = 4,
        width: int = 256,
        heads: int = 4,
        context: int = 128,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"width must be a multiple of heads = {heads}, got {width}")
        self.embedding = nn.Embedding(words, width)
        self.positions = nn.Embedding(context, width)
        blocks = [_TransformerBlock(width, heads, causal=True, dropout=dropout) for _ in range(layers)]
        self.drop = nn.Dropout(dropout) if dropout else nn.Identity()
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.LayerNorm(width)
        self.scores = TiedOutput(self.embedding)
        _draw_weights(self, blocks)

    def forward(self, words: Tensor) -> Tensor:
        positions = torch.arange(words.shape[1], device=words.device).expand_as(words)
        x = self.drop(self.embedding(words) + self.positions(positions))
        for block in self.blocks:
            x = block(x)
        scores: Tensor = self.scores(self.norm(x))
        return scores


class TiedOutput(nn.Module):
    """A score for each word, by the weights of the words' embedding, which remain its own."""

    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self._embedding = (embedding,)  # in a tuple it is no module of this one: the weights have one name

    @property
    def weight(self) -> Tensor:
        return self._embedding[0].weight

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight)


class ViT(nn.Module):
    """A small vision transformer: patches of 4 x 4, learnt positions, the mean over the patches at the end; 2,693,194
    parameters as it stands here.

    Weights are drawn as ``GPT``'s. Images go in as ``(batch, 3, 32, 32)``, scores of ten classes come out.
    """

    def __init__(self, layers: int = 6, width: int = 192, heads: int = 3, side: int = 32, classes: int = 10) -> None:
        super().__init__()
        patch = 4
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.positions = nn.Embedding((side // patch) ** 2, width)
        blocks = [_TransformerBlock(width, heads, causal=False) for _ in range(layers)]
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.LayerNorm(width)
        self.scores = nn.Linear(width, classes)
        _draw_weights(self, blocks)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        positions = torch.arange(x.shape[1], device=x.device).expand(x.shape[:2])
        x = x + self.positions(positions)
        for block in self.blocks:
            x = block(x)
        scores: Tensor = self.scores(self.norm(x).mean(1))
        return scores


def gpt_with_dropout() -> GPT:
    """Build the GPT for trainings of many epochs."""
    return GPT(dropout=DROPOUT)


def gpt2_small() -> GPT:
    """Build a model of GPT-2 small's shape: 124,439,808 parameters."""
    return GPT(words=50_257, layers=12, width=768, heads=12, context=1024)


class _TransformerBlock(nn.Module):
    def __init__(self, width: int, heads: int, causal: bool, dropout: float = 0.0) -> None:
        super().__init__()
        self.drop = nn.Dropout(dropout) if dropout else nn.Identity()
        self.heads, self.causal = heads, causal
        self.attention_norm, self.norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.project, self.merge = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.widen, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        parts = self.project(self.attention_norm(x)).view(batch, time, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        seen = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=self.causal)
        x = x + self.drop(self.merge(seen.transpose(1, 2).reshape(batch, time, width)))
        x = x + self.drop(self.narrow(nn.functional.gelu(self.widen(self.norm(x)))))
        return x


def _draw_weights(model: nn.Module, blocks: Sequence[_TransformerBlock]) -> None:
    model.apply(_normal)
    for block in blocks:
        for last in (block.merge, block.narrow):
            nn.init.normal_(last.weight, std=0.02 / (2 * len(blocks)) ** 0.5)


def _normal(layer: nn.Module) -> None:
    if isinstance(layer, nn.Linear | nn.Embedding):
        nn.init.normal_(layer.weight, std=0.02)
    if isinstance(layer, nn.Linear):
        nn.init.zeros_(layer.bias)
