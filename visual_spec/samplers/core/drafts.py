"""First drafts of slots that enter the window, each with the law it is drawn from.

Any draft is legal; what keeps a sampler exact is the label. A copied token is a point law, although the token
that was copied was itself random: given the earlier slots, which the copy is read from, there is no choice left.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from visual_spec.models.core.protocol import TokenGrid
from visual_spec.samplers.core.noise import DRAFT, CounterNoise

UNIFORM = "uniform"
LEFT = "left"
UP = "up"
LAST_LAW = "last_law"
INITIAL_DRAFTS = (UNIFORM, LEFT, UP, LAST_LAW)


@dataclass(frozen=True)
class Draft:
    """Drafted tokens and the law they were truly drawn from.

    Attributes:
        tokens: long [B, N].
        law: log-probabilities that broadcast to [B, N, V]; None when the acceptance rule looks at tokens only.
        provenance: how they were drawn, one of `INITIAL_DRAFTS`.
    """

    tokens: Tensor
    law: Tensor | None
    provenance: str


def uniform_draft(
    noise: CounterNoise,
    slots: Tensor,
    round: int | Tensor,
    *,
    allowed: tuple[int, int],
    law_like: Tensor | None,
) -> Draft:
    """Every allowed id with equal probability.

    Args:
        slots: long [B, N].
        allowed: half-open range of token ids.
        law_like: a law whose dtype and vocabulary the label takes; None for no label.
    """
    first, stop = allowed
    # float64: in float32 some ids of a large vocabulary would come up 0.1% more often than the label says.
    position = noise.uniform(slots, DRAFT, round, torch.float64).mul_(stop - first)
    tokens = position.long().clamp_(max=stop - first - 1).add_(first)
    law = None
    if law_like is not None:
        law = law_like.new_full(law_like.shape[-1:], -torch.inf)  # [V]
        law[first:stop].fill_(-math.log(stop - first))
    return Draft(tokens, law, UNIFORM)


def copied_draft(
    direction: str, tokens: Tensor, slots: Tensor, newest: Tensor, *, grid: TokenGrid, law_like: Tensor | None
) -> Draft:
    """The token to the left or above: the spatial locality-aware initialisation of SJD (Teng et al., ICLR 2025).

    Args:
        direction: "left" or "up".
        tokens: long [B, S], the tokens by slot.
        slots: long [B, N], the slots to draft, all later than `newest`.
        newest: long [B, 1], the last slot that holds a token.
        law_like: a law whose dtype and vocabulary the label takes; None for no label.
    """
    drafts = tokens.gather(1, copied_slots(direction, slots, newest, grid))
    law = None
    if law_like is not None:
        law = law_like.new_full((*slots.shape, law_like.shape[-1]), -torch.inf)
        law.scatter_(-1, drafts[..., None], 0)
    return Draft(drafts, law, direction)


def copied_slots(direction: str, slots: Tensor, newest: Tensor, grid: TokenGrid) -> Tensor:
    """The nearest slot that holds a token, to the left or above: long [B, N].

    A slot whose neighbour holds no token yet takes the neighbour's neighbour in the same direction, and so on.
    Where the row ends before a token is found, "left" looks up; where the frame ends, "up" looks at the same place
    in earlier frames; and where there is none, the newest token serves.
    """
    frame_size = grid.height * grid.width
    distance = slots - newest  # [B, N], >= 1
    above = slots - grid.width * _ceil_div(distance, grid.width)
    same_frame = above >= slots - slots % frame_size
    earlier = slots - frame_size * _ceil_div(distance, frame_size)
    source = torch.where(same_frame, above, torch.where(earlier >= 0, earlier, newest))
    if direction == LEFT:
        source = torch.where(slots // grid.width == newest // grid.width, newest, source)
    return source


def _ceil_div(dividend: Tensor, divisor: int) -> Tensor:
    return (dividend + (divisor - 1)) // divisor
