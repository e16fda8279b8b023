"""Drafts: proposed tokens, each with the law it was truly drawn from. The seam between proposing and verifying.

Any draft is legal; what keeps a sampler exact is the label. A copied token is a point law, although the token that was
copied was itself random: given the earlier slots, which the copy is read from, there is no choice left. Acceptance
"identical" looks at the tokens only, so it needs no labels, and any heuristic may draft.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from visual_spec.kernels.verify import NO_DRAFT, POINT_LAW, UNIFORM_LAW
from visual_spec.models.core.protocol import TokenGrid
from visual_spec.samplers.core.noise import DRAFT, CounterNoise

UNIFORM = "uniform"
LEFT = "left"
UP = "up"
LAST_LAW = "last_law"
INITIAL_DRAFTS = (UNIFORM, LEFT, UP, LAST_LAW)


@dataclass
class Label:
    """The laws that drafts were drawn from, as rows of stored laws: nothing is copied as a window moves on.

    Attributes:
        laws: [B, C, V] log-probabilities.
        rows: long [B, N], the row of `laws` that each draft was drawn from; or `POINT_LAW` (all mass on the draft),
            `UNIFORM_LAW` (over the allowed ids), `NO_DRAFT`.
        allowed: half-open range of the ids that `UNIFORM_LAW` allows.
    """

    laws: Tensor
    rows: Tensor
    allowed: tuple[int, int]

    def dense(self, tokens: Tensor) -> Tensor:
        """The law of each draft, [B, N, V] log-probabilities; -inf everywhere where there is none.

        Args:
            tokens: long [B, N], the drafts.
        """
        rows = self.rows
        dense = rows_of(self.laws, rows.clamp(min=0))  # [B, N, V]
        dense = dense.masked_fill_((rows < 0)[..., None], -torch.inf)
        first, stop = self.allowed
        uniform = (rows == UNIFORM_LAW)[..., None]
        dense[..., first:stop].masked_fill_(uniform, -math.log(stop - first))
        at = tokens.clamp(min=0)[..., None]
        point = dense.gather(-1, at).masked_fill_((rows == POINT_LAW)[..., None], 0)
        return dense.scatter_(-1, at, point)

    def select(self, samples: Tensor) -> None:
        """Go on with some of the samples only, long [N]."""
        self.laws, self.rows = self.laws[samples], self.rows[samples]


@dataclass
class Draft:
    """Proposed tokens for the slots behind the text, or for the entries of columns.

    Attributes:
        tokens: long [B, N], -1 where there is none.
        label: None where the acceptance looks at tokens only.
        provenance: how they were made, a word for people.
    """

    tokens: Tensor
    label: Label | None
    provenance: str

    def behind(self, count: int) -> Draft:
        """The same without the first `count` positions."""
        label = self.label
        if label is not None:
            label = Label(label.laws, label.rows[:, count:], label.allowed)
        return Draft(self.tokens[:, count:], label, self.provenance)

    @staticmethod
    def points(tokens: Tensor, vocab_size: int, provenance: str) -> Draft:
        """Drafts that are a function of the text, such as copies: long [B, N], -1 where there is none."""
        rows = torch.where(tokens < 0, NO_DRAFT, POINT_LAW)
        none = torch.zeros(len(tokens), 1, vocab_size, device=tokens.device)
        return Draft(tokens, Label(none, rows, (0, vocab_size)), provenance)


def with_bonus(draft: Draft, group: int = 1) -> Draft:
    """The same, with one more position that has no draft: the last one that a call scores, whose token is a bonus.

    Args:
        group: tokens of a position.
    """
    label = draft.label
    if label is not None:
        label = Label(label.laws, F.pad(label.rows, (0, group), value=NO_DRAFT), label.allowed)
    return Draft(F.pad(draft.tokens, (0, group), value=-1), label, draft.provenance)


def rows_of(values: Tensor, rows: Tensor) -> Tensor:
    """values [B, C, V] at rows long [B, N]: [B, N, V]."""
    batch_size, count, size = values.shape
    first = torch.arange(0, batch_size * count, count, device=values.device)[:, None]
    # Whole rows by one index, not a gather of V indices each.
    found = values.reshape(-1, size).index_select(0, (first + rows).flatten())
    return found.view(*rows.shape, size)


def uniform_tokens(
    noise: CounterNoise, slots: Tensor, round: int | Tensor, allowed: tuple[int, int]
) -> Tensor:
    """Every allowed id with equal probability, for slots long [B, N]: long [B, N].

    Args:
        allowed: half-open range of token ids.
    """
    first, stop = allowed
    # float64: in float32 some ids of a large vocabulary would come up 0.1% more often than the label says.
    position = noise.uniform(slots, DRAFT, round, torch.float64).mul_(stop - first)
    return position.long().clamp_(max=stop - first - 1).add_(first)


def copied_tokens(direction: str, tokens: Tensor, slots: Tensor, newest: Tensor, grid: TokenGrid) -> Tensor:
    """The token to the left or above: the spatial locality-aware initialisation of SJD (Teng et al., ICLR 2025).

    Args:
        direction: "left" or "up".
        tokens: long [B, S], the tokens by slot.
        slots: long [B, N], the slots to draft, all later than `newest`.
        newest: long [B, 1], the last slot that holds a token.

    Returns:
        long [B, N].
    """
    return tokens.gather(1, copied_slots(direction, slots, newest, grid))


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
