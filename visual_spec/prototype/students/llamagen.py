"""LlamaGen's students of Distilled Decoding 1: 256 tokens in one call or two (Liu et al. 2024, arXiv 2412.17153).

LlamaGen's layers, but a position reads the very token that it answers for, or its noise: the positions after the class
stand for the slots. Attention is causal and includes the position itself. A learned vector tells tokens from noise.
Parameter names are the official keys.

The released students draw classes. One of captions has LlamaGen's caption prefix
in place of the class.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from visual_spec.models.core.cache import seen_causally
from visual_spec.models.core.checkpoints import Checkpoint, Source, unpack_checkpoint
from visual_spec.models.core.layouts import KeyLayout, count_parts, loaded
from visual_spec.models.core.offload import decodes
from visual_spec.models.core.protocol import TokenGrid, check_heads, wide
from visual_spec.models.core.saved import SavedModel
from visual_spec.models.core.settings import Count, register_to_config
from visual_spec.models.next_token.llamagen import PRESETS
from visual_spec.models.next_token.llamagen_blocks import (
    RMSNorm,
    TextCondition,
    TransformerBlock,
    condition_embedding,
    feed_forward_width,
    rotary_table,
    turns_of,
)
from visual_spec.prototype.students.base import (
    ContinuousHead,
    DistilledAnswer,
    DistilledState,
    check_call,
)

# The released sizes, and how many slots of theirs hold codes.
STUDENTS: dict[str, dict[str, int]] = {
    "B": {**PRESETS["B"], "first_continuous": 80},
    "L": {**PRESETS["L"], "first_continuous": 130},
}

_DROPPED = ("freqs_cis",)  # computed from the grid


class LlamaGenStudent(SavedModel):
    """A `DistilledModel` over a square grid of image tokens, conditioned on a class or on a caption.

    Args:
        vocab_size, token_dim: number and length of the codes.
        dim, num_layers, num_heads: width, depth and attention heads.
        grid_size: tokens per side.
        num_classes: number of classes. The table has one row more, which is never read: guidance is in the weights.
            None: captions.
        norm_eps: epsilon of every RMSNorm.
        first_continuous: slots below it hold codes: 80 of B, 130 of L. The size of the grid: all slots.
        restart: the first slot that a second call draws anew.
        caption_dim, prefix_length, zero_prefix_keys: as of `LlamaGenTransformer`.

    Raises:
        ValueError: not exactly one of `num_classes` and `caption_dim` is given, the head size is not a multiple of 4,
            or one of the two slots is not within the grid.
    """

    _repeated_blocks = ["TransformerBlock"]
    _no_split_modules = ["TransformerBlock"]

    stored_as = (torch.float8_e4m3fn,)  # by `python -m visual_spec.training.distilled`

    @register_to_config
    def __init__(
        self,
        vocab_size: Count = 16384,
        token_dim: Count = 8,
        dim: Count = 768,
        num_layers: int = 12,
        num_heads: Count = 12,
        grid_size: Count = 16,
        num_classes: Count | None = 1000,
        norm_eps: float = 1e-5,
        first_continuous: int = 80,
        restart: int = 80,
        caption_dim: Count | None = None,
        prefix_length: Count = 1,
        zero_prefix_keys: bool = True,
    ):
        super().__init__()
        check_heads(dim, num_heads, 4)
        self.grid = TokenGrid(grid_size, grid_size)
        if not (0 <= first_continuous <= grid_size**2 and 0 < restart < grid_size**2):
            raise ValueError(
                f"first_continuous={first_continuous} and restart={restart} given; pass slots of the {grid_size**2} of "
                "the grid, restart above 0"
            )
        self.vocab_size, self.token_dim = vocab_size, token_dim
        self.first_continuous, self.restart = first_continuous, restart
        self.starts = tuple(range(grid_size**2))  # a teacher draws a slot a call
        self.tok_embeddings = nn.Linear(token_dim, dim)
        self.cls_embedding: Any = condition_embedding(num_classes, caption_dim, dim, prefix_length)
        self.n_d_embed = nn.Embedding(2, dim)  # of noise, of tokens
        hidden = feed_forward_width(dim)
        self.layers = nn.ModuleList(
            TransformerBlock(dim, num_heads, hidden, norm_eps) for _ in range(num_layers)
        )
        self.norm = RMSNorm(dim, norm_eps)
        self.output = nn.Linear(dim, vocab_size, bias=False)
        if first_continuous < grid_size**2:
            self.final_layer_conti = ContinuousHead(dim, token_dim)

    @decodes
    def prefill(self, condition: TextCondition | Tensor, *, batch_size: int) -> DistilledState:
        """Embed class labels `[B]` or captions, and compute the rotary table. See `DistilledModel.prefill`."""
        self.check_condition(condition, batch_size)
        return self._begin(condition)

    def check_condition(self, condition: object, batch_size: int) -> None:
        """Refuse a condition that does not fit this model; errors as in `check_labels` and `check_captions`."""
        self.cls_embedding.check(condition, batch_size)

    def _begin(self, condition: TextCondition | Tensor) -> DistilledState:
        prefix, seen = self.cls_embedding.prefix(condition)
        size = self.config["dim"] // self.config["num_heads"]
        table = rotary_table(self.grid.width, size, dtype=torch.promote_types(self.dtype, torch.float32))
        unturned = torch.zeros_like(table[:1])  # cosine 0 and sine 0: the key vanishes, as in LlamaGen
        if not self.config["zero_prefix_keys"]:
            unturned[..., 0] = 1.0
        table = torch.cat([unturned.expand(prefix.shape[1], -1, -1), table])  # [T + L, D / 2, 2]
        return DistilledState(prefix, seen, table.to(self.device))

    @decodes
    def forward(self, state: DistilledState, vectors: Tensor, known: int) -> DistilledAnswer:
        """Draw the slots from `known` on; see `DistilledModel.__call__`."""
        check_call(self, vectors, known)
        hidden = self._run(state, vectors, torch.full_like(state.seen[:, 0], known, dtype=torch.long))
        split = max(known, self.first_continuous)
        if split == self.grid.num_tokens:
            drawn = vectors[:, split:]  # all slots hold codes
        else:
            drawn = self.final_layer_conti(hidden[:, split:], state.prefix[:, -1])
        return DistilledAnswer(self._head(hidden[:, known:split]), drawn)

    def teacher_forced(self, vectors: Tensor, condition: TextCondition | Tensor, known: Tensor) -> Tensor:
        """Return logits `[B, L, V]` for every slot of whole pictures. Gradients flow.

        Args:
            vectors: `[B, L, D]`, the codes of the first tokens, then noise.
            known: long `[B]`, how many tokens of each row are given.
        """
        return self._head(self._run(self._begin(condition), vectors, known))

    def _run(self, state: DistilledState, vectors: Tensor, known: Tensor) -> Tensor:
        """Return what the heads read `[B, L, dim]`, position i for slot i; `known` long `[B]`."""
        words = self.tok_embeddings(vectors.to(state.prefix.dtype))
        hidden, length = torch.cat([state.prefix, words], 1), state.prefix.shape[1]  # [B, T + L, dim]
        places = torch.arange(hidden.shape[1], device=hidden.device)
        hidden = hidden + self.n_d_embed((places < length + known[:, None]).long())
        turns = turns_of(state.table[None])
        mask = seen_causally(F.pad(state.seen, (0, vectors.shape[1]), value=True))[:, None]
        for block in self.layers:
            assert isinstance(block, TransformerBlock)
            hidden = block.whole(hidden, turns, mask)
        return hidden[:, length:]

    def _head(self, hidden: Tensor) -> Tensor:
        return wide(self.output(self.norm(hidden)))


# -- official checkpoints --------------------------------------------------------------------------------------------


def is_llamagen_student(weights: Mapping[str, Any]) -> bool:
    """Return whether these keys are of a student of LlamaGen."""
    return {"n_d_embed.weight", "final_layer_conti.linear.weight", "tok_embeddings.weight"} <= weights.keys()


def unpack_student(path: Path, content: Any) -> Checkpoint | None:
    """The averaged weights (`ema`) of a file of a student, else those under `model`; None: it is another file.

    Raises:
        ValueError: as in `visual_spec.models.core.checkpoints.unpack_checkpoint`.
    """
    for name in ("ema", "model"):
        weights = content.get(name) if isinstance(content, Mapping) else None
        if isinstance(weights, Mapping) and is_llamagen_student(weights):
            return unpack_checkpoint(path, {"model": weights})
    return None


_STUDENT = KeyLayout(
    "student of LlamaGen",
    "llamagen-B.pt or llamagen-L.pt of Distilled Decoding",
    needed={
        "tok_embeddings.weight": 2,
        "output.weight": 2,
        "cls_embedding.embedding_table.weight": 2,
        "n_d_embed.weight": 2,
        "final_layer_conti.linear.weight": 2,
    },
    dropped=_DROPPED,
    unpack=unpack_student,
    keep='{"ema": c["ema"]}',
)


def load_llamagen_student(
    source: Source, *, dtype: torch.dtype | None = None, **config: Any
) -> LlamaGenStudent:
    """Return the student of an official file, `llamagen-B.pt` or `llamagen-L.pt`.

    `source`, `dtype` and errors: see `visual_spec.models.core.layouts`.

    Args:
        config: constructor arguments that the weights do not tell: `num_heads`, `first_continuous` and `restart` of a
            size that is none of `STUDENTS`, `grid_size` of another than 16.
    """
    weights, name = _STUDENT.read(source)
    dim, token_dim = weights["tok_embeddings.weight"].shape
    layers = count_parts(weights, "layers.")
    sizes = {(size["num_layers"], size["dim"]): size for size in STUDENTS.values()}
    preset = sizes.get((layers, dim))
    if preset is None and "num_heads" not in config:
        known = ", ".join(f"{name} ({s['num_layers']} layers of {s['dim']})" for name, s in STUDENTS.items())
        raise ValueError(
            f"{name} has {layers} layers of {dim}, and the released students are {known}; pass num_heads, "
            "first_continuous and restart for another one, which cannot be read off the weights."
        )
    settings = {
        "vocab_size": weights["output.weight"].shape[0],
        "token_dim": token_dim,
        "dim": dim,
        "num_layers": layers,
        "num_classes": weights["cls_embedding.embedding_table.weight"].shape[0] - 1,
        **(preset or {}),
        **config,
    }
    return loaded(LlamaGenStudent, settings, weights, name, what="student of LlamaGen", dtype=dtype)
