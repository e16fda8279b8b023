"""Speculative masked decoding: a masked model drafts a group in parallel, and checks it one token after the other.

Masked decoding draws a group of tokens as if they were independent, so its law changes with the number of calls. The
law of one token a call in a fixed order is the model's own: every token is drawn given all earlier ones. Here the model
drafts the next tokens of the order from one call, and the next call scores them all, in rows: row w knows the first w
drafts and hides the rest, so it returns exactly what a decode of one token a call would see there. The longest prefix
that passes stands.

It is lossless for every masked model, because the rows repeat the calls they replace; the price is N + 1 rows a call.
Any-subset models (Guo and Ermon, "Reviving any-subset autoregressive models with principled parallel sampling and
speculative decoding" (ASSD), 2504.20456) score all drafts in one row, but only if their conditionals agree with one
joint; a masked model's need not. The order must not depend on what is drawn, so no order by confidence has this
guarantee, and none is offered.
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import Tensor, nn

from visual_spec.kernels.law import NO_DRAFT
from visual_spec.models.core.masked_protocol import MaskedModel, MaskedState
from visual_spec.models.core.protocol import DecodeState, TokenGrid
from visual_spec.models.core.settings import MOST_CALLS, OneOf, Within, register_to_config
from visual_spec.samplers.core.checks import Acceptance, check_guided, check_returned
from visual_spec.samplers.core.draft_chain import ChainSampler
from visual_spec.samplers.core.drafts import Draft, Label
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.core.masking import FIXED_ORDERS
from visual_spec.samplers.core.noise import DRAFT, TOKEN
from visual_spec.samplers.core.state import Run, State
from visual_spec.samplers.core.trace import IDENTICAL, SampleResult
from visual_spec.samplers.core.verification import Verdict
from visual_spec.samplers.masked.unmasking import check_masked_model
from visual_spec.samplers.orders.along_order import placed_in_grid, slots_in_order


@dataclass
class MaskedOrderState(DecodeState):
    """A batch of an `MaskedOrderModel`. Places count along the order.

    Attributes:
        inner: the masked model's own state.
        order: long [B, L], the slot of the grid at each place.
        tokens: long [B, L + window], the tokens fed last, by place.
        ahead: [R, W, N, V], logits of the N places after the one that each position of the last call predicts, given
            what that position knows.
    """

    inner: MaskedState
    order: Tensor
    tokens: Tensor
    ahead: Tensor

    def select(self, samples: Tensor) -> None:
        rows = self.rows(samples)
        self.logits, self.ahead = self.logits[rows], self.ahead[rows]
        self.order, self.tokens = self.order[samples], self.tokens[samples]
        self.inner.select(samples)


class MaskedOrderModel(nn.Module):
    """A masked model as a `NextTokenModel`: its slots are the places of an order, and each is given all earlier ones.

    Args:
        model: of one codebook; its state can `select` samples.
        order: long [B, L], the slots of each sample in the order of decoding.
    """

    def __init__(self, model: MaskedModel, order: Tensor) -> None:
        super().__init__()
        self.model, self.order = model, order
        self.grid = TokenGrid(1, model.grid.num_tokens)
        self.vocab_size = model.vocab_size

    def prefill(self, condition: object, *, batch_size: int, guided: bool, window: int) -> MaskedOrderState:
        """Score everything from nothing: one call with all tokens hidden."""
        inner = check_guided(self.model.prepare(condition, batch_size=batch_size, guided=guided), guided)
        order = self.order.to(inner.device)
        tokens = order.new_zeros(batch_size, order.shape[1] + window)
        state = MaskedOrderState(torch.empty(0), guided, window, inner, order, tokens, torch.empty(0))
        nothing = order.new_full((batch_size, 1), -1)
        state.logits = self._scores(state, nothing)[:, 0]
        return state

    def forward(self, state: MaskedOrderState, tokens: Tensor, slots: Tensor) -> Tensor:
        """Feed `tokens [B, W]` at the places `slots [B, W]`; position w knows all places up to its own.

        Returns:
            logits [R, W, V] of the places `slots + 1`.
        """
        state.tokens.scatter_(1, slots, tokens)
        return self._scores(state, slots)

    def _scores(self, state: MaskedOrderState, newest: Tensor) -> Tensor:
        """Logits `[R, W, V]` after the places `newest [B, W]`, one row for each; sets `state.ahead`."""
        (batch, width), length = newest.shape, state.order.shape[1]
        places = torch.arange(length, device=newest.device)
        known = places <= newest[..., None]  # [B, W, L]
        fed = torch.where(known, state.tokens[:, None, :length], self.model.mask_id)
        order = state.order[:, None].expand_as(fed)
        grid = torch.empty_like(fed).scatter_(2, order, fed)
        inner = copy(state.inner)
        inner.select(torch.arange(batch, device=newest.device).repeat_interleave(width))
        logits = self.model(inner, grid.flatten(0, 1)[..., None], 0)  # [R W, L, V]
        check_returned(logits, batch * width, state.guided, length, self.vocab_size)
        logits = logits.unflatten(0, (-1, width))  # [R, W, L, V]
        # The next place, and those that may be drafted after it.
        later = newest[..., None] + torch.arange(1, state.window + 1, device=newest.device)  # [B, W, window]
        slots = order.gather(2, later.clamp_(max=length - 1))
        slots = slots.repeat(len(logits) // batch, 1, 1)[..., None].expand(-1, -1, -1, logits.shape[-1])
        predicted = logits.gather(2, slots)  # [R, W, window, V]
        state.ahead = predicted[:, :, 1:]
        return predicted[:, :, 0]


@dataclass
class SpeculativeMaskedState(State):
    """Attributes:
    row: long [B], the position of the last call that predicted the newest token.
    """

    row: Tensor


class SpeculativeMaskedSampler(ChainSampler[MaskedModel]):
    """Decodes a masked model in a fixed order by its law of one token a call, in fewer calls.

    Args:
        num_drafts: tokens drafted before a call, drawn from the model's own laws of the call before. A call scores one
            row more than that for each sample. 0 drafts nothing: one token a call.
        order: one of `masking.FIXED_ORDERS`, the order of the slots.
        acceptance: "identical" (the tokens of `num_drafts=0` for the same generator) or "exact" (the same law).
    """

    takes = ()
    law_names = ("order",)
    gives_logprobs = True

    @register_to_config
    def __init__(
        self,
        num_drafts: Annotated[int, Within(0, MOST_CALLS)] = 7,
        order: Annotated[str, OneOf(FIXED_ORDERS)] = "halton",
        acceptance: Acceptance = "identical",
    ) -> None:
        pass

    def check(self, model: MaskedModel, law: TokenLaw, batch_size: int, parts: dict[str, Any]) -> None:
        check_masked_model(model, law)
        check_in_order(model)

    def plan(self, run: Run) -> None:
        order = slots_in_order(self.config.order, run.model.grid, run.noise.keys)
        run.model, run.window = MaskedOrderModel(run.model, order), self.config.num_drafts + 1

    def prepare(self, run: Run) -> SpeculativeMaskedState:
        row = torch.zeros(run.batch_size, dtype=torch.long, device=run.device)
        return SpeculativeMaskedState.begin(run, scratch=self.config.num_drafts + 1, row=row)

    def propose(self, run: Run, state: SpeculativeMaskedState) -> Draft:
        """Draw drafts from what the last call knew of their places: all but the newest token."""
        slots = state.next_slots(self.config.num_drafts)  # [B, N]
        if not self.config.num_drafts:
            none = state.cache.logits.new_zeros(len(slots), 1, run.model.vocab_size)
            return Draft(slots, Label(none, slots, (0, run.model.vocab_size)), "nothing")
        ahead = state.cache.ahead  # [R, W, N, V]
        rows = state.row.repeat(len(ahead) // len(slots))
        logits = ahead[torch.arange(len(ahead), device=rows.device), rows]  # [R, N, V]
        laws = run.law(logits, slots, run.guided)
        stream, round = (TOKEN, 0) if self.keeps == IDENTICAL else (DRAFT, state.round + 1)
        tokens = run.noise.categorical(laws, slots, stream, round)
        run.lap("draft")
        there = slots < run.num_tokens
        labels = torch.arange(slots.shape[1], device=slots.device).where(there, NO_DRAFT)
        label = Label(laws, labels, (0, run.model.vocab_size))
        return Draft(tokens.where(there, -1), label, "its own parallel law")

    def settle(self, run: Run, state: SpeculativeMaskedState, slots: Tensor, verdict: Verdict) -> None:
        state.row = verdict.kept
        super().settle(run, state, slots, verdict)

    def result(self, run: Run, state: State, tokens: Tensor, trace: dict[str, Any]) -> SampleResult:
        return placed_in_grid(run.model.order, tokens, trace)


def check_in_order(model: MaskedModel) -> None:
    """Refuse a model that cannot be decoded in an order of tokens: of several codebooks, or one that reads the time."""
    if model.grid.codebooks != 1:
        raise ValueError(
            f"the model has {model.grid.codebooks} codebooks; this sampler decodes one. Use MaskedSampler."
        )
    if hasattr(model, "set_time"):
        raise ValueError(
            f"a {type(model).__name__} is told how far the decode is, which no order of tokens says; use MaskedSampler."
        )
