"""Chains of drafts: propose tokens for the next slots, score them in one call, keep those before the first refusal."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from visual_spec.samplers.core.base import Run, Sampler
from visual_spec.samplers.core.drafts import Draft, with_bonus
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.core.verification import Verdict, verify


class ChainSampler(Sampler):
    """Speculative decoding of a next-token model. A method defines `propose`, which drafts.

    It reads these settings, if the method declares them: `acceptance` ("identical", "exact", or a relaxed rule) and
    `relaxation`, the numbers of that rule.
    """

    takes = ("codebook",)

    def propose(self, run: Run, state: Any) -> Draft:
        """Return labelled drafts for the slots after the committed tokens, [B, N]."""
        raise NotImplementedError

    def settle(self, run: Run, state: Any, slots: Tensor, verdict: Verdict) -> None:
        """Update the state after a call.

        Args:
            slots: long [B, N + 1], the slots that the call scored.
        """
        state.tokens.scatter_(1, slots, verdict.tokens)
        state.commit(slots, verdict.kept + 1, run.num_tokens, verdict.near)

    @property
    def coupled(self) -> bool:
        """Whether verification also keeps or replaces the drafts after a refusal, for the next call to test."""
        return False

    def redraw(self, state: Any) -> tuple[int, int | Tensor] | None:
        """Return stream and round of the noise that draws the next drafts from this call's laws; None: no draws."""
        return None

    @property
    def needs_laws(self) -> bool:
        """Whether `settle` reads the laws of a call under every acceptance."""
        return False

    def check(self, model: Any, law: TokenLaw, batch_size: int, parts: dict[str, Any]) -> None:
        super().check(model, law, batch_size, parts)
        self.relaxation.check(parts.get("codebook"), model.vocab_size)

    def step(self, run: Run, state: Any) -> None:
        """Commit 1 to N + 1 tokens a row. A complete row does not change."""
        draft = with_bonus(self.propose(run, state))  # [B, N + 1]
        slots = state.next_slots(draft.tokens.shape[1])  # the slots that this call scores
        newest = state.tokens.gather(1, slots[:, :1] - 1)
        inputs = torch.cat([newest, draft.tokens[:, :-1].clamp(min=0)], 1)
        logits = run.score(state.cache, inputs, slots - 1)  # [R, N + 1, V]
        run.lap("model")
        state.round += 1
        verdict = verify(
            run.law,
            run.noise,
            logits,
            slots,
            draft,
            run.guided,
            rule=run.rule,
            round=state.round,
            coupled=self.coupled,
            redraw=self.redraw(state),
            meter=state.meter,
            needs_laws=self.needs_laws,
            unit=run.unit,
        )
        self.settle(run, state, slots, verdict)
        run.lap("verify")
