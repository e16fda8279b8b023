"""A complete music model, real but tiny and random: 3 codebooks of 16 codes, 100 frames of 4 samples a second."""

import copy
from typing import Any

import numpy as np
import torch
from transformers import EncodecConfig, EncodecModel, MusicgenDecoderConfig, MusicgenForCausalLM

from scripts.train.codec import initialise
from tests.helpers.musicgen import musicgen
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
    settings: dict[str, Any] = dict(
        target_bandwidths=[BOOKS * 4 * 100 / 1000],
        sampling_rate=RATE,
        hidden_size=8,
        num_filters=2,
        upsampling_ratios=[2, 2],
        num_lstm_layers=1,
        codebook_size=CODES,
    )
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
    settings: dict[str, Any] = dict(
        vocab_size=CODES,
        num_codebooks=BOOKS,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        ffn_dim=32,
        max_position_embeddings=64,
        pad_token_id=CODES,
        bos_token_id=CODES,
        dropout=0.0,
        is_decoder=True,
        add_cross_attention=True,
    )
    return _ready(MusicgenForCausalLM(MusicgenDecoderConfig(**settings | changes)), dtype)


def tiny_words() -> CaptionEncoder:
    torch.manual_seed(2)
    return CaptionEncoder(vocabulary=WORDS, dim=32, num_layers=1, num_heads=2, max_words=6).eval()


def tiny_audio_pipeline(sampler: Any = None, **settings: Any) -> AudioPipeline:
    settings = dict(max_audio_length_in_s=LONGEST) | settings
    pipe = AudioPipeline(
        tiny_decoder(), tiny_codec(), tiny_words(), sampler or ColumnAutoregressiveSampler(), **settings
    )
    pipe.set_progress_bar_config(disable=True)
    return pipe
