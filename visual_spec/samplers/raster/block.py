"""Block verification: the drafts of a chain are tested together, so that a good later draft may save an earlier one.

Sun et al., "Block verification accelerates speculative decoding", ICLR 2025, algorithm 2. Of all exact tests that look
at one chain it keeps the most drafts in the mean. Each draft must be drawn given the drafts before it, and its label
must be that law: the drafts of Jacobi decoding are not (each was drawn for another text), a drafter's are.
"""

from __future__ import annotations

import torch
from torch import Tensor

from visual_spec.samplers.core.acceptance import AcceptanceRule, residual
from visual_spec.samplers.core.drafts import rows_of
from visual_spec.samplers.core.noise import ACCEPT, RESIDUAL, CounterNoise


def verify_block(
    target: Tensor, label: Tensor, drafts: Tensor, noise: CounterNoise, slots: Tensor, round: int | Tensor
) -> tuple[Tensor, Tensor]:
    """Return how many drafts of each chain are kept, long [B], and the token after them, long [B, 1].

    A chain may end early, at a point that depends on its drafts: after the end the draft law has no mass.

    Args:
        target, label: [B, N, V] log-probabilities; the label is -inf everywhere where there is no draft.
        drafts: long [B, N], -1 where there is no draft; the last position never has one.
        slots: long [B, N], the slots of the drafts.
        round: round of the noise.
    """
    there, at = drafts >= 0, drafts.clamp(min=0)[..., None]
    # [B, N], target / draft of each draft
    ratio = (target.gather(-1, at) - label.gather(-1, at)).squeeze(-1).exp()
    # [B, N], of the drafts before each position: the share of them that may stand
    weight = torch.ones_like(ratio)
    for place in range(1, drafts.shape[1]):
        follows = torch.where(there[:, place - 1], weight[:, place - 1] * ratio[:, place - 1], 0.0)
        weight[:, place] = follows.clamp(max=1)
    left = target.exp() * weight[..., None] - label.exp()  # [B, N, V]
    mass = left.clamp_(min=0).sum(-1)
    mass = torch.where(mass.isnan(), weight, mass)  # past the grid, where a model may say anything
    whole = mass + 1 - weight  # 0 only where nothing is left to draw and all is kept
    keep = torch.where(whole > 0, mass / whole, 1.0)[:, 1:]  # [B, N - 1], to stop after each draft
    keep = noise.bernoulli(keep.masked_fill(~there[:, :-1], 0), slots[:, :-1], ACCEPT, round)
    places = torch.arange(1, drafts.shape[1], device=drafts.device)
    kept = (keep * places).amax(1, keepdim=True)  # the last, else 0
    weighted = rows_of(target, kept) + weight.gather(1, kept).log()[..., None]
    law = residual(weighted, rows_of(label, kept))  # [B, 1, V]
    return kept[:, 0], noise.categorical(law, slots.gather(1, kept), RESIDUAL, round)


BLOCK = AcceptanceRule(whole=verify_block)
