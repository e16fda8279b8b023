"""What a pipeline returns, and pictures as it shows them: what a decoder computed, refused where it is no picture."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers.image_processor import VaeImageProcessor
from diffusers.utils.outputs import BaseOutput
from torch import Tensor

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
        trace: target calls, the call that committed each column, seconds. It counts columns, the K codes of one
            step, where a trace of pictures counts tokens. Windows are concatenated in order.
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
        from visual_spec.pipelines.audio_files import write_audio  # pictures need no such files

        return write_audio(path, self.audios[index], self.sampling_rate, overwrite=overwrite)


@dataclass
class VideoPipelineOutput(BaseOutput):
    """Clips, the tokens they were decoded from, and the record of the decoding.

    Args:
        frames: as `output_type` asked: lists of PIL pictures, one a clip; numpy [B, T, H, W, 3] in [0, 1]; tensor
            [B, T, 3, H, W] in [0, 1]; or (`latent`) the tokens by place, LongTensor [B, T, h, w].
        tokens: LongTensor [B, T * h * w], frame by frame in raster order.
        trace: target calls, the call that committed each token, seconds.
        frame_rate: frames per second of the clips.
    """

    frames: Any
    tokens: torch.Tensor
    trace: DecodeTrace
    frame_rate: float

    def save(self, path: str | os.PathLike, index: int = 0, *, overwrite: bool = False) -> Path:
        """Write one of the clips: mp4 (by PyAV), gif, or a png sheet of all frames, by the end of the name.

        Raises:
            ValueError: the clips are tokens or latents (`output_type="latent"`), or a name with another end.
            FileExistsError: there is something at `path`, and `overwrite` is not set.
            ImportError: mp4, and PyAV is missing (extra `video`).
        """
        clip, kept = self.frames[index], self.to_tuple()[1]
        if self.frames is kept or (isinstance(clip, torch.Tensor) and not clip.is_floating_point()):
            kind = "latents" if kept.is_floating_point() else "tokens"
            raise ValueError(
                f"the clips are {kind}; draw them with output_type 'pil', 'np' or 'pt' to save them."
            )
        from visual_spec.pipelines.video_files import pixels_of, write_video

        return write_video(path, pixels_of(clip), self.frame_rate, overwrite=overwrite)


class ShownPictures(VaeImageProcessor):
    """diffusers' processor of decoded pictures, which refuses nan and infinity instead of showing them as black."""

    def __init__(self) -> None:
        super().__init__(do_resize=False)

    def postprocess(self, image: Tensor, *args: Any, **kwargs: Any) -> Any:
        """As diffusers does, of float [B, 3, H, W] in [-1, 1].

        Raises:
            ValueError: pixels are nan or infinite; says how many.
        """
        check_pixels(image)
        return super().postprocess(image, *args, **kwargs)


def shown(pixels: Tensor | list[Tensor], processor: ShownPictures, output_type: str) -> Any:
    """Pictures [B, 3, H, W], or clips [T, 3, H, W] of each sample, in -1 to 1, in the form `output_type` asks for."""
    if isinstance(pixels, Tensor) and pixels.dim() == 4:
        return processor.postprocess(pixels, output_type=output_type)
    # A list of pictures, an array or a tensor of each clip, though diffusers annotates a single picture.
    clips: list[Any] = [processor.postprocess(clip, output_type=output_type) for clip in pixels]
    if output_type == "np":
        return np.stack(clips)
    return torch.stack(clips) if output_type == "pt" else clips


def check_pixels(pixels: Tensor) -> None:
    """Refuse decoded pixels of any shape that are nan or infinite.

    Raises:
        ValueError: says how many, and what makes them so.
    """
    finite = torch.isfinite(pixels)
    if not finite.all():
        bad = int((~finite).sum())
        dtype = str(pixels.dtype).removeprefix("torch.")
        raise ValueError(
            f"the decoder made {bad} of {pixels.numel()} pixel values nan or infinite in {dtype}; its weights or the "
            "tokens are damaged, or the dtype overflows. Load the pipeline in float32, or draw with "
            "output_type='latent' to look at the tokens."
        )
