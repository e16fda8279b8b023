"""Files of pictures, sounds and videos as arrays. What is no whole file is refused by its name."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageSequence
from torch import Tensor

PICTURES = (".png", ".jpg", ".jpeg", ".webp", ".bmp")
SOUNDS = (".wav", ".flac", ".ogg")
VIDEOS = (".npy", ".gif", ".mp4", ".webm", ".mkv", ".mov", ".avi")
MEDIA = {"image": PICTURES, "audio": SOUNDS, "video": VIDEOS}


def read_picture(path: Path) -> np.ndarray:
    """A picture uint8 [H, W, 3].

    Raises:
        ValueError: no whole picture.
    """
    try:
        with Image.open(path) as picture:
            return np.asarray(picture.convert("RGB"))
    except (OSError, SyntaxError, ValueError) as error:
        raise ValueError(f"{path} is no whole picture ({error}); run sample again, or remove it") from error


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
    import wave

    try:
        with wave.open(str(path)) as file:
            if file.getsampwidth() != 2:
                raise wave.Error("not 16 bits")
            samples = np.frombuffer(file.readframes(file.getnframes()), "<i2").reshape(
                -1, file.getnchannels()
            )
            return torch.from_numpy(samples.astype(np.float32) / 32768).mean(1), file.getframerate()
    except (wave.Error, EOFError):
        pass
    try:
        import soundfile  # pyright: ignore[reportMissingImports]

        samples, rate = soundfile.read(str(path), dtype="float32", always_2d=True)
    except ImportError as error:
        raise ImportError(f"{path} needs soundfile to be read: install visual-spec[audio]") from error
    except RuntimeError as error:
        raise ValueError(f"{path} is no whole clip ({error}); run sample again, or remove it") from error
    return torch.from_numpy(samples).mean(1), int(rate)


def read_video(path: Path) -> np.ndarray:
    """All frames of a video, uint8 [T, H, W, 3], as `visual-spec sample` writes them (.npy), by Pillow (.gif) or PyAV.

    Programs that write GIF files may leave out frames that repeat the one before.

    Raises:
        ValueError: no whole video.
        ImportError: PyAV is missing (extra `video`), for other files than these.
    """
    try:
        if path.suffix.lower() == ".npy":
            return _checked(np.load(path, allow_pickle=False))
        if path.suffix.lower() == ".gif":
            with Image.open(path) as video:
                return np.stack([np.asarray(frame.convert("RGB")) for frame in ImageSequence.Iterator(video)])
        try:
            import av  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            raise ImportError(f"{path} needs PyAV to be read: install visual-spec[video]") from error
        with av.open(str(path)) as video:
            return np.stack([frame.to_ndarray(format="rgb24") for frame in video.decode(video=0)])
    except (OSError, EOFError, SyntaxError, ValueError, IndexError) as error:
        raise ValueError(f"{path} is no whole video ({error}); draw it again, or remove it") from error


def _checked(frames: np.ndarray) -> np.ndarray:
    if frames.dtype != np.uint8 or frames.ndim != 4 or frames.shape[3] != 3:
        raise ValueError(f"{frames.dtype} {list(frames.shape)}, not uint8 [T, H, W, 3]")
    return frames
