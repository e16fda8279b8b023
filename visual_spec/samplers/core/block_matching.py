"""Motion of tokens from frame to frame: block matching, as video codecs do it on pixels.

A place of a frame gets the displacement, in tokens a frame, by which the blocks around it agree best in the last two
complete frames, and in the part of the next frame that holds tokens already. Among equals the smallest displacement is
taken, so what stands still is copied from its own place.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from visual_spec.models.core.protocol import TokenGrid

_REACH = 2  # tokens a frame, the largest displacement along an axis
_BLOCK = 1  # tokens around a place that must agree
_NEXT = 4  # weight of the part of the next frame that is there, against the weight of the last complete frame


def moved_places(tokens: Tensor, slots: Tensor, newest: Tensor, grid: TokenGrid) -> Tensor:
    """Return the slot of the last complete frame whose token each slot continues: long [B, N].

    It is a function of tokens up to `newest`, and so of tokens before the slot. Whole frames are compared at once, and
    each slot reads its block.

    Args:
        tokens: long [B, S], the tokens by slot.
        slots: long [B, N], all later than `newest`.
        newest: long [B, 1], the last slot that holds a token. The result means nothing before two frames are complete.
    """
    size, device = grid.height * grid.width, slots.device
    last = ((newest + 1).div(size, rounding_mode="floor") - 1).clamp(min=1)  # [B, 1], the last complete frame
    ahead = slots // size - last  # [B, N], frames from there to the slot
    row, column = slots % size // grid.width, slots % grid.width
    shifts = _by_size(_displacements(grid)).to(device)  # [M, 2]
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
    """Return all (rows, columns) up to `_REACH` that do not leave a frame from everywhere, [M, 2]."""
    high, wide = (min(_REACH, length - 1) for length in (grid.height, grid.width))
    return torch.cartesian_prod(torch.arange(-high, high + 1), torch.arange(-wide, wide + 1))


def _by_size(shifts: Tensor) -> Tensor:
    return shifts[shifts.square().sum(1).argsort(stable=True)]
