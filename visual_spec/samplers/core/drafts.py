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
# Block matching.
_REACH = 2  # tokens a frame, the largest displacement along an axis
_BLOCK = 1  # tokens around a place that must agree
_NEXT = 4  # weight of the part of the next frame that is there, against the weight of the last complete frame


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

        `tokens`: long [B, N], the drafts.
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

    `group`: tokens per position.
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

    `allowed`: half-open range of token ids.
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
    back = newest - slots  # [B, N], at most -1
    above = newest - back % grid.width
    same_row = slots // grid.width == newest // grid.width
    if grid.frames == 1:
        source = torch.where(above >= 0, above, newest)
        return source if direction == UP else torch.where(same_row, newest, source)
    frame_size = grid.height * grid.width
    earlier = newest - back % frame_size
    source = torch.where(earlier >= 0, earlier, newest)
    source = torch.where(above >= slots - slots % frame_size, above, source)
    if direction != UP:
        source = torch.where(same_row, newest, source)
    if direction in (PREVIOUS_FRAME, MOVED_FRAME, PANNED_FRAME):
        source = torch.where(earlier >= 0, earlier, source)
    if tokens is None:
        return source
    if direction == MOVED_FRAME:
        moved = moved_slots(tokens, slots, newest, grid)
        return torch.where(newest + 1 >= 2 * frame_size, moved, source)
    return panned_slots(tokens, slots, newest, grid, source) if direction == PANNED_FRAME else source


def moved_slots(tokens: Tensor, slots: Tensor, newest: Tensor, grid: TokenGrid) -> Tensor:
    """Return the slot of the last complete frame whose token each slot continues, by block matching as of video codecs.

    A slot gets the displacement, in tokens a frame, by which the blocks around it agree best in the last two complete
    frames, and in the part of the next frame that holds tokens already. Among equals the smallest is taken, so what
    stands still is copied from its own place. Only tokens up to `newest` are read. Whole frames are compared at once.
    Means nothing before two frames are complete. See `copied_slots` for the arguments.
    """
    size, device = grid.height * grid.width, slots.device
    last = ((newest + 1).div(size, rounding_mode="floor") - 1).clamp(min=1)  # [B, 1], the last complete frame
    ahead = slots // size - last  # [B, N], frames from there to the slot
    row, column = slots % size // grid.width, slots % grid.width
    shifts = _displacements(grid).to(device)  # [M, 2]
    # Where the content of a slot was in the last complete frame, for each displacement.
    row = row[..., None] - ahead[..., None] * shifts[:, 0]  # [B, N, M]
    column = column[..., None] - ahead[..., None] * shifts[:, 1]
    inside = (row >= 0) & (row < grid.height) & (column >= 0) & (column < grid.width)

    places = torch.arange(size, device=device)
    before, complete, begun = (
        tokens.gather(1, (frame * size + places).clamp(max=tokens.shape[1] - 1))
        for frame in (last - 1, last, last + 1)
    )
    known = (last + 1) * size + places <= newest  # [B, H * W], of the frame that has begun
    order = torch.arange(len(shifts), device=device)

    def read(agreement: Tensor, row: Tensor, column: Tensor) -> Tensor:
        """The agreement [B, H + 2 R, W + 2 R, M] at centres [B, N, M], of which those inside matter."""
        row = row.clamp(-_REACH, grid.height + _REACH - 1) + _REACH
        column = column.clamp(-_REACH, grid.width + _REACH - 1) + _REACH
        at = (row * agreement.shape[2] + column) * len(shifts) + order
        return agreement.flatten(1).gather(1, at.flatten(1)).view(at.shape)

    still = read(_agreement(complete, before, torch.ones_like(known), shifts, grid), row, column)
    moving = _agreement(begun, complete, known, shifts, grid)
    matches = still + _NEXT * read(moving, row + shifts[:, 0], column + shifts[:, 1])
    # argmax may return any of several equals: let the first, smallest displacement win.
    best = torch.where(inside, matches.int() * len(shifts) - order, -(10**6)).argmax(-1, keepdim=True)
    return last * size + (row * grid.width + column).gather(-1, best)[..., 0]


def _agreement(later: Tensor, earlier: Tensor, known: Tensor, shifts: Tensor, grid: TokenGrid) -> Tensor:
    """How well the block around each place of a frame agrees with the frame before it, moved.

    Args:
        later, earlier: [B, H * W], the tokens of two frames.
        known: bool [B, H * W], the places of the later one that count.
        shifts: long [M, 2], displacements in tokens, at most `_REACH`.

    Returns:
        int8 [B, H + 2 R, W + 2 R, M] for centres up to R = `_REACH` outside the frame, whose blocks reach into it.
    """
    shape, width = (len(later), grid.height, grid.width), 2 * _REACH + 1
    # The token at each place's own place less the displacement: [B, H, W, M].
    views = F.pad(earlier.view(shape), [_REACH] * 4).unfold(1, width, 1).unfold(2, width, 1)
    moved = views[..., _REACH - shifts[:, 0], _REACH - shifts[:, 1]]
    rows = torch.arange(grid.height, device=later.device)[:, None, None] - shifts[:, 0]
    columns = torch.arange(grid.width, device=later.device)[:, None] - shifts[:, 1]
    there = (rows >= 0) & (rows < grid.height) & (columns >= 0) & (columns < grid.width)  # [H, W, M]
    # Places outside the frame count neither way: a difference must tell more than a place that is missing.
    equal = later.view(*shape, 1) == moved
    points = (equal.to(torch.int8) * 3 - 2) * (known.view(*shape, 1) & there)
    edge = _REACH + _BLOCK
    points = F.pad(points, [0, 0, edge, edge, edge, edge])
    height, width = grid.height + 2 * _REACH, grid.width + 2 * _REACH
    lines = sum(points[:, :, step : step + width] for step in range(2 * _BLOCK + 1))
    return sum(lines[:, step : step + height] for step in range(2 * _BLOCK + 1))  # pyright: ignore


def _displacements(grid: TokenGrid) -> Tensor:
    """All (rows, columns) up to `_REACH` that do not leave a frame from everywhere, [M, 2], the smallest first."""
    high, wide = (min(_REACH, length - 1) for length in (grid.height, grid.width))
    shifts = torch.cartesian_prod(torch.arange(-high, high + 1), torch.arange(-wide, wide + 1))
    return shifts[shifts.square().sum(1).argsort(stable=True)]


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
