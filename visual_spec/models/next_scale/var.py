"""VAR: a transformer that predicts the token maps of a picture scale by scale (Tian et al. 2024, section 3.2).

One class serves the embedded sizes and the official class-conditional checkpoints; parameter names are the official
keys. All tokens of a scale are predicted at once from the maps before it. Decoding uses a static cache, allocated once
and written by scale. The last scale is never cached, because nothing reads it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from diffusers.configuration_utils import ConfigMixin
from diffusers.models.modeling_utils import ModelMixin
from einops import rearrange
from torch import Tensor, nn

from visual_spec.kernels.rotary_write import Turns, rotate
from visual_spec.models.core.adapters import weight_of
from visual_spec.models.core.cache import StaticCache
from visual_spec.models.core.conditions import check_labels
from visual_spec.models.core.configuration import register_to_config
from visual_spec.models.core.layouts import Given, KeyLayout, count_parts, loaded
from visual_spec.models.core.offload import loads_weights
from visual_spec.models.core.protocol import ScaleState, checked_stop
from visual_spec.models.core.pruning import Pruning
from visual_spec.models.core.saved import SavedModel
from visual_spec.models.core.settings import Count
from visual_spec.models.next_scale.scale_budget import offsets_of
from visual_spec.models.next_scale.scale_cache import ScaleCache, WholeCache, block_causal
from visual_spec.models.next_scale.scale_pruning import Apply, PrunedMaps, whole

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

_EPSILON = 1e-6  # of every LayerNorm
_LARGEST_SCALE = math.log(100)  # of attention logits, in logarithms

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass
class VARState(ScaleState):
    """The state of one decode.

    Attributes:
        cache: keys and values.
        modulations: `[layers, R, 6, dim]`, AdaLN's output for the condition. It is the same at every scale, and a third
            of all weights compute it.
        head_modulation: `[R, 2, dim]`, the same for the head.
        fed: number of scales fed; 0 if the prefill was the only forward needed.
        stop: the first scale that will not be predicted.
        pruned: which places of later scales go through which layers; None: all.
    """

    cache: ScaleCache
    modulations: Tensor
    head_modulation: Tensor
    fed: int
    stop: int
    pruned: PrunedMaps | None = None

    @property
    def cache_bytes(self) -> int:
        """The most bytes of keys and values held from call to call."""
        return self.cache.most_bytes

    def drop_unconditional(self) -> None:
        """See `ScaleState.drop_unconditional`."""
        super().drop_unconditional()
        count = len(self.head_modulation) // 2
        self.cache.keep_rows(count)
        if self.pruned is not None:
            self.pruned.keep_rows(count)
        self.modulations, self.head_modulation = self.modulations[:, :count], self.head_modulation[:count]

    def apply(self, layer: int, scales: range) -> Apply:
        """Return what runs the sub-layers of a layer on some scales."""
        return whole if self.pruned is None else partial(self.pruned.apply, layer, scales)


class CosineAttention(nn.Module):
    """Cosine attention: unit queries and keys, and a learned scale per head, at most 100."""

    def __init__(self, dim: int, heads: int):
        super().__init__()
        self.heads = heads
        self.mat_qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.q_bias = nn.Parameter(torch.zeros(dim))
        self.v_bias = nn.Parameter(torch.zeros(dim))
        self.scale_mul_1H11 = nn.Parameter(torch.full((1, heads, 1, 1), math.log(4)))
        self.proj = nn.Linear(dim, dim)

    def project(self, x: Tensor, turns: Turns | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Return scaled queries, keys and values `[R, H, W, D]` of `x [R, W, dim]`.

        `turns` (`turns_of` a table) rotate pairs of queries and keys (VAR: None).
        """
        bias = torch.cat([self.q_bias, torch.zeros_like(self.q_bias), self.v_bias])
        q, k, v = (
            F.linear(x, weight_of(self.mat_qkv), bias)
            .unflatten(-1, (3, self.heads, -1))
            .permute(2, 0, 3, 1, 4)
        )
        wide = torch.promote_types(x.dtype, torch.float32)
        scale = self.scale_mul_1H11.to(wide).clamp_max(_LARGEST_SCALE).exp()
        q, k = F.normalize(q.to(wide), dim=-1) * scale, F.normalize(k.to(wide), dim=-1)
        if turns is not None:
            pairs = torch.stack([q, k], 1).permute(0, 3, 1, 2, 4)  # [R, W, 2, H, D]
            q, k = rotate(pairs, turns).permute(2, 0, 3, 1, 4)
        # Rounded back to the model's dtype: float32 keys would double the cache.
        return q.to(x.dtype), k.to(x.dtype), v


