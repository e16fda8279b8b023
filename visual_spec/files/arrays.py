"""NumPy's files, whose headers are checked against what is really there before anything is allocated."""

from __future__ import annotations

import math
import os
import zipfile
from collections.abc import Collection
from typing import IO, Any

import numpy as np

from visual_spec.files.reading import open_regular

_FREE_BYTES = 2**30  # that an archive may unpack to without a look at how much it was packed
_PART = 2**24  # bytes read at a time
_MOST_PACKED = 200  # bytes in one, of what is larger


def read_npy(path: str | os.PathLike) -> np.ndarray:
    """The array in a `.npy` file.

    Raises:
        ValueError: no regular file, or no whole array of numbers or texts.
        OSError: no such file.
    """
    with open_regular(path) as file:
        return _array(file, os.fstat(file.fileno()).st_size, os.fspath(path))


def read_npz(path: str | os.PathLike, only: Collection[str] | None = None) -> dict[str, np.ndarray]:
    """The arrays in a `.npz` file by name.

    Args:
        only: names of those that are read, where they are there; None: all.

    Raises:
        ValueError: no regular file, no archive of whole arrays, or one that unpacks to far more than it is.
        OSError: no such file.
    """
    arrays = {}
    with open_regular(path) as file:
        try:
            archive = zipfile.ZipFile(file)
        except Exception as error:  # damaged archives raise anything
            raise ValueError(f"{os.fspath(path)} is no .npz file ({_reason(error)})") from error
        for member in archive.infolist():
            name = member.filename.removesuffix(".npy")
            if only is not None and name not in only:
                continue
            where = f"{os.fspath(path)}: {name}"
            if member.file_size > max(_FREE_BYTES, _MOST_PACKED * member.compress_size):
                raise ValueError(
                    f"{where} unpacks {member.compress_size} bytes to {member.file_size}; it is refused"
                )
            try:
                with archive.open(member) as inner:
                    arrays[name] = _array(inner, member.file_size, where)
            except _UnfitArray:
                raise
            except Exception as error:
                raise ValueError(f"{where} is damaged ({_reason(error)})") from error
    return arrays


class _UnfitArray(ValueError):
    """A header that does not fit."""


def _array(file: IO[bytes], size: int, where: str) -> np.ndarray:
    """An array of exactly `size` bytes with its header."""
    try:
        version = np.lib.format.read_magic(file)
        read: Any = {
            (1, 0): np.lib.format.read_array_header_1_0,
            (2, 0): np.lib.format.read_array_header_2_0,
        }[version]
        shape, by_columns, dtype = read(file)
        start = file.tell()
    except Exception as error:
        raise _UnfitArray(f"{where} is no whole array ({_reason(error)})") from error
    if dtype.hasobject or dtype.names is not None:
        raise _UnfitArray(f"{where} holds {dtype}, not numbers or texts")
    length = math.prod(shape) * dtype.itemsize
    if start + length != size or min(shape, default=0) < 0:
        raise _UnfitArray(f"{where} says {dtype} {list(shape)[:8]}, {length} bytes, and holds {size - start}")
    data, there = np.empty(length, np.uint8), 0
    while there < length:
        read_now = file.readinto(data[there : there + _PART])  # pyright: ignore[reportAttributeAccessIssue]
        if not read_now:
            raise _UnfitArray(f"{where} ends after {there} of {length} bytes")
        there += read_now
    return np.ndarray(shape, dtype, data, order="F" if by_columns else "C")


def _reason(error: Exception) -> str:
    return " ".join(str(error).split())[:160] or type(error).__name__
