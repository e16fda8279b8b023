"""A model of frames whose logits are sums of table entries: every token that a slot sees moves them."""

from dataclasses import dataclass

import torch
from torch import Tensor

from visual_spec.models.core.masked_protocol import MaskedState
from visual_spec.models.core.protocol import TokenGrid


@dataclass
class TableFrameState(MaskedState):
    """rows: long [R], which tables; written: long [R, frames * N], what was written of earlier frames."""

    rows_of: Tensor
    written: Tensor

    def select(self, samples: Tensor) -> None:
        rows = self.rows(samples, len(self.rows_of))
        self.rows_of, self.written = self.rows_of[rows], self.written[rows]


class TableFrameModel:
    """A `FrameModel` in float64. Conditions are long [B]; the last table is that of no condition.

    Args:
        grid: frames of a few slots.
        vocab_size: V.
        conditions: C.
        spread: of the table entries.
    """

    def __init__(
        self, grid: TokenGrid, vocab_size: int, conditions: int = 1, spread: float = 1.0, seed: int = 0
    ) -> None:
        self.grid, self.vocab_size, self.mask_id = grid, vocab_size, vocab_size
        count = grid.num_tokens
        generator = torch.Generator().manual_seed(seed)
        # By table, slot, slot that is seen, its token, and the token that is scored.
        shape = (conditions + 1, count, count, vocab_size + 1, vocab_size)
        self.table = spread * torch.randn(shape, generator=generator, dtype=torch.float64)
        self.calls: list[Tensor] = []
        self.writes: list[Tensor] = []

    @property
    def frame_tokens(self) -> int:
        return self.grid.height * self.grid.width

    @property
    def frame_groups(self) -> list[list[int]]:
        return [[frame] for frame in range(self.grid.frames)]

    def prepare(self, condition: Tensor | None, *, batch_size: int, guided: bool) -> TableFrameState:
        rows = torch.zeros(batch_size, dtype=torch.long) if condition is None else condition
        if guided:
            rows = torch.cat([rows, torch.full_like(rows, len(self.table) - 1)])
        return TableFrameState(guided, torch.device("cpu"), rows, rows.new_zeros(len(rows), 0))

    def __call__(self, state: TableFrameState, tokens: Tensor) -> Tensor:
        self.calls.append(tokens.clone())
        tokens = tokens.repeat(len(state.rows_of) // len(tokens), 1)
        seen = torch.cat([state.written, tokens], 1)  # [R, J]
        first, count = state.written.shape[1], tokens.shape[1]
        table = self.table[state.rows_of, first : first + count]  # [R, N, L, V + 1, V]
        index = seen[:, None, :, None, None].expand(-1, count, -1, 1, self.vocab_size)
        return table[:, :, : seen.shape[1]].gather(3, index)[:, :, :, 0].sum(2)

    def write(self, state: TableFrameState, tokens: Tensor) -> None:
        tokens = tokens.repeat(len(state.rows_of) // len(tokens), 1)
        self.writes.append(tokens.clone())
        state.written = torch.cat([state.written, tokens], 1)
