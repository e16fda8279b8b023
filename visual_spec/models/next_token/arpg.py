"""ARPG: randomised parallel decoding with a causal decoder (Li et al., ICLR 2026, arXiv 2503.10568).

The first half of the blocks reads the class and the drawn tokens, each turned by the rotary table at its slot, and ends
in one set of keys and values. In the second half queries, which are one learned embedding, attend to these: a query is
turned at the slot that it asks for, and sees neither itself nor other queries. So a slot costs half a pass to ask for
and half a pass to feed. The public code and its files: github.com/hp-l33/ARPG.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from visual_spec.kernels.rotary_write import rotate
from visual_spec.models.core.cache import StaticCache
from visual_spec.models.core.checkpoints import Checkpoint
from visual_spec.models.core.layouts import Given, KeyLayout, count_parts, known_heads, loaded
from visual_spec.models.core.settings import Count, Within, register_to_config, whole
from visual_spec.models.next_token.llamagen import PRESETS as LLAMAGEN_PRESETS
from visual_spec.models.next_token.llamagen_blocks import (
    FeedForward,
    RMSNorm,
    Shared,
    TransformerBlock,
    Turns,
    feed_forward_width,
    rotary_table,
    turns_of,
)
from visual_spec.models.next_token.position_models import PositionModel, additive

PRESETS = {name: LLAMAGEN_PRESETS[name] for name in ("L", "XL", "XXL")}
_GUIDANCE = {1024: 5.0, 1280: 6.0, 1536: 7.5}  # of the public code's figures, by width


class ARPGCrossAttention(nn.Module):
    def __init__(self, dim: int, heads: int):
        super().__init__()
        self.heads = heads
        self.to_q, self.proj = nn.Linear(dim, dim, bias=False), nn.Linear(dim, dim, bias=False)

    def forward(self, x: Tensor, keys: Tensor, values: Tensor, turns: Turns, mask: Tensor) -> Tensor:
        """Attend from queries `x [R, Q, dim]` to `keys, values [R, H, S, D]` with `mask [R, 1, Q, S]`."""
        q = self.to_q(x).unflatten(-1, (1, self.heads, -1))  # [R, Q, 1, H, D]
        q = rotate(q, turns)[:, :, 0].transpose(1, 2)
        mixed = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask)
        return self.proj(mixed.transpose(1, 2).flatten(2))


class CrossBlock(nn.Module):
    """A block of queries, which attend to keys and values that are not their own."""

    def __init__(self, dim: int, heads: int, eps: float):
        super().__init__()
        self.attn, self.ffn = ARPGCrossAttention(dim, heads), FeedForward(dim, feed_forward_width(dim))
        self.attn_norm, self.ffn_norm = RMSNorm(dim, eps), RMSNorm(dim, eps)

    def forward(self, x: Tensor, keys: Tensor, values: Tensor, turns: Turns, mask: Tensor) -> Tensor:
        x = x + self.attn(self.attn_norm(x), keys, values, turns, mask)
        return x + self.ffn(self.ffn_norm(x))


class ARPGTransformer(PositionModel):
    """An `AnyOrderModel` over a square grid of image tokens, conditioned on a class.

    Args:
        vocab_size: number of image codes.
        dim, num_layers, num_heads: width, depth and attention heads; `PRESETS` lists the official sizes. Half of the
            layers read tokens, half ask.
        grid_size: tokens per side; 16 in the official models.
        num_classes: classes.
        norm_eps: epsilon of every RMSNorm.

    Raises:
        ValueError: an odd number of layers, or heads that are no multiple of 4.
    """

    _repeated_blocks = ["TransformerBlock", "CrossBlock"]
    _no_split_modules = ["TransformerBlock", "CrossBlock"]

    @register_to_config
    def __init__(
        self,
        vocab_size: Count = 16384,
        dim: Count = 1024,
        num_layers: int = 24,
        num_heads: Count = 16,
        grid_size: Count = 16,
        num_classes: Count = 1000,
        norm_eps: float = 1e-5,
    ):
        super().__init__()
        self.set_grid(vocab_size, dim, num_heads, grid_size, 4)
        if whole("num_layers", num_layers, Within(2)) % 2:
            raise ValueError(f"num_layers={num_layers}; pass an even number: half of them read, half ask.")
        half, hidden = num_layers // 2, feed_forward_width(dim)
        # Codes, the query, the classes, no class, and a row that nothing here reads.
        self.embeddings = nn.Embedding(vocab_size + 1 + num_classes + 2, dim)
        self.layers = nn.ModuleList(TransformerBlock(dim, num_heads, hidden, norm_eps) for _ in range(half))
        self.cross_layers = nn.ModuleList(CrossBlock(dim, num_heads, norm_eps) for _ in range(half))
        self.middle = RMSNorm(dim, norm_eps)
        self.to_kv = nn.Linear(dim, 2 * dim, bias=False)
        self.norm = RMSNorm(dim, norm_eps)
        self.head = nn.Linear(dim, vocab_size, bias=False)
        for parameter in self.parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.02)

    @property
    def official_sampler(self) -> str:
        steps = min(64, self.grid.num_tokens)
        return f"any-order:order=random,schedule=arpg,steps={steps},guidance_start=1.0"

    @property
    def official_defaults(self) -> dict[str, Any]:
        """Guidance of the public code's figures; it draws from the whole law."""
        return {"default_guidance_scale": _GUIDANCE.get(self.config["dim"], 5.0), "default_top_k": 0}

    @property
    def cached_layers(self) -> int:
        return len(self.layers) + 1  # the last holds what the queries attend to

    def class_rows(self, labels: Tensor) -> Tensor:
        return self.embeddings(labels + self.vocab_size + 1)

    def embed_tokens(self, tokens: Tensor) -> Tensor:
        return self.embeddings(tokens)

    def read(self, cache: StaticCache, fed: Tensor, at: Tensor, asked: Tensor, seen: Tensor) -> Tensor:
        width = fed.shape[1]
        seen = seen[:, :, : seen.shape[2] - asked.shape[1]]  # no query sees a query
        mask, table = additive(seen, fed), self._table()
        if width:
            self._feed(cache, fed, at, mask[:, :, :width], turns_of(table[at.clamp(max=len(table) - 1)]))
        keys, values = (held[:, :, : seen.shape[2]] for held in cache.layer(len(self.layers)))
        turns = turns_of(table[asked.clamp(max=len(table) - 1)])
        x = self.embeddings(torch.full_like(asked, self.vocab_size))
        for block in self.cross_layers:
            x = block(x, keys, values, turns, mask[:, :, width:])
        return self.norm(x)

    def _feed(self, cache: StaticCache, fed: Tensor, at: Tensor, mask: Tensor, turns: Turns) -> None:
        """Run what is fed through the first half, and write the keys and values that queries attend to."""
        cache.at(at, mask.shape[3])
        hidden, change = fed, None
        for layer, block in enumerate(self.layers):
            hidden, change = block(hidden, change, cache.layer(layer), Shared(turns, cache.places, mask, at))
        _, normed = self.middle.after(hidden, change)
        both = self.to_kv(normed).unflatten(-1, (2, self.config["num_heads"], -1))
        cache.update(len(self.layers), rotate(both[:, :, :1], turns)[:, :, 0], both[:, :, 1])

    def _table(self) -> Tensor:
        """The rotary table by position, `[1 + L, D / 2, 2]`; the class's row is zero, so its key vanishes."""
        head_dim = self.config["dim"] // self.config["num_heads"]
        dtype = torch.promote_types(self.dtype, torch.float32)
        table = rotary_table(self.grid.width, head_dim, dtype=dtype).to(self.device)
        return F.pad(table, (0, 0, 0, 0, 1, 0))


