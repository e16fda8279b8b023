"""Infinity: a text-conditional transformer that predicts token maps bit by bit (Han et al. 2024, arXiv 2412.04431).

Like VAR, it predicts all tokens of a scale at once, given the maps before it. A token is d bits, each with its own
logits (section 3, "Infinite-Vocabulary Classifier"): for a sampler, d tokens per place, each one of two values.
Captions come as T5 features. Pooled, they are the first input and the condition of AdaLN; every layer also attends to
the unpooled features.

One class serves tiny sizes and the official checkpoints. It is a `ScaleModel` with `num_layers` in its config, so
`CompressedVAR` can compress its cache (ScaleKV), and two of them can decode together (CoDe).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from visual_spec.kernels.rotary_write import Turns
from visual_spec.models.continuous.blocks import Mlp
from visual_spec.models.core.adapters import weight_of
from visual_spec.models.core.protocol import Side, shape_of, sides_of
from visual_spec.models.core.settings import Count, register_to_config
from visual_spec.models.next_scale.infinity_scales import rope_grid_of, scales_for
from visual_spec.models.next_scale.infinity_vq import check_scales
from visual_spec.models.next_scale.scale_budget import offsets_of
from visual_spec.models.next_scale.scale_pruning import Apply, whole
from visual_spec.models.next_scale.scale_transformer import (
    Attend,
    CosineAttention,
    HeadNorm,
    ScaleTransformer,
    VARState,
    sublayers,
)
from visual_spec.models.next_token.llamagen import TextCondition
from visual_spec.models.next_token.llamagen_blocks import RMSNorm, rotary_table, turns_of

# Released are 2b (with `infinity_vae_d32reg.pth`) and 8b (with `infinity_vae_d56_f8_14_patchify.pth`).
PRESETS: dict[str, dict[str, Any]] = {
    "125m": {"bits": 32, "dim": 768, "num_layers": 12, "num_heads": 8},
    "1b": {"bits": 32, "dim": 1536, "num_layers": 24, "num_heads": 16},
    "2b": {"bits": 32, "dim": 2048, "num_layers": 32, "num_heads": 16},
    "8b": {"bits": 56, "dim": 3584, "num_layers": 40, "num_heads": 28},
}

_EPSILON = 1e-6  # of every norm


@dataclass(kw_only=True)
class InfinityState(VARState):
    """The state of one decode: VAR's, and what was read of the captions.

    Attributes:
        text_keys, text_values: `[layers, R, H, T, D]`, of the captions.
        text_mask: bool `[R, 1, 1, T]`, the words of each row.
        rotations: `[L, D / 2, 2]`, cosines and sines of every place.
    """

    text_keys: Tensor
    text_values: Tensor
    text_mask: Tensor
    rotations: Tensor

    def drop_unconditional(self) -> None:
        super().drop_unconditional()
        count = len(self.head_modulation)
        self.text_keys, self.text_values = self.text_keys[:, :count], self.text_values[:, :count]
        self.text_mask = self.text_mask[:count]


class _TextAttention(nn.Module):
    """Attention to words: keys without a bias, values with one."""

    def __init__(self, dim: int, source_dim: int, heads: int):
        super().__init__()
        self.heads = heads
        self.mat_kv = nn.Linear(source_dim, 2 * dim, bias=False)
        self.v_bias = nn.Parameter(torch.zeros(dim))
        self.proj = nn.Linear(dim, dim)

    def read(self, text: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values `[R, H, T, D]` of words `[R, T, source_dim]`."""
        bias = torch.cat([torch.zeros_like(self.v_bias), self.v_bias])
        both = F.linear(text, weight_of(self.mat_kv), bias)
        k, v = rearrange(both, "r t (two h d) -> two r h t d", two=2, h=self.heads)
        return k, v

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        """Attend `q [R, H, W, D]` to words `[R, H, T, D]` where `mask [R, 1, 1, T]` is true: `[R, W, dim]`."""
        seen = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.proj(seen.transpose(1, 2).flatten(2))


