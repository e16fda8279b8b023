"""Files and folders that are whole or not there: written under a temporary name beside their place, then renamed.

Every temporary name of this package is `.NAME.HOST-PROCESS-RANDOM.tmp`, so one sweep knows what killed runs left.
Readers see what was there before or what is new, never a part of it.
"""

from __future__ import annotations

import errno
import os
import platform
import re
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

HOST = re.sub(r"[^A-Za-z0-9]", "", platform.node())[:32] or "host"
_TEMPORARY = re.compile(rf"\..*\.{HOST}-(\d+)-[^.]+\.tmp")
_INDEX = ("model_index.json", "config.json")  # without it nothing loads a folder
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

    A run that was killed while it moved a new model into the folder leaves the former one: it is put back.
    """
    if not folder.is_dir():
        return
    for path in folder.glob(".*.tmp"):
        match = _TEMPORARY.fullmatch(path.name)
        if not match or is_running(int(match[1])):
            continue
        with suppress(OSError):  # another user's
            _put_back(path) if path.is_dir() else path.unlink()


def _sweep_once(folder: Path) -> None:
    """Sweep a folder before this process writes there for the first time."""
    place = (os.getpid(), str(folder.absolute()))
    if place not in _SWEPT:
        _SWEPT.add(place)
        sweep(folder)


def _temporary(folder: Path, name: str) -> Path:
    """A new temporary name in a folder for what will be called `name`, of which it holds what surely fits."""
    start = name.encode(errors="ignore")[:60].decode(errors="ignore")
    return folder / f".{start}.{HOST}-{os.getpid()}-{secrets.token_hex(4)}.tmp"


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
        OSError: if `path` is a device or a pipe.
    """
    path = Path(path)
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder; name a file in it")
    if path.exists() and not path.is_file():
        raise OSError(f"{path} is a device or a pipe, which a file would replace; name a file")
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
    temporary = _temporary(path.parent, path.name)
    temporary.touch(exist_ok=False)
    try:
        yield temporary
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
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
def written_whole(folder: str | os.PathLike, stale: str = "") -> Iterator[Path]:
    """Within, write to the folder that is given; afterwards its content is at `folder`. An error leaves that as it was.

    If there is a folder already, it stays, be it a link, a mounted volume, or in a folder where nothing can be written:
    only what is in it changes. Its index goes first, and the new one comes last, so that old and new parts are never
    taken for one model. If the process is killed meanwhile, the next `sweep` puts the old ones back.

    Args:
        folder: made if it is not there. Other files in it stay, folders of the same name are replaced.
        stale: pattern of names that are removed if they are not written anew, such as shards.

    Raises:
        NotADirectoryError: there is a file at `folder`.
    """
    folder = Path(os.path.realpath(folder))
    if folder.exists() and not folder.is_dir():
        raise NotADirectoryError(f"{folder} is a file; name a folder to write")
    home = folder if folder.exists() else folder.parent
    home.mkdir(parents=True, exist_ok=True)
    sweep(home)
    scratch = _temporary(home, folder.name)
    new = scratch / "new"
    new.mkdir(parents=True)
    try:
        yield new
        if folder.exists():
            _move(new, folder, stale)
        else:
            new.rename(folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _move(new: Path, folder: Path, stale: str) -> None:
    """Move all that is in `new` to `folder`, and what is there of these names or stale away; an error moves it back."""
    names = sorted(os.listdir(new), key=_INDEX.__contains__)
    going = {*names, *(name for name in os.listdir(folder) if re.fullmatch(stale, name))}
    scratch = _temporary(folder, folder.name)
    old, came = scratch / "old", scratch / "came"
    came.mkdir(parents=True)
    old.mkdir()
    try:
        for name in sorted(going, key=_INDEX.__contains__, reverse=True):
            if os.path.lexists(folder / name):
                _take_away(folder / name, old / name)
        for name in names:
            (came / name).touch()
            (new / name).rename(folder / name)
        old.rename(scratch / "gone")
    except BaseException:
        _put_back(scratch)
        raise
    shutil.rmtree(scratch, ignore_errors=True)


def _take_away(path: Path, place: Path) -> None:
    """Rename a file or folder; one of a lower layer of an overlay, as in an image of a container, has to be copied."""
    try:
        path.rename(place)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        copy = place.parent.with_name("copy")
        shutil.copytree(path, copy, symlinks=True)
        copy.rename(place)
        shutil.rmtree(path)


def _put_back(scratch: Path) -> None:
    """Undo what `_move` has done, as far as it got, and remove its scratch folder or any other."""
    old, folder = scratch / "old", scratch.parent
    if old.is_dir():
        for name in os.listdir(scratch / "came"):
            _remove(folder / name)
            (scratch / "came" / name).unlink()
        for name in sorted(os.listdir(old), key=_INDEX.__contains__):
            _remove(folder / name)
            (old / name).rename(folder / name)
    shutil.rmtree(scratch, ignore_errors=True)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
