"""Motion of tokens from frame to frame: block matching, as video codecs do it on pixels.

A place of a frame gets the displacement, in tokens a frame, by which the blocks around it agree best in the last two
complete frames, and in the part of the next frame that holds tokens already. Among equals the smallest displacement is
taken, so what stands still is copied from its own place.
"""

from __future__ import annotations

import torch
from torch import Tensor

from visual_spec.models.core.protocol import TokenGrid

_REACH = 2  # tokens a frame, the largest displacement along an axis
_BLOCK = 1  # tokens around a place that must agree
_NEXT = 4  # weight of the part of the next frame that is there, against that of the last complete frame


def moved_places(tokens: Tensor, slots: Tensor, newest: Tensor, grid: TokenGrid) -> Tensor:
    """Return the slot of the last complete frame whose token each slot continues: long [B, N].

    It is a function of tokens up to `newest`, and so of tokens before the slot.

    Args:
        tokens: long [B, S], the tokens by slot.
        slots: long [B, N], all later than `newest`.
        newest: long [B, 1], the last slot that holds a token. The result means nothing before two frames are complete.
    """
    size, device = grid.height * grid.width, slots.device
    last = ((newest + 1).div(size, rounding_mode="floor") - 1).clamp(min=1)  # [B, 1], the last complete frame
    ahead = slots // size - last  # [B, N], frames from there to the slot
    row, column = slots % size // grid.width, slots % grid.width
    shifts = _by_size(_square(_REACH)).to(device)  # [M, 2]
    # Where the content of a slot was in the last complete frame, for each displacement.
    row = row[..., None] - ahead[..., None] * shifts[:, 0]  # [B, N, M]
    column = column[..., None] - ahead[..., None] * shifts[:, 1]
    inside = _inside(row, column, grid)

    def agree(frame: Tensor) -> Tensor:
        """How well the block agrees in a frame [B, 1] and in the one before it, moved: [B, N, M]."""
        block = _square(_BLOCK).to(device)
        passed = (frame - last)[..., None, None]  # frames from the last complete one, 0 or 1
        later_row = (row + shifts[:, 0] * passed[..., 0])[..., None] + block[:, 0]  # [B, N, M, K]
        later_column = (column + shifts[:, 1] * passed[..., 0])[..., None] + block[:, 1]
        earlier_row, earlier_column = later_row - shifts[:, :1], later_column - shifts[:, 1:]
        later = frame[..., None, None] * size + later_row * grid.width + later_column
        earlier = (frame - 1)[..., None, None] * size + earlier_row * grid.width + earlier_column
        known = _inside(later_row, later_column, grid) & _inside(earlier_row, earlier_column, grid)
        known &= later <= newest[..., None, None]
        later, earlier = (torch.where(known, place, 0).flatten(1) for place in (later, earlier))
        equal = (tokens.gather(1, later) == tokens.gather(1, earlier)).view(known.shape)
        # Places outside the frame count neither way: a difference must tell more than a place that is missing.
        return torch.where(equal, 1, -2).mul(known).sum(-1)

    matches = torch.where(inside, agree(last) + _NEXT * agree(last + 1), -(10**6))
    # argmax may return any of several equals: let the first, smallest displacement win.
    order = torch.arange(len(shifts), device=device)
    best = (matches * len(shifts) - order).argmax(-1, keepdim=True)
    return last * size + (row * grid.width + column).gather(-1, best)[..., 0]


def _square(reach: int) -> Tensor:
    """Return all (row, column) up to `reach` away, [(2 reach + 1) ** 2, 2]."""
    line = torch.arange(-reach, reach + 1)
    return torch.cartesian_prod(line, line)


def _by_size(shifts: Tensor) -> Tensor:
    return shifts[shifts.square().sum(1).argsort(stable=True)]


def _inside(row: Tensor, column: Tensor, grid: TokenGrid) -> Tensor:
    return (row >= 0) & (row < grid.height) & (column >= 0) & (column < grid.width)
