"""Published settings of masked decoders, as data: those of the sampler, and the law."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from visual_spec.samplers.core.law import TokenLaw


@dataclass(frozen=True)
class MaskedPreset:
    """Published settings: `MaskedSampler(**settings)`, and the law."""

    settings: dict[str, Any]
    law: TokenLaw


_MAGNET = dict(
    clock="magnet", span=3, span_score="max", temperature="falling", guidance="falling", least_guidance=1.0
)
_MASKGCT = dict(
    score="probability",
    choice_temperature=1.0,
    temperature="falling",
    falls="before",
    filtered_score=True,
    score_temperature=1.0,
)
_MUSIC = TokenLaw(guidance_scale=10.0, temperature=3.0, top_p=0.9)
_SOUND = TokenLaw(guidance_scale=20.0, temperature=3.5, top_p=0.8)

PRESETS = {
    "maskgit": MaskedPreset(dict(steps=8, choice_temperature=4.5), TokenLaw()),
    "mage": MaskedPreset(dict(steps=20, choice_temperature=6.0), TokenLaw()),
    # The Gumbel scale falls from 2 at the first step to 0 at the last of 12.
    "amused": MaskedPreset(dict(steps=12, choice_temperature=2.0 * 12 / 11), TokenLaw(guidance_scale=10.0)),
    "halton": MaskedPreset(dict(steps=32, schedule="arccos", clock="halton", score="halton"), TokenLaw()),
    # ReCAP's MaskGIT baseline: guidance from 0.05 to 0.1 beyond 1, temperature from 1 to 0.7.
    "recap": MaskedPreset(
        dict(
            steps=32,
            schedule="power_2.5",
            choice_temperature=5.5,
            temperature="root",
            guidance="ramp",
            least_guidance=1.05,
        ),
        TokenLaw(guidance_scale=1.1),
    ),
    "entropy-bound": MaskedPreset(dict(steps=256, score="entropy", entropy_bound=0.1), TokenLaw()),
    # MaskGCT's two stages. Both draw from the likeliest 2 % of the codes: of 8192, and of 1024. The models guide their
    # hidden states themselves (`visual_spec.models.masked.maskgct`).
    "maskgct": MaskedPreset(dict(steps=25, **_MASKGCT), TokenLaw(temperature=0.9, top_k=164)),
    "maskgct-acoustic": MaskedPreset(
        dict(steps=(25, 10, *[1] * 10), **_MASKGCT), TokenLaw(temperature=1.5, top_k=21)
    ),
    # The audio models differ in clip length and in training data. The released interface decodes all of them with the
    # first one's settings; these are the settings of the training configurations.
    "magnet-10s": MaskedPreset(dict(steps=(20, 10, 10, 10), **_MAGNET), _MUSIC),
    "magnet-30s": MaskedPreset(dict(steps=(60, 10, 10, 10), **_MAGNET), _MUSIC),
    "audio-magnet-10s": MaskedPreset(dict(steps=(20, 10, 10, 10), **_MAGNET), _SOUND),
}
