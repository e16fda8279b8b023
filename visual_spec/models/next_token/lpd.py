"""LPD: a transformer that draws the slots of an image in any order, many in a call (Zhang et al., 2507.01957).

A learned token at the position of a slot asks for it. It sees the class, the tokens drawn before, and the other queries
of its call, and no later call sees it. Tokens see those of earlier calls and of their own. Positions are a learned
table. The public code and its files: github.com/mit-han-lab/lpd.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from visual_spec.models.core.cache import StaticCache
from visual_spec.models.core.checkpoints import Checkpoint
from visual_spec.models.core.layouts import Given, KeyLayout, count_parts, known_heads, loaded
from visual_spec.models.core.settings import Count, register_to_config
from visual_spec.models.next_token.llamagen import PRESETS as LLAMAGEN_PRESETS
from visual_spec.models.next_token.position_models import PositionModel, additive

PRESETS = {name: LLAMAGEN_PRESETS[name] for name in ("L", "XL", "XXL")}


class LPDBlock(nn.Module):
    """A pre-norm block with biases: attention over a cache, and two layers with a GELU between them."""

    def __init__(self, dim: int, heads: int, eps: float):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(dim, eps), nn.LayerNorm(dim, eps)
        self.attn = nn.ModuleDict({"qkv": nn.Linear(dim, 3 * dim), "proj": nn.Linear(dim, dim)})
        self.mlp = nn.ModuleDict({"fc1": nn.Linear(dim, 4 * dim), "fc2": nn.Linear(4 * dim, dim)})

    def forward(self, x: Tensor, cache: StaticCache, layer: int, mask: Tensor) -> Tensor:
        """Write keys and values of `x [R, W, dim]`, attend with `mask [R, 1, W, S]`, and return `[R, W, dim]`."""
        q, k, v = self.attn["qkv"](self.norm1(x)).unflatten(-1, (3, self.heads, -1)).unbind(2)
        mixed = F.scaled_dot_product_attention(q.transpose(1, 2), *cache.update(layer, k, v), attn_mask=mask)
        x = x + self.attn["proj"](mixed.transpose(1, 2).flatten(2))
        return x + self.mlp["fc2"](F.gelu(self.mlp["fc1"](self.norm2(x))))


class LPDTransformer(PositionModel):
    """An `AnyOrderModel` over a square grid of image tokens, conditioned on a class.

    Args:
        vocab_size: number of image codes.
        dim, num_layers, num_heads: width, depth and attention heads; `PRESETS` lists the official sizes.
        grid_size: tokens per side (16 and 32 for the official 256 and 512 pixel models).
        num_classes: classes.
        norm_eps: epsilon of every LayerNorm.

    Raises:
        ValueError: the width is not a multiple of the heads.
    """

    _repeated_blocks = ["LPDBlock"]
    _no_split_modules = ["LPDBlock"]

    @register_to_config
    def __init__(
        self,
        vocab_size: Count = 16384,
        dim: Count = 1024,
        num_layers: int = 24,
        num_heads: Count = 16,
        grid_size: Count = 16,
        num_classes: Count = 1000,
        norm_eps: float = 1e-6,
    ):
        super().__init__()
        self.set_grid(vocab_size, dim, num_heads, grid_size, 1)
        self.class_emb, self.token_emb = nn.Embedding(num_classes, dim), nn.Embedding(vocab_size, dim)
        self.fake_latent = nn.Parameter(torch.empty(1, dim))
        self.mask_token = nn.Parameter(torch.empty(1, 1, dim))
        self.pos_embed = nn.Parameter(torch.empty(1, 1 + self.grid.num_tokens, dim))
        self.z_proj_ln = nn.LayerNorm(dim, norm_eps)
        self.blocks = nn.ModuleList(LPDBlock(dim, num_heads, norm_eps) for _ in range(num_layers))
        self.norm = nn.LayerNorm(dim, norm_eps)
        self.head = nn.Linear(dim, vocab_size, bias=False)
        tables = self.class_emb.weight, self.token_emb.weight
        for parameter in (*tables, self.fake_latent, self.mask_token, self.pos_embed):
            nn.init.normal_(parameter, std=0.02)

    @property
    def official_sampler(self) -> str:
        large, wide = self.grid.num_tokens > 256, self.config["dim"] > 1280
        steps, repulsion = (48, 4) if large else (20, 3 if wide else 2)
        groups = f"order=locality,repulsion={repulsion},schedule=lpd,steps={min(steps, self.grid.num_tokens)}"
        return f"any-order:{groups},guidance_start=1.0"

    @property
    def official_defaults(self) -> dict[str, Any]:
        """Guidance of the public code's evaluation in so many calls, at its last slot; no filter."""
        small, large = {1024: 4.8, 1280: 4.9, 1536: 5.9}, {1024: 7.3, 1280: 6.0}
        scales = large if self.grid.num_tokens > 256 else small
        return {"default_guidance_scale": scales.get(self.config["dim"], 4.8), "default_top_k": 0}

    def class_rows(self, labels: Tensor) -> Tensor:
        table = torch.cat([self.class_emb.weight, self.fake_latent])
        return table[labels]

    def embed_tokens(self, tokens: Tensor) -> Tensor:
        return self.token_emb(tokens)

    def read(self, cache: StaticCache, fed: Tensor, at: Tensor, asked: Tensor, seen: Tensor) -> Tensor:
        queries = self.mask_token.expand(*asked.shape, -1)
        positions = torch.cat([at, asked], 1)
        table = self.pos_embed[0]
        x = torch.cat([fed, queries], 1) + table[positions.clamp(max=len(table) - 1)]
        x, mask = self.z_proj_ln(x), additive(seen, fed)
        first = seen.shape[2] - asked.shape[1]
        own = torch.arange(first, seen.shape[2], device=at.device).expand_as(asked)
        cache.at(torch.cat([at, own], 1), seen.shape[2])
        for layer, block in enumerate(self.blocks):
            x = block(x, cache, layer, mask)
        return self.norm(x[:, at.shape[1] :])


