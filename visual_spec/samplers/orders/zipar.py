"""ZipAR: rows of a raster model decoded side by side, one token per row in each call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from visual_spec.models.core.protocol import TokenGrid
from visual_spec.models.core.settings import COUNT, register_to_config
from visual_spec.samplers.core.acceptance import exact_acceptance, residual
from visual_spec.samplers.core.noise import ACCEPT, RESIDUAL, TOKEN
from visual_spec.samplers.core.state import Run
from visual_spec.samplers.orders.row_order import RowOrder
from visual_spec.samplers.orders.rows import RowSampler, RowState


@dataclass
class ZipARState(RowState):
    """A batch between two calls.

    Attributes:
        held: bool [B, A], the window's row is about to start, and the token at its first slot awaits confirmation
            (adaptive ZipAR).
        held_law: [B, A, V] log-probabilities, the law that this token was drawn from; None before the first call.
    """

    held: Tensor
    held_law: Tensor | None = None


class ZipARSampler(RowSampler):
    """ZipAR: a row starts once the row above holds `window` tokens, and all open rows advance one token a call.

    He et al., "ZipAR: parallel auto-regressive image generation through spatial locality", ICML 2025; `window` is the
    paper's name. It makes `width + (rows - 1) * window` target calls, prefill included, for rows of `width` tokens.
    Window 1 runs along anti-diagonals, which is Diagonal Decoding (Ye et al. 2025) within a frame. A window of at least
    the width is `AutoregressiveSampler`, token for token.

    A position sees the condition and committed tokens only, never an empty slot. A row that starts before the row above
    is complete starts from a stand-in, see `RowOrder`.

    With `adaptive` (version 3 of the paper, adaptive window assignment) `window` is the smallest one. Once the row
    above holds `window` tokens, the row's first token is drawn from law p_s with s = window, but held. In every
    following call the row above has one more token, and the held token x is tested. With probability min(1, p_j(x) /
    p_(j-1)(x)) it is kept, and the row starts. Otherwise a draw from (p_j - p_(j-1))+, normalised, replaces it and is
    held in turn. When the row above is complete, the result of the test is final.

    Guarantee: if testing continued after the first success, the held token would follow p_j after every test, and would
    reach p_width, the law given the whole row above, exactly. Starting the row at the first success changes the law of
    its first token by at most the probability that a later test would have refused it. Nothing is guaranteed for the
    rest of the row.

    Args:
        window: tokens that the row above holds when a row starts, at least 1.
        adaptive: start each row when its first token is confirmed, at least one call later than with a fixed window.
        as_released: as the public code, which draws row 0 alone and lets an early row start from the newest token two
            rows above. There a position also attends to slots without a token, as zeros; here it never does.
        measure: report the distance between the laws that tokens were drawn from and the raster laws. Keeps the law of
            every token, [B, L, V], and feeds the finished tokens once more.
    """

    @register_to_config
    def __init__(
        self,
        window: Annotated[int, COUNT] = 4,
        adaptive: bool = False,
        measure: bool = False,
        as_released: bool = False,
    ) -> None:
        pass

    def order(self, grid: TokenGrid) -> RowOrder:
        """Return an order of rows `window` tokens apart, with as many open rows as possible."""
        return RowOrder.over(grid, self.config.window, released=self.config.as_released)

    def prepare(self, run: Run) -> ZipARState:
        windows = self.order(run.model.grid).windows
        held = torch.zeros(run.batch_size, windows, dtype=torch.bool, device=run.device)
        return self.begin_rows(run, ZipARState, held=held)

    def step(self, run: Run, state: ZipARState) -> None:
        """Make one target call: every open row gets its next token."""
        plan, target = self.score(run, state)  # one position a window: N = A
        order = self.order(run.model.grid)
        drawn = run.noise.categorical(target, plan.predicted, TOKEN)
        settled = plan.scored > 0
        if self.config.adaptive:
            # A token drawn only now counts as a draft from its own law: it is kept with probability 1.
            held = state.held
            drafts = state.tokens.gather(1, plan.predicted).where(held, drawn)
            label = target if state.held_law is None else state.held_law.where(held[..., None], target)
            probability = exact_acceptance(target, label, drafts)
            accept = run.noise.bernoulli(probability, plan.predicted, ACCEPT, state.round)
            left = residual(target, label)
            drawn = drafts.where(accept, run.noise.categorical(left, plan.predicted, RESIDUAL, state.round))
            starting = settled & (plan.length == 0)
            # With the row above complete there is nothing to wait for: the replacement is final.
            settled = settled & (~starting | (held & accept) | (plan.above == order.width))
            state.held = starting & ~settled
            state.held_law = target
        state.tokens.scatter_(1, plan.predicted, drawn)
        state.advance(order, plan, target, settled.long())
        run.lap("verify")
