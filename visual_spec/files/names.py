"""Names of files that came with a folder, and files that are opened: nothing outside of it, and regular files only."""

from __future__ import annotations

import os
import stat
from pathlib import Path, PurePosixPath
from typing import IO, Any


def inside(folder: Path, name: Any, where: str | os.PathLike) -> Path:
    """The path of what a file or a user names below a folder. What is there has to be reached without a link.

    Args:
        name: relative, with `/` between its parts.
        where: what says the name, for errors.

    Raises:
        ValueError: the name is empty, absolute, leads out of the folder, or through a link.
    """
    parts = PurePosixPath(name).parts if isinstance(name, str) and "\0" not in name else ()
    if not parts or ".." in parts or parts[0].startswith("/") or Path(name).is_absolute():
        raise ValueError(
            f"{where} names {shortened(name)}, which is no file below {folder}; names are relative to it and stay in it"
        )
    path = folder
    for part in parts:
        path = path / part
        refuse_link(path)
    return path


def refuse_link(path: Path) -> Path:
    """Return a path at which there is no link.

    Raises:
        ValueError: there is one; says where it leads.
    """
    try:
        linked = path.is_symlink()
    except OSError as error:  # a name that is too long
        raise ValueError(f"{shortened(str(path))} cannot be a file ({error.strerror})") from error
    if linked:
        raise ValueError(
            f"{path} is a link to {os.readlink(path)}; put the file itself there, as `cp -L` copies it"
        )
    return path


def open_regular(path: str | os.PathLike, most: int | None = None) -> IO[bytes]:
    """Open a regular file to read. A pipe would wait for its writer, and a device may never end.

    Args:
        most: bytes that it may have.

    Raises:
        ValueError: a pipe, a socket, a device, or too large a file.
        OSError: no such file, a folder, or one that may not be read.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    file = os.fdopen(descriptor, "rb") if not stat.S_ISDIR(os.fstat(descriptor).st_mode) else None
    if file is None:
        os.close(descriptor)
        raise IsADirectoryError(f"{os.fspath(path)} is a folder; name a file")
    state = os.fstat(descriptor)
    if not stat.S_ISREG(state.st_mode):
        file.close()
        raise ValueError(
            f"{os.fspath(path)} is no regular file, but a pipe, a socket or a device; copy it to a file"
        )
    if most is not None and state.st_size > most:
        file.close()
        raise ValueError(f"{os.fspath(path)} has {state.st_size} bytes; at most {most} are read")
    return file


def read_regular(path: str | os.PathLike, most: int | None = None) -> bytes:
    """The content of a regular file; arguments and errors as `open_regular`."""
    with open_regular(path, most) as file:
        return file.read()


def read_text(path: str | os.PathLike, most: int = 2**30) -> str:
    """The text of a regular file in UTF-8, without a byte-order mark.

    Raises:
        ValueError: as `open_regular`; not UTF-8.
    """
    try:
        return read_regular(path, most).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{os.fspath(path)} is not UTF-8 ({error})") from error


def shortened(value: Any) -> str:
    """The `repr` of a value, in at most 60 characters."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
