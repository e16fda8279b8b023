"""Folders of `save_pretrained` that are whole or recognisably not: a kill in between leaves no half-written file.

A folder is written beside its place and then moved there. If there is one already, its index (the file without which
nothing loads it) is removed first and put back last, so that old and new parts are never taken for one model.
"""

from __future__ import annotations

import glob
import os
import platform
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

HOST = re.sub(r"[^A-Za-z0-9]", "", platform.node())[:32] or "host"


def is_running(process: int) -> bool:
    """Return whether there is such a process on this machine; True where that cannot be told."""
    if os.name != "posix":  # elsewhere signal 0 ends a process
        return True
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        return True
    return True


@contextmanager
def written_whole(folder: str | os.PathLike, index: str, stale: str = "") -> Iterator[Path]:
    """Within, write to the folder that is given; afterwards its content is at `folder`. An error leaves that as it was.

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
    parent = folder.absolute().parent
    parent.mkdir(parents=True, exist_ok=True)
    _sweep(parent, folder.absolute().name)
    prefix = f".{folder.absolute().name}.{HOST}-{os.getpid()}-"
    scratch = Path(tempfile.mkdtemp(dir=parent, prefix=prefix, suffix=".tmp"))
    try:
        new = scratch / "new"
        new.mkdir()
        yield new
        _move(new, folder, scratch, index, stale)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


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


def _sweep(parent: Path, name: str) -> None:
    """Remove what killed runs on this machine left beside a folder."""
    part = re.compile(rf"\.{re.escape(name)}\.{HOST}-(\d+)-[^.]+\.tmp")
    for path in parent.glob(f".{glob.escape(name)}.*.tmp"):
        found = part.fullmatch(path.name)
        if found and not is_running(int(found[1])):
            shutil.rmtree(path, ignore_errors=True)