class CrossAttention(_TextAttention):
    def __init__(self, dim: int, heads: int):
        super().__init__(dim, dim, heads)
        self.mat_q = nn.Linear(dim, dim)

    def forward(self, x: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        q = self.mat_q(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        return self.attend(q, k, v, mask)


class AttentivePool(_TextAttention):
    """Attention pooling: one learned query per head, over the words of a caption."""

    def __init__(self, dim: int, source_dim: int, heads: int):
        super().__init__(dim, source_dim, heads)
        self.mat_q = nn.Parameter(torch.zeros(1, heads, dim // heads))

    def forward(self, text: Tensor, mask: Tensor) -> Tensor:
        """Return `[R, dim]` from words `[R, T, source_dim]`."""
        k, v = self.read(text)
        q = self.mat_q.expand(len(text), -1, -1)[:, :, None]
        return self.attend(q, k, v, mask[:, None, None])[:, 0]


class InfinityBlock(nn.Module):
    def __init__(self, dim: int, heads: int, hidden: int):
        super().__init__()
        self.sa = CosineAttention(dim, heads)
        self.ca = CrossAttention(dim, heads)
        self.ffn = Mlp(dim, hidden, "tanh")
        self.ca_norm = nn.LayerNorm(dim, eps=_EPSILON)
        self.ada_gss = nn.Parameter(torch.randn(1, 1, 6, dim) / dim**0.5)

    def modulation(self, condition: Tensor) -> Tensor:
        """Return `[R, 6, dim]` from the shared AdaLN's output `[R, 6, dim]`."""
        return self.ada_gss[0] + condition

    def forward(
        self,
        x: Tensor,
        modulation: Tensor,
        turns: Turns,
        text: tuple[Tensor, Tensor, Tensor],
        attend: Attend,
        apply: Apply = whole,
    ) -> Tensor:
        attention, feed_forward = sublayers(self.sa, self.ffn, modulation, attend, turns)

        def cross_attention(x: Tensor, places: Tensor | None) -> Tensor:
            return self.ca(self.ca_norm(x), *text)

        x = x + apply(0, x, attention)
        x = x + apply(1, x, cross_attention)
        return x + apply(2, x, feed_forward)


class InfinityTransformer(ScaleTransformer):
    """A `ScaleModel` over the bits of a bitwise multi-scale tokenizer, conditioned on T5 features of a caption.

    Logits of a scale are `[R, n * n * bits, 2]`: the bits of a place one after the other, places in raster order.

    Args:
        bits: bits of a place, `tokens_per_place` of the tokenizer; also the channels of an input map.
        dim, num_layers, num_heads: width, depth and attention heads; `PRESETS` lists the official sizes.
        ffn_dim: hidden width of the feed-forward layers; None: 4 * dim, rounded to a multiple of 256.
        caption_dim: channels of caption features.
        caption_length: the most words of a caption.
        pool_heads: heads of the pooling that makes one vector of a caption.
        scales: places per side of each map, or (height, width), coarse to fine; `scales_for` gives the official ones.
            No weight depends on them.
        rope_grid: the map on which positions are counted; positions of smaller maps are spread over it. None: for an
            official schedule the largest map of its ratio (1 M pixels), else the last map.
        num_levels: the most scales.

    Raises:
        ValueError: the scales are not ordered coarse to fine, do not begin with one place, or are too many; or the
            width does not fit the heads.
    """

    _repeated_blocks = ["InfinityBlock"]
    _no_split_modules = ["InfinityBlock"]

    state_kind = InfinityState

    @register_to_config
    def __init__(
        self,
        bits: int = 32,
        dim: Count = 2048,
        num_layers: int = 32,
        num_heads: Count = 16,
        ffn_dim: int | None = None,
        caption_dim: Count = 2048,
        caption_length: int = 512,
        pool_heads: int = 16,
        scales: Sequence[Side] = scales_for(1024),
        rope_grid: Side | None = None,
        num_levels: int = 15,
    ):
        super().__init__()
        self.scales = sides_of(scales)
        check_scales(self.scales)
        if self.scales[0] != 1 or len(self.scales) > num_levels:
            raise ValueError(
                f"scales={self.scales} given; this model takes at most {num_levels}, of which the first is 1"
            )
        if dim % (4 * num_heads) or dim % pool_heads:
            raise ValueError(
                f"dim={dim}, num_heads={num_heads}, pool_heads={pool_heads} given; dim must be a multiple of "
                "4 * num_heads and of pool_heads"
            )
        self.vocab_size, self.code_dim = 2, bits
        # The first place of each scale, then L.
        self.offsets = offsets_of(self.scales)
        self.cfg_uncond = nn.Parameter(torch.zeros(caption_length, caption_dim))
        self.text_norm = RMSNorm(caption_dim, _EPSILON)
        self.text_proj_for_sos = nn.ModuleDict({"ca": AttentivePool(dim, caption_dim, pool_heads)})
        self.text_proj_for_ca = nn.Sequential(
            nn.Linear(caption_dim, dim), nn.GELU(approximate="tanh"), nn.Linear(dim, dim)
        )
        self.pos_start = nn.Parameter(torch.zeros(1, 1, dim))
        self.lvl_embed = nn.Embedding(num_levels, dim)
        self.word_embed = nn.Linear(bits, dim)
        self.shared_ada_lin = nn.Sequential(nn.SiLU(), nn.Linear(dim, 6 * dim))
        hidden = round(4 * dim / 256) * 256 if ffn_dim is None else ffn_dim
        self.blocks = nn.ModuleList(InfinityBlock(dim, num_heads, hidden) for _ in range(num_layers))
        self.head_nm = HeadNorm(dim)
        self.head = nn.Linear(dim, 2 * bits)
        self._initialise()

    def spread_of(self, name: str) -> float:
        return 1.2 * self.config["caption_dim"] ** -0.5 if name == "cfg_uncond" else super().spread_of(name)

    # -- condition and inputs ----------------------------------------------------------------------------------------

    def check_condition(self, condition: object, batch_size: int) -> None:
        """Refuse what are no caption features, or captions without words or with too many."""
        if not isinstance(condition, TextCondition):
            raise TypeError(
                f"{type(condition).__name__} given; this model takes caption features, a TextCondition"
            )
        width, length = self.config["caption_dim"], self.config["caption_length"]
        for part in condition.parts:
            shape, mask = tuple(part.features.shape), part.mask
            if part.features.ndim != 3 or shape[::2] != (batch_size, width) or mask.shape != shape[:2]:
                raise ValueError(
                    f"features {shape} and mask {tuple(mask.shape)} given; allowed are [{batch_size}, words, {width}] "
                    f"and [{batch_size}, words]"
                )
            words = mask.sum(1)
            if not ((words >= 1) & (words <= length)).all():
                raise ValueError(f"captions of {words.tolist()} words given; allowed are 1 to {length}")

    def embed_condition(
        self, condition: TextCondition, *, guided: bool = False, dropped: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the network's text inputs, unconditional rows last when `guided`.

        Rows without a caption have as many learned words as the caption, or the negative caption if the condition has
        one. `dropped`, bool `[B]`, marks rows that lose their caption (training for guidance).

        Returns:
            The pooled caption `[R, dim]`; its words `[R, T, dim]`; bool `[R, T]`, the mask of words. The longest
            caption of the batch has T words.
        """
        negative = condition.negative
        features, mask = self._words(condition)
        if dropped is not None:
            lost = dropped.to(mask.device)[:, None, None]
            features = torch.where(lost, self._null_words(mask), features)
        if guided:
            other, seen = (self._null_words(mask), mask) if negative is None else self._words(negative)
            length = max(mask.shape[1], seen.shape[1])
            features, other = (F.pad(x, (0, 0, 0, length - x.shape[1])) for x in (features, other))
            mask, seen = (F.pad(x, (0, length - x.shape[1])) for x in (mask, seen))
            features, mask = torch.cat([features, other]), torch.cat([mask, seen])
        text = self.text_norm(features)
        return self.text_proj_for_sos["ca"](text, mask), self.text_proj_for_ca(text), mask

    def _words(self, condition: TextCondition) -> tuple[Tensor, Tensor]:
        """Return features and mask without the positions where no caption has a word."""
        device, dtype = self.cfg_uncond.device, self.cfg_uncond.dtype
        mask = condition.mask.to(device, torch.bool)
        used = mask.any(0)
        features, mask = condition.features.to(device, dtype)[:, used], mask[:, used]
        return features.masked_fill(~mask[..., None], 0), mask

    def _null_words(self, mask: Tensor) -> Tensor:
        """Return the learned words of the null caption `[B, T, caption_dim]`, in order, at the places of `mask`."""
        return self.cfg_uncond[(mask.cumsum(1) - 1).clamp(min=0)].masked_fill(~mask[..., None], 0)

    def _rotations(self, device: torch.device) -> Tensor:
        """Return cosines and sines `[L, D / 2, 2]`, float32 or float64: half of the pairs turn by row."""
        grid = self.config["rope_grid"]
        height, width = shape_of(rope_grid_of(self.scales) if grid is None else sides_of([grid])[0])
        side = max(height, width)
        places = []
        for rows, columns in map(shape_of, self.scales):
            down = (torch.arange(rows) * (height / rows)).round().long()
            across = (torch.arange(columns) * (width / columns)).round().long()
            places.append((side * down[:, None] + across).flatten())
        dtype = torch.promote_types(self.dtype, torch.float32)
        table = rotary_table(side, self.config["dim"] // self.config["num_heads"], dtype=dtype)
        return table[torch.cat(places)].to(device)

    # -- layers ------------------------------------------------------------------------------------------------------

    def read(
        self, condition: TextCondition, *, guided: bool = False, dropped: Tensor | None = None
    ) -> tuple[Tensor, dict[str, object]]:
        """See `ScaleTransformer.read`. Negative captions replace the null caption in the unconditional rows."""
        pooled, words, mask = self.embed_condition(condition, guided=guided, dropped=dropped)
        text = [block.ca.read(words) for block in self._layers]
        return pooled, dict(
            text_keys=torch.stack([keys for keys, _ in text]),
            text_values=torch.stack([values for _, values in text]),
            text_mask=mask[:, None, None],
            rotations=self._rotations(pooled.device),
        )

    @property
    def _layers(self) -> list[InfinityBlock]:
        return cast(list[InfinityBlock], list(self.blocks))

    def _places(self, scale: int) -> Tensor:
        return self.lvl_embed.weight[scale]

    def _logits(self, hidden: Tensor, modulation: Tensor) -> Tensor:
        """Return logits `[R, places * bits, 2]`."""
        logits = super()._logits(hidden, modulation)
        return rearrange(logits, "r place (bit two) -> r (place bit) two", two=2)

    def _run(self, state: InfinityState, hidden: Tensor, scales: range) -> Tensor:
        turns = turns_of(state.rotations[None, self.offsets[scales.start] : self.offsets[scales.stop]])
        for index, block in enumerate(self._layers):
            text = (state.text_keys[index], state.text_values[index], state.text_mask)
            attend = partial(state.cache.attend, index, scales)
            hidden = block(hidden, state.modulations[index], turns, text, attend, state.apply(index, scales))
        return hidden
