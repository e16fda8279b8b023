"""A tiny pipeline of MAGNeT, with the settings that benches and evaluations of music run."""

from tests.helpers.tiny_audio import tiny_audio_pipeline
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.masked.masked import MaskedSampler
from visual_spec.samplers.masked.policies import LawByStep, Schedule

PROMPTS = ["a slow sad organ", "melody", "organ in minor", "a melody"]
LAW = TokenLaw(guidance_scale=2.0, top_k=6)
MASKED_LAW = TokenLaw(guidance_scale=2.0, temperature=1.7)
MASKED = "masked:steps=4/2/2,span=3,clock=magnet,temperature=falling,guidance=falling"


def magnet_sampler() -> MaskedSampler:
    """The plain decoding of the tiny MAGNeT."""
    return MaskedSampler(
        (4, 2, 2),
        span=3,
        schedule=Schedule(clock="magnet"),
        by_step=LawByStep(temperature="falling", guidance="falling"),
    )


def masked_pipeline():
    return tiny_audio_pipeline(
        magnet_sampler(), masked=True, reach=4, default_guidance_scale=2.0, default_temperature=1.7
    )
