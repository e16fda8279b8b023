"""Files of pictures, sounds and videos as arrays. A truncated or damaged file raises an error that names it."""

from __future__ import annotations

import os
import struct
import wave
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from PIL import Image, ImageSequence
from torch import Tensor

from visual_spec.files.arrays import read_npy
from visual_spec.files.extras import extra
from visual_spec.files.pictures import read_picture_file
from visual_spec.files.reading import open_regular

PICTURES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff", ".ppm", ".pgm")
SOUNDS = (".wav", ".flac", ".ogg")
VIDEOS = (".npy", ".gif", ".mp4", ".webm", ".mkv", ".mov", ".avi")
_MOST_RATE = 768_000  # Hz
_MOST_SAMPLES = 2**28  # of a clip, all channels
_MOST_VIDEO = 2**29  # pixels of a video, all frames
MEDIA = {"image": PICTURES, "audio": SOUNDS, "video": VIDEOS}


def read_picture(path: Path) -> np.ndarray:
    """A picture uint8 [H, W, 3]; ValueError where it is not whole, or of more than 8 bits."""
    try:
        return np.asarray(read_picture_file(path))
    except ValueError as error:
        raise ValueError(f"{error}; run sample again, or remove it") from error


def resized(picture: np.ndarray, size: int) -> np.ndarray:
    """A picture uint8 [H, W, 3] at `size` pixels a side, as clean-fid resizes it (Parmar et al. 2022)."""
    if picture.shape[:2] == (size, size):
        return picture
    channels = [
        np.asarray(Image.fromarray(channel).resize((size, size), Image.Resampling.BICUBIC))
        for channel in np.moveaxis(picture.astype(np.float32), -1, 0)
    ]
    return np.stack(channels, -1).clip(0, 255).round().astype(np.uint8)


def read_clip(path: Path) -> tuple[Tensor, int]:
    """A mono clip of sound, float32 [samples], and its rate in Hz; of stereo the mean of the channels.

    Raises:
        ValueError: no whole clip.
        ImportError: soundfile is missing (extra `audio`), for other files than WAV of 16 bits.
    """
    with open_regular(path) as file:
        content = _wave(file) or _by_soundfile(file, path)
    samples, rate = content
    if not len(samples) or not 1 <= rate <= _MOST_RATE or not np.isfinite(samples).all():
        raise ValueError(
            f"{path} has {len(samples)} samples at {rate} Hz, or nan; run sample again, or remove it"
        )
    return torch.from_numpy(samples).mean(1), rate


def _wave(file: BinaryIO) -> tuple[np.ndarray, int] | None:
    """Samples [N, C] of a WAV file of 16 bits, and its rate; None of any other file."""
    try:
        with wave.open(file) as clip:
            length = clip.getnframes() * clip.getnchannels()
            if clip.getsampwidth() != 2 or 2 * length > os.fstat(file.fileno()).st_size:
                return None
            samples = np.frombuffer(clip.readframes(clip.getnframes()), "<i2").reshape(
                -1, clip.getnchannels()
            )
            return samples.astype(np.float32) / 32768, clip.getframerate()
    except (wave.Error, EOFError, ValueError, struct.error):
        return None


def _by_soundfile(file: BinaryIO, path: Path) -> tuple[np.ndarray, int]:
    with extra("audio", f"{path} needs soundfile to be read"):
        import soundfile  # pyright: ignore[reportMissingImports]
    file.seek(0)
    try:
        with soundfile.SoundFile(file) as clip:
            if clip.frames * clip.channels > _MOST_SAMPLES:
                raise ValueError(f"{clip.frames} samples are more than {_MOST_SAMPLES}")
            return clip.read(dtype="float32", always_2d=True), int(clip.samplerate)
    except (RuntimeError, ValueError, TypeError) as error:
        raise ValueError(f"{path} is no whole clip ({error}); run sample again, or remove it") from error


def read_video(path: Path) -> np.ndarray:
    """All frames of a video, uint8 [T, H, W, 3], as `visual-spec sample` writes them (.npy), by Pillow (.gif) or PyAV.

    Programs that write GIF files may leave out frames that repeat the one before.

    Raises:
        ValueError: no whole video.
        ImportError: PyAV is missing (extra `video`), for other files than these.
    """
    try:
        if path.suffix.lower() == ".npy":
            return _checked(read_npy(path))
        with open_regular(path) as file:
            if path.suffix.lower() == ".gif":
                with Image.open(file, formats=("GIF",)) as video:
                    return _stacked(
                        np.asarray(frame.convert("RGB")) for frame in ImageSequence.Iterator(video)
                    )
            with extra("video", f"{path} needs PyAV to be read"):
                import av  # pyright: ignore[reportMissingImports]
            with av.open(file, "r") as video:
                return _stacked(frame.to_ndarray(format="rgb24") for frame in video.decode(video=0))
    except ImportError:
        raise
    except Exception as error:  # decoders raise anything
        reason = " ".join(str(error).split())[:160] or type(error).__name__
        raise ValueError(f"{path} is no whole video ({reason}); draw it again, or remove it") from error


def _stacked(frames: Iterator[np.ndarray]) -> np.ndarray:
    """Frames uint8 [T, H, W, 3]; refuses none, several sizes, and too many pixels in all."""
    stack: list[np.ndarray] = []
    for frame in frames:
        stack.append(frame)
        if len(stack) * frame.shape[0] * frame.shape[1] > _MOST_VIDEO:
            raise ValueError(f"more than {_MOST_VIDEO} pixels in all")
    return _checked(np.stack(stack))


def _checked(frames: np.ndarray) -> np.ndarray:
    if frames.dtype != np.uint8 or frames.ndim != 4 or frames.shape[3] != 3:
        raise ValueError(f"{frames.dtype} {list(frames.shape)}, not uint8 [T, H, W, 3]")
    return frames
