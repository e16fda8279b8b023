"""Official files of audiocraft with their published settings, and the tunes that a MusicGen Melody follows."""

import os
from typing import Any

import torch
from torch import Tensor

from visual_spec.models.columns.audiocraft_codec import load_audiocraft_codec
from visual_spec.models.columns.musicgen_checkpoint import load_musicgen
from visual_spec.models.masked.magnet_checkpoint import load_magnet
from visual_spec.pipelines.sampler_text import make_sampler
from visual_spec.samplers.masked.presets import PRESETS


def official_musicgen(
    source: str | os.PathLike, text_encoder: Any, *, codec: Any, dtype: torch.dtype | None
) -> tuple[Any, dict[str, Any]]:
    """The model and the published settings of `AudioPipeline.from_audiocraft`.

    Raises:
        FileNotFoundError, OSError, ValueError: as `load_musicgen`.
    """
    loaded = load_musicgen(source, text_encoder, codec=codec, dtype=dtype)
    return loaded.model, _published(loaded.settings)


def official_magnet(
    source: str | os.PathLike, *, codec: Any, dtype: torch.dtype | None
) -> tuple[Any, Any, Any, dict[str, Any]]:
    """Transformer, codec, sampler and the published settings of `AudioPipeline.from_magnet`.

    Raises:
        FileNotFoundError, OSError, ValueError: as `load_magnet` and `load_audiocraft_codec`.
    """
    loaded = load_magnet(source, dtype=dtype)
    own = loaded.settings
    steps = {"steps": own.steps, "span": own.span, "least_guidance": own.least_guidance}
    sampler = make_sampler("masked", **PRESETS["magnet"].settings, **steps)
    settings = _published(own) | {"default_top_p": own.top_p, "masked": True, "reach": own.reach}
    return loaded.model, load_audiocraft_codec(source) if codec is None else codec, sampler, settings


def _published(own: Any) -> dict[str, Any]:
    """Settings of a pipeline that both kinds of files name."""
    return {
        "default_guidance_scale": own.guidance_scale,
        "default_temperature": own.temperature,
        "default_top_k": own.top_k,
        "max_audio_length_in_s": own.duration,
        "padding": "zeros",
    }


def check_melody(features: Tensor, model: Any, count: int) -> None:
    """Refuse the chroma of tunes that `model` does not follow; `count`: prompts.

    Raises:
        ValueError: the model follows no tune, or the features have another shape.
    """
    chroma = getattr(model.config, "num_chroma", None)
    if chroma is None:
        raise ValueError(
            "melody_features given, but this model follows no tune; load a MusicgenMelodyForConditionalGeneration, "
            "or leave them out."
        )
    shape = tuple(features.shape)
    if len(shape) != 3 or shape[0] not in (1, count) or not shape[1] or shape[2] != chroma:
        raise ValueError(
            f"melody_features of shape {shape} for {count} prompts; pass [1 or {count}, L, {chroma}], the "
            "input_features of the model's processor."
        )
