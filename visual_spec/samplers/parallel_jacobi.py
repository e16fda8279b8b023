"""Parallel Jacobi decoding (PJD): a window of drafts in each of several rows, on a raster model.

The loop is that of `rows`, which see for what such an order costs in exactness.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from diffusers.schedulers.scheduling_utils import SchedulerMixin  # noqa: F401 (diffusers looks it up here when loading)
from torch import Tensor

from visual_spec.models.core.protocol import DecodeState, OrderModel, TokenGrid
from visual_spec.samplers.core.acceptance import (
    accepted_prefix,
    exact_acceptance,
    identical_acceptance,
    residual,
)
from visual_spec.samplers.core.base import columns_of
from visual_spec.samplers.core.checks import CheckedLaw, check_count, check_coupled, check_flag
from visual_spec.samplers.core.configuration import register_to_config
from visual_spec.samplers.core.drafts import LEFT, UNIFORM, UP, uniform_draft
from visual_spec.samplers.core.noise import ACCEPT, DRAFT, RESIDUAL, TOKEN, CounterNoise
from visual_spec.samplers.core.row_order import RowOrder
from visual_spec.samplers.core.trace import Stopwatch
from visual_spec.samplers.zipar import RowSampler, RowState, commit, prepare, score

ROW_DRAFTS = (LEFT, UP, UNIFORM)


@dataclass(frozen=True)
class ParallelJacobiOptions:
    """The configuration of `ParallelJacobiSampler`, checked."""

    rows: int
    drafts: int
    lead: int
    coupling: str
    acceptance: str
    initial_draft: str

    def __post_init__(self) -> None:
        for name in ("rows", "drafts", "lead"):
            check_count(name, getattr(self, name))
        check_coupled(self, ROW_DRAFTS)


def parallel_jacobi_prepare(
    order: RowOrder,
    cache: DecodeState,
    law: CheckedLaw,
    noise: CounterNoise,
    options: ParallelJacobiOptions,
    *,
    measured: bool = False,
) -> RowState:
    """The state after the prefill: slot 0 is committed, and the first drafts are made."""
    state, target = prepare(order, cache, law, noise, measured=measured)
    none = torch.zeros_like(state.row)  # no slot but the first has been scored
    _redraft(order, state, target.expand(-1, order.columns, -1), none, none, law, noise, options)
    return state


def parallel_jacobi_step(
    model: OrderModel,
    order: RowOrder,
    state: RowState,
    law: CheckedLaw,
    noise: CounterNoise,
    options: ParallelJacobiOptions,
    watch: Stopwatch,
) -> None:
    """One target call: in every open row keep the drafts before the first refusal, replace that one, draft again.

    Updates `state`. Commits 1 to D + 1 tokens a row that is scored; no host synchronisation on CUDA.
    """
    plan, target = score(model, order, state, law, watch)
    size = order.drafts + 1
    offset = torch.arange(size, device=target.device)
    # The last scored column of a window has no draft to test: what it predicts was not fed.
    tested = (offset < plan.scored[..., None] - 1).flatten(1)  # [B, N]
    drafts = state.tokens.gather(1, plan.predicted)

    if options.acceptance == "identical":
        candidates = noise.categorical(target, plan.predicted, TOKEN)
        accept = identical_acceptance(candidates, drafts) & tested
    else:
        assert state.draft_law is not None
        label = state.draft_law.masked_fill(~tested[..., None], -torch.inf)
        probability = exact_acceptance(target, label, drafts).where(tested, 0)
        at = plan.predicted.where(tested, plan.scratch)
        accept = noise.bernoulli(probability, at, ACCEPT, state.round)
        if options.coupling == "maximal":
            replacement = noise.categorical(residual(target, label), plan.predicted, RESIDUAL, state.round)
            candidates = drafts.where(accept, replacement)
        else:
            candidates = None
    kept = accepted_prefix(accept.view(-1, size)).view_as(plan.scored)  # [B, A]
    if candidates is not None:
        state.tokens.scatter_(1, plan.predicted, candidates)
    else:
        refused = torch.arange(0, order.columns, size, device=target.device) + kept  # [B, A]
        law_there = residual(columns_of(target, refused), columns_of(label, refused))
        at = plan.predicted.gather(1, refused)
        state.tokens.scatter_(1, at, noise.categorical(law_there, at, RESIDUAL, state.round))

    count = (kept + 1).where(plan.scored > 0, 0)
    commit(order, state, plan, target, count)
    _redraft(order, state, target, plan.scored, count, law, noise, options)
    watch.lap("verify", state.tokens.device)


def _redraft(
    order: RowOrder,
    state: RowState,
    target: Tensor,
    scored: Tensor,
    advance: Tensor,
    law: CheckedLaw,
    noise: CounterNoise,
    options: ParallelJacobiOptions,
) -> None:
    """Draft the D slots behind the newest token of every row, and label each draft with the law it is drawn from.

    Args:
        target: [B, N, V], the laws of the last call.
        scored: long [B, A], how many columns of a window were scored.
        advance: long [B, A], how many of them were committed: all, if the window has gone on to another row. The
            columns behind them are drafted from their own law, and the other slots get an initial draft.
    """
    exact = options.acceptance == "exact"
    size, width, num_tokens = order.drafts + 1, order.width, order.rows * order.width
    batch_size, device = len(target), target.device
    held_row = state.row.clamp(max=order.rows - 1)
    length = state.lengths.gather(1, held_row)
    offset = torch.arange(order.drafts, device=device)
    column = length[..., None] + offset  # [B, A, D], within the row
    window = torch.arange(0, order.columns, size, device=device)[:, None]
    scratch = num_tokens + window + offset
    inside = (column < width) & (state.row < order.rows)[..., None]
    slots = (held_row[..., None] * width + column).where(inside, scratch).flatten(1)  # [B, A * D]
    source = advance[..., None] + offset  # the column of its window that was about the slot
    reached = (source < scored[..., None]).flatten(1)
    label = None
    if exact:
        label = columns_of(target, (window + source.clamp(max=size - 1)).flatten(1))  # [B, A * D, V]
    drafts = state.tokens.gather(1, slots)
    if label is not None and options.coupling != "maximal":
        # As in the raster sampler: a slot's own noise under Gumbel coupling, else fresh noise in every round.
        stream, round = (TOKEN, 0) if options.coupling == "gumbel" else (DRAFT, state.round)
        drafts = noise.categorical(label, slots.where(reached, scratch.flatten()), stream, round)

    if options.initial_draft == UNIFORM:
        allowed = law.law.allowed or (0, target.shape[-1])
        at = slots.where(~reached, scratch.flatten())
        initial = uniform_draft(noise, at, state.round, allowed=allowed, law_like=label)
        initial_tokens, initial_law = initial.tokens, initial.law
    else:
        initial_tokens = _copied(order, state, options.initial_draft, held_row, length, column).flatten(1)
        initial_law = None
        if label is not None:
            initial_law = torch.full_like(label, -torch.inf).scatter_(-1, initial_tokens[..., None], 0)
    state.tokens.scatter_(1, slots, drafts.where(reached, initial_tokens))
    if label is not None and initial_law is not None:
        label = label.where(reached[..., None], initial_law).view(batch_size, order.windows, order.drafts, -1)
        none = torch.full_like(label[:, :, :1], -torch.inf)  # the last column of a window predicts no draft
        state.draft_law = torch.cat([label, none], 2).flatten(1, 2)


def _copied(
    order: RowOrder, state: RowState, direction: str, row: Tensor, length: Tensor, column: Tensor
) -> Tensor:
    """The token above (none in the first row), or the newest of the row, or of the row above if the row has none."""
    above = state.lengths.gather(1, (row - 1).clamp(min=0))
    newest = (row * order.width + length).where(length > 0, (row - 1) * order.width + above) - 1
    source = newest[..., None].expand_as(column)
    if direction == UP:
        source = ((row - 1)[..., None] * order.width + column).where((row > 0)[..., None], source)
    # Where that token is not committed yet the slot may not be drawn in the next call, and is drafted again after it.
    return state.tokens.gather(1, source.clamp(min=0).flatten(1)).view_as(column)


class ParallelJacobiSampler(RowSampler):
    """Parallel Jacobi decoding: a window of drafts in each of several rows, all scored in one call.

    Liao et al., "Parallel Jacobi decoding for fast autoregressive image generation" (PJD), CVPR 2026. In every row the
    drafts are kept up to the first refusal, as `SpeculativeJacobiSampler` does in the raster sequence. Under the
    row-causal mask drafts are seen in their own row only; rows below see committed tokens. So the rows above run as
    if the rows below were not there, and the rule is exact given what is seen: each token follows the model's law given
    the tokens of its row before it and the tokens that the rows above held at the call that committed it. A `lead` of
    at least the width makes that the raster law (and, with acceptance "identical", the tokens of
    `AutoregressiveSampler` for the same generator).

    A row stays `lead` tokens behind the row above throughout, not at its start only, so that the token above is always
    there; the paper's abstract and figure do not say.

    Args:
        rows: rows that may be open at once, at least 1.
        drafts: drafts a row, at least 1; a call scores up to rows * (drafts + 1) slots.
        lead: tokens that a row is behind the row above at least, at least 1.
        coupling, acceptance: as in `SpeculativeJacobiSampler`. Acceptance "identical" draws every token with its slot's
            own noise.
        initial_draft: the draft of a slot that enters a window: a copy of the newest token to the "left", of the token
            above, "up", or "uniform" over the allowed ids.
        measure: as of `ZipARSampler`.

    Raises:
        ValueError: a value that is not one of these.
    """

    @register_to_config
    def __init__(
        self,
        rows: int = 3,
        drafts: int = 3,
        lead: int = 4,
        coupling: str = "gumbel",
        acceptance: str = "identical",
        initial_draft: str = "left",
        measure: bool = False,
    ) -> None:
        check_flag("measure", measure)
        ParallelJacobiOptions(
            rows, drafts, lead, coupling, acceptance, initial_draft
        )  # refuses what is not allowed

    @property
    def options(self) -> ParallelJacobiOptions:
        """The configuration as a checked record."""
        names = ("rows", "drafts", "lead", "coupling", "acceptance", "initial_draft")
        return ParallelJacobiOptions(**{name: self.config[name] for name in names})

    def order(self, grid: TokenGrid) -> RowOrder:
        """At most `rows` rows, `lead` tokens apart."""
        options = self.options
        return RowOrder.over(grid, options.lead, windows=options.rows, drafts=options.drafts)

    def _start(self, order: RowOrder, cache: DecodeState, law: CheckedLaw, noise: CounterNoise) -> RowState:
        measured = self.config["measure"]
        return parallel_jacobi_prepare(order, cache, law, noise, self.options, measured=measured)

    def _step(
        self,
        model: OrderModel,
        order: RowOrder,
        state: RowState,
        law: CheckedLaw,
        noise: CounterNoise,
        watch: Stopwatch,
    ) -> None:
        parallel_jacobi_step(model, order, state, law, noise, self.options, watch)