# -- official files --------------------------------------------------------------------------------------------------

_ARPG = KeyLayout(
    "ARPG transformer",
    "a file such as arpg_300m.pt",
    needed={"embeddings.weight": 2, "head.weight": 2, "middle.weight": 1},
    renamed={
        r"^layers\.self_dec\.(\d+)\.attn\.proj": r"layers.\1.attention.wo",
        r"^layers\.self_dec\.(\d+)\.attn\.": r"layers.\1.attention.",
        r"^layers\.self_dec\.(\d+)\.attn_norm": r"layers.\1.attention_norm",
        r"^layers\.self_dec\.(\d+)\.ffn\.": r"layers.\1.feed_forward.",
        r"^layers\.self_dec\.(\d+)\.": r"layers.\1.",
        r"^layers\.cross_dec\.": "cross_layers.",
        r"^layers\.norm\.": "middle.",
        r"^layers\.(to_[kv])\.": r"\1.",
    },
)


def name_of(checkpoint: Checkpoint) -> str:
    """Return what a file of ARPG is called, by its width."""
    dim = checkpoint.weights["head.weight"].shape[1]
    return f"ARPG-{next((name for name, size in PRESETS.items() if size['dim'] == dim), f'of width {dim}')}"


def load_arpg(
    source: Given,
    *,
    image_size: int | None = None,
    num_heads: int | None = None,
    dtype: torch.dtype | None = None,
) -> ARPGTransformer:
    """Return the transformer of an official file, such as `arpg_300m.pt`.

    `source`, `dtype` and errors: see `visual_spec.models.core.layouts`.

    Args:
        image_size: side of the pictures in pixels, 16 a token; None: 256. No weight depends on it.
        num_heads: of a size that is not official: the weights do not tell it.

    Raises:
        ValueError: also of an image size that is no multiple of 16.
    """
    weights, name = _ARPG.read(source)
    side, rest = divmod(image_size or 256, 16)
    if rest or side < 1:
        raise ValueError(f"image_size={image_size}; pass a multiple of 16, the pixels per token side.")
    half = count_parts(weights, "layers.")
    groups = {
        f"layers.{layer}.attention.wqkv.weight": f"layers.{layer}.attention.to_" for layer in range(half)
    }
    for joined, parts in [("to_kv.weight", "to_"), *groups.items()]:
        keys = [f"{parts}{part}.weight" for part in ("kv" if joined == "to_kv.weight" else "qkv")]
        if all(key in weights for key in keys):  # else they are listed as missing and unexpected
            weights[joined] = torch.cat([weights.pop(key) for key in keys])
    vocab_size, dim = weights["head.weight"].shape
    config = {
        "vocab_size": vocab_size,
        "dim": dim,
        "num_layers": 2 * half,
        "num_heads": known_heads(PRESETS, dim, 2 * half, num_heads, name),
        "grid_size": side,
        "num_classes": len(weights["embeddings.weight"]) - vocab_size - 3,
    }
    return loaded(ARPGTransformer, config, weights, name, what="ARPG", dtype=dtype)
