"""Speculative decoding of columns: a cheap model drafts a few columns, one target call scores them all.

The loop is `drafted`'s, the test of a column is `columns_jacobi`'s: one coin for all K codebooks, which keeps
a column drawn from Q with probability min(1, P / Q), as often as any rule can. Each draft follows committed columns, or
drafts that follow them. In music this matters: a column drafted after a wrong column, as in Jacobi decoding, is itself
wrong (docs/results/music.md).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import torch

from visual_spec.models.core.protocol import ColumnModel
from visual_spec.models.core.settings import AUTO, COUNT, Graph, register_to_config
from visual_spec.samplers.core.checks import Acceptance, ExactWidth
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.core.state import Run
from visual_spec.samplers.raster.column_base import ColumnChainSampler, ColumnDraftState
from visual_spec.samplers.raster.drafted import DraftedSampler, DraftedState, begin_drafted


@dataclass
class DraftedColumnState(ColumnDraftState, DraftedState):
    """A batch between two calls, without drafts."""


class DraftedColumnSampler(ColumnChainSampler, DraftedSampler):
    """Speculative decoding of several codebooks: a drafter draws a chain of columns, the target keeps a prefix of it.

    As `DraftedSampler` (Leviathan et al., ICML 2023, algorithm 1), with the column as the unit; with a
    `ColumnEagleDrafter`, the chain of EAGLE. Lossless for any drafter. Pass one as `pipe.drafter`.

    Args:
        num_drafts: columns drafted before a target call, at least 1. Each costs a drafter call.
        acceptance: "exact", one coin for each column; or "identical": draft and verify with each entry's own noise,
            which returns the tokens of `ColumnAutoregressiveSampler` for the same generator but keeps fewer drafts.
        graph: as in `SpeculativeJacobiSampler`.
        exact_width: as in `SpeculativeJacobiSampler`, with acceptance "identical"; for at most 31 drafts.
    """

    takes = ("drafter", "drafter_condition")

    @register_to_config
    def __init__(
        self,
        num_drafts: Annotated[int, COUNT] = 3,
        acceptance: Acceptance = "exact",
        graph: Graph = AUTO,
        exact_width: ExactWidth = False,
    ) -> None:
        pass

    def check(self, model: ColumnModel, law: TokenLaw, batch_size: int, parts: dict[str, Any]) -> None:
        super().check(model, law, batch_size, parts)
        drafter = parts.get("drafter")
        fits = f"{model.grid.codebooks} codebooks of {model.vocab_size} codes"
        if drafter is None:
            raise ValueError(
                "DraftedColumnSampler needs a drafter, and got none; pass drafter=..., a ColumnEagleDrafter trained "
                f"for this model (python -m visual_spec.training.column_drafter), or a smaller model of {fits} in the "
                "same steps."
            )
        if hasattr(drafter, "follow"):
            return drafter.check_target(model)
        if (drafter.grid, drafter.vocab_size) != (model.grid, model.vocab_size) or not torch.equal(
            drafter.valid.cpu(), model.valid.cpu()
        ):
            raise ValueError(
                f"the drafter predicts {drafter.grid.codebooks} codebooks of {drafter.vocab_size} codes in "
                f"{drafter.grid.num_tokens} steps, but the model {fits} in {model.grid.num_tokens}, and in its own "
                "pattern; pass a drafter of the model's columns."
            )

    def prepare(self, run: Run) -> DraftedColumnState:
        window, scale = run.window, run.law.law.guidance_scale
        return begin_drafted(run, window, window, DraftedColumnState, guidance_scale=scale)
