"""Waves as files, and clips of others as what a codec reads: rates and channels."""

import io
import math
import os
import warnings
import wave as wave_files
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from visual_spec.files.extras import extra
from visual_spec.files.whole import write_atomically
from visual_spec.models.core.settings import whole

Waves = np.ndarray | Tensor | Sequence[float]
FORMATS = {"wav": "PCM_16", "flac": "PCM_16", "ogg": "VORBIS"}
_CROSSINGS = 6  # zero crossings of the resampling kernel a side
_MOST_RATE = 1000  # of two rates without a common factor for which torchaudio's kernel is small


def audio_bytes(audio: Waves, sampling_rate: int, kind: str = "wav") -> bytes:
    """The content of a sound file.

    Args:
        audio: [N], or [C, N] with 1 or 2 channels; array or tensor. What lies outside of [-1, 1] is cut off.
        sampling_rate: in Hz.
        kind: "wav" (16 bits, needs nothing but Python), "flac" (16 bits) or "ogg" (Vorbis), both through soundfile.

    Raises:
        ValueError: another shape or kind, no samples, values that are not finite, a rate below 1.
        ImportError: a kind that needs soundfile, and it is missing (extra `audio`).
    """
    if kind not in FORMATS:
        raise ValueError(f"cannot write {kind!r}; pass one of {', '.join(FORMATS)}.")
    waves = np.asarray(audio.detach().cpu().float() if isinstance(audio, Tensor) else audio, np.float32)
    if waves.ndim == 1:
        waves = waves[None]
    if waves.ndim != 2 or waves.shape[0] not in (1, 2) or not waves.shape[1]:
        raise ValueError(f"audio of shape {waves.shape} given; pass one clip, [N], [1, N] or [2, N].")
    if not np.isfinite(waves).all():
        raise ValueError("the audio holds nan or infinity; look at what made it.")
    if sampling_rate < 1:
        raise ValueError(f"sampling_rate={sampling_rate}; pass the samples per second.")
    samples = waves.clip(-1, 1).T  # [N, C]
    buffer = io.BytesIO()
    if kind == "wav":
        with wave_files.open(buffer, "wb") as file:
            file.setnchannels(samples.shape[1])
            file.setsampwidth(2)
            file.setframerate(int(sampling_rate))
            file.writeframes(np.rint(samples * 32767).astype("<i2").tobytes())
        return buffer.getvalue()
    with extra("audio", f"writing {kind} needs soundfile", ", or write wav, which needs nothing."):
        import soundfile  # pyright: ignore[reportMissingImports]
    soundfile.write(buffer, samples, int(sampling_rate), format=kind.upper(), subtype=FORMATS[kind])
    return buffer.getvalue()


def write_audio(
    path: str | os.PathLike, audio: Waves, sampling_rate: int, *, overwrite: bool = False
) -> Path:
    """Write a clip to a file of the kind that its name ends with; whole or not at all. Arguments as `audio_bytes`.

    Raises:
        FileExistsError: there is something at `path`, and `overwrite` is not set.
        ValueError, ImportError: as `audio_bytes`.
    """
    path = Path(path)
    content = audio_bytes(audio, sampling_rate, path.suffix.lower().removeprefix("."))
    return write_atomically(path, content, overwrite=overwrite)


