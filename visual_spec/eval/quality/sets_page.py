"""One page of sets that `visual-spec sample` drew and `visual-spec score` scored: samples side by side, scores, chart.

The first set is the one that the others are compared with. Pictures of more than 256 pixels a side are shown smaller.
Everything is in the page: it asks for no other file.
"""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from visual_spec.eval.charts import Point, draw_points, inline_svg
from visual_spec.eval.files import data_url, render_page
from visual_spec.eval.quality.beside import compared, summary
from visual_spec.eval.quality.feature_sets import SampleFiles
from visual_spec.eval.quality.media_files import read_picture, read_video
from visual_spec.eval.quality.metric_table import DISTANCES
from visual_spec.eval.quality.score import key
from visual_spec.eval.quality.set_files import read_manifest, read_run, read_scores, read_times
from visual_spec.files.reading import read_regular
from visual_spec.files.whole import write_atomically
from visual_spec.pipelines.video_files import video_bytes

_KINDS = {".png": "image/png", ".gif": "image/gif", ".npy": "image/gif", ".wav": "audio/wav"}
_FRAME_RATE = 8  # of videos that are stored without one
_SIDE = 256  # pixels; larger pictures are shown smaller


@dataclass(frozen=True)
class ScoredSet:
    """A folder of samples, what fixed them, and its scores if it has any."""

    name: str
    samples: SampleFiles
    run: dict[str, Any]
    scores: dict[str, Any] | None
    seconds: float

    @classmethod
    def read(cls, path: Path) -> ScoredSet:
        """Read a complete set of `visual-spec sample`; ValueError or OSError for another folder, or damaged scores."""
        if not SampleFiles.open(path).lines:
            raise ValueError(f"{path} has no manifest.jsonl; pass folders that visual-spec sample wrote")
        lines = read_manifest(path, whole=True)
        samples, times = (
            SampleFiles(path, tuple(line["file"] for line in lines), tuple(lines)),
            read_times(path),
        )
        seconds = sum(time["seconds"] for time in times) / sum(time["samples"] for time in times)
        return cls(path.name, samples, read_run(path), read_scores(path), seconds)

    @property
    def sampler(self) -> str:
        """The sampler as it was asked for."""
        return self.samples.lines[0]["sampler"]

    @property
    def calls(self) -> float:
        """Mean calls of a sample."""
        return sum(line["calls"] for line in self.samples.lines) / len(self.samples.lines)

    def figure(self, name: str) -> dict[str, Any] | None:
        """A score."""
        return None if self.scores is None else self.scores["figures"].get(name)


def write_sets_page(
    sets: Sequence[ScoredSet], page: Path, title: str, *, shown: int = 200, overwrite: bool = False
) -> Path:
    """Write the page.

    Args:
        sets: for the same prompts and seeds.
        shown: samples of each set; 0: none.

    Raises:
        ValueError: sets of other prompts or seeds; samples that pages do not show.
        FileExistsError: `page` exists and `overwrite` is not set.
    """
    first = sets[0]
    for other in sets[1:]:
        if [key(line) for line in other.samples.lines] != [key(line) for line in first.samples.lines]:
            raise ValueError(
                f"{other.samples.path} and {first.samples.path} are not drawn for the same prompts with the same "
                "seeds; pass them one by one, or draw both with the same --prompts, --num and --seed"
            )
    kinds = {Path(line["file"]).suffix for one in sets for line in one.samples.lines[:1]}
    if unknown := kinds - set(_KINDS):
        raise ValueError(f"samples of {', '.join(unknown)} are not shown; pass --pictures 0")
    distance, drawn = _common_distance(sets), draw_sets(sets)
    content = render_page(
        "sets.html.jinja",
        title=title,
        sets=sets,
        names=list(
            dict.fromkeys(name for one in sets for name in (one.scores or {"figures": {}})["figures"])
        ),
        compared=[summary(compared(one.samples, first.samples)) for one in sets[1:]],
        distance=distance,
        points=_points(sets, distance) if distance else [],
        chart=None if drawn is None else inline_svg(drawn, "chart-"),
        rows=[_row(sets, index) for index in range(min(shown, len(first.samples)))],
        sound=first.samples.medium == "audio",
    )
    return write_atomically(page, content, overwrite=overwrite)


def draw_sets(sets: Sequence[ScoredSet]) -> Any:
    """The chart of speed-up and distance as a matplotlib figure; None where two sets have no distance in common."""
    distance = _common_distance(sets)
    if distance is None:
        return None
    up = f"{distance}, low is good".replace("_", " ")
    return draw_points(_points(sets, distance), "speed-up in model calls", up)


def _common_distance(sets: Sequence[ScoredSet]) -> str | None:
    known = [
        name
        for name in DISTANCES
        if all((figure := one.figure(name)) and math.isfinite(figure["value"]) for one in sets)
    ]
    return known[0] if known and len(sets) > 1 else None


def _points(sets: Sequence[ScoredSet], distance: str) -> list[Point]:
    """Speed-ups and distances."""
    figures = [one.figure(distance) for one in sets]
    return [
        (one.name, sets[0].calls / one.calls, figure["value"], figure["low"], figure["high"])
        for one, figure in zip(sets, figures, strict=True)
        if figure is not None
    ]


def _row(sets: Sequence[ScoredSet], index: int) -> dict[str, object]:
    """A prompt, and what each set has for it."""
    lines = [one.samples.lines[index] for one in sets]
    paths = [one.samples.path / line["file"] for one, line in zip(sets, lines, strict=True)]
    cells = []
    for one, line, path in zip(sets, lines, paths, strict=True):
        content, kind, size = _shown(path)
        cells.append(
            {
                "name": one.name,
                "url": data_url(kind, content),
                "size": size,
                "calls": line["calls"],
                "same": read_regular(path) == read_regular(paths[0]),
            }
        )
    return {"index": index, "prompt": lines[0]["prompt"], "seed": lines[0]["seed"], "cells": cells}


def _shown(path: Path) -> tuple[bytes, str, tuple[int, int]]:
    """Return what the page holds of a sample, its kind, and its width and height, at most `_SIDE` pixels."""
    kind = _KINDS[path.suffix]
    if kind.startswith("audio"):
        return read_regular(path), kind, (0, 0)
    if path.suffix == ".npy":
        frames = [Image.fromarray(frame) for frame in read_video(path)]
        frames = np.stack([np.asarray(_thumbnail(frame)) for frame in frames])
        return video_bytes(frames, _FRAME_RATE, "gif"), kind, (frames.shape[2], frames.shape[1])
    content = read_regular(path)
    picture = Image.open(io.BytesIO(content))
    if kind == "image/gif" or max(picture.size) <= _SIDE:
        return content, kind, picture.size
    buffer, small = io.BytesIO(), _thumbnail(Image.fromarray(read_picture(path)))
    small.save(buffer, "JPEG", quality=90)
    return buffer.getvalue(), "image/jpeg", small.size


def _thumbnail(picture: Image.Image) -> Image.Image:
    picture.thumbnail((_SIDE, _SIDE), Image.Resampling.LANCZOS)
    return picture