# -- official files --------------------------------------------------------------------------------------------------

_LPD = KeyLayout(
    "LPD transformer",
    "a file such as lpd_l_256.pth",
    needed={"class_emb.weight": 2, "token_emb.weight": 2, "fake_latent": 2, "mask_token": 3, "pos_embed": 3},
)


def name_of(checkpoint: Checkpoint) -> str:
    """Return what a file of LPD is called, by its width."""
    dim = checkpoint.weights["mask_token"].shape[-1]
    return f"LPD-{next((name for name, size in PRESETS.items() if size['dim'] == dim), f'of width {dim}')}"


def load_lpd(
    source: Given,
    *,
    image_size: int | None = None,
    num_heads: int | None = None,
    dtype: torch.dtype | None = None,
) -> LPDTransformer:
    """Return the transformer of an official file, such as `lpd_l_256.pth`.

    `source`, `dtype` and errors: see `visual_spec.models.core.layouts`.

    Args:
        image_size: side of the pictures in pixels, 16 a token; None: what the weights tell.
        num_heads: of a size that is not official: the weights do not tell it.

    Raises:
        ValueError: also of another image size than the weights'.
    """
    weights, name = _LPD.read(source)
    side = round((weights["pos_embed"].shape[1] - 1) ** 0.5)
    if image_size not in (None, 16 * side):
        raise ValueError(
            f"image_size={image_size}, but {name} was trained for {16 * side} pixels; pass that."
        )
    vocab_size, dim = weights["token_emb.weight"].shape
    layers = count_parts(weights, "blocks.")
    config = {
        "vocab_size": vocab_size,
        "dim": dim,
        "num_layers": layers,
        "num_heads": known_heads(PRESETS, dim, layers, num_heads, name),
        "grid_size": side,
        "num_classes": len(weights["class_emb.weight"]),
    }
    return loaded(LPDTransformer, config, weights, name, what="LPD", dtype=dtype)
