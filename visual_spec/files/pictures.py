"""Pictures, masks and control pictures as numbers: from files of bounded size, and from PIL, arrays and tensors.

A picture's kind says what its numbers mean: 8 bits count from 0 to 255, floats from 0 to 1, and no other numbers
are pictures. Values in another range are refused, not cut off: they are of another scale.
"""

from __future__ import annotations

import io
import os
import warnings
from typing import Any

import numpy as np
import torch
from PIL import ExifTags, Image, UnidentifiedImageError
from torch import Tensor

from visual_spec.files.reading import open_regular

FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "TIFF", "PPM")
_TURNS = {  # by the orientation of EXIF
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
MOST_PIXELS = 2**27  # of a picture: 11,585 x 11,585
_MODES = (
    "1",
    "L",
    "P",
    "LA",
    "PA",
    "La",
    "RGB",
    "RGBA",
    "RGBa",
    "RGBX",
    "CMYK",
    "YCbCr",
    "HSV",
    "LAB",
)  # of 8 bits
_SLACK = 1e-3  # of floats outside of [0, 1]: roundings of a resizing, which are cut off


def read_picture_file(path: str | os.PathLike, formats: tuple[str, ...] = FORMATS) -> Image.Image:
    """The picture in a file, RGB, upright: turned as its EXIF says.

    Raises:
        ValueError: no regular file, no whole picture of these formats, one of more than 8 bits, or too large a one.
        OSError: no such file.
    """
    with open_regular(path) as file, warnings.catch_warnings():
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)
        try:
            picture = Image.open(file, formats=formats)
            check_size(picture, os.fspath(path))
            return _upright(picture).convert("RGB")
        except UnidentifiedImageError as error:
            raise ValueError(f"{os.fspath(path)} is no picture; pass a {', '.join(formats)} file") from error
        except _UnfitPicture:
            raise
        except Exception as error:  # decoders raise anything
            reason = " ".join(str(error).split())[:160] or type(error).__name__
            raise ValueError(f"{os.fspath(path)} is no whole picture ({reason})") from error


def _upright(picture: Image.Image) -> Image.Image:
    """A picture turned as its EXIF says, and without it; EXIF that cannot be read turns nothing.

    `ImageOps.exif_transpose` writes the rest of the EXIF anew, and fails where that is damaged.
    """
    try:
        turn = _TURNS.get(picture.getexif().get(ExifTags.Base.Orientation, 1))
    except Exception:  # readers of damaged EXIF raise anything
        turn = None
    if turn is None:
        return picture
    picture = picture.transpose(turn)
    picture.info = {}
    return picture


class _UnfitPicture(ValueError):
    """A picture that is whole and is refused."""


def check_size(picture: Image.Image, name: str) -> None:
    """Refuse a picture before its pixels are read.

    Raises:
        ValueError: more pixels than `MOST_PIXELS`, or more than 8 bits.
    """
    width, height = picture.size
    if width * height > MOST_PIXELS:
        raise _UnfitPicture(f"{name} has {width} x {height} pixels, more than {MOST_PIXELS}; make it smaller")
    if picture.mode not in _MODES:
        raise _UnfitPicture(
            f"{name} has pixels of kind {picture.mode}, not of 8 bits; convert it to RGB of 8 bits first"
        )


def unit_pixels(picture: Any, name: str, *, mask: bool = False) -> Tensor:
    """A picture as float [3, H, W] in [0, 1], or a mask as float [1, H, W].

    Args:
        picture: PIL of 8 bits, which is turned as its EXIF says; numpy [H, W, 3] or tensor [3, H, W], uint8 (0 to 255)
            or floats (0 to 1). A mask is [H, W] or [1, H, W], and may also hold True and False, or the whole numbers
            0 and 1.
        name: for errors.

    Raises:
        TypeError: something else.
        ValueError: another shape, another type of numbers, or values out of range.
    """
    if isinstance(picture, Image.Image):
        check_size(picture, name)
        picture = np.asarray(_upright(picture).convert("L" if mask else "RGB"))
    if isinstance(picture, np.ndarray):
        if picture.dtype.kind not in "buif" or picture.dtype.itemsize > 8:
            raise ValueError(f"{name} is of {picture.dtype}; {_allowed(mask)}.")
        native = picture.dtype.newbyteorder("=")
        picture = torch.tensor(np.ascontiguousarray(picture, dtype=native))  # torch takes no flipped ones
        if picture.ndim == 3 and not mask:
            picture = picture.permute(2, 0, 1)
    if not isinstance(picture, Tensor):
        raise TypeError(f"{name} is a {type(picture).__name__}; pass a PIL picture, an array or a tensor.")
    if mask and picture.ndim == 2:
        picture = picture[None]
    if picture.ndim != 3 or picture.shape[0] != (1 if mask else 3) or not picture.numel():
        wanted = "[H, W]" if mask else "[H, W, 3] as an array, [3, H, W] as a tensor"
        raise ValueError(f"{name} has the shape {tuple(picture.shape)}; pass {wanted}.")
    return _scaled(picture, name, mask)


def _scaled(picture: Tensor, name: str, mask: bool) -> Tensor:
    """Numbers of an allowed kind in [0, 1]."""
    if picture.is_floating_point() and picture.dtype.itemsize > 1:
        low, high = (float(end) for end in picture.aminmax())
        if not (-_SLACK <= low and high <= 1 + _SLACK):  # nor if they are nan
            raise ValueError(f"{name} has values from {low:.6g} to {high:.6g}; {_allowed(mask)}.")
        return picture.float().clamp(0, 1)
    if mask and not picture.is_floating_point() and not picture.is_complex():
        low, high = (
            (int(end) for end in picture.long().aminmax()) if picture.dtype != torch.uint64 else (0, 2)
        )
        # A picture of 8 bits with no value above 1 is black everywhere, which nobody means.
        if 0 <= low and high <= 1:
            return picture.float()
    if picture.dtype == torch.uint8:
        return picture.float() / 255
    raise ValueError(f"{name} is of {str(picture.dtype).removeprefix('torch.')}; {_allowed(mask)}.")


def _allowed(mask: bool) -> str:
    more = "True and False, 0 and 1, " if mask else ""
    return f"pass {more}8 bits (uint8) from 0 to 255, or floats from 0 to 1"


def png_bytes(picture: Image.Image) -> bytes:
    """A picture as a PNG file."""
    buffer = io.BytesIO()
    picture.save(buffer, format="PNG", optimize=True)
    return buffer.getvalue()
