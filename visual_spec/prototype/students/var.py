"""VAR's students of Distilled Decoding 1: all scales in one call or two (Liu et al. 2024, arXiv 2412.17153).

VAR's layers, but a position reads the very token that it answers for, or its noise: the class stands in front as a
scale of its own, and 680 positions stand for the slots of ten scales. A position sees all scales before its own, and
of its own scale itself alone. A learned vector tells tokens from noise. It is added to the input, and by a projection
of each layer between attention and feed-forward layer, and before the heads. Parameter names are the official keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from visual_spec.models.core.checkpoints import Source
from visual_spec.models.core.layouts import KeyLayout, count_parts, loaded
from visual_spec.models.core.offload import decodes
from visual_spec.models.core.protocol import TokenGrid, check_labels, wide
from visual_spec.models.core.saved import SavedModel
from visual_spec.models.core.settings import Count, register_to_config
from visual_spec.models.next_scale.scale_budget import offsets_of
from visual_spec.models.next_scale.scale_transformer import HeadNorm, modulated
from visual_spec.models.next_scale.var import (
    PRESETS,
    SCALES,
    VARBlock,
    check_sizes,
    constants_of,
    levels_of,
    sizes_of,
)
from visual_spec.prototype.students.base import ContinuousHead, DistilledAnswer, DistilledState, check_call

# The released sizes. Both numbers are slots: the first scales of 1 to 5, or of 1 to 4, tokens a side.
STUDENTS: dict[str, dict[str, Any]] = {
    "d16": {**PRESETS["d16"], "first_continuous": 55, "restart": 55},
    "d20": {**PRESETS["d20"], "first_continuous": 30, "restart": 30},
    "d24": {**PRESETS["d24"], "first_continuous": 30, "restart": 30},
}


class VARStudent(SavedModel):
    """A `DistilledModel` over the token maps of a multi-scale tokenizer, conditioned on a class.

    Slots count through all scales, coarse to fine; the grid is one row of them.

    Args:
        vocab_size, token_dim: number and length of the codes.
        dim, num_layers, num_heads: width, depth and attention heads.
        num_classes: number of classes. The table has one row more, which is never read: guidance is in the weights.
        scales: tokens per side of each map, coarse to fine.
        first_continuous: slots below it hold codes. Both heads answer for every slot, so this is a choice: the release
            draws up to 424 slots as codes where the teacher draws the first scales.
        restart: the first slot that a second call draws anew.

    Raises:
        ValueError: the scales are not ordered coarse to fine, the width is not a multiple of the heads, or one of the
            two slots is not the first one of a scale, or not within the maps.
    """

    _repeated_blocks = ["VARBlock"]
    _no_split_modules = ["VARBlock"]

    @register_to_config
    def __init__(
        self,
        vocab_size: Count = 4096,
        token_dim: Count = 32,
        dim: Count = 1024,
        num_layers: int = 16,
        num_heads: Count = 16,
        num_classes: Count = 1000,
        scales: Sequence[int] = SCALES[256],
        first_continuous: int = 55,
        restart: int = 55,
    ):
        super().__init__()
        self.scales = tuple(scales)
        check_sizes(scales, dim, num_heads)
        self.offsets = offsets_of(self.scales)
        if first_continuous not in self.offsets or restart not in self.offsets[1:-1]:
            raise ValueError(
                f"first_continuous={first_continuous} and restart={restart} given; pass the first slot of a scale, one "
                f"of {', '.join(map(str, self.offsets))}, and restart above 0 and below the last"
            )
        self.grid = TokenGrid(1, self.offsets[-1])
        self.vocab_size, self.token_dim = vocab_size, token_dim
        self.first_continuous, self.restart = first_continuous, restart
        self.starts = self.offsets[:-1]  # a teacher draws a scale a call
        self.word_embed = nn.Linear(token_dim, dim)
        self.class_emb = nn.Embedding(num_classes + 1, dim)
        self.pos_start = nn.Parameter(torch.zeros(1, 1, dim))
        self.pos_1LC = nn.Parameter(torch.zeros(1, 1 + self.offsets[-1], dim))  # the class, then the slots
        self.lvl_embed = nn.Embedding(1 + len(self.scales), dim)
        self.n_d_embed = nn.Embedding(2, dim)  # of noise, of tokens
        self.layerwise_n_d_embed = nn.ModuleList(nn.Linear(dim, dim) for _ in range(num_layers + 1))
        self.blocks = nn.ModuleList(VARBlock(dim, num_heads, shared_adaln=False) for _ in range(num_layers))
        self.head_nm = HeadNorm(dim)
        self.head = nn.Linear(dim, vocab_size)
        self.final_layer_conti = ContinuousHead(dim, token_dim)

    def check_condition(self, condition: object, batch_size: int) -> None:
        """Refuse a condition that does not fit this model; errors as in `check_labels`."""
        check_labels(condition, batch_size, self.config["num_classes"])

    @decodes
    def prefill(self, condition: Tensor, *, batch_size: int) -> DistilledState:
        """Embed class labels `[B]`, and compute AdaLN's output `[B, layers, 6, dim]`. See `DistilledModel.prefill`."""
        self.check_condition(condition, batch_size)
        classes = self.class_emb(condition.to(self.device))
        modulations = [block.modulation(classes) for block in self.blocks if isinstance(block, VARBlock)]
        seen = torch.ones(batch_size, 1, dtype=torch.bool, device=self.device)
        return DistilledState(classes[:, None], seen, torch.stack(modulations, 1))

    @decodes
    def forward(self, state: DistilledState, vectors: Tensor, known: int) -> DistilledAnswer:
        """Draw the slots from `known` on; see `DistilledModel.__call__`."""
        check_call(self, vectors, known)
        classes = state.prefix[:, 0]
        words = self.word_embed(vectors.to(classes.dtype))
        places = torch.arange(1 + self.offsets[-1], device=self.device)
        levels = torch.stack([places > start for start in self.starts]).sum(0)  # 0: the class; k: scale k - 1
        hidden = torch.cat([classes[:, None] + self.pos_start, words], 1)  # [B, 1 + L, dim]
        roles = self.n_d_embed((places <= known).long())[None]  # [1, 1 + L, dim]
        hidden = hidden + self.lvl_embed(levels) + self.pos_1LC + roles
        mask = (levels[:, None] > levels) | (places[:, None] == places)

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(q, k, v, mask, scale=1.0)

        for index, (block, layer_told) in enumerate(zip(self.blocks, self.layerwise_n_d_embed, strict=False)):
            hidden = block(hidden, state.table[:, index], attend, between=layer_told(roles))
        hidden = (hidden + self.layerwise_n_d_embed[-1](roles))[:, 1:]  # position i is slot i's
        split = max(known, self.first_continuous)
        logits = self.head(modulated(hidden[:, known:split], *self.head_nm.modulation(classes).unbind(1)))
        logits = wide(logits)
        return DistilledAnswer(logits, self.final_layer_conti(hidden[:, split:], classes))


