"""PAR: LlamaGen that draws the regions of a picture in parallel (arXiv 2412.15119).

After the first token of every region, learned tokens are fed, one for each region but the first.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from visual_spec.models.core.orders import LEARNED_TOKENS
from visual_spec.models.next_token.llamagen import LlamaGenTransformer


class LlamaGenRegions(LlamaGenTransformer):
    """A `TrainedOrderModel` of order "par4" or "par16". Ids and places of learned tokens follow the picture's.

    Their keys vanish, like the prefix's.
    """

    def add_parts(self) -> None:
        learned = nn.Embedding(self.learned_tokens, self.config["dim"])
        self.spe_tok_embeddings = nn.ModuleDict({"special_embeddings": learned})

    @property
    def learned_tokens(self) -> int:
        return LEARNED_TOKENS[self.trained_order]

    def rotary_table(self) -> Tensor:
        """The table of the grid, and a row of zeros for the learned tokens, whose keys vanish."""
        table = super().rotary_table()
        return torch.cat([table, torch.zeros_like(table[:1])])

    def embed(self, tokens: Tensor, slots: Tensor, hidden: Tensor | None = None) -> Tensor:
        """Return embeddings `[B, W, dim]` of `tokens [B, W]`, some of them learned ones."""
        size = self.config["vocab_size"]
        learned = self.spe_tok_embeddings["special_embeddings"]((tokens - size).clamp(min=0))
        embedded = super().embed(tokens.clamp(max=size - 1), slots)
        embedded = torch.where((tokens >= size)[..., None], learned, embedded)
        return embedded if hidden is None else embedded.masked_fill(hidden[..., None], 0.0)
