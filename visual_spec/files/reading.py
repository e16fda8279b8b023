"""Files that are read: nothing outside of a folder, regular files only, and JSON of bounded size and depth.

Whoever reads a kind of JSON writes down its entries once, as {name: kind}, and reads it by `read_object` or
`read_objects`. What comes back then needs no further check.
"""

from __future__ import annotations

import io
import json
import math
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, NamedTuple, TypeGuard


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


def open_regular(path: str | os.PathLike, most: int | None = None) -> BinaryIO:
    """Open a regular file to read. A pipe would wait for its writer, and a device may never end.

    Args:
        most: bytes that it may have.

    Raises:
        ValueError: a pipe, a socket, a device, or too large a file.
        OSError: no such file, a folder, or one that may not be read.
    """
    descriptor = os.open(path, os.O_RDONLY | flags("O_NONBLOCK", "O_CLOEXEC", "O_BINARY"))
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


def flags(*names: str) -> int:
    """Flags of `os.open`, of those names that the system has."""
    return sum(getattr(os, name, 0) for name in names)


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


def shortened(value: object) -> str:
    """The `repr` of a value, in at most 60 characters."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


NOT_FINITE = "not_finite"  # texts of the numbers of an object that JSON has no form for
MOST_BYTES = 2**26  # of a file that is one object
_MOST_LINES = 2**30  # bytes of a file of many
_DEPTH = 64


class Kind(NamedTuple):
    """What an entry may be: its name in errors, and the test."""

    name: str
    fits: Callable[[object], bool]

    def __or__(self, other: Kind) -> Kind:  # pyright: ignore[reportIncompatibleMethodOverride]
        return Kind(f"{self.name} or {other.name}", lambda value: self.fits(value) or other.fits(value))


def _whole(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _number(value: object) -> TypeGuard[float]:
    if isinstance(value, float):
        return True
    return _whole(value) and abs(value) < 2**64


NULL = Kind("null", lambda value: value is None)
TEXT = Kind("text", lambda value: isinstance(value, str))
FLAG = Kind("true or false", lambda value: isinstance(value, bool))
COUNT = Kind("a whole number from 0", lambda value: _whole(value) and 0 <= value < 2**64)
POSITIVE = Kind("a whole number from 1", lambda value: _whole(value) and 0 < value < 2**64)
FLOAT = Kind("a number", _number)  # also nan, of an interval that has no end
NUMBER = Kind("a finite number", lambda value: _number(value) and math.isfinite(value))
SECONDS = Kind("seconds from 0", lambda value: _number(value) and 0 <= value < 1e12)
OBJECT = Kind("an object", lambda value: isinstance(value, dict))
LIST = Kind("a list", lambda value: isinstance(value, list))


def _restored(read: dict[str, Any]) -> dict[str, Any]:
    """An object with its numbers that are not finite, as `files.documents` writes them."""
    if isinstance(texts := read.get(NOT_FINITE), dict):
        del read[NOT_FINITE]
        read |= {name: float(text) for name, text in texts.items()}
    return read


def parse(text: str, where: str) -> Any:
    """Return what a text of JSON says.

    Raises:
        ValueError: no JSON, or too many parts within each other; names `where`.
    """
    try:
        value = json.loads(text, object_hook=_restored)
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"{where} is no JSON ({' '.join(str(error).split())[:160]})") from error
    level = [value]
    for _ in range(_DEPTH):
        level = [part for one in level for part in _parts(one) if isinstance(part, dict | list)]
        if not level:
            return value
    raise ValueError(f"{where} has more than {_DEPTH} levels of parts within each other")


def _parts(value: object) -> Iterator[object]:
    if isinstance(value, dict):
        yield from value.values()
    elif isinstance(value, list):
        yield from value


def read_object(
    path: str | os.PathLike,
    needed: Mapping[str, Kind] | None = None,
    optional: Mapping[str, Kind] | None = None,
    *,
    most: int = MOST_BYTES,
) -> dict[str, Any]:
    """The object in a file of JSON.

    Args:
        needed, optional: kinds of its entries; others may be anything.
        most: bytes of the file.

    Raises:
        ValueError: no regular file, no JSON, no object, an entry that is missing or of another kind; names it.
        OSError: it cannot be read.
    """
    return checked(parse(read_text(path, most), str(path)), str(path), needed, optional)


def lines_of(text: str) -> list[str]:
    """The lines of a text. `str.splitlines` would also cut at U+2028 and its kind, which may stand within a line."""
    return [line.removesuffix("\n") for line in io.StringIO(text, newline=None)]


def read_objects(
    path: str | os.PathLike,
    needed: Mapping[str, Kind] | None = None,
    optional: Mapping[str, Kind] | None = None,
) -> list[dict[str, Any]]:
    """The objects in a file with one on each line; arguments and errors as `read_object`."""
    lines = lines_of(read_text(path, _MOST_LINES))
    where = [f"{path}, line {number}" for number in range(1, len(lines) + 1)]
    return [
        checked(parse(line, place), place, needed, optional) for line, place in zip(lines, where, strict=True)
    ]


def checked(
    value: object,
    where: str,
    needed: Mapping[str, Kind] | None = None,
    optional: Mapping[str, Kind] | None = None,
) -> dict[str, Any]:
    """An object with entries of these kinds.

    Raises:
        ValueError: it is none; names `where` and the entry.
    """
    if not isinstance(value, dict):
        raise ValueError(f"{where} holds a {type(value).__name__}, not an object")
    for name, kind in {**(needed or {}), **(optional or {})}.items():
        if name not in value and name in (needed or {}):
            raise ValueError(f"{where} has no {name}; it should be {kind.name}")
        if name in value and not kind.fits(value[name]):
            raise ValueError(f"{where} says {name}={shortened(value[name])}; it should be {kind.name}")
    return value
