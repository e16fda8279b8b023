"""Many tokens a call: masked models, and models of scales."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from visual_spec.models.core.masked_protocol import MaskedModel
from visual_spec.models.core.protocol import ScaleModel, ScaleTokenizer
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.core.noise import (
    CHOICE,
    TOKEN,
    CounterNoise,
)
from visual_spec.samplers.naive.next_token import slots_from


def maskgit(
    model: MaskedModel,
    condition: object,
    law: TokenLaw,
    noise: CounterNoise,
    steps: int = 8,
    choice_temperature: float = 0.0,
) -> Tensor:
    """MaskGIT: Chang et al., CVPR 2022, section 3.2. Returns tokens [1, L].

    A step draws all hidden tokens, keeps the likeliest draws, and hides the others again; a cosine says how many. The
    likelihood is that of the law before top-k and top-p, with Gumbel noise that fades.
    """
    state = model.prepare(condition, batch_size=1, guided=law.guided)
    slots, count = slots_from(0, model.grid.num_tokens), model.grid.num_tokens
    tokens = torch.full_like(slots, model.mask_id)
    for step in range(steps):
        logits, hidden = model(state, tokens[..., None], 0), tokens == model.mask_id
        drawn = noise.categorical(law(logits, law.guided, slots), slots, TOKEN, step)
        likely = replace(law, top_k=0, top_p=1.0)(logits, law.guided, slots)
        score = likely.gather(-1, drawn[..., None])[..., 0]
        fading = choice_temperature * (1 - (step + 1) / steps)
        score = score + fading * noise.gumbel(slots, 1, CHOICE, step, score.dtype)[..., 0]
        share = math.cos(math.pi / 2 * (step + 1) / steps)
        count = 0 if step + 1 == steps else max(1, min(count - 1, math.floor(share * slots.shape[1] + 1e-9)))
        tokens = torch.where(hidden, drawn, tokens)
        unsure = score.masked_fill(~hidden, math.inf).argsort(dim=1, stable=True)[:, :count]
        tokens = tokens.scatter(1, unsure, model.mask_id)
    return tokens


def magnet(
    model: MaskedModel,
    condition: object,
    law: TokenLaw,
    noise: CounterNoise,
    steps: Sequence[int] = (20, 10, 10, 10),
    span: int = 3,
) -> Tensor:
    """MAGNeT: Ziv et al., ICLR 2024, section 3, with the schedule of its public code. Returns tokens [1, L, K].

    Codebooks are decoded one after the other. Spans of tokens are kept or hidden together; a span is as sure as its
    surest token. Guidance falls with the hidden share, and the temperature with the steps.
    """
    state = model.prepare(condition, batch_size=1, guided=law.guided)
    length, books = model.grid.num_tokens, model.grid.codebooks
    slots, spans = slots_from(0, length), -(-length // span)
    tokens = torch.full((1, length, books), model.mask_id)
    for book, calls in enumerate(steps):
        hidden, entries, count = torch.ones(1, spans, dtype=torch.bool), slots * books + book, spans
        shares = [max(0.0, math.cos(math.pi / 2 * step / max(calls - 1, 1))) for step in range(calls)]
        for step, share in enumerate(shares):
            cooler = max(law.temperature * (1 - (step + 1) / calls), 0.01)
            scale = share * law.guidance_scale + (1 - share) if law.guided else 1.0
            now = replace(law, guidance_scale=scale, temperature=cooler)
            logits = model(state, tokens, book)
            logits = logits if now.guided else logits[:1]  # without the unconditional rows
            drawn = noise.categorical(now(logits, now.guided, slots), entries, TOKEN, step)
            likely = replace(now, top_k=0, top_p=1.0)(logits, now.guided, slots)
            open_tokens = hidden.repeat_interleave(span, 1)[:, :length]
            score = likely.gather(-1, drawn[..., None])[..., 0].masked_fill(~open_tokens, -math.inf)
            score = F.pad(score, (0, spans * span - length), value=-math.inf)
            score = score.view(1, spans, span).amax(-1).masked_fill(~hidden, math.inf)
            following = [*shares, 0.0][step + 1]
            count = max(step + 1 < calls, min(count, math.floor(following * spans + 1e-9)))
            tokens[..., book] = torch.where(open_tokens, drawn, tokens[..., book])
            hidden = torch.zeros_like(hidden).scatter(1, score.argsort(dim=1, stable=True)[:, :count], True)
            again = hidden.repeat_interleave(span, 1)[:, :length]
            tokens[..., book] = tokens[..., book].masked_fill(again, model.mask_id)
    return tokens


# -- next-scale models -------------------------------------------------------------------------------------------------


def collaborative(
    large: ScaleModel,
    small: ScaleModel,
    tokenizer: ScaleTokenizer,
    condition: object,
    law: TokenLaw,
    noise: CounterNoise,
    num_draft_scales: int,
) -> Tensor:
    """Collaborative decoding (CoDe): Chen et al. 2025, section 3.2. Returns the tokens of all scales, [1, slots].

    The large model draws the first scales, the small one the rest. Guidance grows linearly from none at the first scale
    to the law's at the last (VAR: Tian et al. 2024). With one model in both places this is VAR's own sampling.
    """
    model, last = large, len(tokenizer.scales) - 1
    state = large.prefill(condition, batch_size=1, guided=law.guided)
    logits, maps, parts, first = state.logits, [], [], 0
    canvas = tokenizer.begin(1, logits.device, logits.dtype)
    for scale in range(last + 1):
        if scale == num_draft_scales:
            model, state = small, small.prefill(condition, batch_size=1, guided=law.guided, maps=maps)
            logits = state.logits
        elif scale:
            logits = model(state, maps[-1], scale)
        now = replace(law, guidance_scale=1 + (law.guidance_scale - 1) * scale / last) if law.guided else law
        slots = slots_from(first, first := first + logits.shape[1])
        logits = logits if now.guided else logits[:1]  # without the unconditional rows
        parts.append(noise.categorical(now(logits, now.guided, slots), slots, TOKEN))
        canvas = tokenizer.accumulate(canvas, scale, parts[-1])
        if scale < last:
            maps.append(tokenizer.next_map(canvas, scale + 1))
    return torch.cat(parts, 1)
