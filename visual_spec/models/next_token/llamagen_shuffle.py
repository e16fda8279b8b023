"""LlamaGen with Token-Shuffle: every s x s tokens of a picture are one position of the transformer.

Token-Shuffle (Ma et al., "Token-Shuffle: towards high-resolution image generation with autoregressive models",
2504.17789). Before the transformer, a layer compresses each token from d to d / s^2 channels, the
s^2 tokens of a block are joined to d channels, and residual MLPs mix them (token-shuffle). After it, residual MLPs and
a layer from d / s^2 to d channels give every token of the next block its own features (token-unshuffle), which one head
reads. So one position predicts s^2 tokens, independent of each other given the blocks before. Words are not shuffled.

No code was released, and the layers are those that summaries of the paper name. The rest is chosen here: an MLP is two
layers with a GELU and no norm, the transformer's last norm comes before the unshuffle, and a block has the rotary index
of its first token.

The cache has one place a block.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from visual_spec.models.core.offload import decodes
from visual_spec.models.next_token.llamagen import LlamaGenTransformer
from visual_spec.models.next_token.llamagen_blocks import LlamaGenState, TextCondition

MLP_BLOCKS = 2  # of both operations, as published


class MLPBlock(nn.Module):
    """x + W2 gelu(W1 x), `[..., dim]`."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(dim, dim, bias=False), nn.Linear(dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.fc2(F.gelu(self.fc1(x)))


class LlamaGenShuffle(LlamaGenTransformer):
    """A `TrainedOrderModel` of order "blocks2" or "blocks4": a LlamaGen whose positions are blocks of s x s tokens.

    Raises:
        ValueError: as `LlamaGenTransformer`; or blocks that do not fit the grid, or the channels.
    """

    def add_parts(self) -> None:
        side, dim, grid = self.block_side, self.config["dim"], self.config["grid_size"]
        if dim % side**2 or grid % side:
            raise ValueError(
                f"blocks of {side} x {side} with grid_size={grid} and dim={dim}; pass a grid_size that is a multiple "
                f"of {side}, and a dim that is a multiple of {side**2}."
            )
        self.compress = nn.Linear(dim, dim // side**2, bias=False)
        self.shuffle = nn.Sequential(*(MLPBlock(dim) for _ in range(MLP_BLOCKS)))
        self.unshuffle = nn.Sequential(*(MLPBlock(dim) for _ in range(MLP_BLOCKS)))
        self.expand = nn.Linear(dim // side**2, dim, bias=False)

    @property
    def block_side(self) -> int:
        """s, the side of a block in tokens."""
        return int(self.trained_order.removeprefix("blocks"))

    @property
    def block_size(self) -> int:
        """K = s^2, the tokens of a block."""
        return self.block_side**2

    def block_slots(self, device: torch.device | None = None) -> Tensor:
        """Return the slots of every block, blocks in raster order: long `[N, K]`."""
        side, width = self.block_side, self.grid.width
        slots = torch.arange(self.grid.num_tokens, device=device).view(-1, side, width // side, side)
        return slots.transpose(1, 2).reshape(-1, side * side)

    def rotary_table(self) -> Tensor:
        table = super().rotary_table()
        return table[self.block_slots(table.device)[:, 0]]

    def embed(self, tokens: Tensor, slots: Tensor, hidden: Tensor | None = None) -> Tensor:
        """Return the token-shuffle `[B, N, dim]` of whole blocks: `tokens [B, N * K]`, block by block."""
        compressed = self.compress(self.tok_embeddings(tokens))  # [B, N * K, dim / K]
        return self.shuffle(compressed.unflatten(1, (-1, self.block_size)).flatten(2))

    def logits(self, features: Tensor, hidden: Tensor, answers: Tensor | None) -> Tensor:
        """Return the token-unshuffle's logits of the tokens of the next blocks `[R, P, V]`; see `LlamaGenTransformer`.

        `answers` counts tokens, K a block.
        """
        parts = self.unshuffle(features).unflatten(2, (self.block_size, -1))  # [R, N, K, dim / K]
        tokens = self.expand(parts).flatten(1, 2)
        return self._head(tokens if answers is None else tokens[:, answers[:, 0]])

    def num_places(self, window: int) -> int:
        """One place a block, and as many to spare as a call has tokens."""
        return self.grid.num_tokens // self.block_size + window

    @decodes
    def run_prompt(
        self,
        prompt: tuple[Tensor, ...],
        *,
        guided: bool,
        window: int,
        held: LlamaGenState | None = None,
        side: Tensor | None = None,
    ) -> LlamaGenState:
        """Run the prefix, as `LlamaGenTransformer` does; the state's `logits [R, K, V]` predict the first block."""
        state = super().run_prompt(prompt, guided=guided, window=window, held=held, side=side)
        state.logits = self.logits(state.features, state.features, None)
        return state

    @decodes
    def forward(
        self,
        state: LlamaGenState,
        tokens: Tensor,
        slots: Tensor,
        visible: Tensor | None = None,
        seen: Tensor | None = None,
        predicted: Tensor | None = None,
        answers: Tensor | None = None,
    ) -> Tensor:
        """Feed whole blocks, the K tokens of each one after the other, and answer as a `TrainedOrderModel`.

        A block sees what its first token sees. The slots of blocks past the grid follow its last slot.

        Raises:
            ValueError: as in `check_call`; or tokens that are no whole blocks.
        """
        self.check_call(slots, seen, predicted, answers)
        if tokens.shape[1] % self.block_size:
            raise ValueError(
                f"{tokens.shape[1]} tokens fed; this model takes whole blocks, of {self.block_size} tokens each."
            )
        assert seen is not None
        side, width, size = self.block_side, self.grid.width, self.block_size
        own = slots[:, ::size]  # [B, N], the first slot of each block
        inside = own // width // side * (width // side) + own % width // side
        blocks = torch.where(own < self.grid.num_tokens, inside, own // size)
        seen = seen[:, ::size, self.block_slots(slots.device)[:, 0]]  # [B, N, blocks]
        return super().forward(state, tokens, blocks, seen=seen, answers=answers)

    def teacher_forced(
        self,
        tokens: Tensor,
        condition: TextCondition | Tensor,
        dropped: Tensor | None = None,
        hidden_tokens: Tensor | None = None,
    ) -> Tensor:
        """Return logits `[B, L, V]` of whole pictures `tokens [B, L]`, block by block, in one pass. Gradients flow.

        Logit n * K + r is of the slot `block_slots()[n, r]`. `dropped` as in `LlamaGenTransformer`.
        """
        slots = self.block_slots(tokens.device)
        fed = tokens[:, slots[:-1].flatten()]  # the last block predicts nothing
        index = torch.arange(len(slots) - 1, device=tokens.device)
        features = self.norm(self.forced(fed, index, index[:, None] >= index, condition, dropped))
        return self.logits(features, features, None)
