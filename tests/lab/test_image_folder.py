"""Photographs in folders."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from sparsync_lab.data import read_image_folder
from sparsync_lab.data.image_folder import standardize


def write(path: Path, colour: tuple[int, int, int], width: int = 40, height: int = 30) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (width, height), colour).save(path)


def test_folders_are_classes(tmp_path: Path) -> None:
    write(tmp_path / "train" / "newt" / "b.png", (0, 255, 0))
    write(tmp_path / "train" / "newt" / "a.JPEG", (0, 0, 0))
    write(tmp_path / "train" / "ant" / "c.png", (255, 0, 0), 16, 90)
    (tmp_path / "train" / "ant" / "notes.txt").write_text("no picture")
    images = read_image_folder(tmp_path, side=8)
    assert images.classes == ("ant", "newt")
    assert [path.name for path in images.paths] == ["c.png", "a.JPEG", "b.png"]
    x, y = images.batch([2, 0])
    assert y.tolist() == [1, 0]
    assert x.shape == (2, 3, 8, 8)
    assert x.dtype == torch.uint8
    assert x.amax((2, 3)).tolist() == [[0, 255, 0], [255, 0, 0]]
    assert [images.shard(rank, 2).tolist() for rank in range(2)] == [[0], [1]]
    assert standardize(x)[1, 0, 0, 0].item() == pytest.approx((1 - 0.485) / 0.229, rel=1e-4)


def test_the_middle_and_random_pieces(tmp_path: Path) -> None:
    across, down = np.meshgrid(np.arange(112), np.arange(56))
    image = np.stack([2 * across, 4 * down, 0 * down], 2).astype(np.uint8)
    (tmp_path / "imagenet" / "val" / "one").mkdir(parents=True)
    Image.fromarray(image).save(tmp_path / "imagenet" / "val" / "one" / "a.png")
    images = read_image_folder(tmp_path, "val", side=49)  # 7/8 of 56: cut out, not resized
    middle = images.batch([0])[0][0]
    cut = image[3:52, 31:80].astype(int)
    assert (middle.permute(1, 2, 0).int().numpy() - cut).__abs__().max() <= 4  # half a pixel off at most
    drawn = images.batch([0] * 40, torch.Generator().manual_seed(1))[0].int()
    assert torch.equal(drawn, images.batch([0] * 40, torch.Generator().manual_seed(1))[0].int())
    assert torch.equal(drawn[:3], images.batch([0] * 3, torch.Generator().manual_seed(1))[0].int())
    leftwards = drawn[:, 0, 20, 0] > drawn[:, 0, 20, -1]
    assert 8 < leftwards.sum() < 32  # half of them mirrored
    spans = (drawn[:, 1, -1, 0] - drawn[:, 1, 0, 0]).float() / 4  # heights, in pixels of the picture
    assert spans.min() < 25
    assert spans.max() > 40


def test_folders_that_are_not_there_are_said(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"the folder val is missing: looked for .*image-net.org"):
        read_image_folder(tmp_path, "val")
    (tmp_path / "val" / "empty").mkdir(parents=True)
    with pytest.raises(ValueError, match="has no images in empty"):
        read_image_folder(tmp_path, "val")


def test_a_damaged_image_is_named(tmp_path: Path) -> None:
    path = tmp_path / "train" / "ant" / "a.jpg"
    write(path, (1, 2, 3))
    whole = path.read_bytes()
    for damaged in (whole[: len(whole) // 2], b"no picture"):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"ant/a.jpg cannot be read as an image"):
            read_image_folder(tmp_path).batch([0])
