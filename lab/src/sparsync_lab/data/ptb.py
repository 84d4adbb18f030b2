"""The Penn Treebank as Mikolov prepared it for language models: words, one after another."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from sparsync_lab.data.files import verified_files

PTB: Mapping[str, str] = {
    "ptb.train.txt": "fcea919f6cf83f35d4d00c6cbf08040d13d4155226340912e2fef9c9c4102cbf",
    "ptb.valid.txt": "c9fe6985fe0d4ccb578183407d7668fc6066c20700cb4cf87d8ff1cc34df1bf2",
    "ptb.test.txt": "dd65dff31e70846b2a6030a87482edcd5d199130cdcfa1f3dccbb033728deee0",
}
SOURCE = (
    "the files ptb.train.txt, ptb.valid.txt and ptb.test.txt are in simple-examples/data of "
    "http://www.fit.vutbr.cz/~imikolov/rnnlm/simple-examples.tgz; the Linguistic Data Consortium licenses it (LDC99T42)"
)
END = "<eos>"


@dataclass(frozen=True)
class PennTreebank:
    """Three texts as numbers of words, ``(words,)`` each, every line closed by ``<eos>``.

    Args:
        words: by number, in the order in which the training text uses them first.
    """

    train: Tensor
    valid: Tensor
    test: Tensor
    words: tuple[str, ...]

    def shard(self, rank: int, workers: int, batch: int) -> Tensor:
        """Return the training streams of one worker, ``(batch, length)``: of all ``workers * batch``, its own."""
        everyone = streams(self.train, workers * batch)
        return everyone[rank * batch : (rank + 1) * batch]


def read_ptb(folder: Path, checksums: Mapping[str, str] = PTB) -> PennTreebank:
    """Read the Penn Treebank from the files in ``folder`` or ``folder/ptb``; refuse one whose SHA-256 sum differs."""
    texts = [
        path.read_text(encoding="utf-8").replace("\n", f" {END} ").split()
        for path in verified_files(folder, "ptb", checksums, SOURCE)
    ]
    number = {word: i for i, word in enumerate(dict.fromkeys(texts[0]))}
    unknown = {word for text in texts[1:] for word in text if word not in number}
    if unknown:
        raise ValueError(f"the training text in {folder} lacks words of the others: {', '.join(sorted(unknown)[:5])}")
    train, valid, test = (torch.tensor([number[word] for word in text]) for text in texts)
    return PennTreebank(train, valid, test, tuple(number))


def streams(text: Tensor, count: int) -> Tensor:
    """Cut a text into ``count`` pieces of the same length, ``(count, length)``; a rest at its end is left out."""
    if not 1 <= count <= text.numel() // 2:
        raise ValueError(f"count must be from 1 to {text.numel() // 2}, so that each has two words, got {count}")
    length = text.numel() // count
    return text[: count * length].view(count, length)


def windows(streams: Tensor, length: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield neighbouring pieces of all streams, from their start to their end: words, and the words that follow them.

    Each is ``(streams, length)``, the last perhaps shorter; the next piece begins where one ends, so a state goes on.
    """
    if length < 1:
        raise ValueError(f"length must be 1 or more, got {length}")
    for start in range(0, streams.shape[1] - 1, length):
        stop = min(start + length, streams.shape[1] - 1)
        yield streams[:, start:stop], streams[:, start + 1 : stop + 1]
