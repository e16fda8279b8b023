"""Official MusicGen and AudioGen checkpoints, as audiocraft exports them, into transformers' MusicGen.

Copet et al. 2023, "Simple and controllable music generation" (mono, and stereo of two interleaved channels); Kreuk et
al. 2023, "AudioGen", in its later version with the same network. `visual_spec.models.columns.audiocraft` reads the
files. The text encoder, a T5, is not in them.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from transformers import EncodecModel, MusicgenConfig, MusicgenForConditionalGeneration, T5EncoderModel

from visual_spec.models.columns.audiocraft import load_language_model
from visual_spec.models.columns.audiocraft_codec import load_audiocraft_codec
from visual_spec.models.columns.audiocraft_settings import shown


def load_musicgen(
    source: str | os.PathLike,
    text_encoder: T5EncoderModel | str | os.PathLike,
    *,
    codec: EncodecModel | None = None,
    dtype: torch.dtype | None = torch.float32,
    num_heads: int | None = None,
) -> tuple[MusicgenForConditionalGeneration, float]:
    """Return the model of an official checkpoint, and the seconds of its training clips.

    Its `generation_config` has the settings of the published clips. Run it with `padding="zeros"` to get the results of
    audiocraft: its own `generate` does not see the padding of captions.

    Args:
        source: the folder with `state_dict.bin`, and `compression_state_dict.bin` unless `codec` is given.
        text_encoder: the T5 that the checkpoint names (`t5-base` for music), or its folder or Hub id.
        codec: in place of the folder's.
        dtype, num_heads: as in `load_language_model`.

    Raises:
        FileNotFoundError, OSError: there is no such file, codec or text encoder.
        ValueError: as in `load_language_model` and `load_audiocraft_codec`; or text encoder, codec and decoder do not
            fit each other.
    """
    decoder, config = load_language_model(
        source,
        "transformer_lm",
        {
            "transformer_lm.causal": (True,),
            "codebooks_pattern.modeling": ("delay",),
            "codebooks_pattern.delay.flatten_first": (0, None),
            "codebooks_pattern.delay.empty_initial": (0, None),
            "interleave_stereo_codebooks.per_timestep": (False, None),
        },
        dtype=dtype,
        num_heads=num_heads,
    )
    channels = 2 if config.of_kind(bool, "interleave_stereo_codebooks.use", False) else 1
    duration = config.of_kind(float, "dataset.segment_duration", 30)
    named = config.of_kind(str, "conditioners.description.t5.name", "t5-base")
    count = decoder.config.num_codebooks
    if count % channels:
        raise ValueError(f"{config.path} holds {count} codebooks, which are no two interleaved channels.")
    usual = [book // channels for book in range(count)]
    if (delays := config("codebooks_pattern.delay.delays", usual)) != usual:
        raise ValueError(
            f"{config.path} was trained with codebooks_pattern.delay.delays={shown(delays)}; transformers' MusicGen "
            f"delays its {count} codebooks by {usual}."
        )
    codec = load_audiocraft_codec(source) if codec is None else codec
    quantiser: Any = codec.quantizer
    books, entries = len(quantiser.layers) * channels, codec.config.codebook_size
    if (count, decoder.config.vocab_size) != (books, entries):
        raise ValueError(
            f"{config.path} predicts {count} codebooks of {decoder.config.vocab_size} codes, but the codec has {books} "
            f"of {entries}; pass codec=, the one that the model was trained on."
        )
    if not isinstance(text_encoder, T5EncoderModel):
        text_encoder = T5EncoderModel.from_pretrained(text_encoder, dtype=decoder.dtype)
    projection: Any = decoder.enc_to_dec_proj
    width, dim = projection.in_features, decoder.config.hidden_size
    if text_encoder.config.hidden_size != width:
        raise ValueError(
            f"{config.path} reads text features of {width} channels, but the text encoder has "
            f"{text_encoder.config.hidden_size}; pass {named}, which the settings name."
        )
    if width == dim:
        raise ValueError(
            f"{config.path} projects text features of {width} channels to as many, which transformers' MusicGen has no "
            "layer for."
        )
    del decoder.enc_to_dec_proj
    decoder.config.audio_channels = channels
    model = _joined(projection, text_encoder=text_encoder, audio_encoder=codec, decoder=decoder)
    # Clips are drawn by default as `MusicGen.set_generation_params` of audiocraft has them, and begin as transformers'.
    own, special = model.generation_config, decoder.config.vocab_size
    own.do_sample, own.guidance_scale, own.top_k, own.temperature = True, 3.0, 250, 1.0
    own.decoder_start_token_id = own.pad_token_id = own.bos_token_id = special
    own.max_length = int(duration * codec.config.frame_rate)
    return model.eval(), duration


def _joined(projection: torch.nn.Module, **parts: Any) -> MusicgenForConditionalGeneration:
    """An empty model that gets our parts: made of them, it would initialise their weights again."""
    with torch.device("meta"):
        model: Any = MusicgenForConditionalGeneration(
            MusicgenConfig(**{name: part.config.to_dict() for name, part in parts.items()})
        )
    for name, part in parts.items():
        setattr(model, name, part)
        setattr(model.config, name, part.config)
    model.enc_to_dec_proj = projection
    return model
