"""Speculative decoding of columns: a cheap model drafts a few columns, one target call scores them all.

The loop is that of `drafted`, the test of a column that of `columns_jacobi`: one coin for all K codebooks, which keeps
a column drawn from Q with probability min(1, P / Q), as often as any rule can. Each draft follows committed columns, or
drafts that follow them. In music this matters: a column drafted after a wrong column, as in Jacobi decoding, is itself
wrong (docs/RESULTS.md).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Protocol

import torch
from torch import Tensor

from visual_spec.models.core.configuration import register_to_config
from visual_spec.models.core.protocol import ColumnModel, DecodeState
from visual_spec.models.core.settings import COUNT, Graph, OneOf
from visual_spec.samplers.core.base import Run
from visual_spec.samplers.core.checks import ACCEPTANCES, check_exact_width
from visual_spec.samplers.core.drafters import ask_drafter, draft_law, start_drafter
from visual_spec.samplers.core.drafts import Draft, Label, rows_of
from visual_spec.samplers.core.graph import AUTO
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.core.noise import DRAFT, TOKEN
from visual_spec.samplers.core.verification import Verdict
from visual_spec.samplers.raster.column_base import ColumnChainSampler, ColumnDraftState


class ColumnFeatureDrafter(Protocol):
    """A drafter that reads the target's features of the columns, and returns guided logits, one row a sample.

    The other kind of drafter is any `ColumnModel` with the target's steps, codebooks and codes.
    """

    @property
    def vocab_size(self) -> int: ...

    def follow(self, model: Any, state: Any, *, window: int, guidance_scale: float) -> Any:
        """Allocate the drafter's state beside a target that has just been prefilled. The state is not `guided`.

        Args:
            window: the most columns of one drafter call.

        Raises:
            ValueError: the drafter was made for another target.
        """
        ...

    def observe(self, state: Any, steps: Tensor) -> None:
        """Record the target's features from its last call at steps [B, W]."""
        ...

    def __call__(self, state: Any, tokens: Tensor, steps: Tensor) -> Tensor:
        """As `ColumnModel.__call__`; logits [B, W, K, V] whether the target is guided or not."""
        ...


@dataclass
class DraftedColumnState(ColumnDraftState):
    """A batch between two calls, without drafts.

    Attributes:
        drafter_cache: the drafter's own state.
        fed: long [B], the number of leading steps that the drafter has been fed in final form.
    """

    drafter_cache: DecodeState
    fed: Tensor


