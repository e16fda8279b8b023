"""A complete music model, real but tiny and random: 3 codebooks of 16 codes, 100 frames of 4 samples a second."""

import copy
from typing import Any

import numpy as np
import torch
from transformers import EncodecConfig, EncodecModel, MusicgenDecoderConfig, MusicgenForCausalLM

from scripts.train.codec import initialise
from tests.helpers.musicgen import CODEC, DECODER, musicgen
from tests.helpers.tiny import quiet
from tests.models.next_token.tiny_transformers import _ready
from visual_spec.models.text.caption_encoder import CaptionEncoder
from visual_spec.pipelines.audio import AudioPipeline
from visual_spec.samplers.raster.columns import ColumnAutoregressiveSampler

WORDS = ["a", "slow", "sad", "organ", "melody", "in", "minor"]
RATE, HOP, BOOKS, CODES = 400, 4, 3, 16
LONGEST = 0.2  # seconds
FRAMES = round(LONGEST * RATE / HOP)
PROMPT = "a slow sad organ"


def clip_of(frames: int, channels: int = 1) -> np.ndarray:
    """Noise [channels, samples]."""
    generator = torch.Generator().manual_seed(9)
    return torch.rand(channels, frames * HOP, generator=generator).sub(0.5).numpy()


def tiny_codec(**changes: Any) -> EncodecModel:
    torch.manual_seed(0)
    settings: dict[str, Any] = dict(CODEC, target_bandwidths=[BOOKS * 4 * 100 / 1000])
    model = EncodecModel(EncodecConfig(**settings | changes))
    initialise(model)
    fill_codebooks(model)
    return model.eval()


def fill_codebooks(codec: Any) -> None:
    """As wide as what the encoder puts out. Fresh ones are zeros: every code would sound the same."""
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        waves = torch.rand(16, 1, 64, generator=generator).to(codec.dtype) - 0.5
        spread, mean = torch.std_mean(codec.encoder(waves), (0, 2))
    for number, layer in enumerate(codec.quantizer.layers):
        noise = torch.randn(layer.codebook.embed.shape, generator=generator)
        layer.codebook.embed.copy_(noise * spread / 2**number + (mean if number == 0 else 0))


def tiny_musicgen(channels: int = 1, dtype: torch.dtype = torch.float64) -> Any:
    """A whole MusicGen of transformers: 4 codebooks of 16 codes, as many frames and samples a second."""
    model = copy.deepcopy(musicgen(channels, dtype=dtype))
    torch.manual_seed(3)
    initialise(model.audio_encoder)  # else the codes of all clips are the same
    fill_codebooks(model.audio_encoder)
    return model


def tiny_decoder(dtype: torch.dtype = torch.float32, **changes: Any) -> MusicgenForCausalLM:
    settings: dict[str, Any] = dict(DECODER, num_codebooks=BOOKS, is_decoder=True, add_cross_attention=True)
    return _ready(MusicgenForCausalLM(MusicgenDecoderConfig(**settings | changes)), dtype)


def tiny_words() -> CaptionEncoder:
    torch.manual_seed(2)
    return CaptionEncoder(vocabulary=WORDS, dim=32, num_layers=1, num_heads=2, max_words=6).eval()


def tiny_audio_pipeline(sampler: Any = None, **settings: Any) -> AudioPipeline:
    parts = tiny_decoder(), tiny_codec(), tiny_words(), sampler or ColumnAutoregressiveSampler()
    return quiet(AudioPipeline(*parts, **{"max_audio_length_in_s": LONGEST, **settings}))
