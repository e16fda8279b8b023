"""Writing results: complete files or none, never over an older one unasked, and pages from templates."""

from __future__ import annotations

import os
import re
import tempfile
from pathlib import Path
from typing import Any

from visual_spec.models.core.whole_folders import HOST, is_running

_PART = re.compile(rf"\..+\.{HOST}-(\d+)-[^.]+\.tmp")  # what `write_atomically` writes first


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
    if folder.is_dir():
        for path in folder.glob(".*.tmp"):
            part = _PART.fullmatch(path.name)
            if part and not is_running(int(part[1])):
                path.unlink(missing_ok=True)
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


def write_atomically(path: str | Path, content: str | bytes, *, overwrite: bool = False) -> Path:
    """Write a whole file under a temporary name beside `path`, then rename it.

    Readers see the old file or the new one, never a part; an interruption leaves `path` as it was.

    Raises:
        FileExistsError: if `path` exists and `overwrite` is not set.
    """
    path = refuse_existing(path, overwrite)
    path.parent.mkdir(parents=True, exist_ok=True)
    data = content.encode() if isinstance(content, str) else content
    prefix = f".{path.name}.{HOST}-{os.getpid()}-"
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=prefix, suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        mask = os.umask(0)  # mkstemp makes files private; results get the modes of ordinary files
        os.umask(mask)
        os.chmod(temporary, 0o666 & ~mask)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    return path


def render_page(template: str, /, **values: Any) -> str:
    """A page made of a template of this package.

    Args:
        template: its name, such as "report.html.jinja".
        values: what it asks for; text is escaped.

    Raises:
        jinja2.UndefinedError: it asks for more.
    """
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    return environment.get_template(template).render(**values)
