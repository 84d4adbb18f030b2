"""Texts as labels of characters for CTC, back again, and how many words are wrong."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

BLANK = 0
CHARACTERS = "_'ABCDEFGHIJKLMNOPQRSTUVWXYZ "  # 29; the first is the blank


def labels_of(text: str) -> Tensor:
    """The numbers of a text's characters."""
    odd = set(text) - set(CHARACTERS[1:])
    if odd:
        raise ValueError(f"text must be capitals, spaces and apostrophes, got {''.join(sorted(odd))!r} in {text!r}")
    return torch.tensor([CHARACTERS.index(character) for character in text], dtype=torch.int64)


def greedy(scores: Tensor, lengths: Tensor) -> list[str]:
    """The text of each row of ``(n, frames, 29)``: the best label of every frame, repeats and then blanks left out."""
    texts = []
    for best, length in zip(scores.argmax(2).cpu(), lengths.tolist(), strict=True):
        labels = torch.unique_consecutive(best[:length])
        texts.append("".join(CHARACTERS[label] for label in labels.tolist() if label != BLANK))
    return texts


def word_error_rate(heard: Sequence[str], said: Sequence[str]) -> float:
    """Words to replace, insert and delete to make ``heard`` into ``said``, over the words of ``said``."""
    wrong = sum(_distance(one.split(), other.split()) for one, other in zip(heard, said, strict=True))
    words = sum(len(text.split()) for text in said)
    if not words:
        raise ValueError("said must hold a word, got none")
    return wrong / words


def _distance(one: Sequence[str], other: Sequence[str]) -> int:
    """The least number of words to replace, insert or delete."""
    row = list(range(len(other) + 1))
    for i, word in enumerate(one, 1):
        before, row = row, [i]
        for j, wanted in enumerate(other, 1):
            row.append(min(before[j] + 1, row[-1] + 1, before[j - 1] + (word != wanted)))
    return row[-1]
