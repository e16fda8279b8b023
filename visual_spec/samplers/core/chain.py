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
    """Speculative decoding of a next-token model. A method says what it drafts: `propose`.

    Settings that it reads, where a method declares them: `acceptance` ("identical", "exact", or a relaxed rule) and
    `relaxation`, the numbers of that rule.
    """

    takes = ("codebook",)

    def propose(self, run: Run, state: Any) -> Draft:
        """Drafts for the slots behind the text, [B, N], with their labels. The state has lengths and tokens."""
        raise NotImplementedError

    def settle(self, run: Run, state: Any, slots: Tensor, verdict: Verdict) -> None:
        """Put what a call found out into the state.

        Args:
            slots: long [B, N + 1], those that the call has scored.
        """
        state.tokens.scatter_(1, slots, verdict.tokens)
        state.commit(slots, verdict.kept + 1, run.num_tokens)

    @property
    def coupled(self) -> bool:
        """Whether drafts behind a refusal are kept or replaced too, to serve again."""
        return False

    def redraw(self, state: Any) -> tuple[int, int | Tensor] | None:
        """Stream and round of the noise that draws the next drafts from the laws of this call; None for no draws."""
        return None

    @property
    def needs_laws(self) -> bool:
        """Whether `settle` reads the laws of a call under every acceptance."""
        return False

    def check(self, model: Any, law: TokenLaw, batch_size: int, parts: dict[str, Any]) -> None:
        super().check(model, law, batch_size, parts)
        self.relaxation.check(parts.get("codebook"), model.vocab_size)

    def step(self, run: Run, state: Any) -> None:
        """Commits 1 to N + 1 tokens a row; a complete row stays as it is."""
        draft = with_bonus(self.propose(run, state))  # [B, N + 1]
        slots = state.next_slots(draft.tokens.shape[1])  # the slots that this call scores
        newest = state.tokens.gather(1, slots[:, :1] - 1)
        inputs = torch.cat([newest, draft.tokens[:, :-1].clamp(min=0)], 1)
        logits = run.model(state.cache, inputs, slots - 1)  # [R, N + 1, V]
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
        )
        self.settle(run, state, slots, verdict)
        run.lap("verify")
