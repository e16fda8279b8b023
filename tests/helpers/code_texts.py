"""Texts of codes by language models of transformers: what is drawn, by their own `generate` and by ours."""

from typing import Any

import torch
from torch import Tensor
from transformers.generation.logits_process import LogitsProcessor, LogitsProcessorList

import visual_spec
from tests.models.next_token.tiny_languages import CODES, END, language_model, texts
from visual_spec.samplers.raster.autoregressive import AutoregressiveSampler
from visual_spec.samplers.raster.jacobi import SpeculativeJacobiSampler

SAMPLERS = {
    "plain": AutoregressiveSampler(),
    "window 4": SpeculativeJacobiSampler(4),
    "window 16": SpeculativeJacobiSampler(16),
    "exact": SpeculativeJacobiSampler(4, "independent", "exact"),
}
SETTINGS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "guidance": dict(guidance_scale=2.5),
    "penalty": dict(repetition_penalty=1.4),
    "n-grams": dict(no_repeat_ngram_size=2),
    "least": dict(min_new_tokens=9),
    "all": dict(guidance_scale=1.8, repetition_penalty=1.3, no_repeat_ngram_size=3, min_new_tokens=3),
}
PROMPTS = texts([7, 4, 9])
NEGATIVE = texts([3, 2, 3], seed=1)
LLAMA = language_model("llama")
LAWS: dict[str, dict[str, Any]] = {
    "plain": {},
    "filtered": dict(temperature=1.3, top_k=20, top_p=0.9),
    "several": dict(top_p=0.8, num_return_sequences=2, no_repeat_ngram_size=2),
    "all": dict(temperature=0.8, top_k=0, **SETTINGS["all"]),
}


class OnlyCodes(LogitsProcessor):
    """Forbids every id that is no code and not the end."""

    def __init__(self, codes: list[tuple[int, int]], end: int | None) -> None:
        self.allowed = [code for first, stop in codes for code in range(first, stop)]
        self.allowed += [] if end is None else [end]

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        kept = torch.full_like(scores, -torch.inf)
        kept[:, self.allowed] = scores[:, self.allowed]
        return kept


class Alternating(LogitsProcessor):
    """A function of the whole text."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        scores[:, 40:80] += ((input_ids.sum(1, keepdim=True) + torch.arange(40)) % 5 == 0) * 3.0
        return scores


def theirs(
    model: Any, inputs: dict[str, Any], codes=(CODES,), end: int | None = END, **settings: Any
) -> Tensor:
    processors = [*settings.pop("logits_processor", []), OnlyCodes(list(codes), end)]
    if not {"max_length", "generation_config"} & settings.keys():
        settings.setdefault("max_new_tokens", 24)
    return model.generate(
        **inputs, eos_token_id=end, logits_processor=LogitsProcessorList(processors), **settings
    )


def ours(
    model: Any,
    inputs: dict[str, Any],
    sampler: Any,
    codes: Any = CODES,
    end: int | None = END,
    **settings: Any,
) -> Tensor:
    if not {"max_length", "generation_config"} & settings.keys():
        settings.setdefault("max_new_tokens", 24)
    visual_spec.accelerate(model, sampler, codes=codes, end=end)
    try:
        return model.generate(**inputs, **settings)
    finally:
        visual_spec.restore(model)


def given(name: str, negative: dict[str, Tensor] = NEGATIVE) -> dict[str, Any]:
    guided = "guidance_scale" in SETTINGS[name]
    second = dict(
        negative_prompt_ids=negative["input_ids"], negative_prompt_attention_mask=negative["attention_mask"]
    )
    return SETTINGS[name] | (second if guided else {})
