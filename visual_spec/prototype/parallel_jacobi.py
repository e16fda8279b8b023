"""Parallel Jacobi decoding (PJD): a window of drafts in each of several rows, on a raster model.

`orders/rows.py` describes the loss of exactness.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

import torch
from torch import Tensor

from visual_spec.kernels.law import NO_DRAFT
from visual_spec.models.core.protocol import TokenGrid
from visual_spec.models.core.settings import COUNT, OneOf, register_to_config
from visual_spec.samplers.core.acceptance import EXACT, IDENTICAL
from visual_spec.samplers.core.checks import Acceptance, Coupling
from visual_spec.samplers.core.drafts import LEFT, UNIFORM, UP, Draft, Label, Redrafting
from visual_spec.samplers.core.state import Run
from visual_spec.samplers.core.verification import verify_laws
from visual_spec.samplers.orders.row_order import RowOrder, RowPlan
from visual_spec.samplers.orders.rows import RowSampler, RowState

ROW_DRAFTS = (LEFT, UP, UNIFORM)


@dataclass
class ParallelJacobiState(RowState):
    """A batch between two calls. `tokens` holds drafts after the committed tokens of every open row.

    Attributes:
        label: the law of each draft of the next call, by position; None under acceptance "identical".
    """

    label: Label | None = None


class ParallelJacobiSampler(RowSampler):
    """Parallel Jacobi decoding: a window of drafts in each of several rows, all scored in one call.

    Liao et al., "Parallel Jacobi decoding for fast autoregressive image generation" (PJD), CVPR 2026. Every row keeps
    its drafts up to the first refusal, as `SpeculativeJacobiSampler` does in the raster sequence. Under the row-causal
    mask, drafts are seen in their own row only; rows below see committed tokens. So a row does not depend on the rows
    below it, and the rule is exact given what is seen: each token follows the model's law given the earlier tokens of
    its row and the tokens that the rows above held at the call that committed it. With a `lead` of at least the width
    that is the raster law (and, with acceptance "identical", the tokens of `AutoregressiveSampler` for the same
    generator).

    The public code (for Lumina-mGPT) has `lead` 2, `start` 8, `drafts` 7 and no limit of `rows`. It differs in what it
    keeps: in all rows but the first open one a call commits accepted drafts only, and a refused draft is drawn again
    from the law, not from the residual, so that tokens of these rows do not follow the law given what is seen. A draft
    after a refused one stays if the law gives it more than half of its label. First drafts are uniform, and labelled
    certain.

    Args:
        rows: most rows open at once, at least 1.
        drafts: drafts per row, at least 1; a call scores up to rows * (drafts + 1) slots.
        lead: least number of tokens by which a row trails the row above throughout, at least 1.
        start: least number of tokens that the row above holds when a row starts, at least 1.
        coupling, acceptance: as in `SpeculativeJacobiSampler`. Acceptance "identical" draws every token with its slot's
            own noise.
        initial_draft: the draft of a slot that enters a window: a copy of the newest token to the "left", of the token
            above, "up", or "uniform" over the allowed ids.
        measure: as in `ZipARSampler`.
    """

    @register_to_config
    def __init__(
        self,
        rows: Annotated[int, COUNT] = 3,
        drafts: Annotated[int, COUNT] = 3,
        lead: Annotated[int, COUNT] = 4,
        coupling: Coupling = "gumbel",
        acceptance: Acceptance = "identical",
        initial_draft: Annotated[str, OneOf(ROW_DRAFTS)] = "left",
        measure: bool = False,
        start: Annotated[int, COUNT] = 1,
    ) -> None:
        pass

    @property
    def own_noise(self) -> bool:
        """Whether tokens are drawn with their slots' own noise, so that a draft is kept if it equals the token."""
        return self.config.acceptance == "identical"

    def order(self, grid: TokenGrid) -> RowOrder:
        """Return an order of at most `rows` open rows, `lead` tokens apart."""
        drafts = min(self.config.drafts, grid.width)
        config = self.config
        return RowOrder.over(grid, config.lead, windows=config.rows, drafts=drafts, start_at=config.start)

    def prepare(self, run: Run) -> ParallelJacobiState:
        state = self.begin_rows(run, ParallelJacobiState)
        slots = torch.zeros_like(state.tokens[:, :1])
        first = run.law(run.cache.logits[:, None], slots, run.guided)  # [B, 1, V]
        none = torch.zeros_like(state.row)  # no slot but the first has been scored
        size = self.order(run.model.grid).columns
        self._redraft(run, state, first.expand(-1, size, -1), none, none)
        return state

    def step(self, run: Run, state: ParallelJacobiState) -> None:
        """Keep the drafts of every open row before the first refusal, replace the refused one, and draft again.

        Commits 1 to D + 1 tokens in each scored row.
        """
        order = self.order(run.model.grid)
        plan, target = self.score(run, state)
        verdict = verify_laws(
            target,
            run.noise,
            plan.predicted,
            self._drafts(run, state, plan, order),
            rule=IDENTICAL if self.own_noise else EXACT,
            round=state.round,
            coupled=self.config.coupling == "maximal",
            chains=order.windows,
        )
        state.tokens.scatter_(1, plan.predicted, verdict.tokens)
        count = (verdict.kept.view_as(plan.scored) + 1).where(plan.scored > 0, 0)
        state.advance(order, plan, target, count)
        self._redraft(run, state, target, plan.scored, count)
        run.lap("verify")

    def _drafts(self, run: Run, state: ParallelJacobiState, plan: RowPlan, order: RowOrder) -> Draft:
        """Return the drafts of a call, [B, N], N = A * (D + 1)."""
        offset = torch.arange(order.drafts + 1, device=run.device)
        # The last scored position of a window has no draft to test: the token that it predicts was not fed.
        tested = (offset < plan.scored[..., None] - 1).flatten(1)  # [B, N]
        label = state.label
        if label is not None:
            label = Label(label.laws, label.rows.where(tested, NO_DRAFT), label.allowed)
        return Draft(state.tokens.gather(1, plan.predicted).where(tested, -1), label, "last call")

    def _redraft(
        self, run: Run, state: ParallelJacobiState, target: Tensor, scored: Tensor, advance: Tensor
    ) -> None:
        """Draft the D slots after the newest token of every row, and label each draft with its law.

        Args:
            target: [B, N, V], the laws of the last call.
            scored: long [B, A], how many positions of a window were scored.
            advance: long [B, A], how many of them were committed; all, if the window has moved to another row. The
                slots of later positions are drafted from their own laws, and the other slots get an initial draft.
        """
        order, device = self.order(run.model.grid), run.device
        size, width = order.drafts + 1, order.width
        held_row = state.row.clamp(max=order.rows - 1)
        length = state.lengths.gather(1, held_row)  # [B, A]
        offset = torch.arange(order.drafts, device=device)
        column = length[..., None] + offset  # [B, A, D], within the row
        window = torch.arange(0, order.columns, size, device=device)[:, None]
        scratch = run.num_tokens + window + offset  # [A, D]
        inside = (column < width) & (state.row < order.rows)[..., None]
        slots = (held_row[..., None] * width + column).where(inside, scratch).flatten(1)  # [B, A * D]
        source = advance[..., None] + offset  # the position of its window that predicted the slot
        reached = (source < scored[..., None]).flatten(1)
        rows = (window + source.clamp(max=size - 1)).flatten(1)  # [B, A * D]
        own = self.own_noise
        rule = Redrafting(self.config.coupling, own, self.config.initial_draft, labelled=not own)
        drafts, label = rule.drafts(
            run.noise,
            state.round,
            target,
            rows,
            slots.where(reached, scratch.flatten()),
            state.tokens.gather(1, slots),
            reached,
            lambda _: self._copied(state, order, held_row, length, column).flatten(1),
            run.law.law.allowed or (0, target.shape[-1]),
            unreached=slots.where(~reached, scratch.flatten()),
        )
        state.tokens.scatter_(1, slots, drafts)
        if label is not None:
            rows = label.rows.view(-1, order.windows, order.drafts)
            # The last position of a window predicts no draft.
            rows = torch.cat([rows, torch.full_like(rows[..., :1], NO_DRAFT)], 2)
            state.label = replace(label, rows=rows.flatten(1))

    def _copied(
        self, state: RowState, order: RowOrder, row: Tensor, length: Tensor, column: Tensor
    ) -> Tensor:
        """Return the token above (if any), or the newest token of the row, or of the row above if the row is empty."""
        above = state.lengths.gather(1, (row - 1).clamp(min=0))
        newest = (row * order.width + length).where(length > 0, (row - 1) * order.width + above) - 1
        source = newest[..., None].expand_as(column)
        if self.config.initial_draft == UP:
            source = ((row - 1)[..., None] * order.width + column).where((row > 0)[..., None], source)
        # If that token is not committed yet, the slot cannot be drawn in the next call and is drafted again.
        return state.tokens.gather(1, source.clamp(min=0).flatten(1)).view_as(column)
