"""CIFAR-10: its archives and packs, and what is done to its images."""

from __future__ import annotations

import hashlib
import io
import pickle
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from sparsync_lab.data import Images, augment, load, read_cifar10, step_generator, train_size
from sparsync_lab.data import cifar10 as cifar
from sparsync_lab.data.cifar10 import BATCHES, PACKS
from tests.lab.real import FOLDER, needs

BATCH = 40  # images in each of the five small training batches and the test batch
# Published SHA-256 sums of data_batch_1.bin to data_batch_5.bin and test_batch.bin.
ORIGINALS = [
    "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5",
    "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed",
    "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67",
    "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48",
    "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add",
    "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b",
]


def small(seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Images and labels of six small batches, the last for the test."""
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (6 * BATCH, 3072), np.uint8), rng.integers(0, 10, 6 * BATCH).astype(np.uint8)


def batches() -> list[tuple[str, np.ndarray, np.ndarray]]:
    x, y = small()
    return [(name, x[i * BATCH :][:BATCH], y[i * BATCH :][:BATCH]) for i, name in enumerate([*BATCHES, "test_batch"])]


def write_archive(path: Path, members: dict[str, bytes]) -> dict[str, str]:
    with tarfile.open(path, "w:gz") as archive:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return {path.name: hashlib.md5(path.read_bytes()).hexdigest()}


def write_binary(folder: Path) -> dict[str, str]:
    rows = {f"cifar-10-batches-bin/{n}.bin": np.column_stack([y, x]).tobytes() for n, x, y in reversed(batches())}
    return write_archive(folder / "cifar-10-binary.tar.gz", {"cifar-10-batches-bin/readme.html": b"", **rows})


def write_pickled(folder: Path) -> dict[str, str]:
    rows = {
        f"cifar-10-batches-py/{name}": pickle.dumps({b"data": x, b"labels": y.tolist(), b"batch_label": b"1"}, 2)
        for name, x, y in batches()
    }
    return write_archive(folder / "cifar-10-python.tar.gz", rows)


def write_packs(folder: Path) -> dict[str, str]:
    """Three packs of the same images; the first has every class's first few."""
    x, y = small()
    parts = {name: {} for name in PACKS}
    for split, start, stop in (("train", 0, 5 * BATCH), ("test", 5 * BATCH, 6 * BATCH)):
        number = np.array([(y[start:i] == y[i]).sum() for i in range(start, stop)])
        near = number < {"train": cifar.HALF_TRAIN, "test": cifar.HALF_TEST}[split]
        for pack, chosen in (("cifar10-device.npz", near), (f"cifar10-rest-{split}.npz", ~near)):
            index = np.flatnonzero(chosen)
            own = {f"{split}_y": y[start:stop][index], f"{split}_index": index.astype(np.uint16)}
            for j, at in enumerate(range(0, len(index), 16)):
                picked = x[start:stop][index[at : at + 16]].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
                file = io.BytesIO()
                Image.fromarray(picked.reshape(-1, 32, 3)).save(file, "WEBP", lossless=True, exact=True)
                own[f"{split}_webp_{j:03}"] = np.frombuffer(file.getvalue(), np.uint8)
            parts[pack] |= own
    sums = {}
    for name, arrays in parts.items():
        np.savez(folder / name, **arrays)
        sums[name] = hashlib.sha256((folder / name).read_bytes()).hexdigest()
    return sums


def check_small(images: Images) -> None:
    x, y = small()
    assert torch.equal(images.train_x.view(-1, 3072), torch.from_numpy(x[: 5 * BATCH]))
    assert torch.equal(images.test_x.view(-1, 3072), torch.from_numpy(x[5 * BATCH :]))
    assert images.train_y.tolist() == y[: 5 * BATCH].tolist()
    assert images.test_y.tolist() == y[5 * BATCH :].tolist()


# ---- reading --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("write", [write_binary, write_pickled])
@pytest.mark.parametrize("subfolder", ["", "cifar10"])
def test_archives_are_read_in_order(tmp_path: Path, write: object, subfolder: str) -> None:
    (tmp_path / subfolder).mkdir(exist_ok=True)
    check_small(read_cifar10(tmp_path, archives=write(tmp_path / subfolder)))  # type: ignore[operator]


def test_packs_are_put_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cifar, "HALF_TRAIN", 9)
    monkeypatch.setattr(cifar, "HALF_TEST", 2)
    sums = write_packs(tmp_path)
    check_small(read_cifar10(tmp_path, packs=sums))
    (tmp_path / "archive").mkdir()
    from_archive = read_cifar10(tmp_path / "archive", True, archives=write_binary(tmp_path / "archive"))
    half = read_cifar10(tmp_path, True, packs=sums)
    assert torch.bincount(half.train_y).tolist() == [9] * 10
    for name in ("train_x", "train_y", "test_x", "test_y"):
        assert torch.equal(getattr(half, name), getattr(from_archive, name)), name


