"""The parts of a pipeline around an official MAGNeT checkpoint, with the settings that it was published with."""

import os
from typing import Any

import torch
from transformers import EncodecModel

from visual_spec.models.columns.audiocraft_codec import load_audiocraft_codec
from visual_spec.models.masked.magnet_checkpoint import load_magnet
from visual_spec.pipelines.sampler_text import make_sampler
from visual_spec.samplers.masked.presets import PRESETS


def official_magnet(
    source: str | os.PathLike, *, codec: EncodecModel | None, dtype: torch.dtype | None
) -> tuple[Any, EncodecModel, Any, dict[str, Any]]:
    """Transformer, codec, sampler and the settings of `AudioPipeline`; see `AudioPipeline.from_magnet`.

    Raises:
        FileNotFoundError, OSError, ValueError: as `load_magnet` and `load_audiocraft_codec`.
    """
    loaded = load_magnet(source, dtype=dtype)
    own = loaded.settings
    sampler = make_sampler(
        "masked",
        **PRESETS["magnet"].settings,
        steps=own.steps,
        span=own.span,
        least_guidance=own.least_guidance,
    )
    published: dict[str, Any] = dict(
        default_guidance_scale=own.guidance_scale,
        default_temperature=own.temperature,
        default_top_k=own.top_k,
        default_top_p=own.top_p,
        max_audio_length_in_s=own.duration,
        padding="zeros",
        masked=True,
        reach=own.reach,
    )
    return loaded.model, load_audiocraft_codec(source) if codec is None else codec, sampler, published
