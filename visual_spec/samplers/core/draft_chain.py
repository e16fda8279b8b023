"""Chains of drafts: propose tokens for the next slots, score them in one call, keep those before the first refusal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from visual_spec.samplers.core.acceptance import RELAXED
from visual_spec.samplers.core.base import Sampler
from visual_spec.samplers.core.drafts import Draft, with_bonus
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.core.state import ModelT, Run, State

if TYPE_CHECKING:
    from visual_spec.samplers.core.verification import Verdict


class ChainSampler(Sampler[ModelT, State]):
    """Speculative decoding of a next-token model, or of one of columns. A method defines `propose`, which drafts.

    It reads these settings, if the method declares them: `acceptance` ("identical", "exact", or a relaxed rule) and
    `relaxation`, the numbers of that rule.
    """

    takes = ("codebook",)

    def propose(self, run: Run[ModelT], state: State) -> Draft:
        """Return labelled drafts for the slots after the committed tokens, entry by entry: [B, N * K]."""
        raise NotImplementedError

    def settle(self, run: Run[ModelT], state: State, slots: Tensor, verdict: Verdict) -> None:
        """Update the state after a call. `slots`: long [B, N + 1], the slots that the call scored."""
        run.view.write(state.tokens, slots, verdict.tokens)
        state.commit(slots, verdict.advance, run.num_tokens, verdict.near)

    @property
    def coupled(self) -> bool:
        """Whether verification also keeps or replaces the drafts after a refusal, for the next call to test."""
        return False

    def redraw(self, state: State) -> tuple[int, int | Tensor] | None:
        """Return stream and round of the noise that draws the next drafts from this call's laws; None: no draws."""
        return None

    @property
    def needs_laws(self) -> bool:
        """Whether `settle` reads the laws of a call under every acceptance."""
        return False

    def check(self, model: ModelT, law: TokenLaw, batch_size: int, parts: dict[str, Any]) -> None:
        super().check(model, law, batch_size, parts)
        if self.config.get("acceptance") in RELAXED:
            self.relaxation.check(parts.get("codebook"), model.vocab_size)

    def step(self, run: Run[ModelT], state: State) -> None:
        """Commit 1 to N + 1 slots a row. A complete row does not change."""
        view = run.view
        draft = with_bonus(self.propose(run, state), view.codebooks)  # [B, (N + 1) * K]
        slots = state.next_slots(draft.tokens.shape[1] // view.codebooks)  # the slots that this call scores
        newest = view.read(state.tokens, slots[:, :1] - 1)
        inputs = torch.cat([newest, draft.tokens[:, : -view.codebooks].clamp(min=0)], 1)
        # [R, N + 1, V], or [R, N + 1, K, V]
        logits = run.score(state.cache, view.fed(inputs, slots - 1), slots - 1)
        run.lap("model")
        state.round += 1
        self.settle(run, state, slots, self.verify(run, state, logits, slots, draft))
        run.lap("verify")

    def verify(self, run: Run[ModelT], state: State, logits: Tensor, slots: Tensor, draft: Draft) -> Verdict:
        """Test the drafts of `slots`, long [B, N + 1], by the logits that predict them."""
        from visual_spec.samplers.core.verification import verify  # the default needs none

        return verify(
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