def test_what_is_missing_or_wrong_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"CIFAR-10 is missing: looked for cifar10-device.npz, .*cs.toronto.edu"):
        read_cifar10(tmp_path)
    write_binary(tmp_path)
    with pytest.raises(ValueError, match=r"binary.tar.gz is not the original: its MD5 sum is .*, not c32a1d4ab"):
        train_size("cifar10", tmp_path)
    cut = write_archive(tmp_path / "cifar-10-binary.tar.gz", {"data_batch_1.bin": bytes(3073)})
    with pytest.raises(ValueError, match=r"lacks data_batch_2.bin, .*test_batch.bin"):
        read_cifar10(tmp_path, archives=cut)
    (tmp_path / "cifar-10-binary.tar.gz").unlink()
    (tmp_path / "cifar10-device.npz").write_bytes(b"")
    with pytest.raises(ValueError, match=r"looked for cifar10-rest-train.npz, .*the half .* is called cifar10-half"):
        read_cifar10(tmp_path)
    with pytest.raises(ValueError, match=r"cifar10-device.npz is not the original: its SHA-256 sum is"):
        load("cifar10-half", tmp_path)
    monkeypatch.delenv("SPARSYNC_DATA", raising=False)
    with pytest.raises(ValueError, match=r"where is CIFAR-10\? Give --data-dir or set"):
        load("cifar10")


def test_a_batch_that_acts_is_refused(tmp_path: Path) -> None:
    class Acts:
        def __reduce__(self) -> tuple[object, ...]:
            return print, ("acted",)

    acting = {name: pickle.dumps({b"data": Acts()}, 2) for name in [*BATCHES, "test_batch"]}
    sums = write_archive(tmp_path / "cifar-10-python.tar.gz", acting)
    with pytest.raises(ValueError, match=r"holds .*print, which no original does"):
        read_cifar10(tmp_path, archives=sums)


@needs("cifar10", *PACKS)
def test_the_real_cifar10() -> None:
    images = load("cifar10", FOLDER)
    assert len(images.train_x) == train_size("cifar10", FOLDER) == 50_000
    x, y = torch.cat([images.train_x, images.test_x]), torch.cat([images.train_y, images.test_y])
    for i, expected in enumerate(ORIGINALS):
        part = slice(10_000 * i, 10_000 * (i + 1))
        rows = torch.cat([y[part, None].to(torch.uint8), x[part].flatten(1)], 1)
        assert hashlib.sha256(rows.numpy().tobytes()).hexdigest() == expected
    means = torch.stack([images.train_x[:, channel].double().mean() for channel in range(3)])
    spreads = torch.stack([images.train_x[:, channel].double().std() for channel in range(3)])
    assert torch.allclose(means.float(), images.mean.flatten(), rtol=1e-4)
    assert torch.allclose(spreads.float(), images.std.flatten(), rtol=1e-4)


@needs("cifar10", "cifar10-device.npz")
def test_the_real_half() -> None:
    images = load("cifar10-half", FOLDER)
    assert torch.bincount(images.train_y).tolist() == [2500] * 10
    assert torch.bincount(images.test_y).tolist() == [300] * 10
    assert len(images.train_x) == train_size("cifar10-half", FOLDER)


# ---- into a model ---------------------------------------------------------------------------------------------------


def photographs() -> Images:
    x = torch.randint(1, 256, (20, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(3))
    mean, std = torch.tensor([100.0, 110, 120]).view(3, 1, 1), torch.tensor([50.0, 60, 70]).view(3, 1, 1)
    return Images(x, torch.arange(20) % 10, x, torch.arange(20) % 10, 10, mean, std)


def test_bytes_are_standardised() -> None:
    images = photographs()
    got = images.inputs(images.train_x[:4])
    assert got.dtype == torch.float32
    assert torch.allclose(got[:, 1], (images.train_x[:4, 1].float() - 110) / 60)
    grey = Images(torch.randn(4, 1, 28, 28), torch.zeros(4), torch.zeros(1, 1, 28, 28), torch.zeros(1), 10)
    assert grey.inputs(grey.train_x, step_generator(0, 0, 0)) is grey.train_x  # digits are never cut or mirrored


def test_augmentation_shifts_and_mirrors() -> None:
    x = torch.randint(1, 256, (600, 3, 32, 32), dtype=torch.uint8)
    got = augment(x, torch.Generator().manual_seed(1))
    assert got.shape == x.shape
    assert got.dtype == torch.uint8
    padded = torch.nn.functional.pad(x, (4, 4, 4, 4))
    seen = set()
    for image, around in zip(got, padded, strict=True):
        options = [
            (top, left, mirrored)
            for top in range(9)
            for left in range(9)
            for mirrored in (False, True)
            if torch.equal(image[0], crop(around[0], top, left, mirrored))
        ]
        ((top, left, mirrored),) = options
        assert torch.equal(image, crop(around, top, left, mirrored))  # all channels alike
        seen.add((top, left, mirrored))
    assert {top for top, _, _ in seen} == {left for _, left, _ in seen} == set(range(9))
    assert {mirrored for _, _, mirrored in seen} == {False, True}


def crop(padded: torch.Tensor, top: int, left: int, mirrored: bool) -> torch.Tensor:
    cut = padded[..., top : top + 32, left : left + 32]
    return cut.flip(-1) if mirrored else cut


def test_the_same_moment_draws_the_same() -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    x = photographs().train_x
    again = [augment(x, step_generator(1, 2, 3)) for _ in range(2)]
    assert torch.equal(*again)
    others = [augment(x, step_generator(*other)) for other in ((2, 2, 3), (1, 3, 3), (1, 2, 4))]
    assert not any(torch.equal(again[0], other) for other in others)
    assert torch.equal(torch.get_rng_state(), before)  # the user's random state is left alone
