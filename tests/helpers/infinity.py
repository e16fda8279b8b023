"""A tiny Infinity pipeline."""

from typing import Any

import torch

from tests.helpers.tiny import quiet
from tests.helpers.tiny_infinity import SIDES, tiny_bits, tiny_infinity
from tests.helpers.tiny_t5 import tiny_t5, tiny_tokenizer
from visual_spec.models.next_scale.scale_budget import ScaleBudget
from visual_spec.models.text.t5_features import T5Features
from visual_spec.pipelines.infinity import InfinityPipeline
from visual_spec.samplers.scales.scales import ScaleWiseSampler

PROMPTS = ["a red circle", "blue square on a circle"]
TIGHT = ScaleBudget(SIDES, ((0, 0), (1, 1), (4, 5), (9, 11)))


def tiny_pipeline(**changes: Any) -> InfinityPipeline:
    text = T5Features(tiny_t5(), tiny_tokenizer(), max_words=7, clean=False).eval()
    parts = tiny_infinity(dtype=torch.float32, caption_dim=8), tiny_bits(dtype=torch.float32), text
    return quiet(InfinityPipeline(*parts, ScaleWiseSampler(ramp=False), **changes))
