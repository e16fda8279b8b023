"""VAR: a transformer that predicts the token maps of a picture scale by scale (Tian et al. 2024, section 3.2).

One class serves the embedded sizes and the official class-conditional checkpoints; parameter names are the official
keys.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from visual_spec.models.continuous.blocks import Mlp
from visual_spec.models.core.checkpoints import Checkpoint
from visual_spec.models.core.layouts import Given, KeyLayout, count_parts, loaded
from visual_spec.models.core.protocol import check_heads, check_labels
from visual_spec.models.core.settings import Count, register_to_config
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

# Tokens per side of each map, by picture size in pixels.
SCALES: dict[int, tuple[int, ...]] = {
    256: (1, 2, 3, 4, 5, 6, 8, 10, 13, 16),
    512: (1, 2, 3, 4, 6, 9, 13, 18, 24, 32),
}

PRESETS: dict[str, dict[str, Any]] = {
    **{
        f"d{depth}": {"num_layers": depth, "num_heads": depth, "dim": 64 * depth, "scales": SCALES[256]}
        for depth in (16, 20, 24, 30)
    },
    "d36": {"num_layers": 36, "num_heads": 36, "dim": 2304, "scales": SCALES[512], "shared_adaln": True},
}


class VARBlock(nn.Module):
    def __init__(self, dim: int, heads: int, shared_adaln: bool):
        super().__init__()
        self.attn = CosineAttention(dim, heads)
        self.ffn = Mlp(dim, 4 * dim, "tanh")
        if shared_adaln:
            self.ada_gss = nn.Parameter(torch.randn(1, 1, 6, dim) / dim**0.5)
        else:
            self.ada_lin = nn.Sequential(nn.SiLU(), nn.Linear(dim, 6 * dim))

    def modulation(self, condition: Tensor) -> Tensor:
        """Return `[R, 6, dim]` from the class embedding `[R, dim]`, or from the shared AdaLN's output `[R, 6, dim]`."""
        if condition.ndim == 3:
            return self.ada_gss[0] + condition
        return self.ada_lin(condition).unflatten(-1, (6, -1))

    def forward(
        self,
        x: Tensor,
        modulation: Tensor,
        attend: Attend,
        apply: Apply = whole,
        between: Tensor | None = None,
    ) -> Tensor:
        """Run the layer on `x [R, W, dim]`; `between`, of this shape, is added after attention (VAR: None)."""
        attention, feed_forward = sublayers(self.attn, self.ffn, modulation, attend)
        x = x + apply(0, x, attention)
        if between is not None:
            x = x + between
        return x + apply(1, x, feed_forward)


def check_sizes(scales: Sequence[int], dim: int, num_heads: int) -> None:
    """Refuse, by ValueError, scales that are not ordered coarse to fine, and heads that do not divide the width."""
    scales = tuple(scales)
    if not scales or scales[0] < 1 or any(a > b for a, b in pairwise(scales)):
        raise ValueError(
            f"scales={scales} given; pass sides of at least 1, coarse to fine, such as {SCALES[256]}"
        )
    check_heads(dim, num_heads)


