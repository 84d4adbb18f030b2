"""AN4: audio and transcriptions, spectrograms, spelling, word error rates."""

from __future__ import annotations

import hashlib
import lzma
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from sparsync_lab.data import (
    greedy_decode,
    load_an4,
    read_an4,
    spectrogram,
    speech_batch,
    text_to_labels,
    word_error_rate,
)
from sparsync_lab.data.an4 import AN4, Utterance
from sparsync_lab.data.ctc import CHARACTERS
from tests.lab.real import FOLDER, needs

NAMES = ["an4_clstk/one/an1-one-b", "an4_clstk/one/an2-one-b", "an4test_clstk/two/an3-two-b"]
TEXTS = ["<s> YES </s> (an1-one-b)", "<s> GO HOME </s> (an2-one-b)", "<s> R U B </s> (an3-two-b)"]


def sounds() -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.integers(-(2**15), 2**15, n).astype(np.int16) for n in (700, 900, 1234)]


def write_texts(folder: Path) -> dict[str, str]:
    folder.mkdir(parents=True, exist_ok=True)
    contents = [NAMES[:2], NAMES[2:], TEXTS[:2], TEXTS[2:]]
    sums = {}
    for name, lines in zip(AN4, contents, strict=True):
        content = "".join(f"{line}\n" for line in lines)
        (folder / name).write_text(content)
        sums[name] = hashlib.sha256(content.encode()).hexdigest()
    return sums


def write_pack(folder: Path) -> dict[str, str]:
    sums = write_texts(folder)
    parts = []
    for sound in sounds():
        difference = np.diff(sound, prepend=np.int16(0)).astype(np.int16).astype(np.int32)
        parts.append(((difference << 1) ^ (difference >> 15)).astype(np.uint16))
    words = np.concatenate(parts)
    packed = {"hi": (words >> 8).astype(np.uint8), "lo": (words & 255).astype(np.uint8)}
    arrays = {name: np.frombuffer(lzma.compress(part.tobytes()), np.uint8) for name, part in packed.items()}
    np.savez(folder / "an4-audio.npz", ids=np.array(NAMES), n=np.array([len(s) for s in sounds()]), **arrays)
    return sums


def write_tree(folder: Path) -> dict[str, str]:
    """As the original archive is unpacked."""
    for name, sound in zip(NAMES, sounds(), strict=True):
        path = folder / "wav" / f"{name}.raw"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(sound.astype(">i2").tobytes())
    return write_texts(folder / "etc")


def digest() -> str:
    return hashlib.sha256(b"".join(sound.astype(">i2").tobytes() for sound in sounds())).hexdigest()


@pytest.mark.parametrize("write", [write_pack, write_tree])
@pytest.mark.parametrize("subfolder", ["", "an4"])
def test_audio_and_words_are_read(tmp_path: Path, write: object, subfolder: str) -> None:
    speech = read_an4(tmp_path, write(tmp_path / subfolder), digest())  # type: ignore[operator]
    assert [u.text for u in speech.train] == ["YES", "GO HOME"]
    assert [u.text for u in speech.test] == ["R U B"]
    for utterance, sound in zip([*speech.train, *speech.test], sounds(), strict=True):
        assert torch.equal(utterance.samples, torch.from_numpy(sound))
    assert [u.text for u in speech.shard(1, 2)] == ["GO HOME"]


@pytest.mark.parametrize("left", [0, 100, 1500])
def test_a_damaged_pack_is_named(tmp_path: Path, left: int) -> None:
    sums = write_pack(tmp_path)
    path = tmp_path / "an4-audio.npz"
    path.write_bytes(path.read_bytes()[:left])
    with pytest.raises(ValueError, match=r"an4-audio.npz is damaged .*AN4 is at"):
        read_an4(tmp_path, sums, digest())


def test_what_is_wrong_with_the_audio_is_said(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"an4_train.fileids is missing: .*speech.cs.cmu.edu"):
        load_an4(tmp_path)
    sums = write_tree(tmp_path)
    with pytest.raises(ValueError, match=r"the audio in .* is not the original: the SHA-256 sum of its samples is"):
        read_an4(tmp_path, sums)
    (tmp_path / "wav" / f"{NAMES[1]}.raw").unlink()
    with pytest.raises(ValueError, match=r"an2-one-b.raw is missing; AN4 is at"):
        read_an4(tmp_path, sums, digest())


