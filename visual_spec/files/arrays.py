"""NumPy's files, without pickled objects; whatever is wrong with one is a `ValueError` that names it."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from typing import Any, TypeVar

import numpy as np

from visual_spec.files.reading import open_regular

Read = TypeVar("Read")


def read_npy(path: str | os.PathLike) -> np.ndarray:
    """The array in a `.npy` file.

    Raises:
        ValueError: no regular file, or no whole array of numbers or texts.
        OSError: no such file.
    """
    return _read(path, _plain)


def read_npz(path: str | os.PathLike, only: Collection[str] | None = None) -> dict[str, np.ndarray]:
    """The arrays in a `.npz` file by name.

    Args:
        only: names of those that are read, where they are there; None: all.

    Raises:
        ValueError: no regular file, or no archive of whole arrays.
        OSError: no such file.
    """
    return _read(
        path,
        lambda archive: {
            name: _plain(archive[name]) for name in archive.files if only is None or name in only
        },
    )


def _read(path: str | os.PathLike, read: Callable[[Any], Read]) -> Read:
    with open_regular(path) as file:
        try:
            return read(np.load(file, allow_pickle=False))
        except Exception as error:  # damaged files raise anything, and one that says too much MemoryError
            reason = " ".join(str(error).split())[:160] or type(error).__name__
            raise ValueError(f"{os.fspath(path)} holds no whole arrays ({reason})") from error


def _plain(array: object) -> np.ndarray:
    if not isinstance(array, np.ndarray) or array.dtype.names is not None:
        raise ValueError(f"{getattr(array, 'dtype', 'an archive')}, not numbers or texts")
    return array
