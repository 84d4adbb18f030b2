"""Labels of characters for CTC, texts decoded from them, and the word error rate."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

BLANK = 0
CHARACTERS = "_'ABCDEFGHIJKLMNOPQRSTUVWXYZ "  # 29; the first is the blank


def text_to_labels(text: str) -> Tensor:
    """Return the numbers of a text's characters."""
    odd = set(text) - set(CHARACTERS[1:])
    if odd:
        raise ValueError(f"text must be capitals, spaces and apostrophes, got {''.join(sorted(odd))!r} in {text!r}")
    return torch.tensor([CHARACTERS.index(character) for character in text], dtype=torch.int64)


def greedy_decode(scores: Tensor, lengths: Tensor) -> list[str]:
    """Return the text of each row of ``(n, frames, 29)``: the best label of every frame, repeats and then blanks left
    out."""
    texts = []
    for best, length in zip(scores.argmax(2).cpu(), lengths.tolist(), strict=True):
        labels = torch.unique_consecutive(best[:length])
        texts.append("".join(CHARACTERS[label] for label in labels.tolist() if label != BLANK))
    return texts


def word_error_rate(decoded: Sequence[str], spoken: Sequence[str]) -> float:
    """Return the number of words to replace, insert and delete to turn ``decoded`` into ``spoken``, over the words of
    ``spoken``."""
    import jiwer

    if not any(text.split() for text in spoken):
        raise ValueError("said must hold a word, got none")
    return float(jiwer.wer(list(spoken), list(decoded)))