# ---- spectrograms ---------------------------------------------------------------------------------------------------


def test_a_tone_is_seen_at_its_frequency() -> None:
    time = torch.arange(16_000) / 16_000
    tone = (8000 * torch.sin(2 * math.pi * 1000 * time)).to(torch.int16)
    image = spectrogram(tone)
    assert image.shape == (161, 101)  # 50 Hz a bin, a frame every 10 ms
    assert (image[:, 1:-1].argmax(0) == 20).all()
    assert image.mean().abs() < 1e-5
    assert image.std() == pytest.approx(1, abs=1e-4)
    by_hand = torch.fft.rfft((tone[1600 - 160 : 1600 + 160].float() / 32768) * torch.hamming_window(320)).abs().log1p()
    raw = image[:, 10]
    scale = (by_hand[20] - by_hand[80]) / (raw[20] - raw[80])
    assert torch.allclose((raw - raw[80]) * scale, by_hand - by_hand[80], atol=1e-4)


def test_a_batch_pads_with_zeros() -> None:
    utterances = [
        Utterance(torch.from_numpy(s), text) for s, text in zip(sounds(), ("YES", "GO HOME", "A"), strict=True)
    ]
    batch = speech_batch(utterances)
    assert batch.spectrograms.shape == (3, 161, 8)
    assert batch.frames.tolist() == [5, 6, 8]
    assert torch.equal(batch.spectrograms[0, :, :5], spectrogram(utterances[0].samples))
    assert not batch.spectrograms[0, :, 5:].any()
    assert batch.label_counts.tolist() == [3, 7, 1]
    assert torch.equal(batch.labels[1], text_to_labels("GO HOME"))
    assert not batch.labels[0, 3:].any()


# ---- spelling -------------------------------------------------------------------------------------------------------


def test_greedy_decoding_undoes_repeats_and_blanks() -> None:
    assert len(CHARACTERS) == 29
    frames = ["__GG_OO_", "HEL_LO__", "________"]
    scores = torch.zeros(3, 8, 29)
    for row, text in zip(scores, frames, strict=True):
        for frame, character in zip(row, text, strict=True):
            frame[CHARACTERS.index(character)] = 1
    assert greedy_decode(scores, torch.tensor([8, 5, 8])) == ["GO", "HELL", ""]
    labels = text_to_labels("O'ER A")
    assert greedy_decode(torch.nn.functional.one_hot(labels, 29)[None], torch.tensor([6])) == ["O'ER A"]
    with pytest.raises(ValueError, match="text must be capitals, spaces and apostrophes, got '_é'"):
        text_to_labels("é_A")


def test_word_error_rates() -> None:
    spoken = ["YES", "GO HOME NOW", "A B C D"]
    assert word_error_rate(spoken, spoken) == 0
    assert word_error_rate(["", "GO HOME NOW", "A B C D"], spoken) == pytest.approx(1 / 8)  # one deleted
    assert word_error_rate(["YES YES", "GO AWAY", "B C D A"], spoken) == pytest.approx((1 + 2 + 2) / 8)
    assert word_error_rate(["A B C"], ["D"]) == 3
    with pytest.raises(ValueError, match="said must hold a word"):
        word_error_rate([""], [""])


@needs("an4", "an4-audio.npz", *AN4)
def test_the_real_an4() -> None:
    speech = load_an4(FOLDER)
    assert (len(speech.train), len(speech.test)) == (948, 130)
    assert sum(u.samples.numel() for u in [*speech.train, *speech.test]) == 46_452_800
    assert [sum(len(u.text.split()) for u in part) for part in (speech.train, speech.test)] == [5_442, 773]
    batch = speech_batch(speech.test[:4])
    assert torch.isfinite(batch.spectrograms).all()
    assert (batch.frames >= 2 * batch.label_counts).all()
