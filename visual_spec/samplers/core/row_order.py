"""Which slots are decoded when: rows side by side, on a model that was trained in raster order."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from visual_spec.models.core.protocol import TokenGrid


@dataclass(frozen=True)
class RowPlan:
    """What one target call feeds and scores. A windows (one an open row) of D + 1 columns make N columns.

    Attributes:
        length: long [B, A], tokens that the row of each window holds.
        above: long [B, A], tokens that the row above holds; its width if it is complete, or if there is none.
        scored: long [B, A], how many columns of each window, from the first, predict a slot that may be drawn.
        sources: long [B, N], the slot whose token a column feeds.
        slots: long [B, N], the slot at which it is fed: the source, but for a stand-in.
        predicted: long [B, N], the slot that the column predicts, if it is scored, else a place past the grid.
        scratch: long [N], the place past the grid that belongs to each column.
        seen: bool [B, N, L], the slots that each column sees (`OrderModel`).
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
    """Rows decoded side by side: column c of a row may be drawn once the row above holds min(width, c + lead) tokens.

    With lead 1 the calls run over anti-diagonals, with lead `width` it is raster order. The rows of successive frames
    form one chain: the row above the first row of a frame is the last row of the frame before.

    A row is open from its first prediction until its last token is in the cache. Row r lives in window r mod A, so at
    most A successive rows are open.

    What a column sees: the committed tokens of the rows above, and of its own row all that is before it, drafts
    included. Drafts of other rows it does not see (the row-causal mask of PJD). The first column of a row must be
    predicted from the end of the row above. While that is not there, the newest token of the row above is fed in its
    place, as ZipAR does on models without an end-of-row token; no other column ever sees this stand-in, and the
    true token is written over it later.

    Args:
        rows: rows of all frames.
        width: tokens of a row.
        lead: tokens that a row is behind the row above at least, 1 to width.
        windows: A, the largest number of open rows.
        drafts: D, drafts that a window scores behind the row's newest token.
    """

    rows: int
    width: int
    lead: int
    windows: int
    drafts: int = 0

    @staticmethod
    def over(grid: TokenGrid, lead: int, *, windows: int | None = None, drafts: int = 0) -> RowOrder:
        """The order of a grid. `lead` is cut to the width, `windows` to the rows; None opens rows as they may start."""
        rows, width = grid.frames * grid.height, grid.width
        lead = min(lead, width)
        if windows is None:
            # One more than fit side by side: a complete row is fed its last token while the next ones go on. In raster
            # order the first column of the next row does that.
            windows = 1 if lead == width else width // lead + 1
        return RowOrder(rows, width, lead, min(rows, windows), drafts)

    @property
    def columns(self) -> int:
        """N, the columns of a call."""
        return self.windows * (self.drafts + 1)

    @property
    def calls(self) -> int:
        """Target calls, prefill included, when every open row advances by one token a call: width + (rows - 1) lead."""
        return self.width + (self.rows - 1) * self.lead

    def start(self, batch_size: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """After the prefill, which predicts slot 0: `lengths` long [B, rows], the tokens that each row holds, and
        `row` long [B, A], the row that each window is at."""
        lengths = torch.zeros(batch_size, self.rows, dtype=torch.long, device=device)
        lengths[:, 0] = 1
        row = torch.arange(self.windows, device=device).repeat(batch_size, 1)
        if self.width == 1:
            row[:, 0] = self.windows  # complete, and the first column of the next row feeds its only token
        return lengths, row

    def plan(self, lengths: Tensor, row: Tensor) -> RowPlan:
        """The next call."""
        device, width, size = lengths.device, self.width, self.drafts + 1
        num_tokens = self.rows * width
        opened = row < self.rows
        length = lengths.gather(1, row.clamp(max=self.rows - 1))  # [B, A]
        above = lengths.gather(1, (row - 1).clamp(0, self.rows - 1)).where(row > 0, width)
        reach = (above - self.lead + 1).where(above < width, width)  # the columns before it may be drawn
        scored = (reach - length).clamp(0, size) * opened
        # A complete row feeds its last token, and a row that waits its newest: rows below may see them.
        fed = torch.maximum(scored, (opened & (length > 0)).long())

        offset = torch.arange(size, device=device)
        scratch = num_tokens + torch.arange(self.columns, device=device)
        place = scratch.view(self.windows, size)
        first = (
            row * width + length - 1
        )  # the newest token; before a row's first one, the end of the row above
        slots = first[..., None] + offset  # [B, A, D + 1]
        counted = offset < scored[..., None]
        predicted = (slots + 1).where(counted, place)
        slots = slots.where(offset < fed[..., None], place)
        sources = slots.clone()
        starting = (length == 0) & (scored > 0)
        sources[..., 0] = ((row - 1) * width + above - 1).where(starting, slots[..., 0])

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
        """`lengths` and `row` after a call that committed the first `count` [B, A] predictions of each window."""
        lengths = lengths.scatter_add(1, row.clamp(max=self.rows - 1), count)
        complete = plan.length + count == self.width
        following = lengths.gather(1, (row + 1).clamp(max=self.rows - 1))
        # A row closes when its last token has been fed. If the next row has not started, its first column does that.
        handed_on = complete & ((following == 0) | (row == self.rows - 1))
        return lengths, torch.where((plan.length == self.width) | handed_on, row + self.windows, row)

    def done(self, lengths: Tensor) -> Tensor:
        """Whether a sample is complete: bool [B]. The last row is complete last."""
        return lengths[:, -1] == self.width