class TanhMlp(nn.Module):
    """Two layers with the tanh approximation of GELU between them."""

    def __init__(self, dim: int, hidden: int):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(dim, hidden), nn.Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x), approximate="tanh"))


def modulated(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """Return LayerNorm of `x [R, W, dim]` with gain 1 + `scale [R, dim]` and bias `shift [R, dim]`."""
    return F.layer_norm(x, x.shape[-1:], eps=_EPSILON) * (1 + scale[:, None]) + shift[:, None]


class VARBlock(nn.Module):
    def __init__(self, dim: int, heads: int, shared_adaln: bool):
        super().__init__()
        self.attn = CosineAttention(dim, heads)
        self.ffn = TanhMlp(dim, 4 * dim)
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
        gain1, gain2, scale1, scale2, shift1, shift2 = modulation.unbind(1)  # [R, dim] each

        def attention(x: Tensor, places: Tensor | None) -> Tensor:
            q, k, v = self.attn.project(modulated(x, scale1, shift1))
            return self.attn.proj(attend(q, k, v).transpose(1, 2).flatten(2)) * gain1[:, None]

        def feed_forward(x: Tensor, places: Tensor | None) -> Tensor:
            return self.ffn(modulated(x, scale2, shift2)) * gain2[:, None]

        x = x + apply(0, x, attention)
        if between is not None:
            x = x + between
        return x + apply(1, x, feed_forward)


class HeadNorm(nn.Module):
    def __init__(self, dim: int):
        super().__init__()
        self.ada_lin = nn.Sequential(nn.SiLU(), nn.Linear(dim, 2 * dim))

    def modulation(self, condition: Tensor) -> Tensor:
        """Return `[R, 2, dim]`, scale and shift, from the class embedding `[R, dim]`."""
        return self.ada_lin(condition).unflatten(-1, (2, -1))


class VARTransformer(SavedModel, ModelMixin, ConfigMixin):
    """A `ScaleModel` over the residual token maps of a multi-scale tokenizer, conditioned on a class.

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
    prunes = True  # `prefill` takes `pruning`

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
        if not self.scales or self.scales[0] < 1 or any(a > b for a, b in pairwise(self.scales)):
            raise ValueError(
                f"scales={self.scales} given; pass sides of at least 1, coarse to fine, such as {SCALES[256]}"
            )
        if dim % num_heads:
            raise ValueError(
                f"dim={dim} and num_heads={num_heads} given; dim must be a multiple of num_heads"
            )
        # The first slot of each scale, then L.
        self.offsets = offsets_of(self.scales)
        self.word_embed = nn.Linear(code_dim, dim)
        self.class_emb = nn.Embedding(num_classes + 1, dim)
        self.pos_start = nn.Parameter(torch.zeros(1, self.offsets[1], dim))
        self.pos_1LC = nn.Parameter(torch.zeros(1, self.offsets[-1], dim))
        self.lvl_embed = nn.Embedding(len(self.scales), dim)
        if shared_adaln:
            self.shared_ada_lin = nn.Sequential(nn.SiLU(), nn.Linear(dim, 6 * dim))
        self.blocks = nn.ModuleList(VARBlock(dim, num_heads, shared_adaln) for _ in range(num_layers))
        self.head_nm = HeadNorm(dim)
        self.head = nn.Linear(dim, vocab_size)
        self._initialise()

    def _initialise(self) -> None:
        """Initialise as in the official training: layers begin close to the identity, and laws close to uniform."""
        dim, depth = self.config["dim"], len(self.blocks)
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif "scale_mul" not in name and "ada_gss" not in name:
                nn.init.trunc_normal_(parameter, std=(3 * dim) ** -0.5)
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if name == "head.weight":
                    parameter *= 0.02
                elif name == "head_nm.ada_lin.1.weight":
                    parameter *= 0.5
                elif name.endswith(("attn.proj.weight", "ffn.fc2.weight")):
                    parameter /= (2 * depth) ** 0.5
                elif name.startswith("blocks.") and name.endswith(("ada_lin.1.weight", "ada_gss")):
                    six = parameter.unflatten(0, (6, dim)) if parameter.ndim == 2 else parameter[0, 0]
                    six[:2] *= 1e-3  # the gains of attention and feed-forward layer
                    six[2:] *= 0.5

    @property
    def num_layers(self) -> int:
        """Number of layers."""
        return len(self.blocks)

    # -- condition and inputs ----------------------------------------------------------------------------------------

    def check_condition(self, condition: Any, batch_size: int) -> None:
        """Refuse a condition that does not fit this model.

        Raises:
            TypeError: the condition is not class labels.
            ValueError: the number of labels is not the batch size, or a label is out of range.
        """
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

    def _check_map(self, map: Tensor, scale: int, batch_size: int) -> None:
        side = self.scales[scale]
        if map.shape != (batch_size, self.code_dim, side, side):
            raise ValueError(
                f"an input map of shape {tuple(map.shape)} given for scale {scale}; this model takes "
                f"{(batch_size, self.code_dim, side, side)}"
            )

    def _embed_map(self, map: Tensor, scale: int) -> Tensor:
        """Return `[B, n * n, dim]` for an input map `[B, D, n, n]`."""
        words = self.word_embed(rearrange(map, "b c h w -> b (h w) c").to(self.word_embed.weight.dtype))
        return words + self._places(scale)

    def _places(self, scale: int) -> Tensor:
        """Return the position embeddings of a scale: `[1, n * n, dim]`."""
        return self.pos_1LC[:, slice(*self.offsets[scale : scale + 2])] + self.lvl_embed.weight[scale]

    def _embed(self, classes: Tensor, maps: Sequence[Tensor]) -> Tensor:
        """Return inputs `[R, n, dim]` of scale 0, which gets the class, and of the scales of `maps`."""
        for scale, map in enumerate(maps, 1):
            self._check_map(map, scale, len(maps[0]))
        first = classes[:, None] + self.pos_start + self._places(0)
        if not maps:
            return first
        words = torch.cat([self._embed_map(map, scale) for scale, map in enumerate(maps, 1)], 1)
        return torch.cat([first, words.repeat(len(classes) // len(words), 1, 1)], 1)

    # -- layers ------------------------------------------------------------------------------------------------------

    def _modulations(self, classes: Tensor) -> tuple[list[Tensor], Tensor]:
        """AdaLN's output for class embeddings `[R, dim]`: `[R, 6, dim]` per layer, `[R, 2, dim]` for the head."""
        shared = classes
        if self.config["shared_adaln"]:
            shared = self.shared_ada_lin(classes).unflatten(-1, (6, -1))
        blocks = [block.modulation(shared) for block in self.blocks if isinstance(block, VARBlock)]
        return blocks, self.head_nm.modulation(classes)

    def _block_causal(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return block_causal(q, k, v, self.offsets)

    def _logits(self, hidden: Tensor, modulation: Tensor) -> Tensor:
        logits = self.head(modulated(hidden, *modulation.unbind(1)))
        return logits.to(torch.promote_types(logits.dtype, torch.float32))

    # -- decoding: the ScaleModel contract ---------------------------------------------------------------------------

    @loads_weights
    @torch.no_grad()
    def prefill(
        self,
        condition: Tensor,
        *,
        batch_size: int,
        guided: bool,
        maps: Sequence[Tensor] = (),
        stop: int | None = None,
        cache: ScaleCache | None = None,
        pruning: Pruning | None = None,
    ) -> VARState:
        """Run the class and the known scales in one forward; see `ScaleModel.prefill`. `condition`: labels `[B]`.

        The vocabulary head is applied to the last of these scales only.

        Args:
            cache: an empty cache of another kind, made for these maps and `stop`; None: a static one that keeps
                everything. `CompressedVAR` passes its own.
            pruning: the parts of later maps that go through the layers; the scales of this forward are whole. Not with
                a `cache`.

        Raises:
            TypeError, ValueError: as in `check_condition`; or the maps have other shapes, or `stop` is not after them.
        """
        self.check_condition(condition, batch_size)
        stop = checked_stop(maps, stop, self.scales)
        if maps:
            self._check_map(maps[0], 1, batch_size)
        classes = self.embed_condition(condition, guided=guided)
        hidden = self._embed(classes, maps)
        modulations, head_modulation = self._modulations(classes)
        # No scale reads the last one, so it is not cached; if this forward ends there, nothing is cached.
        more = len(maps) < stop - 1
        pruned = (
            None if pruning is None else PrunedMaps(pruning.behind(len(maps)), self.scales, len(self.blocks))
        )
        if cache is None:
            heads = self.config["num_heads"]
            size = self.offsets[stop - 1] if more else 0
            shape = (len(self.blocks), len(classes), heads, size, self.config["dim"] // heads)
            cache = WholeCache(StaticCache.allocate(hidden, shape), self.offsets, pruned)
        state = VARState(
            logits=hidden,  # until there are
            guided=guided,
            cache=cache,
            modulations=torch.stack(modulations),
            head_modulation=head_modulation,
            fed=len(maps) + 1 if more else 0,
            stop=stop,
            pruned=pruned,
        )
        hidden = self._run(state, hidden, range(len(maps) + 1))
        state.logits = self._logits(hidden[:, self.offsets[len(maps)] :], head_modulation)
        return state

    @loads_weights
    @torch.no_grad()
    def forward(self, state: VARState, map: Tensor, scale: int) -> Tensor:
        """Feed the input map `[B, D, n, n]` of a scale; logits `[R, n * n, V]`. See `ScaleModel.__call__`.

        Raises:
            ValueError: the map has another shape, or the scale is not the next one, or is not below `stop`.
        """
        rows = state.head_modulation.shape[0]
        again = " or one from 1 on again" if state.cache.repeatable else ""
        if not (1 if again else state.fed) <= scale <= state.fed or not 1 <= scale < state.stop:
            raise ValueError(
                f"scale {scale} given after {state.fed} cached ones; this state takes scale {state.fed}{again}, below "
                f"its stop={state.stop}"
            )
        self._check_map(map, scale, rows // 2 if state.guided else rows)
        hidden = self._embed_map(map, scale)
        if state.guided:
            hidden = hidden.repeat(2, 1, 1)
        hidden = self._run(state, hidden, range(scale, scale + 1))
        state.fed = scale + 1
        return self._logits(hidden, state.head_modulation)

    def _run(self, state: VARState, hidden: Tensor, scales: range) -> Tensor:
        """Run all layers on the inputs `[R, places, dim]` of some scales."""
        for index, block in enumerate(self.blocks):
            attend = partial(state.cache.attend, index, scales)
            hidden = block(hidden, state.modulations[index], attend, state.apply(index, scales))
        return hidden

    # -- training ----------------------------------------------------------------------------------------------------

    def teacher_forced(self, maps: Sequence[Tensor], labels: Tensor, dropped: Tensor | None = None) -> Tensor:
        """Return logits `[B, L, V]` for every slot of scales 0 to `len(maps)`, with gradients.

        Args:
            maps: the input maps `[B, D, n, n]` of scales 1 on, from `ScaleTokenizer.next_map` on the true canvas: all
                of them, or those of the scales that a drafter is trained for.
            labels: long `[B]`.
            dropped: bool `[B]`, rows whose class is replaced by the null class.
        """
        classes = self.embed_condition(labels, dropped=dropped)
        hidden = self._embed(classes, maps)
        modulations, head_modulation = self._modulations(classes)
        for block, modulation in zip(self.blocks, modulations, strict=True):
            hidden = block(hidden, modulation, self._block_causal)
        return self._logits(hidden, head_modulation)


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
    """Whether these keys are of a VAR."""
    return "pos_1LC" in weights


def name_of(checkpoint: Any) -> str:
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
    source: Given,
    *,
    scales: Sequence[int] | None = None,
    dtype: torch.dtype | None = None,
) -> VARTransformer:
    """Return the transformer of an official file, e.g. `var_d16.pth`, or of a state dict with its keys.

    Sizes are read off the weights. Constants that the official files carry (the level of each slot, the attention mask,
    the zero bias of keys) are checked and dropped.

    Args:
        source: the file, the result of `read_checkpoint`, or a state dict.
        scales: tokens per side of each map; needed only for a file without the level of each slot, and with other
            scales than the official ones.
        dtype: dtype of the weights; None keeps that of the file.

    Raises:
        ValueError, OSError: as in `read_checkpoint`; or the weights are not VAR's; or keys are missing, unexpected or
            mis-shaped, which the message lists; or the scales are unknown or do not fit.
    """
    weights, name = _VAR.read(source)
    config = _config(weights, name, scales)
    return loaded(VARTransformer, config, weights, name, what="VAR", constants=_constants, dtype=dtype)


def _constants(model: VARTransformer) -> dict[str, Tensor]:
    """Return the buffers of the official files that our models do not have."""
    length, dim = model.pos_1LC.shape[1:]
    sizes = torch.tensor([side * side for side in model.scales])
    levels = torch.arange(len(sizes)).repeat_interleave(sizes)  # [L]
    mask = torch.zeros(length, length).masked_fill(levels[:, None] < levels, -torch.inf)
    biases = {f"blocks.{index}.attn.zero_k_bias": torch.zeros(dim) for index in range(len(model.blocks))}
    return {"lvl_1L": levels[None], "attn_bias_for_masking": mask[None, None], **biases}


def _config(weights: Mapping[str, Tensor], name: str, scales: Sequence[int] | None) -> dict[str, Any]:
    length, dim = weights["pos_1LC"].shape[1:]
    return {
        "vocab_size": weights["head.weight"].shape[0],
        "code_dim": weights["word_embed.weight"].shape[1],
        "dim": dim,
        "num_layers": count_parts(weights, "blocks."),
        "num_heads": weights["blocks.0.attn.scale_mul_1H11"].shape[1],
        "num_classes": weights["class_emb.weight"].shape[0] - 1,
        "scales": _read_scales(weights, name, scales, len(weights["lvl_embed.weight"]), length),
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
    found = tuple(asked) if asked is not None else held
    if found is None:
        raise ValueError(
            f"{name} has {length} slots in {count} scales and does not tell their sides; pass `scales`, for example "
            f"{SCALES[256]}."
        )
    if len(found) != count or sum(side * side for side in found) != length or (held or found) != found:
        raise ValueError(
            f"scales {found} have {sum(side * side for side in found)} slots, but {name} has {length} slots in {count} "
            f"scales{f' of sides {held}' if held and held != found else ''}."
        )
    return found
