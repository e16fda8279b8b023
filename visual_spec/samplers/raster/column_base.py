"""Columns, the K tokens of one step of a codebook pattern, for samplers of several codebooks.

Given the earlier columns, the tokens of a column are independent. Slots are steps. The noise of codebook k at step s
uses the counter slot s * K + k, called its entry. So one codebook gets the same noise as in the plain samplers.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from visual_spec.kernels.law import POINT_LAW
from visual_spec.models.core.protocol import ColumnModel, NextTokenModel
from visual_spec.samplers.core.acceptance import accepted_prefix, exact_acceptance, residual
from visual_spec.samplers.core.base import Sampler
from visual_spec.samplers.core.checks import CheckedLaw, check_allowed, check_returned
from visual_spec.samplers.core.draft_chain import ChainSampler
from visual_spec.samplers.core.drafts import Draft, Label, rows_of
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.core.noise import ACCEPT, RESIDUAL, TOKEN
from visual_spec.samplers.core.precision import rounding_of
from visual_spec.samplers.core.state import Law, Run, State, TokenView
from visual_spec.samplers.core.trace import DecodeTrace, SampleResult
from visual_spec.samplers.core.verification import Verdict, verify_laws
from visual_spec.samplers.raster.column_residual import draw_product_residual, product_acceptance


class ColumnView(TokenView):
    """The codebook pattern of a model. Entries without a token hold token 0 in the sampler and `special_id` in the
    model.

    Args:
        window: most columns of a call. The view adds that many steps after the last one, all of them forced.
    """

    carries_drafts = True

    def __init__(self, model: ColumnModel, window: int) -> None:
        self.codebooks = model.grid.codebooks
        self.num_steps = model.grid.num_tokens
        self.special_id, self.vocab_size = model.special_id, model.vocab_size
        self.valid = F.pad(model.valid, (0, 0, 0, window))  # [S + W, K]
        self.certain = torch.full((model.vocab_size,), -torch.inf)  # the law of a forced entry
        self.certain[:1] = 0

    def to(self, device: torch.device) -> None:
        self.valid, self.certain = self.valid.to(device), self.certain.to(device)

    def opened(self, run: Run, slots: Tensor, length: int) -> Tensor:
        laws = self.laws(run.law, self.first(run.cache.logits), slots, run.guided)
        tokens = slots.new_zeros(len(slots), length, self.codebooks)
        self.write(tokens, slots, run.noise.categorical(laws, self.entries(slots), TOKEN))
        return tokens

    def first(self, logits: Tensor) -> Tensor:
        return logits[:, None]  # [R, 1, K, V]

    def entries(self, slots: Tensor) -> Tensor:
        entry = torch.arange(self.codebooks, device=slots.device)
        return (slots[..., None] * self.codebooks + entry).flatten(1)

    def places(self, positions: Tensor) -> Tensor:
        return ColumnView.entries(self, positions)

    def read(self, tokens: Tensor, slots: Tensor) -> Tensor:
        return rows_of(tokens, slots).flatten(1)

    def write(self, tokens: Tensor, slots: Tensor, entries: Tensor) -> None:
        columns = entries.view(*slots.shape, self.codebooks)
        tokens.scatter_(1, slots[..., None].expand_as(columns), columns)

    def fed(self, entries: Tensor, slots: Tensor) -> Tensor:
        return self.with_special(entries.view(*slots.shape, self.codebooks), slots)

    def with_special(self, columns: Tensor, steps: Tensor) -> Tensor:
        """Return columns [B, N, K] at steps [B, N] or [N] as the model takes them, `special_id` where none is."""
        return torch.where(self.valid[steps], columns, self.special_id)

    def laws(self, law: Law, logits: Tensor, slots: Tensor, guided: bool) -> Tensor:
        """Return laws [B, N * K, V] from logits [R, N, K, V] that predict steps [B, N]; forced entries are token 0."""
        valid = self.valid[slots]  # [B, N, K]
        if logits.shape != ((2 if guided else 1) * len(slots), *valid.shape[1:], self.vocab_size):
            # Says what is wrong.
            check_returned(logits, len(slots), guided, *valid.shape[1:], self.vocab_size)
        # The logits of a forced entry are never used, so they are marked as past the grid and not checked.
        at = torch.where(valid, slots[..., None], self.num_steps).flatten(1)
        laws = law(logits.flatten(1, 2), at, guided)
        return torch.where(valid.flatten(1)[..., None], laws, self.certain.to(laws))

    def forced(self, drafts: Tensor, label: Label | None, slots: Tensor) -> tuple[Tensor, Label | None]:
        # An initial draft ignores the pattern; a forced entry is token 0 for certain.
        valid = self.valid[slots].flatten(1)
        if label is not None:
            label = replace(label, rows=torch.where(valid, label.rows, POINT_LAW))
        return drafts.masked_fill(~valid, 0), label


COLUMN = "column"
CODEBOOK = "codebook"
UNITS = (COLUMN, CODEBOOK)


@dataclass
class ColumnDraftState(State):
    """A batch with drafted columns. `tokens` is long [B, S + scratch, K], 0 at forced entries.

    Attributes:
        pending: bool [B]. The first drafted column was refused, but no attempt at its residual was kept. The next call
            must replace it.
        refused_law: [B, K, V], the law that the refused column was drawn from.
    """

    pending: Tensor = field(kw_only=True)
    refused_law: Tensor = field(kw_only=True)

    @classmethod
    def begin(cls, run: Run, scratch: int, **more: Any) -> Self:
        nothing = run.cache.logits.new_full((), -torch.inf)
        shape = run.batch_size, run.model.grid.codebooks, run.model.vocab_size
        precise = torch.promote_types(nothing.dtype, torch.float32)
        pending = torch.zeros(run.batch_size, dtype=torch.bool, device=run.device)
        law = nothing.to(precise).repeat(shape)
        return super().begin(run, scratch, pending=pending, refused_law=law, **more)


class ColumnSampler(Sampler[NextTokenModel, State]):
    """What makes a sampler of tokens one of columns: a base to name before it.

    The result has tokens long [B, S, K], `special_id` where the pattern has no token. The trace counts columns in place
    of tokens: `commit_call` is [B, S], and `tokens_per_call` is columns per call.
    """

    reads_text = False

    def plan(self, run: Run) -> None:
        super().plan(run)
        run.view = ColumnView(run.model, run.window)

    def check(self, model: ColumnModel, law: TokenLaw, batch_size: int, parts: dict[str, Any]) -> None:
        valid, size = getattr(model, "valid", None), (model.grid.num_tokens, model.grid.codebooks)
        if valid is None:
            raise ValueError(
                f"{type(model).__name__} has no codebook pattern; this sampler decodes columns of several codebooks. "
                "Use AutoregressiveSampler or SpeculativeJacobiSampler."
            )
        if tuple(valid.shape) != size or valid.dtype != torch.bool:
            raise ValueError(
                f"the model's pattern is {valid.dtype} of shape {tuple(valid.shape)}; its grid asks for bool {size}, "
                "[steps, codebooks]."
            )
        check_allowed(law, model.vocab_size)

    def result(self, run: Run, state: State, tokens: Tensor, trace: dict[str, Any]) -> SampleResult:
        every = torch.arange(run.num_tokens, device=run.device)
        return SampleResult(run.view.with_special(tokens, every), DecodeTrace(**trace))

    def _near_ties(self, run: Run, target: Tensor, logits: Tensor, steps: Tensor) -> Tensor:
        """Return the columns with a near-tie in one of their entries, bool [B, N]; see `verification.draw_near`.

        Args:
            target: [B, N * K, V].
            logits: [R, N, K, V].
        """
        assert run.unit is not None
        _, margin = run.noise.race(target, run.view.entries(steps), TOKEN)
        valid, law = run.view.valid[steps], run.law.law
        margin = margin.view(valid.shape)  # [B, N, K]
        if law.temperature == 0:  # all mass is on the largest logit, so the law says nothing about the second
            open_law = CheckedLaw(replace(law, temperature=1.0, top_k=0, top_p=1.0), 0)
            best = run.view.laws(open_law, logits, steps, run.guided).topk(2, -1).values
            margin = (best[..., 0] - best[..., 1]).view(valid.shape)
        return (valid & (margin < 2 * rounding_of(logits, law, run.guided, run.unit))).any(-1)


class ColumnChainSampler(ColumnSampler, ChainSampler[NextTokenModel]):
    """As `ColumnSampler`, for samplers that test chains of drafted columns.

    The logits after a column are valid only if all K drafts of the column stand. So a column is kept or refused as a
    whole.
    """

    tries = 8  # attempts at the residual of a column in one call

    def verify(
        self, run: Run, state: ColumnDraftState, logits: Tensor, slots: Tensor, draft: Draft
    ) -> Verdict:
        """Test the drafts. A row may commit nothing while the replacement of its column is pending."""
        view = run.view
        target = view.laws(run.law, logits, slots, run.guided)  # [B, (N + 1) * K, V]
        if self.config.get("unit", COLUMN) == COLUMN and not run.rule.identical:
            verdict, drawn = self._verify_products(run, state, target, slots, draft)
            state.pending = ~drawn
            return replace(verdict, replaced=drawn)
        verdict = verify_laws(
            target,
            run.noise,
            view.entries(slots),
            draft,
            rule=run.rule,
            round=state.round,
            coupled=self.coupled,
            meter=state.meter,
            inside=view.valid[slots].flatten(1),
            group=view.codebooks,
        )
        if run.unit is not None:
            verdict = replace(verdict, near=self._near_ties(run, target, logits, slots))
        return verdict

    def _verify_products(
        self, run: Run, state: ColumnDraftState, target: Tensor, steps: Tensor, draft: Draft
    ) -> tuple[Verdict, Tensor]:
        """Test each column as one token (`product_residual`). Returns the verdict, and bool [B]: replacement drawn."""
        assert draft.label is not None
        codebooks, shape = run.view.codebooks, (*steps.shape, run.view.codebooks, -1)
        # A column that waits for its replacement has no draft to test. All laws may forbid the tokens that stand there.
        first = torch.arange(draft.tokens.shape[1], device=steps.device) < codebooks
        drafts = draft.tokens.masked_fill(state.pending[:, None] & first, -1)
        label = draft.label.dense(drafts)  # [B, N * K, V]
        tokens = drafts.clamp(min=0)
        columns, there = tokens.view(shape[:3]), (drafts >= 0).view(shape[:3]).all(-1)
        probability = product_acceptance(target.view(shape), label.view(shape), columns).masked_fill(
            ~there, 0
        )
        accept = run.noise.bernoulli(probability, steps * codebooks, ACCEPT, state.round)  # [B, N]
        kept = accepted_prefix(accept)
        if self.coupled:
            # Keep or replace the later drafts token by token: a draw from the target law that changes few of them.
            exact = exact_acceptance(target, label, tokens).masked_fill(drafts < 0, 0)
            entries = run.view.entries(steps)
            keep = run.noise.bernoulli(exact, entries, RESIDUAL, state.round)  # [B, N * K]
            position = torch.arange(steps.shape[1], device=steps.device).repeat_interleave(codebooks)
            keep = keep | (position < kept[:, None])
            fresh = run.noise.categorical(residual(target, label), entries, RESIDUAL, state.round)
            tokens = torch.where(keep, tokens, fresh)
        first_refused = kept[:, None] * codebooks
        where = first_refused + torch.arange(codebooks, device=steps.device)  # [B, K]
        refused_law = torch.where(state.pending[:, None, None], state.refused_law, rows_of(label, where))
        at = run.view.entries(steps.gather(1, kept[:, None]))
        column, drawn = draw_product_residual(
            rows_of(target, where), refused_law, run.noise, at, state.round, tries=self.tries
        )
        state.refused_law = refused_law
        return Verdict(tokens.scatter(1, where, column), kept, target), drawn