def prepare_clip(audio: Waves, sampling_rate: int | None, *, rate: int, channels: int) -> Tensor:
    """A clip as float waves [B or 1, C, N] at the rate, and with the channels, of a codec.

    What has to be changed for it is said in a warning: another rate, stereo that becomes mono (the mean) and mono that
    becomes stereo (twice the same).

    Args:
        audio: [N], [C, N] or [B, C, N], array or tensor.
        sampling_rate: of `audio`, in Hz.
        rate, channels: of the codec.

    Raises:
        ValueError: no rate given, another shape, no samples, nan or infinity.
        ImportError: as `resample`.
    """
    if sampling_rate is None:
        raise ValueError(f"audio given without its rate; pass sampling_rate (the model's own is {rate}).")
    sampling_rate = whole("sampling_rate", sampling_rate, note=", the clip's samples per second")
    clip = torch.as_tensor(audio).detach().cpu()
    if not clip.is_floating_point():
        raise ValueError(f"audio of {clip.dtype} given; pass floating-point samples in [-1, 1].")
    clip = clip.float()
    shape = tuple(clip.shape)
    clip = clip[(None,) * (3 - clip.ndim)] if clip.ndim < 3 else clip
    if clip.ndim != 3 or clip.shape[1] not in (1, 2) or not clip.numel():
        raise ValueError(f"audio of shape {shape}; pass [N], [C, N] or [B, C, N] with 1 or 2 channels.")
    if not clip.isfinite().all():
        raise ValueError("the audio holds nan or infinity; pass finite samples, in [-1, 1].")
    if clip.shape[1] != channels:
        what = "is averaged to mono" if channels == 1 else "stands in both channels"
        warnings.warn(f"the clip has {clip.shape[1]} channels; it {what}.", stacklevel=3)
        clip = clip.mean(1, keepdim=True).expand(-1, channels, -1)
    if sampling_rate != rate:
        warnings.warn(f"the clip is resampled from {sampling_rate} Hz to {rate} Hz.", stacklevel=3)
        clip = resample(clip, sampling_rate, rate)
    return clip


def resample(clip: Tensor, rate: int, wanted: int) -> Tensor:
    """A clip [..., N] at another rate, [..., ceil(N * wanted / rate)]; both in Hz. By torchaudio.

    Raises:
        ImportError: torchaudio is missing (extra `audio`), for other rates than `in_parts` takes.
    """
    if rate == wanted:
        return clip
    common = math.gcd(rate, wanted)
    if max(rate, wanted) // common > _MOST_RATE:
        return in_parts(clip, rate // common, wanted // common)
    need = f"resampling from {rate} Hz to {wanted} Hz needs torchaudio"
    with extra("audio", need, f", or pass a clip of {wanted} Hz."):
        from torchaudio.functional import resample as by_torchaudio
    return by_torchaudio(clip.double(), rate, wanted).to(clip)


def in_parts(clip: Tensor, before: int, after: int) -> Tensor:
    """As torchaudio's `resample`, for `after` outputs at `before` samples, again and again.

    By a sinc with six zero crossings a side in a Hann window, cut off at 0.99 of the lower of the two Nyquist rates.
    torchaudio's kernel of before x after numbers takes gigabytes where two rates have no large common factor; here
    outputs that lie close share one that is little wider than the window.
    """
    cutoff = 0.99 * min(before, after) / before  # zero crossings a sample of the clip
    reach = math.ceil(_CROSSINGS / cutoff)
    count = -(-clip.shape[-1] * after // before)
    turns = -(-count // after)
    padded = F.pad(clip.reshape(-1, 1, clip.shape[-1]), (reach, 2 * before + 2 * reach))
    parts = []
    for places in torch.arange(min(after, count)).split(max(1, 2 * reach * after // before)):
        times = places.double()[:, None] * before / after  # in samples of the clip
        first, width = int(times[0]), math.ceil(times[-1] - times[0]) + 2 * reach + 1
        distances = (first - reach + torch.arange(width) - times) * cutoff
        distances = distances.clamp(-_CROSSINGS, _CROSSINGS)
        window = (distances * math.pi / (2 * _CROSSINGS)).cos() ** 2
        kernel = (torch.sinc(distances) * window * cutoff).to(clip)
        heard = padded[..., first : first + (turns - 1) * before + width]
        parts.append(F.conv1d(heard, kernel[:, None], stride=before))
    whole = torch.cat(parts, 1).transpose(1, 2).reshape(-1, turns * sum(part.shape[1] for part in parts))
    return whole[:, :count].reshape(*clip.shape[:-1], count)
