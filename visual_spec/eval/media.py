"""What an evaluation does with pictures and with clips: make stored samples visible or audible, and the way back.

`MEDIA` has one entry a medium; a new medium is one more entry. A pipeline says its own by `pipe.medium`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from transformers import EncodecModel

_STRETCH = 0.5  # seconds that are decoded at once, as `AudioPipeline` does by default


@dataclass(frozen=True)
class Medium:
    """How samples of one medium are handled.

    Attributes:
        ids: name of the token ids in the output of a pipeline.
        finished: name of the finished samples in it, which are the canvas where the output type is "latent".
        tokenizer: (pipeline) -> the network between tokens and what is judged.
        show: (pipeline, stored samples) -> what is judged: pictures uint8 [N, H, W, 3], clips of frames uint8
            [N, T, H, W, 3], or clips of sound float32 [N, samples].
        encode: (pipeline, what is judged) -> what the tokenizer or codec makes of it, as samples are stored.
    """

    ids: str
    finished: str
    tokenizer: Callable[[Any], nn.Module]
    show: Callable[[Any, np.ndarray], np.ndarray]
    encode: Callable[[Any, np.ndarray], Tensor]


def show(pipe: Any, stored: np.ndarray) -> np.ndarray:
    """Return what stored samples look or sound like, as `Medium.show` gives it."""
    return MEDIA[pipe.medium].show(pipe, stored)


@torch.no_grad()
def pictures_of(pipe: Any, stored: np.ndarray) -> np.ndarray:
    """Pictures uint8 [N, H, W, 3] as the pipeline shows them, of token ids [N, L] or of canvases [N, D, h, w]."""
    if np.issubdtype(stored.dtype, np.floating):
        images = pipe.decode_canvas(torch.from_numpy(stored).to(pipe.device), "pil")
    else:
        images = pipe.decode_tokens(torch.from_numpy(stored.astype(np.int64)).to(pipe.device), "pil")
    return np.stack([np.asarray(image) for image in images])


@torch.no_grad()
def encode_pictures(pipe: Any, pictures: np.ndarray) -> Tensor:
    """Token ids [N, L], or canvases [N, D, h, w], of pictures uint8 [N, H, W, 3]."""
    signed = torch.from_numpy(pictures).permute(0, 3, 1, 2)  # [N, 3, H, W]
    if pipe.medium == "image" and hasattr(pipe, "encode_canvas"):
        return pipe.encode_canvas(signed / 127.5 - 1)
    ids = pipe.vq_model.encode_tokens(signed.to(pipe.device, pipe.vq_model.dtype) / 127.5 - 1)
    return pipe.decode_tokens(ids, "latent") if pipe.stored_as == "canvas" else ids


@torch.no_grad()
def frames_of(pipe: Any, tokens: np.ndarray) -> np.ndarray:
    """Clips uint8 [N, T, H, W, 3] of tokens [N, L], as the pipeline shows them."""
    from visual_spec.pipelines.video_files import pixels_of

    ids = torch.from_numpy(tokens.astype(np.int64)).to(pipe.device)
    return np.stack([pixels_of(clip) for clip in pipe.decode_tokens(ids, "pil")])


@torch.no_grad()
def tokens_of_frames(pipe: Any, clips: np.ndarray) -> Tensor:
    """Token ids [N, L] of clips uint8 [N, T, H, W, 3], frame by frame."""
    signed = torch.from_numpy(clips.reshape(-1, *clips.shape[2:])).permute(0, 3, 1, 2)  # [N T, 3, H, W]
    ids = pipe.vq_model.encode_tokens(signed.to(pipe.device, pipe.vq_model.dtype) / 127.5 - 1)
    return ids.reshape(len(clips), -1)


@torch.no_grad()
def clips_of(pipe: Any, codes: np.ndarray) -> np.ndarray:
    """Clips float32 [N, samples] of codes [N, K, T], as the pipeline plays them; of stereo the mean of channels."""
    from visual_spec.pipelines.audio_stream import WaveStream  # which brings MusicGen and EnCodec

    columns = torch.from_numpy(codes.astype(np.int64)).to(pipe.device)
    stretch = max(1, round(_STRETCH * pipe.frame_rate))
    stream = WaveStream(codec_of(pipe), pipe.channels, columns.shape[-1], stretch)
    stream(columns)
    return stream.waves().mean(1).numpy()


@torch.no_grad()
def codes_of(pipe: Any, clips: np.ndarray) -> Tensor:
    """Codes [N, K, T] of clips float32 [N, samples]."""
    from visual_spec.models.columns.encodec import encode_waves

    waves = torch.from_numpy(clips)[:, None].expand(-1, pipe.channels, -1)
    return encode_waves(codec_of(pipe), waves.contiguous())


def codec_of(pipe: Any) -> EncodecModel:
    """The codec of a music pipeline, which may be a part of its transformer."""
    return pipe.transformer.audio_encoder if pipe.codec is None else pipe.codec


MEDIA = {
    "image": Medium("tokens", "images", lambda pipe: pipe.vq_model, pictures_of, encode_pictures),
    "video": Medium("tokens", "frames", lambda pipe: pipe.vq_model, frames_of, tokens_of_frames),
    "audio": Medium("codes", "audios", codec_of, clips_of, codes_of),
}
