"""Pictures, masks and control pictures: every kind of numbers is read as what it means, or refused by its name."""

import os
import struct
import time
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers.utils.loading_utils import load_image
from PIL import Image

from tests.helpers.refusals import refuses
from visual_spec.files.pictures import read_picture_file, unit_pixels

EIGHT = np.random.default_rng(0).integers(0, 256, (5, 4, 3), np.uint8)
UNIT = EIGHT.transpose(2, 0, 1) / 255


@pytest.mark.parametrize(
    "picture",
    [
        EIGHT,
        EIGHT / 255,
        (EIGHT / 255).astype(np.float32),
        (EIGHT / 255).astype(">f4"),
        EIGHT[::-1].copy()[::-1],
        np.flip(np.flip(EIGHT, 1).copy(), 1),
        torch.from_numpy(EIGHT).permute(2, 0, 1),
        torch.from_numpy(UNIT),
        Image.fromarray(EIGHT),
        Image.fromarray(EIGHT).convert("RGBA"),
    ],
)
def test_allowed_kinds_are_the_same_picture(picture):
    np.testing.assert_allclose(unit_pixels(picture, "image").numpy(), UNIT, atol=1e-6)


def rgb(value: Any, dtype: Any) -> np.ndarray:
    return np.full((5, 4, 3), value, dtype)


@pytest.mark.parametrize(
    ("picture", "said"),
    [
        (EIGHT.astype(np.float32), "values from [0-9]+ to 2"),
        (rgb(-1, np.float32), "values from -1 to -1"),
        (2 * UNIT.transpose(1, 2, 0) - 1, "values from -"),
        (rgb(np.nan, np.float32), "values from nan"),
        (rgb(np.inf, np.float32), "values from inf"),
        (rgb(7, np.int64), "is of int64"),
        (rgb(7, np.uint16), "is of uint16"),
        (rgb(7, np.int8), "is of int8"),
        (rgb(1, np.bool_), "is of bool"),
        (rgb(1j, np.complex64), "is of complex64"),
        (rgb("x", object), "is of object"),
        (rgb("x", "U1"), "is of <U1"),
        (torch.zeros(3, 5, 4, dtype=torch.complex64), "is of complex64"),
        (torch.zeros(3, 5, 4, dtype=torch.float8_e4m3fn), "is of float8_e4m3fn"),
        (torch.full((3, 5, 4), 100.0, dtype=torch.bfloat16), "values from 100 to 100"),
        (Image.new("I;16", (4, 5)), "kind I;16"),
        (Image.new("I", (4, 5)), "kind I,"),
        (Image.new("F", (4, 5)), "kind F,"),
        (np.zeros((0, 4, 3)), r"shape \(3, 0, 4\)"),
    ],
)
def test_other_kinds_are_refused_by_name(picture, said):
    refuses(ValueError, f"control.*({said})", unit_pixels, picture, "control")


WHITE = np.array([[0, 1], [1, 0]])


@pytest.mark.parametrize(
    "mask",
    [
        WHITE.astype(bool),
        WHITE.astype(np.uint8),
        WHITE.astype(np.uint8) * 255,
        WHITE,
        WHITE.astype(np.float64),
        torch.from_numpy(WHITE),
        torch.from_numpy(WHITE)[None].bool(),
        Image.fromarray(WHITE.astype(np.uint8) * 255),
        Image.fromarray(WHITE.astype(np.uint8)),
        Image.fromarray(WHITE.astype(bool)),
    ],
)
def test_masks_of_zeros_and_ones_mask(mask):
    assert unit_pixels(mask, "mask", mask=True).tolist() == [WHITE.tolist()]


@pytest.mark.parametrize("mask", [WHITE * 255, WHITE * 2 - 1, WHITE * 255.0, WHITE + 1j, WHITE * np.nan])
def test_masks_of_other_numbers_are_refused(mask):
    refuses(ValueError, "mask", unit_pixels, mask, "mask", mask=True)


# -- files -------------------------------------------------------------------------------------------------------------


def test_damaged_exif_does_not_hide_a_picture(tmp_path):
    """Turned where the turn can be read, else as it is stored; once, whatever is called on it."""
    exif = Image.Exif()
    exif[0x0112], exif[0x010F] = 6, "maker"
    fine, cut = bytearray(exif.tobytes()), b"Exif\0\0MM\0"
    fine[17] = 9  # the maker's name is of a kind of numbers
    for content, size in ((bytes(fine), (5, 4)), (cut, (4, 5))):
        Image.fromarray(EIGHT).save(tmp_path / "a.jpg", exif=content, quality=100)
        read = read_picture_file(tmp_path / "a.jpg")
        assert read.size == size and unit_pixels(read, "image").shape == (3, size[1], size[0])


def bomb(path: Path, width: int = 60_000, height: int = 60_000) -> Path:
    """A PNG file of a few bytes that says it has many pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    data = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0" * 100)) + chunk(b"IEND", b"")
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + data)
    return path


@pytest.mark.every_set
@pytest.mark.parametrize("turn", range(1, 9))
def test_pictures_are_turned_as_their_exif_says(tmp_path, turn):
    """Against transformers' and diffusers' way: what a viewer shows."""
    stored = Image.fromarray(np.random.default_rng(0).integers(0, 255, (4, 6, 3), dtype=np.uint8))
    exif = Image.Exif()
    exif[0x0112] = turn
    stored.save(tmp_path / "a.png", exif=exif)
    seen = np.asarray(load_image(str(tmp_path / "a.png")))
    assert np.array_equal(np.asarray(read_picture_file(tmp_path / "a.png")), seen)
    with Image.open(tmp_path / "a.png") as picture:
        assert np.array_equal((unit_pixels(picture, "image") * 255).permute(1, 2, 0).round(), seen)
        shape = unit_pixels(picture, "mask", mask=True).shape
    assert shape == (1, *seen.shape[:2])


def test_files_that_are_no_pictures_are_refused_in_time(tmp_path):
    Image.fromarray(EIGHT).save(tmp_path / "fine.png")
    assert np.array_equal(np.asarray(read_picture_file(tmp_path / "fine.png")), EIGHT)
    content = (tmp_path / "fine.png").read_bytes()
    (tmp_path / "cut.png").write_bytes(content[:60])
    (tmp_path / "text.png").write_text("no picture")
    Image.fromarray(EIGHT).save(tmp_path / "other.gif")
    Image.fromarray(np.full((5, 4), 40_000, np.uint16)).save(tmp_path / "deep.png")
    os.mkfifo(tmp_path / "pipe.png")
    started = time.monotonic()
    for path, said in (
        (tmp_path / "cut.png", r"cut\.png.*whole"),
        (tmp_path / "text.png", "picture.*PNG"),
        (tmp_path / "other.gif", "picture.*PNG"),
        (tmp_path / "deep.png", "kind I;16"),
        (tmp_path / "pipe.png", "regular file"),
        (Path("/dev/zero"), "regular file"),
        (bomb(tmp_path / "bomb.png"), "60000"),
        (bomb(tmp_path / "smaller.png", 12_000, 12_000), "12000 x 12000"),
    ):
        with pytest.raises(ValueError, match=said) as caught:
            read_picture_file(path)
        assert str(path) in str(caught.value)
    assert time.monotonic() - started < 5
