"""Folders that appear whole or not at all, and replace only what was written the same way before.

What is written is listed in a manifest. A folder is replaced only if it holds exactly what its manifest says: anything
else in it is someone's own.
"""

import os
import re
from collections.abc import Callable
from pathlib import Path

from visual_spec.files.documents import json_text
from visual_spec.files.reading import OBJECT, read_object, refuse_link
from visual_spec.files.whole import sweep, written_whole

MANIFEST = "conversion.json"


def check_replaceable(out: Path, overwrite: bool) -> None:
    """Refuse a place where something is that may not be replaced.

    Args:
        out: where a folder is to be written.
        overwrite: replace what `write_folder` wrote there before.

    Raises:
        FileExistsError: a link, a file, or a folder with something in it that is not to be overwritten, or that
            `write_folder` did not write.
    """
    sweep(out.absolute().parent)
    sweep(out)
    if out.is_symlink():
        raise FileExistsError(
            f"{out} is a link to {os.readlink(out)}; name the folder itself, or another one."
        )
    if not out.exists():
        return
    if not out.is_dir():
        raise FileExistsError(f"{out} is a file; name a folder to write")
    held = _sizes(out)
    if not held:
        return
    if not overwrite:
        raise FileExistsError(f"{out} exists and is not empty; choose another name or pass --overwrite")
    listed = _read_manifest(out)
    if listed is None:
        raise FileExistsError(
            f"{out} holds no {MANIFEST} of a conversion, so no conversion wrote it; it is not replaced. Choose another "
            "name, or remove it yourself."
        )
    own = sorted(name for name, size in held.items() if listed.get(name) != size)
    if own:
        raise FileExistsError(
            f"{out} holds {', '.join(own[:3])}{' and more' if len(own) > 3 else ''}, which was changed or added since "
            "the conversion that wrote it; it is not replaced. Choose another name, or move these away."
        )


def write_folder(save: Callable[[Path], object], out: Path) -> None:
    """Have `save` fill a folder, list what it wrote, and put it at `out`, in place of what is there.

    What is there stays until the new folder is complete; `check_replaceable` says what may be replaced.
    """
    former = {re.escape(name.partition("/")[0]) for name in _read_manifest(out) or ()}
    with written_whole(out, "|".join(former)) as new:
        save(new)
        manifest = {"written_by": "visual-spec convert", "files": _sizes(new)}
        (new / MANIFEST).write_text(json_text(manifest, indent=1) + "\n")


def _sizes(folder: Path) -> dict[str, int]:
    """Bytes of all files in a folder by their path in it; -1 for what is no regular file."""
    sizes = {}
    for path in sorted(folder.rglob("*")):
        if path.is_symlink() or not path.is_dir():
            regular = path.is_file() and not path.is_symlink()
            sizes[path.relative_to(folder).as_posix()] = path.stat().st_size if regular else -1
    return sizes


def _read_manifest(folder: Path) -> dict[str, int] | None:
    """What a conversion lists; None where there is no such list."""
    path = folder / MANIFEST
    try:
        written = read_object(refuse_link(path), {"files": OBJECT})
    except (OSError, ValueError):
        return None
    if written.get("written_by") != "visual-spec convert":
        return None
    return {**written["files"], MANIFEST: path.stat().st_size}
