"""Music pipelines under measurement: codes to waves, features of clips, and two models of one codec side by side."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from visual_spec.data.waves import levels
from visual_spec.models.columns.encodec import encode_waves
from visual_spec.models.core.fingerprint import fingerprint
from visual_spec.pipelines.audio_stream import WaveStream
from visual_spec.samplers.masked import MaskedSampler

_STRETCH = 0.5  # seconds that are decoded at once, as `AudioPipeline` does unless it is told otherwise
_WINDOW = 1024  # samples of a spectrum, and so 64 mel bands
# What is quieter, in dB of a full-scale sine, counts as silence: with a lower floor the hiss that a codec leaves in
# empty bands outweighs the music.
_SILENCE = -60.0


def plays(pipe: Any) -> bool:
    """Whether a pipeline plays music."""
    return hasattr(pipe, "sampling_rate")


class MelStatistics(nn.Module):
    """Statistics of a clip's log mel spectrogram: no network, nothing to download, the same on every machine.

    The spectrogram has 64 bands in dB from spectra of 1024 samples, a quarter apart; what lies more than 60 dB below a
    full-scale sine counts as silence. A clip is described by the mean and the standard deviation of each band over
    time, 128 numbers in dB. They tell timbre, register, loudness and how lively a clip is, but not its order: whether
    notes make the melody that was asked for is what the parser hears.

    Args:
        sampling_rate: of the clips, in Hz.
    """

    num_features = 2 * _WINDOW // 16
    sampling_rate: Tensor

    def __init__(self, sampling_rate: int) -> None:
        super().__init__()
        # In the state: features of other rates are features of another judge.
        self.register_buffer("sampling_rate", torch.tensor(sampling_rate))

    def forward(self, clips: Tensor) -> Tensor:
        """Features float32 [B, 128] of clips [B, samples]."""
        bands = levels(clips.double(), _WINDOW, int(self.sampling_rate))  # [B, 64, frames]
        bands = bands.clamp_min(_SILENCE)
        return torch.cat([bands.mean(-1), bands.std(-1, correction=0)], -1).float()


@torch.no_grad()
def clips_of(pipe: Any, codes: np.ndarray) -> np.ndarray:
    """Clips float32 [N, samples] of codes [N, K, T], as the pipeline plays them; of stereo the mean of channels."""
    given = torch.from_numpy(codes.astype(np.int64)).to(pipe.device)
    stretch = max(1, round(_STRETCH * pipe.frame_rate))
    stream = WaveStream(codec_of(pipe), pipe.channels, given.shape[-1], stretch)
    stream(given)
    return stream.waves().mean(1).numpy()


def codes_of(pipe: Any, clips: np.ndarray) -> Tensor:
    """Codes [N, K, T] of clips [N, samples]."""
    waves = torch.from_numpy(clips)[:, None].expand(-1, pipe.channels, -1)
    return encode_waves(codec_of(pipe), waves.contiguous())


def codec_of(pipe: Any) -> Any:
    """The codec of a music pipeline, which may be a part of its transformer."""
    return pipe.transformer.audio_encoder if pipe.codec is None else pipe.codec


def mel_thumbnails(clips: np.ndarray, sampling_rate: int, side: int = 96) -> np.ndarray:
    """Log mel spectrograms of clips [N, samples] as small pictures, uint8 [N, side, side, 3]."""
    from visual_spec.eval.report.music_pages import mel_picture

    return np.stack([np.asarray(mel_picture(clip, sampling_rate, side, side)) for clip in clips])


class MusicPair:
    """A model of columns and a masked one as a single pipeline: `MaskedSampler` is played by the latter.

    So both can stand in one table, on the same prompts and in the same rounds.

    Args:
        columns, masked: `AudioPipeline`s.

    Raises:
        ValueError: pipelines of the same kind, with different codecs, or for clips of different length.
    """

    def __init__(self, columns: Any, masked: Any) -> None:
        if columns.config["masked"] or not masked.config["masked"]:
            raise ValueError(
                "a pair is a model of columns and a masked one, in this order; pass --model tunes --masked "
                "tunes_masked, or the like."
            )
        if fingerprint([codec_of(columns)]) != fingerprint([codec_of(masked)]):
            raise ValueError(
                "the two models have different codecs, so their codes do not mean the same; measure each alone."
            )
        if columns.max_frames != masked.max_frames:
            raise ValueError(
                f"the two models play clips of {columns.max_frames} and of {masked.max_frames} frames; measure each "
                "alone."
            )
        self.columns, self.masked = columns, masked
        self.sampler = columns.sampler

    def __getattr__(self, name: str) -> Any:
        if name == "columns":  # not there yet
            raise AttributeError(name)
        return getattr(self.columns, name)

    @property
    def components(self) -> dict[str, Any]:
        """Those of both."""
        more = {f"masked_{name}": part for name, part in self.masked.components.items()}
        return {**self.columns.components, **more}

    @property
    def drafter(self) -> Any:
        """That of the model of columns."""
        return self.columns.drafter

    @drafter.setter
    def drafter(self, drafter: Any) -> None:
        self.columns.drafter = drafter

    @property
    def player(self) -> Any:
        """The pipeline that plays by the sampler."""
        return self.masked if isinstance(self.sampler, MaskedSampler) else self.columns

    def check_sampler(self) -> None:
        """As `AudioPipeline.check_sampler`."""
        self._with_sampler(lambda player: player.check_sampler())

    def __call__(self, *args: Any, **settings: Any) -> Any:
        """As `AudioPipeline.__call__`."""
        return self._with_sampler(lambda player: player(*args, **settings))

    def _with_sampler(self, act: Any) -> Any:
        player = self.player
        before = player.sampler
        player.sampler = self.sampler
        try:
            return act(player)
        finally:
            player.sampler = before
