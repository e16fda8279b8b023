"""A causal layer on top of a masked model: the tokens of a group given each other, and not only given the context.

After self-speculative masked diffusion (2510.03929). A masked model draws the hidden tokens as if they were
independent. The layer reads the model's features at the slots of a group, in the order in which they are decoded, and
the tokens of the earlier ones. So it gives the group a joint law, a product of conditionals, at the price of one narrow
layer a pass. The model's own laws are its drafts.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from visual_spec.models.core.offload import loads_weights
from visual_spec.models.core.protocol import check_heads
from visual_spec.models.core.saved import SavedModel
from visual_spec.models.core.settings import register_to_config


class CausalLayer(SavedModel):
    """Scores the tokens of a group one given the other; see `SelfSpeculativeMaskedSampler`.

    A fresh layer returns the features as they are, so its law is the masked model's.

    Args:
        feature_dim: C, width of the features before the model's head.
        vocab_size: V of the model.
        grid_size: tokens on each side of a picture.
        dim: width of the layer; None: `feature_dim`.
        num_heads: attention heads.

    Raises:
        ValueError: heads that do not divide the width.
    """

    stored_as = (torch.float8_e4m3fn,)  # by `python scripts/train causal_layer`

    @register_to_config
    def __init__(
        self, feature_dim: int, vocab_size: int, grid_size: int, dim: int | None = None, num_heads: int = 8
    ) -> None:
        super().__init__()
        dim = feature_dim if dim is None else dim
        check_heads(dim, num_heads)
        self.proj_in = nn.Sequential(nn.LayerNorm(feature_dim), nn.Linear(feature_dim, dim))
        self.token_emb = nn.Embedding(vocab_size, dim)
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(3))
        self.query, self.key_value = nn.Linear(dim, dim), nn.Linear(dim, 2 * dim)
        self.nothing = nn.Parameter(torch.zeros(2, num_heads, 1, dim // num_heads))  # seen by the first token
        # By the distance of two slots in rows and columns. All zeros take thousands of steps to find the neighbours.
        self.distance = nn.Parameter(_near_first(num_heads, grid_size))
        self.out = nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))
        self.proj_out = nn.Linear(dim, feature_dim)
        nn.init.zeros_(self.proj_out.weight)
        nn.init.zeros_(self.proj_out.bias)

    def check_fits(self, model: Any) -> None:
        """Refuse a model of other features, tokens or slots than this layer was made for, by ValueError."""
        side = self.config["grid_size"]
        own = (self.config["feature_dim"], self.config["vocab_size"], side, side)
        grid = model.grid
        wanted = (getattr(model, "feature_dim", None), model.vocab_size, grid.height, grid.width)
        if own != wanted or grid.codebooks * grid.frames != 1:
            raise ValueError(
                f"the causal layer is for features of {own[0]} numbers, {own[1]} codes and {side} x {side} slots of "
                f"one codebook, and a {type(model).__name__} has {wanted[0]}, {wanted[1]} and {grid.height} x "
                f"{grid.width} of {grid.codebooks}; train one for it by python scripts/train causal_layer."
            )

    @loads_weights
    def forward(self, features: Tensor, tokens: Tensor, slots: Tensor) -> Tensor:
        """Features `[R, G, C]` of the slots of a group, each given the tokens at the places before its own.

        Args:
            features: [R, G, C], of the model, which knows no token of the group.
            tokens: long [R, G], in the order of decoding. The last one is not read.
            slots: long [R, G], where they stand in the grid.
        """
        x = self.proj_in(features.to(self.distance.dtype))  # [R, G, D]
        heads = self.config["num_heads"]
        query = self.query(self.norms[0](x))
        key, value = self.key_value(self.norms[1](x + self.token_emb(tokens))).chunk(2, -1)
        query, key, value = (part.unflatten(-1, (heads, -1)).transpose(1, 2) for part in (query, key, value))
        nothing = self.nothing[:, None].expand(-1, len(x), -1, -1, -1)
        key, value = (
            torch.cat([nothing[0], key], 2),
            torch.cat([nothing[1], value], 2),
        )  # [R, H, 1 + G, D / H]
        seen = F.scaled_dot_product_attention(query, key, value, attn_mask=self._scores(slots))
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        x = x + self.mlp(self.norms[2](x))
        return features + self.proj_out(x).to(features.dtype)

    def _scores(self, slots: Tensor) -> Tensor:
        """Return what is added to the scores of attention, `[R, H, G, 1 + G]`: by distance, -inf for later places."""
        side, count = self.config["grid_size"], slots.shape[1]
        row, column = slots // side, slots % side
        down, right = (at[:, :, None] - at[:, None] + side - 1 for at in (row, column))  # [R, G, G]
        near = self.distance.flatten(1)[:, down * (2 * side - 1) + right].transpose(0, 1)  # [R, H, G, G]
        later = torch.ones(count, count, dtype=torch.bool, device=slots.device).triu()
        return F.pad(near.masked_fill(later, -torch.inf), (1, 0))


def _near_first(heads: int, side: int) -> Tensor:
    """Scores `[H, 2 side - 1, 2 side - 1]` by distance in rows and columns that fall with the distance.

    Of eight heads, four fall steeply around the slot on the left, above, on the right and below; the others fall around
    the slot itself, each at half the rate of the one before.
    """
    around = ((0, 1), (1, 0), (0, -1), (-1, 0))
    at = torch.arange(1.0 - side, side)
    slots = []
    for head in range(heads):
        kind = head % 8
        (row, column), rate = (around[kind], 2.0) if kind < 4 else ((0, 0), 2.0 ** (4 - kind))
        slots.append(-rate * ((at - row).abs()[:, None] + (at - column).abs()))
    return torch.stack(slots)