# -- official checkpoints --------------------------------------------------------------------------------------------


_STUDENT = KeyLayout(
    "student of VAR",
    "var-d16.pth, var-d20.pth or var-d24.pth of Distilled Decoding",
    needed={
        "word_embed.weight": 2,
        "class_emb.weight": 2,
        "pos_1LC": 3,
        "head.weight": 2,
        "n_d_embed.weight": 2,
        "blocks.0.attn.scale_mul_1H11": 4,
    },
    keep='{"trainer": {"ema_parameters": c["trainer"]["ema_parameters"]}}',
)


def load_var_student(source: Source, *, dtype: torch.dtype | None = None, **config: Any) -> VARStudent:
    """Return the student of an official file, `var-d16.pth`, `var-d20.pth` or `var-d24.pth`.

    Constants that the files may carry (levels, attention mask, zero bias of keys) are checked and dropped.
    `source`, `dtype` and errors: see `visual_spec.models.core.layouts`.

    Args:
        config: constructor arguments that the weights do not tell: `first_continuous` and `restart` of a size that is
            none of `STUDENTS`, or other ones than published; `scales` other than the official ones.
    """
    weights, name = _STUDENT.read(source)
    dim, token_dim = weights["word_embed.weight"].shape
    layers = count_parts(weights, "blocks.")
    released = {(size["num_layers"], size["dim"]): size for size in STUDENTS.values()}
    preset = released.get((layers, dim), {})
    unknown = [key for key in ("first_continuous", "restart") if key not in preset and key not in config]
    if unknown:
        known = ", ".join(f"{key} ({s['num_layers']} layers of {s['dim']})" for key, s in STUDENTS.items())
        raise ValueError(
            f"{name} has {layers} layers of {dim}, and the released students are {known}; pass "
            f"{' and '.join(unknown)} for another one, which cannot be read off the weights."
        )
    length, scales = weights["pos_1LC"].shape[1] - 1, tuple(config.get("scales", SCALES[256]))
    if sum(side * side for side in scales) != length:
        raise ValueError(
            f"{name} has {length} slots, and scales {scales} have {sum(side * side for side in scales)}; pass `scales`."
        )
    read = ("vocab_size", "dim", "num_layers", "num_heads", "num_classes")
    sizes = {key: size for key, size in sizes_of(weights).items() if key in read}
    own = {key: preset.get(key) for key in ("first_continuous", "restart")}
    settings = {**sizes, "token_dim": token_dim, "scales": scales, **own, **config}
    what = "student of VAR"
    return loaded(VARStudent, settings, weights, name, what=what, constants=_constants, dtype=dtype)


def _constants(model: VARStudent) -> dict[str, Tensor]:
    """Return the buffers of the official class that ours does not have."""
    levels = levels_of((1, *model.scales))  # [1 + L]
    return constants_of(model, levels, (levels[:, None] <= levels).fill_diagonal_(False))
