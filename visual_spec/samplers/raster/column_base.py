"""Columns, the K tokens of one step of a codebook pattern, for samplers of several codebooks.

Given the earlier columns, the tokens of a column are independent. Slots are steps. The noise of codebook k at step s
uses the counter slot s * K + k, called its entry. So one codebook gets the same noise as in the plain samplers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from visual_spec.models.core.protocol import ColumnModel
from visual_spec.samplers.core.acceptance import accepted_prefix, exact_acceptance, residual
from visual_spec.samplers.core.base import Run, Sampler, State
from visual_spec.samplers.core.checks import CheckedLaw, check_allowed, check_batch_size, check_returned
from visual_spec.samplers.core.drafts import Draft, rows_of, with_bonus
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.core.noise import ACCEPT, RESIDUAL, TOKEN, CounterNoise
from visual_spec.samplers.core.precision import rounding_of
from visual_spec.samplers.core.trace import DecodeTrace, DivergenceMeter, SampleResult
from visual_spec.samplers.core.verification import Verdict, verify_laws
from visual_spec.samplers.raster.column_residual import draw_product_residual, product_acceptance


class ColumnView:
    """The codebook pattern of a model. Entries without a token hold token 0 in the sampler and `special_id` in the
    model.

    Args:
        window: most columns of a call. The view adds that many steps after the last one, all of them forced.
    """

    def __init__(self, model: ColumnModel, window: int, device: torch.device) -> None:
        self.codebooks = model.grid.codebooks
        self.num_steps = model.grid.num_tokens
        self.special_id, self.vocab_size = model.special_id, model.vocab_size
        self.valid = F.pad(model.valid.to(device), (0, 0, 0, window))  # [S + W, K]

    def slots(self, steps: Tensor) -> Tensor:
        """Return the counter slots of all entries of steps [B, N]: long [B, N * K]."""
        return (
            steps[..., None] * self.codebooks + torch.arange(self.codebooks, device=steps.device)
        ).flatten(1)

    def with_special(self, tokens: Tensor, steps: Tensor) -> Tensor:
        """Return tokens [B, N, K] at steps [B, N] or [N] as the model takes them, `special_id` where there is none."""
        return torch.where(self.valid[steps], tokens, self.special_id)

    def laws(
        self, law: Callable[[Tensor, Tensor, bool], Tensor], logits: Tensor, steps: Tensor, guided: bool
    ) -> Tensor:
        """Return laws [B, N, K, V] from logits [R, N, K, V] that predict steps [B, N]; forced entries are token 0."""
        valid = self.valid[steps]  # [B, N, K]
        check_returned(logits, len(steps), guided, *valid.shape[1:], self.vocab_size)
        # The logits of a forced entry are never used, so they are marked as past the grid and not checked.
        at = torch.where(valid, steps[..., None], self.num_steps).flatten(1)
        laws = law(logits.flatten(1, 2), at, guided).view(*valid.shape, -1)
        return self.forced(laws, valid)

    def forced(self, laws: Tensor, valid: Tensor) -> Tensor:
        """Put the laws of forced entries (`valid` [B, N, K] is false) of laws [B, N, K, V] on token 0."""
        certain = laws.new_full(laws.shape[-1:], -torch.inf)
        certain[:1].fill_(0)
        return torch.where(valid[..., None], laws, certain)

    def draw(self, noise: CounterNoise, laws: Tensor, steps: Tensor, stream: int, round: int = 0) -> Tensor:
        """Draw tokens [B, N, K] from laws [B, N, K, V]."""
        return noise.categorical(laws.flatten(1, 2), self.slots(steps), stream, round).view(laws.shape[:-1])


@dataclass
class ColumnState(State):
    """A batch of columns. `tokens` is long [B, S + scratch, K], 0 at forced entries; lengths and calls count steps."""

    @classmethod
    def begin(cls, run: Run, scratch: int, **more: Any) -> Any:
        """Return the state after the prefill: step 0 is drawn and committed. Also sets `run.pattern`."""
        pattern = run.pattern = ColumnView(run.model, scratch, run.device)
        steps = torch.zeros(run.batch_size, 1, dtype=torch.long, device=run.device)
        target = pattern.laws(run.law, run.cache.logits[:, None], steps, run.guided)  # [B, 1, K, V]
        length = pattern.num_steps + scratch
        state = cls(
            cache=run.cache,
            tokens=steps.new_zeros(run.batch_size, length, pattern.codebooks),
            lengths=steps.new_ones(run.batch_size),
            round=0,
            target_calls=steps.new_ones(run.batch_size),
            commit_call=steps.new_zeros(run.batch_size, length),
            meter=None if run.rule.lossless else DivergenceMeter(run.batch_size, run.device),
            near_ties=None if run.unit is None else steps.new_zeros(run.batch_size),
            **more,
        )
        state.write(steps, pattern.draw(run.noise, target, steps, TOKEN))
        return state

    def write(self, steps: Tensor, tokens: Tensor) -> None:
        """Write tokens [B, N, K] at steps [B, N]."""
        self.tokens.scatter_(1, steps[..., None].expand_as(tokens), tokens)


class ColumnSampler(Sampler):
    """A sampler for models of several codebooks.

    The result has tokens long [B, S, K], `special_id` where the pattern has no token. The trace counts columns in place
    of tokens: `commit_call` is [B, S], and `tokens_per_call` is columns per call.
    """

    def check(self, model: Any, law: TokenLaw, batch_size: int, parts: dict[str, Any]) -> None:
        check_column_request(model, law, batch_size)

    def result(self, run: Run, state: Any, tokens: Tensor, trace: dict[str, Any]) -> SampleResult:
        every = torch.arange(run.num_tokens, device=run.device)
        return SampleResult(run.pattern.with_special(tokens, every), DecodeTrace(**trace))


COLUMN = "column"
CODEBOOK = "codebook"
UNITS = (COLUMN, CODEBOOK)


@dataclass
class ColumnDraftState(ColumnState):
    """A batch with drafted columns.

    Attributes:
        pending: bool [B]. The first drafted column was refused, but no attempt at its residual was kept. The next call
            must replace it.
        refused_law: [B, K, V], the law that the refused column was drawn from.
    """

    pending: Tensor
    refused_law: Tensor

    @classmethod
    def begin(cls, run: Run, scratch: int, **more: Any) -> Any:
        nothing = run.cache.logits.new_full((), -torch.inf)
        shape = run.batch_size, run.model.grid.codebooks, run.model.vocab_size
        precise = torch.promote_types(nothing.dtype, torch.float32)
        pending = torch.zeros(run.batch_size, dtype=torch.bool, device=run.device)
        law = nothing.to(precise).repeat(shape)
        return super().begin(run, scratch, pending=pending, refused_law=law, **more)


class ColumnChainSampler(ColumnSampler):
    """Draft a chain of columns, score it in one call, keep the columns before the first refusal and add one.

    The logits after a column are valid only if all K drafts of the column stand. So a column is kept or refused as a
    whole. A method defines `propose`, which drafts.
    """

    unit = COLUMN
    tries = 8  # attempts at the residual of a column in one call

    def propose(self, run: Run, state: Any) -> Draft:
        """Return drafts of the next columns, entry by entry: [B, N * K]."""
        raise NotImplementedError

    def settle(self, run: Run, state: Any, steps: Tensor, verdict: Verdict, advance: Tensor) -> None:
        """Update the state after a call.

        Args:
            steps: long [B, N + 1], the steps that the call scored.
            advance: long [B], how many of them are final.
        """
        state.write(steps, verdict.tokens.view(*steps.shape, -1))
        state.commit(steps, advance, run.num_tokens, verdict.near)

    @property
    def coupled(self) -> bool:
        """Whether verification also keeps or replaces the drafts after a refusal, for the next call to test."""
        return False

    def step(self, run: Run, state: Any) -> None:
        """Commit 0 to N + 1 columns a row, 0 only where a replacement is pending. A complete row does not change."""
        pattern = run.pattern
        draft = with_bonus(self.propose(run, state), pattern.codebooks)  # [B, (N + 1) * K]
        count = draft.tokens.shape[1] // pattern.codebooks
        steps = state.next_slots(count)  # [B, N + 1], scored by this call
        columns = draft.tokens.view(*steps.shape, -1)
        inputs = torch.cat([rows_of(state.tokens, steps[:, :1] - 1), columns[:, :-1]], 1)
        inputs = pattern.with_special(inputs, steps - 1)
        logits = run.score(state.cache, inputs, steps - 1)  # [R, N + 1, K, V]
        run.lap("model")
        state.round += 1
        target = pattern.laws(run.law, logits, steps, run.guided).flatten(1, 2)  # [B, (N + 1) * K, V]
        if self.unit == COLUMN and not run.rule.identical:
            verdict, found = self._verify_products(run, state, target, steps, draft)
        else:
            verdict = verify_laws(
                target,
                run.noise,
                pattern.slots(steps),
                draft,
                rule=run.rule,
                round=state.round,
                coupled=self.coupled,
                meter=state.meter,
                inside=pattern.valid[steps].flatten(1),
                group=pattern.codebooks,
            )
            found = torch.ones_like(state.pending)
            if run.unit is not None:
                verdict = replace(verdict, near=self._near_ties(run, target, logits, steps))
        state.pending = ~found
        self.settle(run, state, steps, verdict, verdict.kept + found)
        run.lap("verify")

    def _near_ties(self, run: Run, target: Tensor, logits: Tensor, steps: Tensor) -> Tensor:
        """Return the columns with a near-tie in one of their entries, bool [B, N]; see `verification.draw_near`.

        Args:
            target: [B, N * K, V].
            logits: [R, N, K, V].
        """
        assert run.unit is not None
        _, margin = run.noise.race(target, run.pattern.slots(steps), TOKEN)
        valid, law = run.pattern.valid[steps], run.law.law
        margin = margin.view(valid.shape)  # [B, N, K]
        if law.temperature == 0:  # all mass is on the largest logit, so the law says nothing about the second
            open_law = CheckedLaw(replace(law, temperature=1.0, top_k=0, top_p=1.0), 0)
            best = run.pattern.laws(open_law, logits, steps, run.guided).topk(2, -1).values
            margin = best[..., 0] - best[..., 1]
        return (valid & (margin < 2 * rounding_of(logits, law, run.guided, run.unit))).any(-1)

    def _verify_products(
        self, run: Run, state: Any, target: Tensor, steps: Tensor, draft: Draft
    ) -> tuple[Verdict, Tensor]:
        """Test each column as one token (`product_residual`). Returns the verdict, and bool [B]: replacement found."""
        assert draft.label is not None
        codebooks, shape = run.pattern.codebooks, (*steps.shape, run.pattern.codebooks, -1)
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
            entries = run.pattern.slots(steps)
            keep = run.noise.bernoulli(exact, entries, RESIDUAL, state.round)  # [B, N * K]
            position = torch.arange(steps.shape[1], device=steps.device).repeat_interleave(codebooks)
            keep = keep | (position < kept[:, None])
            fresh = run.noise.categorical(residual(target, label), entries, RESIDUAL, state.round)
            tokens = torch.where(keep, tokens, fresh)
        first_refused = kept[:, None] * codebooks
        where = first_refused + torch.arange(codebooks, device=steps.device)  # [B, K]
        refused_law = torch.where(state.pending[:, None, None], state.refused_law, rows_of(label, where))
        at = run.pattern.slots(steps.gather(1, kept[:, None]))
        column, found = draw_product_residual(
            rows_of(target, where), refused_law, run.noise, at, state.round, tries=self.tries
        )
        state.refused_law = refused_law
        return Verdict(tokens.scatter(1, where, column), kept, target), found


def check_column_request(model: ColumnModel, law: TokenLaw, batch_size: int) -> None:
    """Refuse, before any compute, a request that a column sampler cannot decode.

    Raises:
        ValueError: the batch size is below 1, the model has no pattern, or `allowed` exceeds the vocabulary.
    """
    check_batch_size(batch_size)
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
