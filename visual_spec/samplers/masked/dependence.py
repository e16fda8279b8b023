"""How far groups that are drawn independently are from the model's own chain of one token a call."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from visual_spec.samplers.core.noise import ACCEPT, DRAFT
from visual_spec.samplers.core.state import Run
from visual_spec.samplers.core.trace import DivergenceMeter


class Dependence(DivergenceMeter):
    """A `DivergenceMeter` of groups, which also estimates the dependence that they were drawn without.

    Attributes:
        correlation: [B], the total correlation of all groups, in nats.
    """

    def __init__(self, batch_size: int, device: torch.device) -> None:
        super().__init__(batch_size, device)
        self.correlation = torch.zeros(batch_size, device=device)

    def measure(self, run: Run, state: Any, logits: Tensor, kept: Tensor) -> None:
        """Estimate how far the group of a step is from its own chain of one token a call, in a random order.

        Along an order, token k of the group has some law given the tokens before it, and was drawn from another, which
        knows none of them. The sum over k of the total variation between both bounds the total variation of the group;
        the sum of the log ratios is an estimate of its (conditional) total correlation, a divergence in nats. One call
        estimates both: a random number of the n kept tokens is shown, and the mean over the others, times n, has the
        sum as its mean.

        Where the order looks at the draws, these are the figures of the draws that were kept.

        Args:
            state: a `MaskedRunState`.
            logits: [R, L, V], of the step.
            kept: bool [B, L], the group.
        """
        stage = state.stage
        slots, tokens = stage.entries, state.tokens[..., stage.codebook]
        count = kept.sum(1)  # [B]
        rank = run.noise.uniform(slots, DRAFT, stage.step).masked_fill(~kept, torch.inf).argsort(1).argsort(1)
        shown = (run.noise.uniform(slots[:, :1], ACCEPT, stage.step)[:, 0] * count).long()  # [B], below n
        left = kept & (rank >= shown[:, None])
        tested = state.tokens.clone()
        tested[..., stage.codebook] = tokens.masked_fill(left, run.model.mask_id)
        chained = state.calls(stage.cache, tested, stage.codebook)
        ignored = torch.where(left, slots, run.num_tokens)
        guided = run.law.law.guided
        used, wanted = (
            run.law(part if guided else part[: len(slots)], ignored, guided) for part in (logits, chained)
        )
        moved = (used.exp() - wanted.exp()).clamp(min=0).sum(-1)  # [B, L]
        at = tokens[..., None].clamp(max=run.model.vocab_size - 1)
        ratio = (used.gather(-1, at) - wanted.gather(-1, at))[..., 0]
        number = left.sum(1).clamp(min=1)
        mean = torch.where(left, moved, 0).sum(1) / number
        self.count(mean[:, None].expand_as(moved), kept)
        self.correlation += (torch.where(left, ratio, 0).sum(1) / number * count).to(self.correlation)
