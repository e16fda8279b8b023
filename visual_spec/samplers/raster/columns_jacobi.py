"""Jacobi decoding of several codebooks: one call scores a window of drafted columns, and the kept ones are committed.

Drafts, couplings and proofs are as with one codebook (`jacobi`). The test of a column is new. It has two exact forms:
one coin for all its tokens (unit "column"), or one coin for each token (unit "codebook").

Relaxed rules come from `relaxed`, one for each codebook, with the tables of its codes. Yanuka et al., "Principled
coarse-grained acceptance for speculative decoding in speech", 2025 (arXiv 2511.13732), relax the test for audio tokens
by groups of similar codes: a draft is kept as often as its group allows. They also replace a refused draft through the
groups, which may overlap. Here `relaxed` replaces it, at a cost that the divergence meter can measure.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import Tensor

from visual_spec.models.core.protocol import ColumnModel
from visual_spec.models.core.settings import AUTO, Graph, OneOf, register_to_config
from visual_spec.samplers.core.acceptance import (
    RELAXED,
    AcceptanceRule,
    RelaxedAcceptance,
    RelaxedNumbers,
)
from visual_spec.samplers.core.checks import Coupling, ExactWidth, Window
from visual_spec.samplers.core.drafts import LAST_LAW, LEFT, UNIFORM, copied_slots, uniform_tokens
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.core.noise import TOKEN
from visual_spec.samplers.core.relaxed import rule_of
from visual_spec.samplers.core.state import Run, State
from visual_spec.samplers.core.trace import LOSSY
from visual_spec.samplers.raster.column_base import (
    CODEBOOK,
    COLUMN,
    UNITS,
    ColumnChainSampler,
    ColumnDraftState,
)
from visual_spec.samplers.raster.jacobi import JacobiState, SpeculativeJacobiSampler

COLUMN_DRAFTS = (UNIFORM, LEFT, LAST_LAW)


@dataclass
class ColumnJacobiState(ColumnDraftState, JacobiState):
    """A batch between two calls. `tokens` holds drafts for the W - 1 steps after the committed columns."""


@dataclass
class IdenticalColumnState(State):
    """The same under acceptance "identical", where drafts need no labels.

    Attributes:
        window: W, the most steps that a call scores.
        width: steps that the next call scores, at most the window; None: the window.
    """

    window: int = 1
    width: int | None = None


class ColumnJacobiSampler(ColumnChainSampler, SpeculativeJacobiSampler):
    """Jacobi decoding of several codebooks: several columns a call, from the autoregressive law or near it.

    As `SpeculativeJacobiSampler`, with the column as the unit: SJD (Teng et al., ICLR 2025) and its couplings (SCD /
    MC-SJD, So et al., ICML 2026) for models that predict K codebooks at once. Acceptance "identical" returns the tokens
    of `ColumnAutoregressiveSampler` for the same generator. "exact" tests a column with one coin, unit "column", or
    each token with a coin of its own, unit "codebook"; the former never keeps a column less often. All are lossless.

    The relaxed acceptances are lossy. They test each token together with tokens of similar sound (`relaxed`),
    so they need unit "codebook". The trace measures their cost per token.

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
    """

    state_kind = ColumnJacobiState

    @register_to_config
    def __init__(
        self,
        window: Window = 16,
        coupling: Coupling = "gumbel",
        acceptance: RelaxedAcceptance = "identical",
        unit: Annotated[str, OneOf(UNITS)] = COLUMN,
        initial_draft: Annotated[str, OneOf(COLUMN_DRAFTS)] = LEFT,
        relaxation: RelaxedNumbers = None,
        graph: Graph = AUTO,
        exact_width: ExactWidth = False,
    ) -> None:
        if acceptance in RELAXED and unit != CODEBOOK:
            raise ValueError(
                f"acceptance={acceptance!r} tests each token, got unit={unit!r}; pass unit='codebook'."
            )

    def check(self, model: ColumnModel, law: TokenLaw, batch_size: int, parts: dict[str, Any]) -> None:
        super().check(model, law, batch_size, parts)
        books, count = parts.get("codebook"), model.grid.codebooks
        if books is not None and self.relaxation.needs_codebook:
            if books.dim() != 3 or len(books) != count:
                raise ValueError(
                    f"codebook of shape {tuple(books.shape)} for a model of {count} codebooks; pass the codes of each, "
                    f"[{count}, {model.vocab_size}, D]."
                )
            books = books[0]
        self.relaxation.check(books, model.vocab_size)

    def prepare(self, run: Run) -> State:
        if self.config.acceptance != "identical":
            return self.labelled(run, run.window)
        state = IdenticalColumnState.begin(run, scratch=run.window, window=run.window)
        first = run.view.first(run.cache.logits)
        law = run.view.laws(run.law, first, torch.zeros_like(state.lengths)[:, None], run.guided)
        self._enter(run, state, law, state.lengths[:, None] - 1)
        return state

    def step(self, run: Run, state: Any) -> None:
        if self.config.acceptance != "identical":
            return super().step(run, state)
        # As `jacobi_identical.step`: draw every entry with its own noise, keep the columns that are drawn again.
        view, width = run.view, min(state.width or state.window, state.window)
        steps = state.lengths[:, None] + torch.arange(width, device=run.device)  # [B, W]
        logits = run.score(state.cache, view.fed(view.read(state.tokens, steps - 1), steps - 1), steps - 1)
        run.lap("model")
        state.round += 1
        target = view.laws(run.law, logits, steps, run.guided)  # [B, W * K, V]
        drawn = run.noise.categorical(target, view.entries(steps), TOKEN)  # [B, W * K]
        same = (drawn == view.read(state.tokens, steps)).view(len(steps), width, -1).all(-1)
        kept = same[:, :-1].long().cumprod(1).sum(1)
        near = None if run.unit is None else self._near_ties(run, target, logits, steps)
        view.write(state.tokens, steps, drawn)
        state.commit(steps, kept + 1, run.num_tokens, near)
        self._enter(run, state, target[:, -view.codebooks :], steps[:, -1:])
        run.lap("verify")

    def _enter(self, run: Run, state: IdenticalColumnState, law: Tensor, newest: Tensor) -> None:
        """Draft the steps of the next window that no call has scored yet.

        Args:
            law: [B, K, V] of `newest`, long [B, 1], the last step that the last call scored.
        """
        view, initial = run.view, self.config.initial_draft
        steps = state.next_slots(state.window - 1)
        if initial == UNIFORM:
            allowed = run.law.law.allowed or (0, run.model.vocab_size)
            drafts = uniform_tokens(run.noise, view.entries(steps), state.round, allowed)
        elif initial == LAST_LAW:
            # If the last column is forced and the next is not, this drafts token 0: a poor draft.
            laws = law.repeat(1, steps.shape[1], 1)
            drafts = run.noise.categorical(laws, view.entries(steps), TOKEN)
        else:
            drafts = view.read(state.tokens, copied_slots(initial, steps, newest, run.model.grid))
        drafts, _ = view.forced(drafts, None, steps)
        # An earlier, wider call may have scored a step: its draw is a better draft.
        scored = (state.commit_call.gather(1, steps) > 0).repeat_interleave(view.codebooks, 1)
        view.write(state.tokens, steps, torch.where(scored, view.read(state.tokens, steps), drafts))

    def rule(self, model: ColumnModel, parts: dict[str, Any], device: torch.device) -> AcceptanceRule:
        if self.keeps != LOSSY:
            return super().rule(model, parts, device)
        books = parts.get("codebook")
        codes = [None] * model.grid.codebooks if books is None else books
        return join_rules([rule_of(self.relaxation, one, device) for one in codes])


def join_rules(rules: Sequence[AcceptanceRule]) -> AcceptanceRule:
    """Join one rule for each codebook to one for windows of N * K entries; entry i belongs to codebook i % K."""

    def by_codebook(calls: Sequence[Callable[..., Tensor]], *window: Tensor) -> Tensor:
        count = len(calls)
        answers = [call(*(part[:, k::count] for part in window)) for k, call in enumerate(calls)]
        return torch.stack(answers, 2).flatten(1, 2)

    return AcceptanceRule(
        lambda *window: by_codebook([rule.probability for rule in rules], *window),
        lambda *window: by_codebook([rule.refused_target for rule in rules], *window),
        lossless=all(rule.lossless for rule in rules),
    )
