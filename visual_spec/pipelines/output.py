"""What a pipeline returns."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from diffusers.utils.outputs import BaseOutput

from visual_spec.pipelines.audio_files import write_audio
from visual_spec.samplers.core.trace import DecodeTrace


@dataclass
class ImagePipelineOutput(BaseOutput):
    """Pictures, the tokens they were decoded from, and the record of the decoding.

    Args:
        images: as `output_type` asked: PIL pictures, numpy [B, H, W, 3] in [0, 1], tensor [B, 3, H, W] in [0, 1],
            or (`latent`) the token grid, LongTensor [B, h, w].
        tokens: LongTensor [B, h * w] in raster order.
        trace: target calls, the call that committed each token, seconds.
    """

    images: Any
    tokens: torch.Tensor
    trace: DecodeTrace


@dataclass
class AudioPipelineOutput(BaseOutput):
    """Clips, the codes they were decoded from, and the record of the decoding.

    Args:
        audios: as `output_type` asked: float32 [B, C, N], numpy or tensor, or (`latent`) the codes.
        sampling_rate: samples per second.
        codes: LongTensor [B, K, T].
        trace: target calls, the call that committed each column, seconds. It counts columns, the K codes of a step,
            where that of pictures counts tokens; of several windows one stands behind the other.
    """

    audios: Any
    sampling_rate: int
    codes: torch.Tensor
    trace: DecodeTrace

    def save(self, path: str | os.PathLike, index: int = 0, *, overwrite: bool = False) -> Path:
        """Write one of the clips as a wav, flac or ogg file, by the end of the name; see `write_audio`.

        Raises:
            ValueError: the clips are codes (`output_type="latent"`), or a name with another end.
            FileExistsError: there is something at `path`, and `overwrite` is not set.
            ImportError: flac or ogg, and soundfile is missing (extra `audio`).
        """
        if self.audios is self.codes:
            raise ValueError("the clips are codes; play them with output_type 'np' or 'pt' to save them.")
        return write_audio(path, self.audios[index], self.sampling_rate, overwrite=overwrite)
