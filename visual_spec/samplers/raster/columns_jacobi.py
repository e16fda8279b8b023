"""Jacobi decoding of several codebooks: one call scores a window of drafted columns, and the kept ones are committed.

Drafts, couplings and proofs are those of one codebook (`jacobi`). The test of a column is new. It has two exact forms:
one coin for all its tokens (unit "column"), or one coin for each token (unit "codebook").
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any

import torch
from torch import Tensor

from visual_spec.kernels.law import POINT_LAW
from visual_spec.models.core.configuration import register_to_config
from visual_spec.models.core.settings import Graph, OneOf
from visual_spec.samplers.core.acceptance import AcceptanceRule
from visual_spec.samplers.core.base import Run
from visual_spec.samplers.core.checks import COUPLINGS, check_coupled, check_exact_width
from visual_spec.samplers.core.drafts import LAST_LAW, LEFT, UNIFORM, Draft, Label, Redrafting, rows_of
from visual_spec.samplers.core.graph import AUTO
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.core.relaxation import RELAXED, Relaxation
from visual_spec.samplers.core.verification import Verdict
from visual_spec.samplers.core.window import Window, check_window, widest
from visual_spec.samplers.raster.column_base import (
    CODEBOOK,
    COLUMN,
    UNITS,
    ColumnChainSampler,
    ColumnDraftState,
)
from visual_spec.samplers.raster.column_relaxation import check_codebooks, rule_by_codebook

COLUMN_DRAFTS = (UNIFORM, LEFT, LAST_LAW)


@dataclass
class ColumnJacobiState(ColumnDraftState):
    """A batch between two calls. `tokens` holds drafts for the W - 1 steps after the committed columns.

    Attributes:
        label: the laws that the drafts were drawn from, entry by entry; None under acceptance "identical".
        width: steps that the next call scores, at most the window; None: the whole window.
    """

    label: Label | None = None
    width: int | None = None


class ColumnJacobiSampler(ColumnChainSampler):
    """Jacobi decoding of several codebooks: several columns a call, from the autoregressive law or near it.

    As `SpeculativeJacobiSampler`, with the column as the unit: SJD (Teng et al., ICLR 2025) and its couplings (SCD /
    MC-SJD, So et al., ICML 2026) for models that predict K codebooks at once. Acceptance "identical" returns the tokens
    of `ColumnAutoregressiveSampler` for the same generator. "exact" tests a column with one coin, unit "column", or
    each token with a coin of its own, unit "codebook"; the former never keeps a column less often. All are lossless.

    The relaxed acceptances are lossy. They test each token together with those of similar sound (`relaxed_columns`), so
    they need unit "codebook". The trace measures their cost per token.

    Args:
        window: steps scored by one call, at least 1; or "auto", as in `SpeculativeJacobiSampler`.
        coupling: how the drafts of an entry in successive rounds depend on each other: "gumbel", "independent" or
            "maximal".
        acceptance: "identical" (needs coupling "gumbel"), "exact", "grouped", "clustered" or "lantern".
        unit: "column" or "codebook". Under "identical" both give the same tokens.
        initial_draft: the draft of a step that enters the window: "uniform" over the allowed ids, a copy of the column
            to the "left", or a draw from the laws of the last scored column, "last_law".
        relaxation: the numbers of a relaxed acceptance, by name, such as {"delta": 0.2}; see `Relaxation`. A call then
            takes `codebook`, [K, V, D], the codes of each codebook as the decoder sees them.
        graph, exact_width: as in `SpeculativeJacobiSampler`.

    Raises:
        ValueError: a setting has a value that is not listed here.
    """

    takes = ("codebook",)

    @register_to_config
    def __init__(
        self,
        window: Window = 16,
        coupling: Annotated[str, OneOf(COUPLINGS)] = "gumbel",
        acceptance: Annotated[str, OneOf(("identical", "exact", *RELAXED))] = "identical",
        unit: Annotated[str, OneOf(UNITS)] = COLUMN,
        initial_draft: Annotated[str, OneOf(COLUMN_DRAFTS)] = LEFT,
        relaxation: Mapping[str, Any] | None = None,
        graph: Graph = AUTO,
        exact_width: bool = False,
    ) -> None:
        lossless = Relaxation.of(acceptance, relaxation).lossless
        check_window(window, acceptance)
        if not lossless and unit != CODEBOOK:
            raise ValueError(
                f"acceptance={acceptance!r} tests each token, got unit={unit!r}; pass unit='codebook'."
            )
        check_coupled(coupling, acceptance)
        check_exact_width(exact_width, acceptance, window)

    @property
    def unit(self) -> str:
        return self.config.unit

    @property
    def coupled(self) -> bool:
        return self.config.coupling == "maximal"

    @property
    def redrafting(self) -> Redrafting:
        """How drafts follow from the last call, entry by entry."""
        return Redrafting(self.config.coupling, self.identical, self.config.initial_draft, not self.identical)

    def window_of(self, model: Any) -> int:
        return min(widest(self.config.window, self.fixed_width), model.grid.num_tokens)

    def check(self, model: Any, law: TokenLaw, batch_size: int, parts: dict[str, Any]) -> None:
        super().check(model, law, batch_size, parts)
        check_codebooks(self.relaxation, parts.get("codebook"), model.grid.codebooks, model.vocab_size)

    def rule(self, model: Any, parts: dict[str, Any], device: torch.device) -> AcceptanceRule:
        if self.lossless:
            return super().rule(model, parts, device)
        return rule_by_codebook(self.relaxation, parts.get("codebook"), model.grid.codebooks, device)

    def prepare(self, run: Run) -> ColumnJacobiState:
        window = self.window_of(run.model)
        state = ColumnJacobiState.begin(run, scratch=window)
        steps = torch.zeros_like(state.lengths)[:, None]
        first = run.pattern.laws(run.law, run.cache.logits[:, None], steps, run.guided)  # [B, 1, K, V]
        laws = first.repeat(1, window, 1, 1).flatten(1, 2)
        self.redraft(run, state, laws, torch.ones_like(state.lengths), width=1)
        return state

    def propose(self, run: Run, state: ColumnJacobiState) -> Draft:
        window = self.window_of(run.model)
        steps = state.next_slots(min(state.width or window, window) - 1)
        return Draft(rows_of(state.tokens, steps).flatten(1), state.label, "last call")

    def settle(
        self, run: Run, state: ColumnJacobiState, steps: Tensor, verdict: Verdict, advance: Tensor
    ) -> None:
        super().settle(run, state, steps, verdict, advance)
        self.redraft(run, state, verdict.laws, advance, steps.shape[1])

    def redraft(
        self, run: Run, state: ColumnJacobiState, laws: Tensor | None, advance: Tensor, width: int
    ) -> None:
        """Draft the W - 1 steps after the committed columns, and label each draft with the law it is drawn from.

        Args:
            laws: [B, C * K, V] of the last call, of which the first `width` columns count.
            advance: long [B], the number of its columns that were committed. The steps of later columns are drafted
                from their own laws; steps that the call did not reach get an initial draft. Where a column is pending,
                its draft is already refused, so any draft will do: its label is `refused_law`.
        """
        pattern, steps = run.pattern, state.next_slots(self.window_of(run.model) - 1)  # [B, W - 1]
        source = advance[:, None] + torch.arange(
            steps.shape[1], device=steps.device
        )  # the column that scored a step
        reached = source < width
        if self.identical:  # an earlier, wider call may also have scored a step: drafts need no label
            reached = reached | (state.commit_call.gather(1, steps) > 0)
        # If the last column is forced and the next is not, "last_law" drafts token 0 with certainty: a poor draft,
        # correctly labelled.
        rows = source.clamp(max=width - 1)[..., None] * pattern.codebooks
        rows = (rows + torch.arange(pattern.codebooks, device=steps.device)).flatten(1)  # [B, (W - 1) * K]
        valid = pattern.valid[steps]  # [B, W - 1, K]

        def copies(drafts: Tensor) -> Tensor:
            # The last column that the call reached: committed, or drafted just now.
            newest = (state.lengths - advance + width - 1)[:, None]  # [B, 1]
            state.write(steps, drafts.view_as(valid))
            return rows_of(state.tokens, newest).expand_as(valid).flatten(1)

        drafts, label = self.redrafting.drafts(
            run.noise,
            state.round,
            laws,
            rows,
            pattern.slots(steps),
            rows_of(state.tokens, steps).flatten(1),
            reached.repeat_interleave(pattern.codebooks, 1),
            copies,
            run.law.law.allowed or (0, run.model.vocab_size),
        )
        # An initial draft ignores the pattern; a forced entry is token 0 for certain.
        state.write(steps, drafts.view_as(valid).masked_fill(~valid, 0))
        if label is not None:
            state.label = replace(label, rows=torch.where(valid.flatten(1), label.rows, POINT_LAW))
