"""The lab's images, models and settings, without any process."""

from __future__ import annotations

import gzip
import hashlib
import json
import math
import struct
from pathlib import Path

import pytest
import torch

from sparsync_lab import models
from sparsync_lab.data import MNIST, Images, check_workers, load, read_mnist, train_size
from sparsync_lab.training.settings import Outcome, Point, Training, attach_options, dense_bytes
from tests.lab.real import needs


def idx(*shape: int, content: bytes) -> bytes:
    return bytes([0, 0, 8, len(shape)]) + struct.pack(f">{len(shape)}I", *shape) + content


def write_mnist(folder: Path, train: int = 12, test: int = 5) -> dict[str, str]:
    """Four small files in MNIST's form; their checksums."""
    folder.mkdir(parents=True, exist_ok=True)
    sums = {}
    for name, size in zip(MNIST, (train, train, test, test), strict=True):
        if "images" in name:
            content = idx(size, 28, 28, content=bytes(i % 251 for i in range(size * 784)))
        else:
            content = idx(size, content=bytes(i % 10 for i in range(size)))
        packed = gzip.compress(content)
        (folder / name).write_bytes(packed)
        sums[name] = hashlib.md5(packed).hexdigest()
    return sums


def pack(path: Path, content: bytes) -> dict[str, str]:
    path.write_bytes(gzip.compress(content))
    return {path.name: hashlib.md5(path.read_bytes()).hexdigest()}


def blank(side: int) -> Images:
    x, y = torch.zeros(4, 1, side, side), torch.zeros(4, dtype=torch.int64)
    return Images(x, y, x, y, 10)


# ---- images ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("subfolder", ["", "mnist"])
def test_idx_files_are_read_where_they_lie(tmp_path: Path, subfolder: str) -> None:
    images = read_mnist(tmp_path, write_mnist(tmp_path / subfolder))
    assert images.train_x.shape == (12, 1, 28, 28)
    assert images.test_x.shape == (5, 1, 28, 28)
    assert images.train_y.tolist() == [i % 10 for i in range(12)]
    assert images.train_x.mean().abs() < 1e-5
    assert images.train_x.std() == pytest.approx(1, abs=1e-4)
    raw = torch.tensor([i % 251 for i in range(12 * 784)], dtype=torch.float64)
    expected = (raw - raw.mean()) / raw.std()
    assert torch.allclose(images.train_x.flatten(), expected.float(), atol=1e-5)  # in the file's order


def test_what_is_wrong_with_a_file_is_said(tmp_path: Path) -> None:
    sums = write_mnist(tmp_path)
    images, labels = (tmp_path / name for name in ("t10k-images-idx3-ubyte.gz", "t10k-labels-idx1-ubyte.gz"))
    with pytest.raises(ValueError, match=r"train-images-idx3-ubyte.gz is not the original: its MD5 sum is .*ossci"):
        read_mnist(tmp_path)  # with the sums of the real files
    good = images.read_bytes()
    images.write_bytes(good[:-20])
    cut = sums | {images.name: hashlib.md5(images.read_bytes()).hexdigest()}
    with pytest.raises(ValueError, match=r"t10k-images-idx3-ubyte.gz cannot be unpacked"):
        read_mnist(tmp_path, cut)
    with pytest.raises(ValueError, match=r"t10k-images.* says it has \[5, 28, 28\] entries and holds 3900 bytes"):
        read_mnist(tmp_path, sums | pack(images, idx(5, 28, 28, content=bytes(3900))))
    with pytest.raises(ValueError, match=r"t10k-images.* is not an idx file of bytes"):
        read_mnist(tmp_path, sums | pack(images, b"\0\0"))
    images.write_bytes(good)
    with pytest.raises(ValueError, match=r"t10k has images \(5, 28, 28\) and labels \(4,\), which do not match"):
        read_mnist(tmp_path, sums | pack(labels, idx(4, content=bytes(4))))
    labels.unlink()
    looked = rf"t10k-labels-idx1-ubyte.gz is missing: looked for {tmp_path}/mnist/t10k.* and {tmp_path}/t10k.*; MNIST's"
    with pytest.raises(ValueError, match=looked):
        read_mnist(tmp_path, sums)


def test_a_missing_data_folder_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SPARSYNC_DATA", raising=False)
    with pytest.raises(ValueError, match=r"Give --data-dir or set \$SPARSYNC_DATA"):
        load("mnist")
    monkeypatch.setenv("SPARSYNC_DATA", str(tmp_path / "none"))
    with pytest.raises(ValueError, match=rf"data folder {tmp_path}/none does not exist"):
        train_size("mnist")
    with pytest.raises(ValueError, match=r"data must be one of digits, mnist, .*, got 'cifar'"):
        load("cifar")


