"""Clips as files: mp4 by PyAV, gif and png sheets by Pillow."""

from __future__ import annotations

import io
import math
import os
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from types import ModuleType

import numpy as np
import torch
from PIL import Image

from visual_spec.files.extras import extra
from visual_spec.files.whole import write_atomically

Frames = Sequence[Image.Image] | np.ndarray | torch.Tensor

FORMATS = ("mp4", "gif", "png")
_LEAST_SIDE = 256  # pixels; smaller clips are enlarged by a whole number, so that players show their pixels


def pixels_of(clip: Frames) -> np.ndarray:
    """Return uint8 frames `[T, H, W, 3]` of PIL pictures, numpy `[T, H, W, 3]` or a tensor `[T, 3, H, W]` in [0, 1]."""
    if isinstance(clip, torch.Tensor):
        clip = clip.detach().cpu().float().permute(0, 2, 3, 1).numpy()
    if isinstance(clip, np.ndarray) and clip.dtype == np.uint8:
        return clip
    if isinstance(clip, np.ndarray):
        if not np.isfinite(clip).all():
            raise ValueError("the clip holds nan or infinity; look at what made it.")
        return np.rint(clip.clip(0, 1) * 255).astype(np.uint8)
    return np.stack([np.asarray(frame.convert("RGB")) for frame in clip])


def check_format(kind: str) -> None:
    """Refuse, before any work, a format that cannot be written here.

    Raises:
        ValueError: the format is none of `FORMATS`.
        ImportError: it is mp4, and PyAV is missing (extra `video`).
    """
    if kind not in FORMATS:
        raise ValueError(
            f"cannot write {kind or 'a name without an end'!r}; pass one of {', '.join(FORMATS)}."
        )
    if kind == "mp4":
        _av()


def video_bytes(frames: np.ndarray, frame_rate: float, kind: str = "mp4") -> bytes:
    """Return the content of a file of a clip.

    Args:
        frames: uint8 `[T, H, W, 3]`. Frames of less than 256 pixels are enlarged by a whole number.
        frame_rate: frames per second.
        kind: "mp4" (H.264), "gif" (repeats for ever) or "png" (all frames in one picture, row by row).

    Raises:
        ValueError: another kind or shape, no frames, or a rate that is not positive.
        ImportError: mp4, and PyAV is missing (extra `video`).
    """
    check_format(kind)
    if frames.dtype != np.uint8 or frames.ndim != 4 or frames.shape[3] != 3 or not frames.size:
        raise ValueError(f"frames {frames.dtype} {frames.shape} given; pass one clip, uint8 [T, H, W, 3].")
    if not (math.isfinite(frame_rate) and frame_rate > 0):
        raise ValueError(f"frame_rate={frame_rate}; pass the frames per second.")
    if kind == "png":
        return _sheet(frames)
    factor = -(-_LEAST_SIDE // min(frames.shape[1:3])) if min(frames.shape[1:3]) < _LEAST_SIDE else 1
    large = frames.repeat(factor, 1).repeat(factor, 2)
    return _gif(large, frame_rate) if kind == "gif" else _mp4(large, frame_rate)


def write_video(
    path: str | os.PathLike, frames: np.ndarray, frame_rate: float, *, overwrite: bool = False
) -> Path:
    """Write a clip to a file of the kind that its name ends with; whole or not at all. Arguments as `video_bytes`.

    Raises:
        FileExistsError: there is something at `path`, and `overwrite` is not set.
        ValueError, ImportError: as `video_bytes`.
    """
    path = Path(path)
    content = video_bytes(frames, frame_rate, path.suffix.lower().removeprefix("."))
    return write_atomically(path, content, overwrite=overwrite)


def _av() -> ModuleType:
    with extra("video", "writing mp4 needs PyAV", ", or write gif or png, which need nothing."):
        import av  # pyright: ignore[reportMissingImports]
    return av


def _mp4(frames: np.ndarray, frame_rate: float) -> bytes:
    av, buffer = _av(), io.BytesIO()
    height, width = frames.shape[1:3]
    # H.264 with half the colour resolution takes even sizes only: repeat the last row and column.
    frames = np.pad(frames, ((0, 0), (0, height % 2), (0, width % 2), (0, 0)), mode="edge")
    with av.open(buffer, "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=Fraction(frame_rate).limit_denominator(1001))
        stream.height, stream.width = frames.shape[1:3]
        stream.pix_fmt, stream.options = "yuv420p", {"crf": "14"}
        for frame in frames:
            picture = av.VideoFrame.from_ndarray(np.ascontiguousarray(frame), format="rgb24")
            container.mux(stream.encode(picture))
        container.mux(stream.encode())
    return buffer.getvalue()


def _gif(frames: np.ndarray, frame_rate: float) -> bytes:
    buffer = io.BytesIO()
    first, *others = [Image.fromarray(frame) for frame in frames]
    first.save(
        buffer, format="GIF", save_all=True, append_images=others, duration=round(1000 / frame_rate), loop=0
    )
    return buffer.getvalue()


def _sheet(frames: np.ndarray) -> bytes:
    count, height, width = frames.shape[:3]
    columns = math.ceil(math.sqrt(count))
    rows = -(-count // columns)
    sheet = np.full((rows * (height + 2) - 2, columns * (width + 2) - 2, 3), 255, np.uint8)
    for index, frame in enumerate(frames):
        top, left = (index // columns) * (height + 2), index % columns * (width + 2)
        sheet[top : top + height, left : left + width] = frame
    buffer = io.BytesIO()
    Image.fromarray(sheet).save(buffer, format="PNG")
    return buffer.getvalue()
