"""BitDance: a causal transformer over tokens of bits, several of them a call (Ai et al. 2026, arXiv 2602.14041).

A slot is a square patch of tokens, one token in the smallest models. Class, drawn patches and learned queries run
through LlamaGen's blocks; positions of one patch see each other. The conditions of all tokens of the next patch come
out at those of the last one, and the head draws them together. The public code and its files:
github.com/shallowdream204/BitDance.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from einops import rearrange
from torch import Tensor, nn

from visual_spec.models.continuous.bitdance_head import (
    HEAD_KEYS,
    BinaryHead,
    EulerMaruyamaSchedule,
    GatedLayer,
)
from visual_spec.models.continuous.causal import CausalContinuousState
from visual_spec.models.core.cache import StaticCache, seen_up_to
from visual_spec.models.core.checkpoints import Checkpoint
from visual_spec.models.core.continuous import ChainSettings
from visual_spec.models.core.layouts import Given, KeyLayout, count_parts, loaded
from visual_spec.models.core.offload import check_cache_fits
from visual_spec.models.core.protocol import TokenGrid, check_heads, check_labels
from visual_spec.models.core.saved import SavedModel
from visual_spec.models.core.settings import Count, register_to_config
from visual_spec.models.next_token.llamagen_blocks import (
    RMSNorm,
    Shared,
    TransformerBlock,
    feed_forward_width,
    rotary_table,
    turns_of,
)

PRESETS: dict[str, dict[str, int]] = {
    "B": {"dim": 768, "num_layers": 24, "head_width": 768, "head_depth": 6, "head_modulated": 2},
    "L": {"dim": 1024, "num_layers": 32, "head_width": 1024, "head_depth": 8, "head_modulated": 2},
    "H": {"dim": 1280, "num_layers": 40, "head_width": 1280, "head_depth": 12, "head_modulated": 3},
}
_HEAD = 64  # numbers of an attention head, of the trunk and of the head
_EPS = 1e-6


@dataclass
class BitDanceState(CausalContinuousState):
    """A `CausalContinuousState` of patches.

    Attributes:
        table: the rotary table by position, [S, D / 2, 2].
        first: what the unconditional rows hold at slot 0, [B, P bits]; None: what the others hold.
    """

    table: Tensor
    first: Tensor | None = None

    def select(self, samples: Tensor) -> None:
        super().select(samples)
        self.first = None if self.first is None else self.first[samples]

    def buffers(self) -> list[Tensor]:
        return [*super().buffers(), self.table, *([] if self.first is None else [self.first])]


class BitDanceTransformer(SavedModel):
    """A `CausalContinuousModel` whose slots are patches of tokens, conditioned on a class. The defaults are B-1x's.

    A slot's vector has the bits of its patch, token after token, as numbers whose signs count: it is fed by its signs.

    Args:
        grid_size: tokens per side.
        bits: numbers of a token.
        patch: tokens per side of a slot; their square P is drawn in one call.
        dim, num_layers: width and depth; attention heads have 64 numbers. `PRESETS` lists the official sizes.
        head_width, head_depth, head_modulated: of `BinaryHead`.
        num_classes: classes; the table has one row more, of no class.
        prefix_length: positions that hold the class.
        head_steps, time_shift: the chain of a slot unless a sampler sets otherwise, see `EulerMaruyamaSchedule`.

    Raises:
        ValueError: a width that is no multiple of 64, a patch that does not divide the grid, or as `BinaryHead`.
    """

    _repeated_blocks = ["TransformerBlock", "BinaryHeadBlock"]
    _no_split_modules = ["TransformerBlock", "BinaryHeadBlock"]

    # Linear guidance starts at 1, where the unconditional rows draw a first slot of their own, as published.
    starts_unguided = True

    @register_to_config
    def __init__(
        self,
        grid_size: Count = 16,
        bits: Count = 32,
        patch: Count = 1,
        dim: Count = 768,
        num_layers: int = 24,
        head_width: Count = 768,
        head_depth: Count = 6,
        head_modulated: Count = 2,
        num_classes: Count = 1000,
        prefix_length: Count = 64,
        head_steps: int = 101,
        time_shift: float = 1.0,
    ):
        super().__init__()
        check_heads(dim, max(1, dim // _HEAD))
        side, rest = divmod(grid_size, patch)
        if rest or dim % _HEAD:
            raise ValueError(
                f"grid_size={grid_size}, patch={patch}, dim={dim}; the patch divides the grid, and {_HEAD} the width."
            )
        EulerMaruyamaSchedule(head_steps, shift=time_shift)
        self.chain = ChainSettings(head_steps)
        self.grid, self.patch, self.patch_tokens = TokenGrid(side, side), patch, patch * patch
        self.token_dim, self.condition_dim = bits * patch * patch, dim * patch * patch
        hidden, heads = feed_forward_width(dim), dim // _HEAD
        self.cls_embedding = nn.Embedding(num_classes + 1, prefix_length * dim)
        queries = nn.Parameter(torch.empty(1, self.patch_tokens - 1, dim)) if patch > 1 else None
        self.register_parameter("query_token", queries)
        self.proj_in, self.emb_norm = GatedLayer(bits, dim), RMSNorm(dim, _EPS)
        self.layers = nn.ModuleList(TransformerBlock(dim, heads, hidden, _EPS) for _ in range(num_layers))
        self.norm = RMSNorm(dim, _EPS)
        self.pos_for_diff = nn.Embedding(grid_size * grid_size, dim)
        self.head = BinaryHead(
            bits, self.patch_tokens, dim, head_width, head_depth, max(1, head_width // _HEAD), head_modulated
        )
        for parameter in self.parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=0.02)

    @property
    def places(self) -> Tensor:
        """Slots stand in raster order; one more after the last."""
        return torch.arange(self.grid.num_tokens + 1, device=self.device)

    def schedule(self, num_steps: int, eta: float | None = None) -> EulerMaruyamaSchedule:
        """The chain of so many levels, where the model is; see `ContinuousModel.schedule`."""
        return EulerMaruyamaSchedule(num_steps, shift=self.config["time_shift"], eta=eta).to(self.device)

    @torch.no_grad()
    def prefill(
        self, condition: Tensor | None, *, batch_size: int, guided: bool, window: int
    ) -> BitDanceState:
        """Run the class, labels long [B] or None; see `CausalContinuousModel.prefill`."""
        nothing = torch.full((batch_size,), self.config["num_classes"], device=self.device)
        if condition is not None:
            check_labels(condition, batch_size, self.config["num_classes"])
        labels = nothing if condition is None else condition.to(self.device)
        hidden = self.cls_embedding(torch.cat([labels, nothing]) if guided else labels)
        hidden = hidden.unflatten(-1, (self.config["prefix_length"], -1))
        if self.query_token is not None:
            hidden = torch.cat([hidden, self.query_token.expand(len(hidden), -1, -1)], 1)
        rows, dim = len(hidden), self.config["dim"]
        room = hidden.shape[1] + (self.grid.num_tokens + window) * self.patch_tokens
        shape = (len(self.layers), rows, dim // _HEAD, room, _HEAD)
        check_cache_fits(2 * math.prod(shape) * hidden.element_size() // batch_size, batch_size, self.device)
        cache = StaticCache.allocate(hidden, shape)
        state = BitDanceState(hidden[:, -1], guided, window, cache, self._table(hidden.shape[1]))
        at = torch.arange(hidden.shape[1], device=self.device).expand(rows, -1)
        hidden = self._run(state, hidden, at)[:, -self.patch_tokens :]
        state.conditions = (hidden + self.pos_for_diff.weight[: self.patch_tokens]).flatten(1)
        return state

    @torch.no_grad()
    def forward(self, state: BitDanceState, tokens: Tensor, slots: Tensor) -> Tensor:
        """Feed the signs of tokens [B, W, P bits] at slots [B, W]; conditions [R, W, P dim] of the slots after.

        Writes the cache at those slots. Slots after the last one are allowed, up to the window; what comes out there
        means nothing.
        """
        if state.guided:
            other = tokens
            if state.first is not None:
                other = torch.where((slots == 0)[..., None], state.first[:, None].to(tokens), tokens)
            tokens, slots = torch.cat([tokens, other]), slots.repeat(2, 1)
        width, each = slots.shape[1], torch.arange(self.patch_tokens, device=slots.device)
        bits = tokens.sign().unflatten(-1, (self.patch_tokens, -1)).flatten(1, 2)
        places = (slots[..., None] * self.patch_tokens + each).flatten(1)
        prefix = self.config["prefix_length"] + self.patch_tokens - 1
        hidden = self._run(state, self.proj_in(bits), prefix + places)
        following = places + self.patch_tokens
        hidden = hidden + self.pos_for_diff(following.clamp_max(self.pos_for_diff.num_embeddings - 1))
        return hidden.unflatten(1, (width, -1)).flatten(2)

    def _run(self, state: BitDanceState, hidden: Tensor, at: Tensor) -> Tensor:
        """The blocks and the norm on `hidden [R, W, dim]` at places [R, W] of the cache."""
        # The last position of the class and the queries are the patch before the first one.
        into = at - (self.config["prefix_length"] - 1)
        last = at + torch.where(into < 0, 0, self.patch_tokens - 1 - into % self.patch_tokens)
        mask = seen_up_to(last, state.cache.num_slots)[:, None]  # [R, 1, W, S]
        state.cache.at(at, mask.shape[-1])
        turns = turns_of(state.table[at.clamp_max(len(state.table) - 1)])
        shared = Shared(turns, state.cache.places, mask, at)
        hidden, change = self.emb_norm(hidden), None
        for index, block in enumerate(self.layers):
            hidden, change = block(hidden, change, state.cache.layer(index), shared)
        return self.norm.after(hidden, change)[1]

    def _table(self, prefix: int) -> Tensor:
        """The rotary table: places before the first slot are not turned, tokens by column, then by row, from 1.5 on."""
        side = self.config["grid_size"]
        dtype = torch.promote_types(self.dtype, torch.float32)
        table = rotary_table(side, _HEAD, dtype=dtype, start=1.5).unflatten(0, (side, side)).transpose(0, 1)
        shape = "(h p) (w q) d c -> (h w p q) d c"
        table = rearrange(table, shape, p=self.patch, q=self.patch).to(self.device)
        still = torch.tensor([1.0, 0.0], dtype=dtype, device=self.device)
        return torch.cat([still.expand(prefix, table.shape[1], 2), table])


# -- official files --------------------------------------------------------------------------------------------------

_BITDANCE = KeyLayout(
    "BitDance transformer",
    "a file such as BitDance_B_16x.pt",
    needed={
        "cls_embedding.weight": 2,
        "proj_in.w1.weight": 2,
        "pos_for_diff.weight": 2,
        "head.input_proj.weight": 2,
        "head.final_layer.linear.weight": 2,
    },
    dropped=(r"vae\..*",),  # of training; the tokenizer's own file is read
    renamed={r"^head\.net\.": "head.", **HEAD_KEYS},
    container="ema",
)


def unpack_bitdance(path: Path, content: object) -> Checkpoint | None:
    """The averaged weights in the content of a file of BitDance, or the others where there are none; None of others."""
    for container in ("ema", "model"):
        weights = content.get(container) if isinstance(content, Mapping) else None
        if isinstance(weights, Mapping) and is_bitdance(weights):
            return _BITDANCE.contained(path, {"ema": weights})
    return None


def is_bitdance(weights: Mapping[str, object]) -> bool:
    """Return whether these keys are of a BitDance of classes."""
    return {"pos_for_diff.weight", "head.net.input_proj.weight", "cls_embedding.weight"} <= weights.keys()


def name_of(checkpoint: Checkpoint) -> str:
    """Return what a file of BitDance is called, by its width and the tokens of a call."""
    weights = checkpoint.weights
    dim, queries = weights["pos_for_diff.weight"].shape[1], weights.get("query_token")
    size = next((name for name, preset in PRESETS.items() if preset["dim"] == dim), f"of width {dim}")
    return f"BitDance-{size}-{1 if queries is None else queries.shape[1] + 1}x"


def load_bitdance(source: Given, *, dtype: torch.dtype | None = None) -> BitDanceTransformer:
    """The transformer of an official file of classes, such as `BitDance_B_16x.pt`, from its averaged weights.

    `source`, `dtype` and errors: see `visual_spec.models.core.layouts`.

    Raises:
        ValueError: also of tokens that are no square.
    """
    weights, name = _BITDANCE.read(source)
    (places, dim), queries = weights["pos_for_diff.weight"].shape, weights.get("query_token")
    side, patch = round(places**0.5), round((1 if queries is None else queries.shape[1] + 1) ** 0.5)
    if side * side != places or queries is not None and patch * patch != queries.shape[1] + 1:
        raise ValueError(
            f"{name} has {places} tokens and {0 if queries is None else queries.shape[1]} queries; a BitDance has a "
            "square of tokens, and one query less than a square."
        )
    layers = count_parts(weights, "layers.")
    for layer in range(layers):
        joined = weights.pop(f"layers.{layer}.feed_forward.w1.weight", None)
        if joined is not None:  # else it is listed as missing
            for part, half in zip(("w1", "w3"), joined.chunk(2), strict=True):
                weights[f"layers.{layer}.feed_forward.{part}.weight"] = half
    classes, prefix = weights["cls_embedding.weight"].shape
    config = {
        "grid_size": side,
        "bits": weights["head.input_proj.weight"].shape[1],
        "patch": patch,
        "dim": dim,
        "num_layers": layers,
        "head_width": weights["head.input_proj.weight"].shape[0],
        "head_depth": count_parts(weights, "head.res_blocks."),
        "head_modulated": count_parts(weights, "head.ada_ln_blocks."),
        "num_classes": classes - 1,
        "prefix_length": prefix // dim,
    }
    return loaded(BitDanceTransformer, config, weights, name, what="BitDance", dtype=dtype)
