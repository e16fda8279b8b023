"""Laws, tests and draws of a window in one kernel, for logits on a GPU. Elsewhere samplers take them step by step."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from visual_spec.kernels.draw import LawNumbers, draw, on_gpu
from visual_spec.kernels.verify import verify
from visual_spec.samplers.core.acceptance import identical_acceptance
from visual_spec.samplers.core.checks import CheckedLaw
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.core.noise import ACCEPT, DRAFT, RESIDUAL, TOKEN, CounterNoise


@dataclass(frozen=True)
class Verdict:
    """What one call's logits say about its window.

    Attributes:
        tokens: long [B, W]: under identical acceptance what the slot's own noise draws from its law, under exact
            acceptance the draft, or its replacement where it is refused.
        accept: BoolTensor [B, W - 1], whether each draft is kept.
        laws: [B, W, V] log-probabilities; [B, W, 0] under identical acceptance, which needs none.
        drawn: long [B, W], the next drafts of the slots; None where drafts are carried over.
    """

    tokens: Tensor
    accept: Tensor
    laws: Tensor
    drawn: Tensor | None = None


def fits(logits: Tensor) -> bool:
    """Whether the kernels take these logits. They compute in float32."""
    return on_gpu(logits) and logits.dtype != torch.float64


def numbers(law: TokenLaw, guided: bool, vocab_size: int) -> LawNumbers:
    """A law as the kernels take it."""
    return law.numbers(guided, vocab_size)


def draw_tokens(
    law: CheckedLaw, noise: CounterNoise, logits: Tensor, slots: Tensor, guided: bool, stream: int = TOKEN
) -> Tensor:
    """`noise.categorical(law(logits, slots, guided), slots, stream)`, in one kernel where it fits: long [B, W]."""
    if not fits(logits):
        return noise.categorical(law(logits, slots, guided), slots, stream)
    tokens, finite = draw(
        logits, noise.keys, slots, numbers(law.law, guided, logits.shape[-1]), stream=stream
    )
    law.remember(~finite, slots)
    return tokens


def verify_identical(
    law: CheckedLaw, noise: CounterNoise, logits: Tensor, slots: Tensor, drafts: Tensor, guided: bool
) -> Verdict:
    """Keep the drafts [B, W - 1] that are the tokens which the slots' own noise draws."""
    tokens = draw_tokens(law, noise, logits, slots, guided)
    accept = identical_acceptance(tokens[:, :-1], drafts)
    return Verdict(tokens, accept, logits.new_empty(*slots.shape, 0))


def verify_exact(
    law: CheckedLaw,
    noise: CounterNoise,
    logits: Tensor,
    slots: Tensor,
    drafts: Tensor,
    guided: bool,
    stored_laws: Tensor,
    draft_laws: Tensor,
    *,
    round: int | Tensor,
    coupling: str,
) -> Verdict:
    """Test the drafts [B, W - 1] by the exact rule, replace refused ones, and draw the slots anew from their laws.

    Args:
        stored_laws: [B, C, V], the laws that drafts were drawn from.
        draft_laws: long [B, W], which of them each draft was drawn from, as in `kernels.verify`.
        coupling: of the next drafts; under "maximal" they are the tokens themselves.
    """
    stream, draw_round = {"gumbel": (TOKEN, 0), "independent": (DRAFT, round), "maximal": (None, 0)}[coupling]
    laws, accept, tokens, drawn, finite = verify(
        logits,
        F.pad(drafts, (0, 1)),
        stored_laws,
        draft_laws,
        noise.keys,
        slots,
        numbers(law.law, guided, logits.shape[-1]),
        round=round,
        accept_stream=ACCEPT,
        residual_stream=RESIDUAL,
        draw_stream=stream,
        draw_round=draw_round,
    )
    law.remember(~finite, slots)
    return Verdict(tokens, accept[:, :-1], laws, None if stream is None else drawn)