@needs("mnist", *MNIST)
def test_the_real_mnist() -> None:
    images = load("mnist")
    assert images.train_x.shape == (train_size("mnist"), 1, 28, 28) == (60_000, 1, 28, 28)
    assert torch.bincount(images.train_y).tolist() == [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
    assert torch.bincount(images.test_y).tolist() == [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]


def test_digits_are_shared_out_without_overlap() -> None:
    images = load("digits")
    assert len(images.train_x) == train_size("digits") == 1347
    assert images.test_x.shape == (450, 1, 8, 8)
    shards = [images.shard(rank, 4) for rank in range(4)]
    assert {len(x) for x, _ in shards} == {336}
    together = torch.stack([y for _, y in shards], 1).flatten()
    assert torch.equal(together, images.train_y[: 4 * 336])
    check_workers(42, 1347, 32)
    with pytest.raises(ValueError, match="workers must be from 1 to 42, so that each has 32 images, got 43"):
        check_workers(43, 1347, 32)
    with pytest.raises(ValueError, match="batch must be at most 1347, the number of training images, got 1348"):
        check_workers(1, 1347, 1348)


# ---- models ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "side", "parameters"),
    [("mlp", 8, 85_002), ("mlp", 28, 199_210), ("lenet5", 8, 61_706), ("lenet5", 28, 61_706)],
)
def test_models_have_the_sizes_they_are_known_by(name: str, side: int, parameters: int) -> None:
    images = blank(side)
    model = models.make_image_model(name, images)
    assert sum(p.numel() for p in model.parameters()) == models.parameter_count(name, images) == parameters
    assert model(images.train_x).shape == (4, 10)


def test_lenet_has_400_features_between_convolutions_and_layers() -> None:
    model = models.make_image_model("lenet5", blank(28))
    before = next(i for i, layer in enumerate(model) if isinstance(layer, torch.nn.Linear))
    assert model[:before](torch.zeros(1, 1, 28, 28)).shape == (1, 400)


# ---- settings -------------------------------------------------------------------------------------------------------


def test_methods_become_options_of_attach() -> None:
    assert attach_options(Training("dense")) is None
    assert attach_options(Training("topk", density=0.02, seed=3)) == {"compressor": "topk", "density": 0.02, "seed": 3}
    asked = Training("random+shared", momentum_mode="move", values="bf16", scope="global", indices="int")
    assert attach_options(asked) == {
        "compressor": "random", "collective": "shared", "momentum": "move", "values": "bf16", "scope": "global",
        "indices": "int", "seed": 0,
    }  # fmt: skip
    assert attach_options(Training("dgc", scope="bucket")) == {"recipe": "dgc", "scope": "bucket", "seed": 0}
    assert attach_options(Training("dgc+gtopk")) == {"compressor": "dgc", "collective": "gtopk", "seed": 0}


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        (
            {"method": "nothing"},
            "unknown method 'nothing'; known are dense, default, auto, balanced, paper, dgc, .*as in random.shared",
        ),
        ({"method": "topk+nothing"}, "unknown collective 'nothing'"),
        ({"method": "topk+shared"}, "needs the same entries on every rank"),
        ({"method": "dense", "scope": "global"}, "method 'dense' is plain DDP and takes no options.*scope='global'"),
        ({"data": "cifar"}, "data must be one of digits, mnist, .*, got 'cifar'"),
        ({"model": "vgg"}, "model must be one of mlp, lenet5, .*, got 'vgg'"),
        ({"model": "resnet20"}, "model resnet20 is for images of 3 x 32 x 32 in 10 classes, got 1 x 8 x 8 in 10"),
        ({"density": 0.0}, "density must be above 0 and at most 1, got 0"),
        ({"density": 2.0}, "density must be above 0 and at most 1, got 2"),
        ({"density": math.nan}, "density must be above 0 and at most 1, got nan"),
        ({"scope": "all"}, "scope must be one of layer, bucket, global, got 'all'"),
        ({"values": "fp8"}, "values must be one of .*got 'fp8'"),
        ({"indices": "huffman"}, "indices must be one of int, ef.*got 'huffman'"),
        ({"momentum_mode": "lose"}, "momentum_mode must be one of keep, move.*got 'lose'"),
        ({"seed": -1}, "seed must be from 0 to 2147483647, got -1"),
        ({"steps": 0}, "steps must be 1 or more, got 0"),
        ({"batch": 0}, "batch must be 1 or more, got 0"),
        ({"rate": 0.0}, "rate must be above 0, got 0"),
        ({"momentum": 1.0}, "momentum must be 0 or more and below 1, got 1"),
    ],
)
def test_a_training_that_cannot_be_is_refused(wrong: dict[str, object], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        Training(**wrong)  # type: ignore[arg-type]


def test_outcomes_go_through_json() -> None:
    training = Training("topk", density=0.01, values="sign", indices="ef", momentum_mode="move", steps=7)
    curve = [Point(3, 2.5, 0.25, 100.0), Point(7, 0.5, 0.75, 250.0)]
    outcome = Outcome(training, 4, 85_002, 0.75, 35.7, dense_bytes(85_002, 4), 0.015, 0.0123, curve)
    assert Outcome.from_json(json.loads(json.dumps(outcome.to_json()))) == outcome
    lost = json.loads(json.dumps(Point(3, math.nan, 0.1, 0.0).to_json(), allow_nan=False))
    assert math.isnan(Point.from_json(lost).loss)
    with pytest.raises(ValueError, match="Training has fields that are missing or unknown: rate, speed"):
        Training.from_json({"speed" if key == "rate" else key: value for key, value in training.to_json().items()})
    with pytest.raises(ValueError, match="Training has a value of the wrong kind"):
        Training.from_json(training.to_json() | {"rate": "fast"})
