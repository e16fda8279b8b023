"""Official MAGNeT checkpoints (Ziv et al. 2024), as audiocraft exports them, into transformers' modules.

The language model becomes a `MusicgenForCausalLM`, whose modules compute the same without a causal mask;
`visual_spec.models.columns.musicgen.MagnetModel` runs them. `visual_spec.models.columns.audiocraft` reads the files.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
from transformers import MusicgenForCausalLM

from visual_spec.models.columns.audiocraft import load_language_model
from visual_spec.models.columns.audiocraft_settings import TrainingSettings
from visual_spec.models.core.settings import COUNT


@dataclass(frozen=True)
class MagnetSettings:
    """The settings of a checkpoint. Missing ones have the values of the official 10 s music model, except the first
    number of steps, which is 60 for clips longer than 10 s.

    Attributes:
        duration: seconds of the training clips.
        frame_rate: frames a second.
        reach: frames to either side that stages after the first see; None: all.
        span: frames that are hidden together.
        steps: steps of each codebook.
        temperature, top_k, top_p: of the law.
        guidance_scale, least_guidance: the scale at the beginning of a codebook, and the one it falls to.
    """

    duration: float
    frame_rate: int
    reach: int | None
    span: int
    steps: tuple[int, ...]
    temperature: float
    top_k: int
    top_p: float
    guidance_scale: float
    least_guidance: float

    @property
    def num_frames(self) -> int:
        """T, frames of a clip: whole spans, as in audiocraft. A clip of 10 s has 498 of 500."""
        return round(self.duration * self.frame_rate) // self.span * self.span


def load_magnet(
    source: str | os.PathLike, *, dtype: torch.dtype | None = torch.float32, num_heads: int | None = None
) -> tuple[MusicgenForCausalLM, MagnetSettings]:
    """Return the language model of an official checkpoint, and its settings.

    The model's `enc_to_dec_proj` is the projection of the text encoder's states. Run it with `padding="zeros"` to get
    the results of audiocraft. Arguments and errors: see `load_language_model`.
    """
    model, config = load_language_model(
        source,
        "transformer_lm_magnet",
        {"transformer_lm.causal": (False,), "codebooks_pattern.modeling": ("parallel",)},
        dtype=dtype,
        num_heads=num_heads,
    )
    return model, _settings(config, len(model.lm_heads))


def _settings(config: TrainingSettings, num_codebooks: int) -> MagnetSettings:
    duration = config.of_kind(float, "dataset.segment_duration", 10)
    first = 20 if duration <= 10 else 60
    usual = [first] + [10] * (num_codebooks - 1)
    reach = config.of_kind(int, "transformer_lm.subcodes_context", 5)
    generate = "generate.lm"
    top_k = config.of_kind(int, f"{generate}.top_k", 0)
    top_p = config.of_kind(float, f"{generate}.top_p", 0.9)
    return MagnetSettings(
        duration=duration,
        frame_rate=config.of_kind(int, "transformer_lm.compression_model_framerate", 50),
        reach=None if reach < 0 else reach,
        span=config.of_kind(int, "masking.span_len", 3, COUNT),
        steps=tuple(config.of_kind(list, f"{generate}.decoding_steps", usual)),
        temperature=config.of_kind(float, f"{generate}.temp", 3.0),
        # Audiocraft's 0 means no top-p, and with top-p it uses no top-k.
        top_k=0 if top_p else top_k,
        top_p=top_p or 1.0,
        guidance_scale=config.of_kind(float, f"{generate}.max_cfg_coef", 10.0),
        least_guidance=config.of_kind(float, f"{generate}.min_cfg_coef", 1.0),
    )
