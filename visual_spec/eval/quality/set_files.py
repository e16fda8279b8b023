"""What stands beside the samples of a set: manifest.jsonl, run.json, seconds.jsonl and scores.json, each read once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from visual_spec.eval.quality.media_files import MEDIA
from visual_spec.files.reading import (
    COUNT,
    FLAG,
    FLOAT,
    NULL,
    NUMBER,
    OBJECT,
    POSITIVE,
    SECONDS,
    TEXT,
    checked,
    inside,
    read_object,
    read_objects,
)

MANIFEST, TIMES, RUN, SCORES = "manifest.jsonl", "seconds.jsonl", "run.json", "scores/scores.json"
_ENDINGS = tuple(ending for endings in MEDIA.values() for ending in endings)
_AGAIN = "; run sample again"
_LINE = {
    "index": COUNT,
    "prompt": TEXT,
    "seed": COUNT,
    "sampler": TEXT,
    "law": OBJECT,
    "calls": POSITIVE,
    "promise": TEXT,
    "own_promise": TEXT,
    "law_settings": OBJECT,
    "moved_mass": NUMBER,
    "divergence": NUMBER,
    "head_calls": COUNT,
    "bytes": COUNT,
    "crc32": COUNT,
}
_PAIRED = ("index", "prompt", "seed", "bytes", "crc32")  # what two sets are compared by
_DRAWN = ("sampler", "calls")  # what visual-spec sample writes too
_TIME = {"first": COUNT, "samples": POSITIVE, "seconds": SECONDS}
# What else is known of a batch, where it is; see `visual_spec.eval.draws.draw`.
BATCH_FACTS = {
    "seconds": SECONDS,
    "processor_seconds": SECONDS,
    "length": POSITIVE,
    "promises": FLAG,
    "divergence": NUMBER,
    "lossless": FLAG,
    "cache_held": COUNT,
    "cache_peak": COUNT,
    "peak_memory": COUNT,
    "rollouts_bytes": COUNT,
    "rollouts_crc32": COUNT,
}
_FIGURE = {"value": FLOAT, "low": FLOAT, "high": FLOAT, "extractor": TEXT, "weights": TEXT}

T = TypeVar("T")


def read_manifest(folder: Path, name: str = MANIFEST, *, whole: bool = False) -> list[dict[str, Any]]:
    """The lines of a manifest, or of a batch that will be part of one. Every file lies in the folder, and is no link.

    Args:
        whole: every line has all that `visual-spec sample` writes.

    Raises:
        ValueError: a damaged line, or the name of a file outside of the folder.
        OSError: it cannot be read.
    """
    needed = {"file": TEXT} | {entry: _LINE[entry] for entry in (*_PAIRED, *(_DRAWN if whole else ()))}
    lines = _refused_again(read_objects, inside(folder, name, folder), needed, _LINE)
    for line in lines:
        inside(folder, line["file"], folder / name)
    kinds = sorted({Path(line["file"]).suffix for line in lines})
    if kinds[1:] or (kinds and kinds[0].lower() not in _ENDINGS):
        raise ValueError(
            f"{folder / name} names files of kinds {kinds}; a set has one of {', '.join(_ENDINGS)}{_AGAIN}"
        )
    if not lines:
        raise ValueError(f"{folder / name} is empty{_AGAIN}")
    return lines


def read_run(folder: Path) -> dict[str, Any]:
    """Return what fixed the samples of a set."""
    kinds = {"model": TEXT, "weights": TEXT, "sampler": OBJECT}
    return _refused_again(read_object, inside(folder, RUN, folder), {}, kinds)


def read_times(folder: Path, name: str = TIMES) -> list[dict[str, Any]]:
    """The seconds of every batch, at least one, and its `BATCH_FACTS`."""
    times = _refused_again(read_objects, inside(folder, name, folder), _TIME, BATCH_FACTS)
    if not times:
        raise ValueError(f"{folder / name} is empty{_AGAIN}")
    return times


def read_scores(folder: Path) -> dict[str, Any] | None:
    """Return what `visual-spec score` wrote into the folder of a set; None where it wrote nothing."""
    path = inside(folder, SCORES, folder)
    if not path.exists():
        return None
    scores = read_object(path, {"figures": OBJECT}, {"reference": TEXT | NULL})
    for name, figure in scores["figures"].items():
        checked(figure, f"{path}: {name}", _FIGURE)
    return {"reference": None, **scores}


def _refused_again(read: Callable[..., T], path: Path, *kinds: object) -> T:
    """Return what `read` returns; its refusals say what to do."""
    try:
        return read(path, *kinds)
    except ValueError as error:
        raise ValueError(f"{error}{_AGAIN}") from error
