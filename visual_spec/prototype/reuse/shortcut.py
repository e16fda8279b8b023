"""A shortcut: one block that makes the features of a masked model's next call from the features of its last one.

After MIGM-Shortcut (2602.23996). Between two calls only a few tokens become known, and the features that the head reads
move smoothly. The block reads the last features, the tokens that were kept since, and the hidden share. It is narrower
than the model, whose head scores what the block returns.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from visual_spec.models.core.offload import loads_weights
from visual_spec.models.core.protocol import check_heads
from visual_spec.models.core.saved import SavedModel
from visual_spec.models.core.settings import Count, register_to_config


class _ContextAttention(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key_value = nn.Linear(dim, dim), nn.Linear(dim, 2 * dim)
        self.out = nn.Linear(dim, dim)

    def forward(self, x: Tensor, context: Tensor, mask: Tensor | None = None) -> Tensor:
        """`x [R, W, D]` over `context [R, S, D]` under a bool mask [R, 1, 1, S]."""
        query, key, value = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in (self.query(x), *self.key_value(context).chunk(2, -1))
        )
        seen = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        return self.out(seen.transpose(1, 2).flatten(2))


class FeatureShortcut(SavedModel):
    """Stands in for a masked model of one codebook on some calls; see `ReusingMaskedSampler`.

    Args:
        feature_dim: C, width of the features before the model's head.
        vocab_size: V of the model.
        num_tokens: L, slots of a picture.
        dim: width of the block; None: half of `feature_dim`.
        num_heads: attention heads.

    Raises:
        ValueError: heads that do not divide the width.
    """

    stored_as = (torch.float8_e4m3fn,)  # by `python scripts/train shortcut`

    @register_to_config
    def __init__(
        self,
        feature_dim: int,
        vocab_size: Count,
        num_tokens: int,
        dim: Count | None = None,
        num_heads: Count = 4,
    ) -> None:
        super().__init__()
        dim = feature_dim // 2 if dim is None else dim
        check_heads(dim, num_heads)
        self.proj_in = nn.Sequential(
            nn.LayerNorm(feature_dim), nn.Linear(feature_dim, dim), nn.GELU(), nn.LayerNorm(dim)
        )
        self.token_emb = nn.Embedding(vocab_size, dim)
        self.pos_emb = nn.Parameter(torch.randn(num_tokens, dim) * dim**-0.5)
        self.nothing = nn.Parameter(torch.zeros(1, 1, dim))  # seen where no token was kept
        self.share = nn.Sequential(nn.Linear(1, dim), nn.SiLU(), nn.Linear(dim, 9 * dim))
        self.cross, self.own = _ContextAttention(dim, num_heads), _ContextAttention(dim, num_heads)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))
        self.norms = nn.ModuleList(nn.LayerNorm(dim, elementwise_affine=False) for _ in range(3))
        self.proj_out = nn.Linear(dim, feature_dim)
        for layer in (self.share[2], self.proj_out):  # at first nothing changes
            nn.init.zeros_(layer.weight)  # pyright: ignore[reportArgumentType]
            nn.init.zeros_(layer.bias)  # pyright: ignore[reportArgumentType]
        gates = torch.ones(3, dim)
        with torch.no_grad():
            self.share[2].bias.unflatten(0, (3, 3, dim))[:, 2] = gates  # pyright: ignore

    def check_fits(self, model: Any) -> None:
        """Refuse a model of other features, tokens or slots than this network was made for, by ValueError."""
        own = tuple(self.config[name] for name in ("feature_dim", "vocab_size", "num_tokens"))
        wanted = (getattr(model, "feature_dim", None), model.vocab_size, model.grid.num_tokens)
        if own != wanted or model.grid.codebooks != 1:
            raise ValueError(
                f"the shortcut is for features of {own[0]} numbers, {own[1]} codes and {own[2]} slots of one codebook, "
                f"and a {type(model).__name__} has {wanted[0]}, {wanted[1]} and {wanted[2]} of {model.grid.codebooks}; "
                "train one for it by python scripts/train shortcut."
            )

    def follow(self, model: Any, state: Any, tokens: Tensor, newest: Tensor, share: Tensor) -> Tensor:
        """Features of the next call of a model, from its state after the last one; arguments as of `forward`."""
        return self(state.features, tokens, newest, share)

    @loads_weights
    def forward(self, features: Tensor, tokens: Tensor, newest: Tensor, share: Tensor) -> Tensor:
        """Features of the next call, `[R, L, C]`.

        Args:
            features: [R, L, C], of the last call.
            tokens: long [R, L]; read only where `newest`.
            newest: bool [R, L], the tokens that the last call kept.
            share: [R], the hidden share that is left.
        """
        x = self.proj_in(features.to(self.pos_emb.dtype)) + self.pos_emb
        kept = self.token_emb(tokens.masked_fill(~newest, 0)) + self.pos_emb
        context = torch.cat([self.nothing.expand(len(x), -1, -1), kept], 1)
        mask = F.pad(newest, (1, 0), value=True)[:, None, None]
        modulations = self.share(share.to(x)[:, None]).unflatten(-1, (9, -1)).unbind(1)
        parts = (lambda h: self.cross(h, context, mask), lambda h: self.own(h, h), self.mlp)
        for index, part in enumerate(parts):
            shift, scale, gate = (one[:, None] for one in modulations[3 * index : 3 * index + 3])
            x = x + gate * part(self.norms[index](x) * (1 + scale) + shift)
        return features + self.proj_out(x).to(features.dtype)
