"""Files and folders that are whole or not there: written under a temporary name beside their place, then renamed.

Every temporary name of this package is `.NAME.HOST-PROCESS-RANDOM.tmp`, so one sweep knows what killed runs left.
Readers see what was there before or what is new, never a part of it.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

HOST = re.sub(r"[^A-Za-z0-9]", "", platform.node())[:32] or "host"
_TEMPORARY = re.compile(rf"\.(.+)\.{HOST}-(\d+)-[^.]+\.tmp")
_SWEPT: set[tuple[int, str]] = set()  # (process, folder)


def is_running(process: int) -> bool:
    """Return whether there is such a process on this machine; True where that is unknown."""
    if os.name != "posix":  # elsewhere signal 0 ends a process
        return True
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        return True
    return True


def sweep(folder: Path) -> None:
    """Remove what killed runs on this machine left half-written in a folder; other processes' work stays.

    A run that was killed between moving a folder away and moving its successor there leaves the former: it is put back.
    """
    if not folder.is_dir():
        return
    for path in folder.glob(".*.tmp"):
        match = _TEMPORARY.fullmatch(path.name)
        if not match or is_running(int(match[2])):
            continue
        if path.is_symlink() or not path.is_dir():
            path.unlink(missing_ok=True)
            continue
        old, place = path / "old", folder / match[1]
        if old.is_dir() and not place.exists():
            old.rename(place)
        shutil.rmtree(path, ignore_errors=True)


def _sweep_once(folder: Path) -> None:
    """Sweep a folder before this process writes there for the first time."""
    place = (os.getpid(), str(folder.absolute()))
    if place not in _SWEPT:
        _SWEPT.add(place)
        sweep(folder)


def _prefix(path: Path) -> str:
    return f".{path.absolute().name}.{HOST}-{os.getpid()}-"


def ready_folder(folder: str | Path) -> Path:
    """Return `folder`, made sure that files can be written there; call it before the work whose results go there.

    The folder itself is not made. What killed runs on this machine left half-written in it is removed.

    Raises:
        OSError: nothing can be written there; names the folder.
    """
    folder = Path(folder)
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    try:
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        raise OSError(
            f"cannot write to {folder} ({error.strerror or error}); choose another folder"
        ) from error
    sweep(folder)
    return folder


def refuse_existing(path: str | Path, overwrite: bool) -> Path:
    """Return `path`, made sure that it may be written; call it before the work whose result goes there.

    Raises:
        FileExistsError: if there is something at `path` and `overwrite` is not set.
        IsADirectoryError: if `path` is a folder.
    """
    path = Path(path)
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder; name a file in it")
    if path.exists() and not overwrite:
        raise FileExistsError(f"{path} exists; choose another name or pass --overwrite")
    return path


@contextmanager
def whole_file(path: str | Path, *, overwrite: bool = True) -> Iterator[Path]:
    """Within, write the file that is given; afterwards it is at `path`. An error leaves `path` as it was.

    The name that is given is another one each time. `torch.save` writes the name of a path into the file, so open it.

    Raises:
        FileExistsError, IsADirectoryError: as `refuse_existing`.
    """
    path = refuse_existing(path, overwrite)
    path.parent.mkdir(parents=True, exist_ok=True)
    _sweep_once(path.parent)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=_prefix(path), suffix=".tmp")
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        mask = os.umask(0)  # mkstemp makes files private; results get the modes of ordinary files
        os.umask(mask)
        temporary.chmod(0o666 & ~mask)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_atomically(path: str | Path, content: str | bytes, *, overwrite: bool = False) -> Path:
    """Write a whole file; returns its path.

    Raises:
        FileExistsError: if `path` exists and `overwrite` is not set.
        IsADirectoryError: if `path` is a folder.
    """
    with whole_file(path, overwrite=overwrite) as temporary:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)
    return Path(path)


@contextmanager
def scratch_folder(place: Path) -> Iterator[Path]:
    """A folder beside `place` that is gone afterwards; what killed runs left there goes first."""
    parent = place.absolute().parent
    parent.mkdir(parents=True, exist_ok=True)
    sweep(parent)
    scratch = Path(tempfile.mkdtemp(dir=parent, prefix=_prefix(place), suffix=".tmp"))
    try:
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


@contextmanager
def written_whole(folder: str | os.PathLike, index: str, stale: str = "") -> Iterator[Path]:
    """Within, write to the folder that is given; afterwards its content is at `folder`. An error leaves that as it was.

    If there is one already, its index (the file without which nothing loads it) is removed first and put back last, so
    that old and new parts are never taken for one model.

    Args:
        folder: made if it is not there. Other files in it stay, folders of the same name are replaced.
        index: name of the file that makes it a model; it appears last.
        stale: pattern of files that are removed if they are not written anew, such as shards.

    Raises:
        NotADirectoryError: there is a file at `folder`.
    """
    folder = Path(folder)
    if folder.exists() and not folder.is_dir():
        raise NotADirectoryError(f"{folder} is a file; name a folder to write")
    with scratch_folder(folder) as scratch:
        new = scratch / "new"
        new.mkdir()
        yield new
        _move(new, folder, scratch, index, stale)


def _move(new: Path, folder: Path, scratch: Path, index: str, stale: str) -> None:
    if not folder.exists():
        new.rename(folder)
        return
    (folder / index).unlink(missing_ok=True)
    for path in folder.iterdir():
        if stale and re.fullmatch(stale, path.name) and not (new / path.name).exists():
            path.unlink()
    old = scratch / "old"
    old.mkdir()
    for path in sorted(new.iterdir(), key=lambda path: path.name == index):
        place = folder / path.name
        if place.is_dir() and not place.is_symlink():
            place.rename(old / path.name)
        os.replace(path, place)