class VARTransformer(ScaleTransformer):
    """A `ScaleModel` over the residual token maps of a multi-scale tokenizer, conditioned on a class. Logits of a scale
    are `[R, n * n, V]`.

    Args:
        vocab_size: number of codes.
        code_dim: channels of a code and of an input map.
        dim, num_layers, num_heads: width, depth and attention heads; `PRESETS` lists the official sizes.
        num_classes: number of classes; row `num_classes` of the table is the null class of guidance.
        scales: tokens per side of each map, coarse to fine.
        shared_adaln: one AdaLN projection for all layers, to which each adds a constant (the official d36), instead
            of one projection per layer.

    Raises:
        ValueError: the scales are not ordered coarse to fine, or the width is not a multiple of the heads.
    """

    _repeated_blocks = ["VARBlock"]
    _no_split_modules = ["VARBlock"]

    stored_as = (torch.float8_e4m3fn,)  # matrices of blocks and last norm (scripts/assemble.py)
    scales: tuple[int, ...]  # squares only

    @register_to_config
    def __init__(
        self,
        vocab_size: Count = 4096,
        code_dim: Count = 32,
        dim: Count = 1024,
        num_layers: int = 16,
        num_heads: Count = 16,
        num_classes: Count = 1000,
        scales: Sequence[int] = SCALES[256],
        shared_adaln: bool = False,
    ):
        super().__init__()
        self.scales = tuple(scales)
        self.vocab_size = vocab_size
        self.code_dim = code_dim
        check_sizes(scales, dim, num_heads)
        # The first slot of each scale, then L.
        self.offsets = offsets_of(self.scales)
        self.word_embed = nn.Linear(code_dim, dim)
        self.class_emb = nn.Embedding(num_classes + 1, dim)
        self.pos_start = nn.Parameter(torch.zeros(1, self.offsets[1], dim))
        self._add_positions(dim)
        if shared_adaln:
            self.shared_ada_lin = nn.Sequential(nn.SiLU(), nn.Linear(dim, 6 * dim))
        self.blocks = nn.ModuleList(VARBlock(dim, num_heads, shared_adaln) for _ in range(num_layers))
        self.head_nm = HeadNorm(dim)
        self.head = nn.Linear(dim, vocab_size)
        self._initialise()

    def _add_positions(self, dim: int) -> None:
        """Add what tells the places of all scales from each other."""
        self.pos_1LC = nn.Parameter(torch.zeros(1, self.offsets[-1], dim))
        self.lvl_embed = nn.Embedding(len(self.scales), dim)

    # -- condition and inputs ----------------------------------------------------------------------------------------

    def check_condition(self, condition: object, batch_size: int) -> None:
        """Refuse a condition that does not fit this model; errors as in `check_labels`."""
        check_labels(condition, batch_size, self.config["num_classes"])

    def embed_condition(
        self, labels: Tensor, *, guided: bool = False, dropped: Tensor | None = None
    ) -> Tensor:
        """Return class embeddings `[R, dim]`, unconditional rows last when `guided`.

        `dropped`, bool `[B]`, marks rows whose class is replaced by the null class (training for guidance).
        """
        null = self.config["num_classes"]
        labels = labels.to(self.class_emb.weight.device)
        if dropped is not None:
            labels = torch.where(dropped, null, labels)
        if guided:
            labels = torch.cat([labels, torch.full_like(labels, null)])
        return self.class_emb(labels)

    def _places(self, scale: int) -> Tensor:
        """Return the position embeddings of a scale: `[1, n * n, dim]`."""
        return self.pos_1LC[:, slice(*self.offsets[scale : scale + 2])] + self.lvl_embed.weight[scale]

    def read(
        self, condition: Tensor, *, guided: bool = False, dropped: Tensor | None = None
    ) -> tuple[Tensor, dict[str, object]]:
        """See `ScaleTransformer.read`. `condition`: labels `[B]`."""
        return self.embed_condition(condition, guided=guided, dropped=dropped), {}

    def _run(self, state: VARState, hidden: Tensor, scales: range) -> Tensor:
        for index, block in enumerate(self.blocks):
            attend = partial(state.cache.attend, index, scales)
            hidden = block(hidden, state.modulations[index], attend, state.apply(index, scales))
        return hidden


# -- official checkpoints --------------------------------------------------------------------------------------------


_VAR = KeyLayout(
    "VAR transformer",
    "a file such as var_d16.pth",
    needed={
        "pos_1LC": 3,
        "lvl_embed.weight": 2,
        "class_emb.weight": 2,
        "word_embed.weight": 2,
        "head.weight": 2,
        "blocks.0.attn.scale_mul_1H11": 4,
    },
)


def is_var(weights: Mapping[str, Tensor]) -> bool:
    """Return whether these keys are of a VAR."""
    return "pos_1LC" in weights and weights["pos_1LC"].ndim == 3


def name_of(checkpoint: Checkpoint) -> str:
    """Return what a file of VAR is called, as `read_checkpoint` reads it, by its depth."""
    return f"VAR-d{count_parts(checkpoint.weights, 'blocks.')}"


