"""What a pipeline says about itself. Plain data, no PyTorch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# The law's settings that a pipeline saves defaults of, and all that a call takes.
LAW_DEFAULTS = ("guidance_scale", "temperature", "top_k", "top_p")
LAW_SETTINGS = (*LAW_DEFAULTS, "guidance_until")


@dataclass(frozen=True)
class PipelineFacts:
    """What those who draw, measure or compare need to know of a pipeline, loaded or saved.

    Attributes:
        medium: "image", "video" or "audio".
        unit: what a call commits, in the plural, as printed: "tokens", "columns" or "scales".
        calls: the kinds of calls that its model answers (`visual_spec.models.core.calls`).
        plain_sampler: its plain decoding, as on the command line.
        fast_sampler: what `visual_spec.accelerate` sets when no sampler is named; the plain one where no other has been
            faster by the clock.
        shorter_sampler: where the fast sampler is the plain one, one that takes less time and has a law of its own.
        default_settings: the law's settings where none are given.
        comparable: whether an accelerated decoding is compared with the plain one. Masked models and Infinity have one
            way to decode.
        stored_as: what keeps a sample: its token "ids", or the finished "canvas" where ids do not tell the picture.
    """

    medium: str
    unit: str
    calls: tuple[str, ...]
    plain_sampler: str
    fast_sampler: str
    default_settings: Mapping[str, Any]
    comparable: bool = True
    stored_as: str = "ids"
    shorter_sampler: str | None = None
