"""Speculative any-order decoding (ASSD): an any-order model drafts in parallel and verifies itself in one call.

Guo and Ermon, "Reviving any-subset autoregressive models with principled parallel sampling and speculative decoding",
2504.20456. Two calls alternate. One asks for the next places of the order in parallel, all given the decoded tokens
only. The other feeds the drafts with a permutation mask, each seeing those before it along the order, so it returns the
laws of one token a call. Drafts are kept in order, and the first refused one is drawn again from the residual.

The first place of a drafting call is asked exactly as one token a call would ask it. So it is no draft: it always
stands, and is committed at once. Every call commits a token, and no sample takes more calls than tokens.

The law is the model's along the order, because the verifying call repeats the calls it replaces. That needs a model
whose prediction of a place does not change with what is fed after it. A masked model's does: see
`masked_speculative` for a method that scores its drafts in rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from visual_spec.models.core.orders import AnyOrderModel
from visual_spec.models.core.settings import CALLS, register_to_config
from visual_spec.samplers.core.checks import Acceptance
from visual_spec.samplers.core.draft_chain import ChainSampler
from visual_spec.samplers.core.drafts import Draft, Label
from visual_spec.samplers.core.noise import TOKEN
from visual_spec.samplers.core.state import Run, State
from visual_spec.samplers.orders.along_order import AlongOrderSampler, GuidanceStart, SlotOrder


@dataclass
class AnyOrderDraftState(State):
    """Attributes:
    drafted: long [B, N], tokens drafted for the places after the text; used by the next call if that verifies.
    laws: [B, N, V] log-probabilities, the laws that they were drawn from.
    """

    drafted: Tensor
    laws: Tensor


class SpeculativeAnyOrderSampler(AlongOrderSampler, ChainSampler[AnyOrderModel]):
    """Decodes an any-order model by its law of one token a call along an order, in fewer calls.

    A pair of calls commits 2 to `num_drafts` + 2 tokens.

    Args:
        num_drafts: tokens drafted after the one that a drafting call commits, at least 1. (The paper's k counts that
            one too.)
        order: as in `AnyOrderSampler`.
        acceptance: "identical" (the tokens of `AnyOrderSampler` for the same generator) or "exact" (its law).
        guidance_start: as in `AnyOrderSampler`.
    """

    @register_to_config
    def __init__(
        self,
        num_drafts: Annotated[int, CALLS] = 7,
        order: SlotOrder = "random",
        acceptance: Acceptance = "identical",
        guidance_start: GuidanceStart = None,
    ) -> None:
        pass

    def first_places(self, num_tokens: int) -> int:
        return self.config.num_drafts + 1

    def plan(self, run: Run) -> None:
        super().plan(run)
        run.window = self.config.num_drafts + 2  # the newest token, the drafts, and one place more

    def prepare(self, run: Run) -> AnyOrderDraftState:
        """Commit the first place, and draft the next ones, from what the prefill asked."""
        none = torch.empty(run.batch_size, 0, device=run.device)
        state = self.start(
            run, AnyOrderDraftState, scratch=self.config.num_drafts + 2, drafted=none.long(), laws=none
        )
        self._draft(run, state, run.cache.logits[:, 1:])
        return state

    def step(self, run: Run, state: AnyOrderDraftState) -> None:
        """Verify what the last call drafted, or draft: the calls alternate, and the prefill drafts."""
        if state.round % 2 == 0:
            super().step(run, state)
        else:
            self._commit_and_draft(run, state)

    def propose(self, run: Run, state: AnyOrderDraftState) -> Draft:
        # Drafts for places past the grid are tested too: what they commit is scratch.
        rows = torch.arange(state.drafted.shape[1], device=run.device).expand_as(state.drafted)
        label = Label(state.laws, rows, (0, run.model.vocab_size))
        return Draft(state.drafted, label, "its own parallel law")

    def _commit_and_draft(self, run: Run, state: AnyOrderDraftState) -> None:
        """Feed the newest token, ask the next places in parallel, commit the first and draft the others."""
        places = state.lengths[:, None] + torch.arange(-1, self.config.num_drafts + 1, device=run.device)
        newest, first = places[:, :1], places[:, 1:2]
        known = torch.cat([newest, first.expand_as(places[:, 1:])], 1)
        logits = run.model.ask(state.cache, state.tokens.gather(1, newest), places, known)[:, 1:]
        run.lap("model")
        state.round += 1
        tokens, near = run.draw(logits[:, :1], first)
        run.scored = logits, places[:, 1:]
        state.tokens.scatter_(1, first, tokens)
        state.commit(first, torch.ones_like(state.lengths), run.num_tokens, near)
        run.lap("verify")
        self._draft(run, state, logits[:, 1:])

    def _draft(self, run: Run, state: AnyOrderDraftState, logits: Tensor) -> None:
        """Draw drafts for the places after the text from logits [R, N, V], which know nothing of each other.

        Each is drawn with its place's own noise, under both acceptances: the call that tests a draft commits its place,
        so no noise is drawn again of which a test has told something.
        """
        slots = state.next_slots(self.config.num_drafts)
        state.laws = run.law(logits, slots, run.guided)
        state.drafted = run.noise.categorical(state.laws, slots, TOKEN)
        run.lap("draft")
