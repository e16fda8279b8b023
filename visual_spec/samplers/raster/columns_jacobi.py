"""Jacobi decoding of several codebooks: one call scores a window of drafted columns, and the kept ones are committed.

Drafts, couplings and proofs are as with one codebook (`jacobi`). The test of a column is new. It has two exact forms:
one coin for all its tokens (unit "column"), or one coin for each token (unit "codebook").
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import torch

from visual_spec.models.core.settings import AUTO, Graph, OneOf, register_to_config
from visual_spec.samplers.core.acceptance import RELAXED, AcceptanceRule, RelaxedAcceptance, RelaxedNumbers
from visual_spec.samplers.core.checks import Coupling, ExactWidth, Window
from visual_spec.samplers.core.drafts import LAST_LAW, LEFT, UNIFORM
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.raster.column_base import (
    CODEBOOK,
    COLUMN,
    UNITS,
    ColumnChainSampler,
    ColumnDraftState,
)
from visual_spec.samplers.raster.column_relaxation import check_codebooks, rule_by_codebook
from visual_spec.samplers.raster.jacobi import JacobiState, SpeculativeJacobiSampler

COLUMN_DRAFTS = (UNIFORM, LEFT, LAST_LAW)


@dataclass
class ColumnJacobiState(ColumnDraftState, JacobiState):
    """A batch between two calls. `tokens` holds drafts for the W - 1 steps after the committed columns."""


class ColumnJacobiSampler(ColumnChainSampler, SpeculativeJacobiSampler):
    """Jacobi decoding of several codebooks: several columns a call, from the autoregressive law or near it.

    As `SpeculativeJacobiSampler`, with the column as the unit: SJD (Teng et al., ICLR 2025) and its couplings (SCD /
    MC-SJD, So et al., ICML 2026) for models that predict K codebooks at once. Acceptance "identical" returns the tokens
    of `ColumnAutoregressiveSampler` for the same generator. "exact" tests a column with one coin, unit "column", or
    each token with a coin of its own, unit "codebook"; the former never keeps a column less often. All are lossless.

    The relaxed acceptances are lossy. They test each token together with tokens of similar sound (`relaxed_columns`),
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

    Raises:
        ValueError: a setting has a value that is not listed here.
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

    def check(self, model: Any, law: TokenLaw, batch_size: int, parts: dict[str, Any]) -> None:
        super().check(model, law, batch_size, parts)
        check_codebooks(self.relaxation, parts.get("codebook"), model.grid.codebooks, model.vocab_size)

    def rule(self, model: Any, parts: dict[str, Any], device: torch.device) -> AcceptanceRule:
        if self.lossless:
            return super().rule(model, parts, device)
        return rule_by_codebook(self.relaxation, parts.get("codebook"), model.grid.codebooks, device)
