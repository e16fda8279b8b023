"""Published settings of masked decoders, as data: the sampler's settings, and the law. Pipelines start with them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from visual_spec.models.core.settings import of_settings
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.masked.masked import MaskedSampler


@dataclass(frozen=True)
class MaskedPreset:
    """Published settings of a `MaskedSampler`, or one of its kind, one by one, and the law."""

    settings: dict[str, Any]
    law: TokenLaw
    kind: type[MaskedSampler] = MaskedSampler

    def sampler(self, **others: Any) -> MaskedSampler:
        """The sampler with these settings, and others in their place."""
        return of_settings(self.kind, **self.settings | others)


_MASKGCT = dict(
    score="probability",
    choice_temperature=1.0,
    temperature="falling",
    falls="before",
    filtered_score=True,
    score_temperature=1.0,
)

PRESETS = {
    "mage": MaskedPreset(dict(steps=20, choice_temperature=6.0), TokenLaw()),
    # The Gumbel scale falls from 2 at the first step to 0 at the last of 12.
    "amused": MaskedPreset(dict(steps=12, choice_temperature=2.0 * 12 / 11), TokenLaw(guidance_scale=10.0)),
    # Its `cfg_scale` is 4. At another temperature its noise has that scale, and `score_temperature` is 1.
    "dimoo": MaskedPreset(
        dict(steps=64, choice_temperature=1.0, falls="never"), TokenLaw(guidance_scale=5.0)
    ),
    # Steps, span and law come from a checkpoint.
    "magnet": MaskedPreset(dict(clock="magnet", temperature="falling", guidance="falling"), TokenLaw()),
    "halton": MaskedPreset(dict(steps=32, schedule="arccos", clock="halton", score="halton"), TokenLaw()),
    # MaskGCT's two stages. Both draw from the likeliest 2 % of the codes: of 8192, and of 1024. The models guide their
    # hidden states themselves (`visual_spec.models.masked.maskgct`).
    "maskgct": MaskedPreset(dict(steps=25, **_MASKGCT), TokenLaw(temperature=0.9, top_k=164)),
    "maskgct-acoustic": MaskedPreset(
        dict(steps=(25, 10, *[1] * 10), **_MASKGCT), TokenLaw(temperature=1.5, top_k=21)
    ),
}
