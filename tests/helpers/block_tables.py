"""A drafter of blocks whose laws are tables."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.helpers.tabular import TabularState


class TableDrafter:
    """Drafts from tables; as a corrector's, its law depends on the draft that stands at the slot."""

    taps = ()

    def __init__(self, table: Any, most: int) -> None:
        self.table, self.most = table, most
        self.grid, self.vocab_size = table.grid, table.vocab_size

    def follow(self, model: Any, state: Any, *, window: int, guidance: float) -> TabularState:
        """A state that holds nothing of use."""
        return self.table.prefill(None, batch_size=len(state.tokens), guided=False, window=window)

    def observe(self, state: Any, target: Any, slots: Tensor) -> None:
        pass

    def draft(self, state: Any, tokens: Tensor, fed: Tensor, slots: Tensor, draw: Any) -> Tensor:
        rows = self.table.logits[0, slots[:, 1:].clamp(max=self.grid.num_tokens - 1), 0]  # [B, N, V]
        own = torch.nn.functional.one_hot(tokens[:, 1:], self.vocab_size)
        return draw(rows + own + 0.3 * tokens[:, :1, None] * own, slots[:, 1:])
