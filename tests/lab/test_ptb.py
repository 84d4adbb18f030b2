"""The Penn Treebank: words as numbers, streams and windows."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch

from sparsync_lab.data import load_ptb, read_ptb, streams, windows
from sparsync_lab.data.ptb import PTB, PennTreebank
from tests.lab.real import FOLDER, needs


def write_ptb(folder: Path, train: str, valid: str = "a b\n", test: str = "b\n") -> dict[str, str]:
    folder.mkdir(exist_ok=True)
    sums = {}
    for name, content in zip(PTB, (train, valid, test), strict=True):
        (folder / name).write_text(content)
        sums[name] = hashlib.sha256(content.encode()).hexdigest()
    return sums


@pytest.mark.parametrize("subfolder", ["", "ptb"])
def test_words_become_numbers(tmp_path: Path, subfolder: str) -> None:
    text = read_ptb(tmp_path, write_ptb(tmp_path / subfolder, " a <unk> b \n b a N \n"))
    assert text.words == ("a", "<unk>", "b", "<eos>", "N")
    assert text.train.tolist() == [0, 1, 2, 3, 2, 0, 4, 3]
    assert text.valid.tolist() == [0, 2, 3]
    assert text.test.tolist() == [2, 3]


def test_what_is_wrong_with_the_text_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"ptb.train.txt is missing: looked for .*simple-examples"):
        load_ptb(tmp_path)
    sums = write_ptb(tmp_path, "a b\n", valid="a new word\n")
    with pytest.raises(ValueError, match=r"ptb.train.txt is not the original: its SHA-256 sum is"):
        load_ptb(tmp_path)
    with pytest.raises(ValueError, match="lacks words of the others: new, word"):
        read_ptb(tmp_path, sums)
    monkeypatch.delenv("SPARSYNC_DATA", raising=False)
    with pytest.raises(ValueError, match="where is the Penn Treebank"):
        load_ptb()


def test_windows_follow_one_another() -> None:
    cut = streams(torch.arange(50), 4)
    assert cut.shape == (4, 12)
    assert cut[1].tolist() == list(range(12, 24))
    pieces = list(windows(cut, 5))
    assert [x.shape[1] for x, _ in pieces] == [5, 5, 1]
    assert torch.equal(torch.cat([x for x, _ in pieces], 1), cut[:, :-1])
    assert all(torch.equal(y, x + 1) for x, y in pieces)
    with pytest.raises(ValueError, match="count must be from 1 to 25, so that each has two words, got 26"):
        streams(torch.arange(50), 26)
    with pytest.raises(ValueError, match="length must be 1 or more, got 0"):
        next(windows(cut, 0))


def test_workers_have_streams_of_their_own() -> None:
    text = PennTreebank(torch.arange(100), torch.arange(2), torch.arange(2), ())
    shards = [text.shard(rank, 3, 4) for rank in range(3)]
    assert torch.equal(torch.cat(shards), streams(torch.arange(100), 12))


@needs("ptb", *PTB)
def test_the_real_treebank() -> None:
    text = load_ptb(FOLDER)
    assert [part.numel() for part in (text.train, text.valid, text.test)] == [929_589, 73_760, 82_430]
    assert len(text.words) == 10_000
    unknown, end = text.words.index("<unk>"), text.words.index("<eos>")
    assert [int((part == unknown).sum()) for part in (text.train, text.valid, text.test)] == [45_020, 3_485, 4_794]
    assert [int((part == end).sum()) for part in (text.train, text.valid, text.test)] == [42_068, 3_370, 3_761]
