"""AN4, the Census speech of Carnegie Mellon University: audio and transcriptions."""

from __future__ import annotations

import hashlib
import lzma
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from zipfile import BadZipFile

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sparsync_lab.data.ctc import text_to_labels
from sparsync_lab.data.files import find_file, verified_files

AN4: Mapping[str, str] = {
    "an4_train.fileids": "a8a4c7f10776bb7d6804b9f1acd0bb6eedd9978490b514c185cebc216a0efed6",
    "an4_test.fileids": "6860eb5ead0e3219b8aa6510fd1a0f1c0717c560bb18928329728ab2614261ce",
    "an4_train.transcription": "6773e208c26be55101aac7a982983706bc6fcae1375fcff938008bddb7f9a286",
    "an4_test.transcription": "a36c14d7473eeba948ea64aa95be1e4fa42321ae6d535ea91e2381cb16faacfd",
}
# Of all samples, training before test, in the order of the file ids, as big-endian 16 bit.
SAMPLES = "6d265bf6f68cd66ab4ba41fed1da0a278e3510ec2c57f37f7b7d8a61a7a53537"
PACK = "an4-audio.npz"
SOURCE = "AN4 is at http://www.speech.cs.cmu.edu/databases/an4/: unpack an4_raw.bigendian.tar.gz into the data folder"
RATE = 16_000  # samples a second
WINDOW, HOP = RATE // 50, RATE // 100  # 20 ms every 10 ms: 161 frequencies
BINS = WINDOW // 2 + 1

Samples = NDArray[np.int16]


@dataclass(frozen=True)
class Utterance:
    """A recording as int16 samples at 16 kHz, and what is said in it, in capitals."""

    samples: Tensor
    text: str


@dataclass(frozen=True)
class Speech:
    """Utterances to train on and to test with, in the order of the file ids."""

    train: Sequence[Utterance]
    test: Sequence[Utterance]

    def shard(self, rank: int, workers: int) -> Sequence[Utterance]:
        """Return the training utterances of one worker: every ``workers``-th, all shards of the same size."""
        return self.train[rank::workers][: len(self.train) // workers]


@dataclass(frozen=True)
class SpeechBatch:
    """A batch of utterances, padded.

    Args:
        spectrograms: ``(n, 161, frames)``, zeros after the end of each.
        frames: ``(n,)``, of each.
        labels: ``(n, labels)``, 0 after the end of each.
        label_counts: ``(n,)``, of each.
    """

    spectrograms: Tensor
    frames: Tensor
    labels: Tensor
    label_counts: Tensor


def read_an4(folder: Path, checksums: Mapping[str, str] = AN4, samples: str = SAMPLES) -> Speech:
    """Read AN4 from ``folder`` or ``folder/an4``: the ``.raw`` files as they are unpacked (or one pack,
    ``an4-audio.npz``), file ids and transcriptions.

    Args:
        checksums: SHA-256 of the small files.
        samples: SHA-256 of all samples in order, as big-endian 16 bit.
    """
    root = next((place for place in (folder / "an4", folder) if place.is_dir()), folder)
    within = "etc" if (root / "etc").is_dir() else ""
    files = verified_files(root, within, checksums, SOURCE)
    ids, texts = ([path.read_text().splitlines() for path in pair] for pair in (files[:2], files[2:]))
    pack = find_file(root, "", PACK)
    names = [*ids[0], *ids[1]]
    audio = _read_pack(pack, names) if pack else _read_raw(root / "wav", names)
    digest, utterances = hashlib.sha256(), []
    for sound, text in zip(audio, [*texts[0], *texts[1]], strict=True):
        digest.update(sound.astype(">i2").tobytes())
        spoken = re.sub(r"<s>|</s>|\([^)]*\)\s*$", "", text).strip()
        utterances.append(Utterance(torch.from_numpy(sound), spoken))
    if digest.hexdigest() != samples:
        raise ValueError(
            f"the audio in {root} is not the original: the SHA-256 sum of its samples is {digest.hexdigest()}, "
            f"not {samples}; {SOURCE}"
        )
    return Speech(utterances[: len(ids[0])], utterances[len(ids[0]) :])


def spectrogram(samples: Tensor) -> Tensor:
    """Return the logarithms of the magnitudes of 161 frequencies, 100 frames a second, ``(161, frames)``, standardized.

    Args:
        samples: int16, 1-D, on any device.
    """
    window = torch.hamming_window(WINDOW, device=samples.device)
    sound = samples.float() / 32768
    size = torch.stft(sound, WINDOW, HOP, WINDOW, window, return_complex=True).abs().log1p()
    return (size - size.mean()) / (size.std() + 1e-8)


def speech_batch(utterances: Sequence[Utterance], device: torch.device | str = "cpu") -> SpeechBatch:
    """Return utterances as a model takes them, and the labels it should give."""
    images = [spectrogram(utterance.samples.to(device)) for utterance in utterances]
    labels = [text_to_labels(utterance.text) for utterance in utterances]
    padded = torch.zeros(len(images), BINS, max(image.shape[1] for image in images), device=device)
    for row, image in zip(padded, images, strict=True):
        row[:, : image.shape[1]] = image
    return SpeechBatch(
        padded,
        torch.tensor([image.shape[1] for image in images]),
        torch.nn.utils.rnn.pad_sequence(labels, batch_first=True).to(device),
        torch.tensor([len(word) for word in labels]),
    )


def _read_raw(folder: Path, names: Sequence[str]) -> Iterator[Samples]:
    for name in names:
        path = folder / f"{name}.raw"
        if not path.is_file():
            raise ValueError(f"{path} is missing; {SOURCE}")
        yield np.fromfile(path, ">i2").astype(np.int16)


def _read_pack(path: Path, names: Sequence[str]) -> Iterator[Samples]:
    """Yield the samples of each utterance from a pack: high and low bytes of the samples' differences, each utterance
    starting from 0, small numbers first (0, -1, 1, -2, ...), packed by xz."""
    try:
        with np.load(path, allow_pickle=False) as pack:
            ids, stops = pack["ids"].tolist(), pack["n"].cumsum().tolist()
            high, low = (np.frombuffer(lzma.decompress(pack[part].tobytes()), np.uint8) for part in ("hi", "lo"))
    except (ValueError, KeyError, EOFError, BadZipFile, lzma.LZMAError) as error:
        raise ValueError(f"{path} is damaged ({error}); {SOURCE}") from None
    if ids != list(names):
        raise ValueError(f"{path} holds other utterances than the file ids name; {SOURCE}")
    start = 0
    for stop in stops:
        word = high[start:stop].astype(np.uint16) << 8 | low[start:stop]
        difference = ((word >> 1) ^ (0 - (word & 1))).astype(np.uint16).view(np.int16)
        yield np.cumsum(difference, dtype=np.int16)
        start = stop