class DraftedColumnSampler(ColumnChainSampler):
    """Speculative decoding of several codebooks: a drafter draws a chain of columns, the target keeps a prefix of it.

    As `DraftedSampler` (Leviathan et al., ICML 2023, algorithm 1), with the column as the unit; with a
    `ColumnEagleDrafter`, the chain of EAGLE. Lossless for any drafter. Pass one as `pipe.drafter`.

    Args:
        num_drafts: columns drafted before a target call, at least 1. Each costs a drafter call.
        acceptance: "exact", one coin for each column; or "identical": draft and verify with each entry's own noise,
            which returns the tokens of `ColumnAutoregressiveSampler` for the same generator but keeps fewer drafts.
        graph: as in `SpeculativeJacobiSampler`.
        exact_width: as in `SpeculativeJacobiSampler`, with acceptance "identical"; for at most 31 drafts.

    Raises:
        ValueError: a setting has a value that is not listed here.
    """

    takes = ("drafter", "drafter_condition")
    needs_drafter = True

    @register_to_config
    def __init__(
        self,
        num_drafts: Annotated[int, COUNT] = 3,
        acceptance: Annotated[str, OneOf(ACCEPTANCES)] = "exact",
        graph: Graph = AUTO,
        exact_width: bool = False,
    ) -> None:
        check_exact_width(exact_width, acceptance, num_drafts + 1)

    def check(self, model: Any, law: TokenLaw, batch_size: int, parts: dict[str, Any]) -> None:
        super().check(model, law, batch_size, parts)
        check_column_drafter(model, parts.get("drafter"))

    def num_drafts(self, model: Any) -> int:
        """Columns drafted before a target call, at most those of the clip."""
        return max(1, min(self.config.num_drafts, model.grid.num_tokens - 1))

    def window_of(self, model: Any) -> int:
        return self.num_drafts(model) + 1

    def prepare(self, run: Run) -> DraftedColumnState:
        window = self.window_of(run.model)
        cache = start_drafter(run, window=window, guidance_scale=run.law.law.guidance_scale)
        run.lap("prefill")
        fed = torch.zeros(run.batch_size, dtype=torch.long, device=run.device)
        return DraftedColumnState.begin(run, scratch=window, drafter_cache=cache, fed=fed)

    def propose(self, run: Run, state: DraftedColumnState) -> Draft:
        """Draft `num_drafts` columns, one drafter call each."""
        pattern, law = run.pattern, partial(draft_law, run.law)
        # The identical mode draws with the entries' own noise, so a draft equals the target's token if the laws agree.
        noise = (TOKEN, 0) if self.identical else (DRAFT, state.round + 1)
        # Feed all columns that the last call may have committed, in one call of fixed width. Columns after the newest
        # one are scratch, at steps that are fed again before anything reads them. If the last call committed nothing,
        # because a replacement is pending or the row is complete, the newest column is fed again.
        first = torch.minimum(state.fed, state.lengths - 1)[:, None]  # [B, 1]
        steps = first + torch.arange(self.window_of(run.model), device=run.device)  # [B, W]
        fed = pattern.with_special(rows_of(state.tokens, steps), steps)
        logits = ask_drafter(run.drafter, state.drafter_cache, fed, steps)  # [R, W, K, V]
        newest = state.lengths[:, None] - 1 - first  # [B, 1]
        state.fed = state.lengths
        picked = rows_of(logits.flatten(2), newest.repeat(len(logits) // len(newest), 1))
        logits = picked.view(len(logits), 1, *logits.shape[2:])  # [R, 1, K, V]
        tokens, laws = [], []
        for index in range(self.num_drafts(run.model)):
            steps = state.lengths[:, None] + index  # [B, 1]
            if index:
                fed = pattern.with_special(tokens[-1], steps - 1)
                logits = ask_drafter(run.drafter, state.drafter_cache, fed, steps - 1)
            laws.append(pattern.laws(law, logits, steps, state.drafter_cache.guided))  # [B, 1, K, V]
            tokens.append(pattern.draw(run.noise, laws[-1], steps, *noise))
        run.lap("draft")
        drafts = torch.cat(tokens, 1).flatten(1)  # [B, N * K]
        rows = torch.arange(drafts.shape[1], device=run.device).expand_as(drafts)
        label = Label(torch.cat(laws, 1).flatten(1, 2), rows, (0, run.model.vocab_size))
        return Draft(drafts, label, "drafter")

    def settle(
        self, run: Run, state: DraftedColumnState, steps: Tensor, verdict: Verdict, advance: Tensor
    ) -> None:
        super().settle(run, state, steps, verdict, advance)
        if hasattr(run.drafter, "observe"):
            run.drafter.observe(state.drafter_cache, steps - 1)


def check_column_drafter(model: ColumnModel, drafter: Any) -> None:
    """Refuse, before any compute, a drafter whose columns the model cannot score.

    Raises:
        ValueError: there is no drafter, or its codebooks, steps or codes differ; the message says what fits.
    """
    fits = f"{model.grid.codebooks} codebooks of {model.vocab_size} codes"
    if drafter is None:
        raise ValueError(
            "DraftedColumnSampler needs a drafter, and got none; pass drafter=..., a ColumnEagleDrafter trained for "
            f"this model (python -m visual_spec.training.column_drafter), or a smaller model of {fits} in the same "
            "steps."
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
