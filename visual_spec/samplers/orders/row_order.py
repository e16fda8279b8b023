"""Row-parallel decoding order: when each slot is decoded if a model trained in raster order runs rows side by side."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from visual_spec.models.core.protocol import TokenGrid


@dataclass(frozen=True)
class RowPlan:
    """What one target call feeds and scores. A windows (one per open row) of D + 1 positions make N positions.

    Attributes:
        length: long [B, A], the number of tokens in each window's row.
        above: long [B, A], the number of tokens in the row above; the width if that row is complete or does not exist.
        scored: long [B, A], how many leading positions of each window predict a slot that may be drawn.
        sources: long [B, N], the slot whose token each position feeds.
        slots: long [B, N], the slot at which it is fed: equal to the source, except for a stand-in.
        predicted: long [B, N], the slot that a scored position predicts; for other positions a place past the grid.
        scratch: long [N], each position's own place past the grid.
        seen: bool [B, N, L], the slots that each position sees (`OrderModel`).
    """

    length: Tensor
    above: Tensor
    scored: Tensor
    sources: Tensor
    slots: Tensor
    predicted: Tensor
    scratch: Tensor
    seen: Tensor


@dataclass(frozen=True)
class RowOrder:
    """Rows decoded side by side: slot c of a row may be drawn once the row above holds min(width, c + lead) tokens.

    With lead 1 the calls run along anti-diagonals; with lead `width` the order is raster order. The rows of successive
    frames form one chain: the row above the first row of a frame is the last row of the frame before.

    A row is open from its first prediction until its last token is in the cache. Row r uses window r mod A, so at most
    A successive rows are open.

    A position sees the committed tokens of the rows above, and everything before it in its own row, drafts included. It
    does not see drafts of other rows (the row-causal mask of PJD). The first slot of a row must be predicted from the
    end of the row above. If that token is not there yet, the newest token of the row above is fed in its place, as
    ZipAR does on models without an end-of-row token. No other position ever sees this stand-in, and the true token
    overwrites it later.

    Args:
        rows: rows of all frames.
        width: tokens of a row.
        lead: least number of tokens by which a row trails the row above, 1 to width.
        windows: A, the largest number of open rows.
        drafts: D, drafts that a window scores after the row's newest token.
        released: as in ZipAR's public code, row 1 starts once row 0 is complete, and the stand-in is the newest token
            two rows above.
        start_at: least number of tokens (or a whole row) that the row above holds when a row starts.
    """

    rows: int
    width: int
    lead: int
    windows: int
    drafts: int = 0
    released: bool = False
    start_at: int = 1

    @staticmethod
    def over(
        grid: TokenGrid,
        lead: int,
        *,
        windows: int | None = None,
        drafts: int = 0,
        released: bool = False,
        start_at: int = 1,
    ) -> RowOrder:
        """Return the order of a grid. Caps `lead` at the width, `windows` at the rows; None: as many as can be open."""
        rows, width = grid.frames * grid.height, grid.width
        lead = min(lead, width)
        if windows is None:
            # One more than can advance at once: a complete row still feeds its last token while the next rows advance.
            # In raster order the first position of the next row feeds it.
            windows = 1 if lead == width else width // lead + 1
        return RowOrder(rows, width, lead, min(rows, windows), drafts, released, min(start_at, width))

    @property
    def columns(self) -> int:
        """N, the positions of a call."""
        return self.windows * (self.drafts + 1)

    @property
    def calls(self) -> int:
        """Target calls, prefill included, if every open row advances one token a call: width + (rows - 1) lead."""
        alone = self.width - self.lead if self.released and self.rows > 1 else 0
        return self.width + (self.rows - 1) * self.lead + alone

    def start(self, batch_size: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """The order's state after the prefill, which predicts slot 0: `lengths` long [B, rows], the tokens of each
        row, and `row` long [B, A], the row of each window."""
        lengths = torch.zeros(batch_size, self.rows, dtype=torch.long, device=device)
        lengths[:, 0] = 1
        row = torch.arange(self.windows, device=device).repeat(batch_size, 1)
        if self.width == 1:
            row[:, 0] = self.windows  # complete; the first position of the next row feeds its only token
        return lengths, row

    def plan(self, lengths: Tensor, row: Tensor) -> RowPlan:
        """Return the plan of the next call."""
        device, width, size = lengths.device, self.width, self.drafts + 1
        num_tokens = self.rows * width
        opened = row < self.rows
        length = lengths.gather(1, row.clamp(max=self.rows - 1))  # [B, A]
        above = lengths.gather(1, (row - 1).clamp(0, self.rows - 1)).where(row > 0, width)
        lead = torch.where(row == 1, width, self.lead) if self.released else self.lead
        opened = opened & ((length > 0) | (above >= self.start_at))
        reach = (above - lead + 1).where(above < width, width)  # earlier slots of the row may be drawn
        scored = (reach - length).clamp(0, size) * opened
        # A complete row feeds its last token, and a waiting row its newest, so that rows below can see them.
        fed = torch.maximum(scored, (opened & (length > 0)).long())

        offset = torch.arange(size, device=device)
        scratch = num_tokens + torch.arange(self.columns, device=device)
        place = scratch.view(self.windows, size)
        # The newest token; before a row's first one, the end of the row above.
        first = row * width + length - 1
        slots = first[..., None] + offset  # [B, A, D + 1]
        counted = offset < scored[..., None]
        predicted = (slots + 1).where(counted, place)
        slots = slots.where(offset < fed[..., None], place)
        sources = slots.clone()
        starting = (length == 0) & (scored > 0)
        newest = (row - 1) * width + above - 1
        if self.released:
            second = lengths.gather(1, (row - 2).clamp(0, self.rows - 1))
            newest = newest.where(above == width, (row - 2) * width + second - 1)
        sources[..., 0] = newest.where(starting, slots[..., 0])

        slot = torch.arange(num_tokens, device=device)
        slot_row = slot // width
        committed = slot - slot_row * width < lengths[:, slot_row]  # [B, L]
        known = committed[:, None] | (slot_row == row[..., None])  # [B, A, L]
        seen = known[:, :, None] & (slot < slots[..., None])  # [B, A, D + 1, L]
        return RowPlan(
            length,
            above,
            scored,
            sources.flatten(1),
            slots.flatten(1),
            predicted.flatten(1),
            scratch,
            seen.flatten(1, 2),
        )

    def advance(self, lengths: Tensor, row: Tensor, plan: RowPlan, count: Tensor) -> tuple[Tensor, Tensor]:
        """Return `lengths` and `row` after a call that commits the first `count` [B, A] predictions of each window."""
        lengths = lengths.scatter_add(1, row.clamp(max=self.rows - 1), count)
        complete = plan.length + count == self.width
        following = lengths.gather(1, (row + 1).clamp(max=self.rows - 1))
        # A row closes when its last token has been fed. If the next row has not started, its first position feeds it.
        handed_on = complete & ((following == 0) | (row == self.rows - 1))
        return lengths, torch.where((plan.length == self.width) | handed_on, row + self.windows, row)

    def done(self, lengths: Tensor) -> Tensor:
        """Return whether each sample is complete: bool [B]. The last row is always complete last."""
        return lengths[:, -1] == self.width
