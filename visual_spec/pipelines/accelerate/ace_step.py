"""Speed up the language model of ACE-Step 1.5 that the user already has, and undo it.

    handler = LLMHandler()
    handler.initialize(..., backend="pt")
    visual_spec.accelerate(handler)

Its loops draw metadata and then audio codes. Phase "codes", where the time goes, is drawn by a sampler: the codes and
their end alone, guided pairs, the repetition penalty and the length that was asked for included. Everything else goes
the handler's own way. Tokens equal those of its own loops in float32 after the same `torch.manual_seed` on a CPU.

Source: `acestep/llm_inference.py` and `acestep/constrained_logits_processor.py` of ACE-Step-1.5.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from visual_spec.models.core.offload import at_hand
from visual_spec.models.core.transformers_cache import ImagePrompt, Prompt
from visual_spec.models.next_token.code_language import CodeLanguageModel, why_not
from visual_spec.pipelines.accelerate.adapter import (
    Adapter,
    Thing,
    check_writes_texts,
    hang,
    is_accelerated,
    plain,
    tell,
)
from visual_spec.pipelines.accelerate.arguments import LiveStream, noise_of
from visual_spec.pipelines.accelerate.drawn_noise import DrawnNoise
from visual_spec.pipelines.accelerate.speech_rules import BySlot
from visual_spec.samplers.core.history import HistoryRule, NotBefore, RepetitionPenalty, Text
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.registry import RASTER

if TYPE_CHECKING:
    from visual_spec.samplers.core.base import Sampler

_LOOPS = ("_generate_with_cfg_custom", "_generate_with_constrained_decoding")


@dataclass(frozen=True)
class EndAt:
    """At slot `count` and later all mass is on `end`."""

    end: int
    count: int

    def __call__(self, scores: Tensor, text: Text) -> Tensor:
        over = (text.stops - text.start >= self.count)[..., None]
        others = torch.arange(scores.shape[-1], device=scores.device) != self.end
        return scores.masked_fill(over & others, -torch.inf)


class AceStepAdapter(Adapter):
    """ACE-Step 1.5's `LLMHandler`: its audio codes by a sampler of next-token models without a drafter."""

    takes = ("ACE-Step 1.5's LLMHandler",)
    calls = (RASTER,)
    fast_sampler = "speculative-jacobi:window=auto"

    def models(self, thing: object) -> list[Any]:
        return [thing] if type(thing).__name__ == "LLMHandler" and hasattr(thing, "llm_backend") else []

    def accelerate(self, thing: Thing, sampler: Sampler) -> Thing:
        """Replace the loops of its codes.

        Raises:
            TypeError: a sampler that does not fit, a handler without a model, or one whose model another engine runs.
        """
        (handler,) = self.models(thing)
        if handler.llm is None or handler.llm_backend != "pt":
            raise TypeError(
                f"this LLMHandler has llm_backend={handler.llm_backend!r} and {'no' if handler.llm is None else 'a'} "
                "model; call initialize(..., backend='pt') first."
            )
        check_writes_texts(sampler, self.calls, "of which ACE-Step takes none; name another sampler")
        if (reason := why_not(handler.llm)) is not None:
            raise TypeError(f"its {type(handler.llm).__name__} cannot be read: {reason}.")
        loops = {name: functools.partial(_loop, handler, name) for name in _LOOPS}
        hang(handler, sampler=sampler, last_trace=None, **loops)
        return thing


@torch.no_grad()
def _loop(handler: Any, name: str, **given: Any) -> Tensor:
    """What a loop of the handler returns: long [R, T + N], prompts and codes with their end; R = 2 with guidance."""
    processor = given.get("constrained_processor")
    prefix = "batch_" if name == _LOOPS[0] else ""
    ids, mask = given[f"{prefix}input_ids"], given[f"{prefix}attention_mask"]
    if processor is None:
        return plain(handler, name)(**given)
    ready = (
        processor.enabled
        and processor.generation_phase == "codes"
        and processor.state.name == "THINK_TAG"
        and processor.audio_code_token_ids
        and processor.eos_token_id is not None
        and processor._input_contains_think_end_tag(ids[:1])
    )
    if not ready or len(ids) != (2 if prefix else 1):
        return plain(handler, name)(**given)
    processor(ids[:1], torch.zeros(1, processor.vocab_size, device=ids.device))  # it sees that codes begin
    hung, target = is_accelerated(handler), processor.target_codes
    most = given["max_new_tokens"] if target is None else min(given["max_new_tokens"], target + 1)
    stage = CodeLanguageModel(
        handler.llm, _ranges(processor.audio_code_token_ids), processor.eos_token_id, new_tokens=most
    )
    assert stage.end is not None
    # Its loops count padding among the positions.
    places = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
    starts = torch.full((len(ids),), ids.shape[1], device=ids.device)
    mask = torch.ones_like(ids) if mask is None else mask
    rows = [
        Prompt(ids[row : row + 1], mask[row : row + 1], places[row : row + 1], starts[row : row + 1])
        for row in range(len(ids))
    ]
    law = TokenLaw(
        guidance_scale=given.get("cfg_scale", 1.0),
        temperature=max(0.0, given["temperature"]),
        history=_rules(given, processor, stage.end),
        end=stage.end,
    )
    noise = noise_of(stage, handler.sampler, law, None, ids[:1])
    live = LiveStream(given.get("streamer"), ids[:1, :0])
    live.sent = 0  # its loops hand on no prompt
    watching = live.watching(lambda tokens, ready: stage.texts(tokens[:, :ready], None))
    with at_hand(stage, leaves=False), watching:
        result = handler.sampler(
            stage,
            ImagePrompt(rows[0], rows[1] if law.guided else None),
            law=law,
            generator=noise,
            batch_size=1,
        )
    tell(handler, hung, last_trace=result.trace)
    codes = stage.texts(result.tokens, None).to(ids.device)
    if isinstance(noise, DrawnNoise):
        noise.rewind(codes.shape[1])
    live.end(codes)
    for code in codes[0].tolist():
        processor.update_state(code)
    return torch.cat([ids, codes.expand(len(ids), -1)], 1)


def _rules(given: dict[str, Any], processor: Any, end: int) -> tuple[HistoryRule, ...]:
    """The law of a loop in its order: constraint, temperature of the phase, penalty, filters before the temperature."""
    from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    rules: list[HistoryRule] = []
    if processor.target_codes is not None:
        rules += [NotBefore(end, processor.target_codes), EndAt(end, processor.target_codes)]
    if processor.codes_temperature is not None:
        rules.append(BySlot((TemperatureLogitsWarper(float(max(processor.codes_temperature, 1e-6))),)))
    if given["repetition_penalty"] != 1:
        rules.append(RepetitionPenalty(given["repetition_penalty"]))
    top_k, top_p = given["top_k"], given["top_p"]
    filters = (
        *((TopKLogitsWarper(top_k),) if top_k is not None and top_k > 0 else ()),
        *((TopPLogitsWarper(top_p),) if top_p is not None and 0 < top_p < 1 else ()),
    )
    return (*rules, *((BySlot(filters),) if filters else ()))


def _ranges(ids: Iterable[int]) -> list[tuple[int, int]]:
    """Half-open ranges of a set of ids."""
    ordered = sorted(ids)
    cuts = [place for place in range(1, len(ordered)) if ordered[place] != ordered[place - 1] + 1]
    starts, stops = [0, *cuts], [*cuts, len(ordered)]
    return [(ordered[first], ordered[stop - 1] + 1) for first, stop in zip(starts, stops, strict=True)]
