"""Drafts: proposed tokens, each labelled with the law it was truly drawn from. They link proposing and verifying.

Any draft is legal; the label keeps the sampler exact. A copied token is labelled with a point law, although the copied
token was itself random: given the earlier slots that the copy is read from, no randomness is left. Acceptance
"identical" uses only the tokens, so it needs no labels, and any heuristic may draft.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from visual_spec.kernels.law import NO_DRAFT, POINT_LAW, UNIFORM_LAW
from visual_spec.models.core.protocol import TokenGrid
from visual_spec.samplers.core.noise import DRAFT, TOKEN, CounterNoise

UNIFORM = "uniform"
LEFT = "left"
UP = "up"
LAST_LAW = "last_law"
PREVIOUS_FRAME = "previous_frame"
MOVED_FRAME = "moved_frame"
PANNED_FRAME = "panned_frame"
INITIAL_DRAFTS = (UNIFORM, LEFT, UP, LAST_LAW, PREVIOUS_FRAME, MOVED_FRAME, PANNED_FRAME)


@dataclass
class Label:
    """The laws that drafts were drawn from, as row numbers into stored laws. Moving the window copies no laws.

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
        """Return the law of each draft, [B, N, V] log-probabilities; -inf everywhere where there is no draft.

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
        """Continue with the samples long [N] only."""
        self.laws, self.rows = self.laws[samples], self.rows[samples]


@dataclass
class Draft:
    """Proposed tokens for the next slots, or for the entries of the next columns.

    Attributes:
        tokens: long [B, N], -1 where there is no draft.
        label: the laws of the drafts; None if the acceptance uses tokens only.
        provenance: how the drafts were made, in one word, for display.
    """

    tokens: Tensor
    label: Label | None
    provenance: str

    def after(self, count: int) -> Draft:
        """Return the draft without its first `count` positions."""
        label = self.label
        if label is not None:
            label = Label(label.laws, label.rows[:, count:], label.allowed)
        return Draft(self.tokens[:, count:], label, self.provenance)

    @staticmethod
    def points(tokens: Tensor, vocab_size: int, provenance: str) -> Draft:
        """Return drafts that are a function of earlier tokens, such as copies: long [B, N], -1 for no draft."""
        rows = torch.where(tokens < 0, NO_DRAFT, POINT_LAW)
        none = torch.zeros(len(tokens), 1, vocab_size, device=tokens.device)
        return Draft(tokens, Label(none, rows, (0, vocab_size)), provenance)


def with_bonus(draft: Draft, group: int = 1) -> Draft:
    """Return the draft with one more position that has no draft: the last scored position, whose token is a bonus.

    Args:
        group: tokens per position.
    """
    label = draft.label
    if label is not None:
        label = Label(label.laws, F.pad(label.rows, (0, group), value=NO_DRAFT), label.allowed)
    return Draft(F.pad(draft.tokens, (0, group), value=-1), label, draft.provenance)


def rows_of(values: Tensor, rows: Tensor) -> Tensor:
    """Return the rows long [B, N] of values [B, C, V]: [B, N, V]."""
    batch_size, count, size = values.shape
    first = torch.arange(0, batch_size * count, count, device=values.device)[:, None]
    # Index whole rows: a gather would need V indices for each.
    picked = values.reshape(-1, size).index_select(0, (first + rows).flatten())
    return picked.view(*rows.shape, size)


def uniform_tokens(
    noise: CounterNoise, slots: Tensor, round: int | Tensor, allowed: tuple[int, int]
) -> Tensor:
    """Return ids drawn uniformly from the allowed ones, for slots long [B, N]: long [B, N].

    Args:
        allowed: half-open range of token ids.
    """
    first, stop = allowed
    # float64: float32 would draw some ids of a large vocabulary 0.1% more often than the label says.
    position = noise.uniform(slots, DRAFT, round, torch.float64).mul_(stop - first)
    return position.long().clamp_(max=stop - first - 1).add_(first)


def copied_tokens(direction: str, tokens: Tensor, slots: Tensor, newest: Tensor, grid: TokenGrid) -> Tensor:
    """Return the tokens at `copied_slots`: long [B, N]. `tokens`: long [B, S], the tokens by slot."""
    return tokens.gather(1, copied_slots(direction, slots, newest, grid, tokens))


def copied_slots(
    direction: str, slots: Tensor, newest: Tensor, grid: TokenGrid, tokens: Tensor | None = None
) -> Tensor:
    """Return the slots that drafts are copied from: the nearest to the left or above that holds a token, as in the
    spatial locality-aware initialisation of SJD (Teng et al., ICLR 2025), or in an earlier frame.

    Args:
        direction: "left", "up", "previous_frame", "moved_frame" (`moved_slots`) or "panned_frame" (`panned_slots`).
        slots: long [B, N], the slots to draft, all later than `newest`.
        newest: long [B, 1], the last slot that holds a token.
        tokens: long [B, S], the tokens by slot; only "moved_frame" and "panned_frame" read them.

    Returns:
        long [B, N].

    If a slot's neighbour holds no token yet, the search goes on in the same direction. If the row ends before a token
    is found, "left" looks up; if the frame ends, "up" looks at the same place in earlier frames; if that finds none,
    the newest token is used. "previous_frame" looks at the same place in earlier frames first, then to the left.
    """
    if direction == MOVED_FRAME and grid.frames > 1 and tokens is not None:
        return moved_slots(tokens, slots, newest, grid)
    frame_size = grid.height * grid.width
    distance = slots - newest  # [B, N], >= 1
    above = slots - grid.width * _ceil_div(distance, grid.width)
    same_frame = above >= slots - slots % frame_size
    earlier = slots - frame_size * _ceil_div(distance, frame_size)
    source = torch.where(same_frame, above, torch.where(earlier >= 0, earlier, newest))
    if direction != UP:
        source = torch.where(slots // grid.width == newest // grid.width, newest, source)
    if direction in (PREVIOUS_FRAME, MOVED_FRAME, PANNED_FRAME):
        source = torch.where(earlier >= 0, earlier, source)
    if direction == PANNED_FRAME and grid.frames > 1 and tokens is not None:
        source = panned_slots(tokens, slots, newest, grid, source)
    return source


def moved_slots(tokens: Tensor, slots: Tensor, newest: Tensor, grid: TokenGrid) -> Tensor:
    """Return where the content of each slot was in the last complete frame, if it moves on as in the last frames.

    Before two frames are complete nothing is known of motion, and the slots are the ones of "previous_frame". See
    `block_matching` for the displacement of each slot, and `copied_slots` for the arguments.
    """
    from visual_spec.samplers.core.block_matching import moved_places  # only clips need it

    still = copied_slots(PREVIOUS_FRAME, slots, newest, grid)
    moved = moved_places(tokens, slots, newest, grid)
    return torch.where(newest + 1 >= 2 * grid.height * grid.width, moved, still)


def panned_slots(tokens: Tensor, slots: Tensor, newest: Tensor, grid: TokenGrid, still: Tensor) -> Tensor:
    """Return the slots that lie one lag earlier, the same for the whole window; `still` where the frame stands.

    The lags are a frame, a frame with a shift of one token to the left or right, and three frames, after which a
    pattern of three tokens that slides is back. It is the one that explains most of the last H * W committed tokens.
    A frame that stands has an eighth of them ahead, so that chance does not move it.
    """
    size = grid.height * grid.width
    lags = _lags(size, slots.device)  # [M]
    recent = torch.minimum(newest, slots[:, :1] - 1) - torch.arange(size, device=slots.device)
    recent = recent[..., None]  # [B, H * W, 1]
    now, earlier = (
        tokens.gather(1, places.clamp(min=0).flatten(1)).view(places.shape)
        for places in (recent, recent - lags)
    )
    hits = ((earlier == now) & (recent >= lags)).sum(1)  # [B, M]
    hits[:, 0] += size // 8
    # argmax may return any of several equals: let the first lag win.
    best = (hits * len(lags) - torch.arange(len(lags), device=lags.device)).argmax(1)
    lag = lags[best][:, None]
    moved = slots - lag * ((slots - newest + lag - 1) // lag)
    return torch.where((lag == size) | (moved < 0), still, moved)


@functools.cache
def _lags(size: int, device: torch.device) -> Tensor:
    """The first is a frame that stands."""
    return torch.tensor([size, max(size - 1, 1), size + 1, 3 * size], device=device)


def _ceil_div(dividend: Tensor, divisor: int) -> Tensor:
    return (dividend + (divisor - 1)) // divisor


@dataclass(frozen=True)
class Redrafting:
    """How Jacobi decoding drafts the slots of a window from what the last call scored, whatever their order.

    Attributes:
        coupling: one of `checks.COUPLINGS`, of the drafts of one slot in successive rounds.
        identical: whether drafts are tested by the slots' own noise.
        initial: what a slot is drafted from that the call did not reach: "uniform", "last_law" (the law of the nearest
            position), or else copies.
        labelled: whether drafts need labels.
    """

    coupling: str
    identical: bool
    initial: str
    labelled: bool

    @property
    def redraws(self) -> bool:
        """Whether drafts are drawn anew after every call, instead of carried over from verification."""
        return not self.identical and self.coupling != "maximal"

    def noise(self, round: int | Tensor) -> tuple[int, int | Tensor]:
        """Stream and round of the drafts' noise. Gumbel coupling always draws a slot with its own noise, so that
        similar laws give the same token; other couplings use fresh noise in every round."""
        return (TOKEN, 0) if self.coupling == "gumbel" else (DRAFT, round)

    def drafts(
        self,
        noise: CounterNoise,
        round: int | Tensor,
        laws: Tensor | None,
        rows: Tensor,
        slots: Tensor,
        carried: Tensor,
        reached: Tensor,
        copies: Callable[[Tensor], Tensor],
        allowed: tuple[int, int],
        *,
        drawn: Tensor | None = None,
        unreached: Tensor | None = None,
    ) -> tuple[Tensor, Label | None]:
        """Return the drafts of N slots, long [B, N], and their labels, or None.

        Args:
            laws: [B, C, V] of the last call; None if nothing is drawn.
            rows: long [B, N], the position of the call that scored each slot, or the nearest one.
            slots: long [B, N], counters of the noise.
            carried: long [B, N], what verification left there.
            reached: bool [B, N], whether a call scored the slot.
            copies: the initial drafts that are copies, long [B, N], from the drafts of the slots that were reached.
            drawn: long [B, C], draws from the laws that a kernel has already made.
            unreached: long [B, N], counters of uniform drafts, if not `slots`.
        """
        drafts = carried
        if self.redraws or self.initial == LAST_LAW:
            if drawn is None:
                assert laws is not None
                fresh = noise.categorical(rows_of(laws, rows), slots, *self.noise(round))
            else:
                fresh = drawn.gather(1, rows)
            drafts = fresh if self.redraws else torch.where(reached, drafts, fresh)
        if self.initial == UNIFORM:
            at = slots if unreached is None else unreached
            drafts = torch.where(reached, drafts, uniform_tokens(noise, at, round, allowed))
        elif self.initial != LAST_LAW:
            drafts = torch.where(reached, drafts, copies(drafts))
        if not self.labelled:
            return drafts, None
        assert laws is not None
        kind = UNIFORM_LAW if self.initial == UNIFORM else POINT_LAW
        rows = rows if self.initial == LAST_LAW else torch.where(reached, rows, kind)
        return drafts, Label(laws, rows, allowed)
