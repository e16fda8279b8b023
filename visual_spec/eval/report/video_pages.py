"""Plain and accelerated clips side by side: players, the frames in a row, and what each of them cost.

As in `pages`, a call commits a run of tokens, and the last token of a run is what the call was *paid* for.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from torch import Tensor

from visual_spec.eval.files import render_page
from visual_spec.eval.report.drawing import RUN_COLOURS, png_bytes
from visual_spec.eval.report.maps import acceptance_svg
from visual_spec.eval.report.pictures import check_commit_call, paid_slots
from visual_spec.files.whole import write_atomically
from visual_spec.models.core.protocol import TokenGrid
from visual_spec.pipelines.video_files import video_bytes


@dataclass
class VideoRow:
    """One prompt drawn plainly and accelerated.

    Attributes:
        plain_frames, fast_frames: uint8 [T, H, W, 3].
        frame_rate: frames per second.
        commit_call: long [L], the call at which each token of the accelerated clip was committed.
        grid: of the tokens of the clip.
        plain_calls, fast_calls: target calls.
        plain_seconds, fast_seconds: wall clock of the decoding.
        identical: whether tokens and pixels of both are the same.
        promised: whether the sampler says so without a condition.
        output_law, near_ties: what the sampler says it drew from, see `DecodeTrace`.

    Raises:
        ValueError: `commit_call` does not fit `grid`.
    """

    prompt: str
    plain_frames: np.ndarray
    fast_frames: np.ndarray
    frame_rate: float
    commit_call: Tensor
    grid: TokenGrid
    plain_calls: int
    fast_calls: int
    plain_seconds: float
    fast_seconds: float
    identical: bool
    promised: bool = False
    output_law: str = ""
    near_ties: int | None = None

    def __post_init__(self) -> None:
        check_commit_call(self.commit_call, self.grid)

    @property
    def tokens_per_call(self) -> float:
        """Committed tokens over target calls, the one that each call draws itself included."""
        return self.grid.num_tokens / self.fast_calls

    @property
    def speed_up(self) -> float:
        """Plain seconds over accelerated seconds."""
        return self.plain_seconds / self.fast_seconds if self.fast_seconds > 0 else 0.0

    @property
    def paid_by_frame(self) -> list[int]:
        """Tokens of each frame that a call was paid for."""
        return paid_slots(self.commit_call).view(self.grid.frames, -1).sum(1).tolist()


def write_video_page(
    rows: Sequence[VideoRow],
    path: str | Path,
    title: str = "Plain and accelerated video",
    facts: Mapping[str, Any] | None = None,
    *,
    overwrite: bool = False,
) -> Path:
    """Write one self-contained page: players and pictures inline, its own style, no scripts.

    The players are mp4 where PyAV is installed, and moving gifs otherwise.

    Args:
        rows: the comparisons, one section each.
        facts: name -> value, shown as a table.

    Raises:
        ValueError: no rows.
        FileExistsError: `path` exists, and `overwrite` is not set.
    """
    if not rows:
        raise ValueError("no rows to show; pass at least one VideoRow.")
    fast_seconds = sum(row.fast_seconds for row in rows)
    calls = sum(row.fast_calls for row in rows)
    totals = {
        "tokens_per_call": sum(row.grid.num_tokens for row in rows) / calls,
        "plain_calls": sum(row.plain_calls for row in rows),
        "fast_calls": calls,
        "speed_up": sum(row.plain_seconds for row in rows) / fast_seconds if fast_seconds > 0 else 0.0,
        "identical": sum(row.identical for row in rows),
    }
    sections = []
    for row in rows:
        paid = row.paid_by_frame
        said = f"{sum(paid)} tokens paid, {row.grid.num_tokens - sum(paid)} free; paid by frame: "
        said += " ".join(map(str, paid))
        strip = Image.fromarray(np.concatenate(list(row.fast_frames), 1))
        sections.append(
            {
                "row": row,
                "plain": _player(row.plain_frames, row.frame_rate),
                "fast": _player(row.fast_frames, row.frame_rate),
                "strip": _url("image/png", png_bytes(strip)),
                "map": acceptance_svg(row.commit_call, row.grid, said),
                "caption": said,
            }
        )
    page = render_page(
        "video.html.jinja",
        title=title,
        facts=dict(facts or {}),
        sections=sections,
        totals=totals,
        colours=RUN_COLOURS[0],
    )
    return write_atomically(path, page, overwrite=overwrite)


def _player(frames: np.ndarray, frame_rate: float) -> dict[str, str]:
    try:
        return {"kind": "video", "url": _url("video/mp4", video_bytes(frames, frame_rate, "mp4"))}
    except ImportError:
        return {"kind": "image", "url": _url("image/gif", video_bytes(frames, frame_rate, "gif"))}


def _url(kind: str, content: bytes) -> str:
    return f"data:{kind};base64," + base64.b64encode(content).decode()