def scales_of_size(size: int | None, path: object = None) -> tuple[int, ...]:
    """Return the scales of pictures of this side in pixels; None: of the smallest.

    Raises:
        ValueError: VAR draws no such pictures.
    """
    size = min(SCALES) if size is None else size
    if size not in SCALES:
        raise ValueError(f"image_size={size}; VAR draws {' or '.join(map(str, SCALES))} pixels.")
    return SCALES[size]


def load_var_checkpoint(
    source: Given, *, scales: Sequence[int] | None = None, dtype: torch.dtype | None = None
) -> VARTransformer:
    """Return the transformer of an official file, e.g. `var_d16.pth`.

    Sizes are read off the weights. Constants that the official files carry (the level of each slot, the attention mask,
    the zero bias of keys) are checked and dropped.
    `source`, `dtype` and errors: see `visual_spec.models.core.layouts`.

    Args:
        scales: tokens per side of each map; needed only for a file without the level of each slot, and with other
            scales than the official ones.
    """
    weights, name = _VAR.read(source)
    length, levels = weights["pos_1LC"].shape[1], len(weights["lvl_embed.weight"])
    config = sizes_of(weights) | {"scales": _read_scales(weights, name, scales, levels, length)}
    return loaded(VARTransformer, config, weights, name, what="VAR", constants=_constants, dtype=dtype)


def _constants(model: VARTransformer) -> dict[str, Tensor]:
    """Return the buffers of the official files that our models do not have."""
    levels = levels_of(model.config["scales"])
    return constants_of(model, levels, levels[:, None] < levels)


def levels_of(scales: Sequence[int]) -> Tensor:
    """Return the number of the scale of each slot, long [L]."""
    sizes = torch.tensor([side * side for side in scales])
    return torch.arange(len(sizes)).repeat_interleave(sizes)


def constants_of(model: Any, levels: Tensor, hidden: Tensor) -> dict[str, Tensor]:
    """Return what official files hold beside weights: levels [L], what slots do not see, bool [L, L], key biases."""
    mask = torch.zeros(hidden.shape).masked_fill(hidden, -torch.inf)[None, None]
    return {"lvl_1L": levels[None], "attn_bias_for_masking": mask, **zero_biases(model)}


def zero_biases(model: Any) -> dict[str, Tensor]:
    """Return the biases of keys, which official files hold."""
    zero = torch.zeros(model.config["dim"])
    return {f"blocks.{index}.attn.zero_k_bias": zero for index in range(len(model.blocks))}


def sizes_of(weights: Mapping[str, Tensor]) -> dict[str, int]:
    """Return the sizes of a VAR or a FlexVAR, without its scales."""
    return {
        "vocab_size": weights["head.weight"].shape[0],
        "code_dim": weights["word_embed.weight"].shape[1],
        "dim": weights["class_emb.weight"].shape[1],
        "num_layers": count_parts(weights, "blocks."),
        "num_heads": weights["blocks.0.attn.scale_mul_1H11"].shape[1],
        "num_classes": weights["class_emb.weight"].shape[0] - 1,
        "shared_adaln": "shared_ada_lin.1.weight" in weights,
    }


def _read_scales(
    weights: Mapping[str, Tensor], name: str, asked: Sequence[int] | None, count: int, length: int
) -> tuple[int, ...]:
    """Return the requested scales, or those given by the level of each slot, or the official ones of this length."""
    held = None
    if "lvl_1L" in weights:
        levels = weights["lvl_1L"].flatten().tolist()
        slots = [levels.count(level) for level in range(count)]
        held = tuple(math.isqrt(number) for number in slots)
    else:
        fitting = [known for known in SCALES.values() if sum(side * side for side in known) == length]
        held = fitting[0] if fitting else None
    scales = tuple(asked) if asked is not None else held
    if scales is None:
        raise ValueError(
            f"{name} has {length} slots in {count} scales and does not tell their sides; pass `scales`, for example "
            f"{SCALES[256]}."
        )
    if len(scales) != count or sum(side * side for side in scales) != length or (held or scales) != scales:
        raise ValueError(
            f"scales {scales} have {sum(side * side for side in scales)} slots, but {name} has {length} slots in "
            f"{count} scales{f' of sides {held}' if held and held != scales else ''}."
        )
    return scales
