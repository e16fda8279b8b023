"""Tiny MusicGens of ours and of transformers, and checkpoints in audiocraft's layout."""

import copy
import functools
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    EncodecConfig,
    MusicgenConfig,
    MusicgenDecoderConfig,
    MusicgenForConditionalGeneration,
    T5Config,
)
from transformers.generation.streamers import BaseStreamer

from tests.helpers.audiocraft_files import (
    BOOKS,
    CODEC_SETTINGS,
    MUSICGEN_SETTINGS,
    STEREO_SETTINGS,
    codec_weights,
    write,
    write_language_model,
)
from tests.models.next_token.tiny_transformers import _ready
from visual_spec.models.columns.musicgen import MusicgenColumnModel
from visual_spec.models.next_token.llamagen import TextCondition
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.raster.columns import ColumnAutoregressiveSampler

CODES, FRAMES = 16, 7
IDS = torch.tensor([[5, 6, 7, 0, 0], [8, 9, 10, 11, 4], [12, 3, 0, 0, 0]])
MASK = (IDS != 0).long()


# Sizes of codecs and decoders.
CODEC: dict[str, Any] = dict(
    sampling_rate=400, hidden_size=8, num_filters=2, upsampling_ratios=[2, 2], num_lstm_layers=1, codebook_size=CODES
)  # fmt: skip
DECODER: dict[str, Any] = dict(
    vocab_size=CODES, max_position_embeddings=64, num_hidden_layers=2, ffn_dim=32, num_attention_heads=4,
    hidden_size=32, pad_token_id=CODES, bos_token_id=CODES, dropout=0.0,
)  # fmt: skip


def musicgen(
    channels: int = 1, *, codebooks: int = 4, dtype: torch.dtype = torch.float64, text_width: int = 24
) -> Any:
    """A whole MusicGen, random, with weights large enough that the laws differ from step to step.

    Every call returns a model of its own, so that what a test does to it stays with the test.
    """
    return copy.deepcopy(_musicgen(channels, codebooks, dtype, text_width))


@functools.cache
def _musicgen(channels: int, codebooks: int, dtype: torch.dtype, text_width: int) -> Any:
    text = T5Config(vocab_size=16, d_model=text_width, d_kv=8, d_ff=32, num_layers=1, num_heads=2)
    codec = EncodecConfig(target_bandwidths=[codebooks // channels * 4 * 100 / 1000], **CODEC)
    decoder = MusicgenDecoderConfig(num_codebooks=codebooks, audio_channels=channels, **DECODER)
    config = MusicgenConfig(text_encoder=text, audio_encoder=codec, decoder=decoder)
    model = _ready(MusicgenForConditionalGeneration(config), dtype)
    settings = model.generation_config
    settings.decoder_start_token_id = settings.bos_token_id = settings.pad_token_id = CODES
    return model


def native_codes(model: Any, count: int, scale: float, **inputs: Any) -> torch.Tensor:
    """Codes [B, K, T] that `generate` hands to its codec, both channels of a codebook beside each other."""
    kept: list[torch.Tensor] = []
    decode = model.audio_encoder.decode

    def keeping(codes: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        kept.append(codes[0])
        return decode(codes, *args, **kwargs)

    model.audio_encoder.decode = keeping
    try:
        model.generate(**inputs, do_sample=False, guidance_scale=scale, max_new_tokens=count)
    finally:
        del model.audio_encoder.decode
    return kept[0] if len(kept) == 1 else torch.stack(kept, 2).flatten(1, 2)


def greedy(model: MusicgenColumnModel, condition: TextCondition, scale: float, batch: int) -> torch.Tensor:
    """Codes [B, K, T]."""
    law = TokenLaw(temperature=0.0, guidance_scale=scale)
    tokens = ColumnAutoregressiveSampler()(model, condition, law=law, batch_size=batch).tokens
    return model.codes(tokens, condition)


def rows_of(condition: TextCondition, rows: list[int]) -> TextCondition:
    """Some rows of a condition; a single one also without its padding."""
    length = int(condition.mask[rows].sum(1).max())
    return TextCondition(condition.features[rows, :length], condition.mask[rows, :length])


def random_codes(model: MusicgenColumnModel, batch: int, seed: int = 0) -> torch.Tensor:
    size = (batch, model.num_codebooks, model.num_frames)
    return torch.randint(0, CODES, size, generator=torch.Generator().manual_seed(seed))


def write_musicgen(folder: Path, channels: int = 1, **changes: Any) -> Path:
    settings = STEREO_SETTINGS if channels == 2 else MUSICGEN_SETTINGS
    write_language_model(folder, settings, changes or None, BOOKS * channels)
    write(folder, "compression_state_dict.bin", codec_weights(), CODEC_SETTINGS)
    return folder


class Heard(BaseStreamer):
    """A streamer that keeps what it gets."""

    def __init__(self) -> None:
        self.parts: list[Tensor] = []
        self.ends = 0

    def put(self, value: Tensor) -> None:
        assert value.device.type == "cpu" and not self.ends
        self.parts.append(value.clone())

    def end(self) -> None:
        self.ends += 1
