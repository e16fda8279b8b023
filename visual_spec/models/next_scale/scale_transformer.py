"""What next-scale transformers share: layers with AdaLN and cosine attention, and the calls of a `ScaleModel`.

All tokens of a scale are predicted at once from the maps before it. Decoding uses a static cache, allocated once and
written by scale. The last scale is never cached, because nothing reads it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from visual_spec.kernels.rotary_write import Turns, rotate
from visual_spec.models.continuous.blocks import Mlp
from visual_spec.models.core.adapters import weight_of
from visual_spec.models.core.cache import StaticCache
from visual_spec.models.core.offload import decodes
from visual_spec.models.core.protocol import ScaleState, Side, checked_stop, shape_of, wide
from visual_spec.models.core.pruning import Pruning
from visual_spec.models.core.saved import SavedModel
from visual_spec.models.next_scale.scale_cache import ScaleCache, WholeCache
from visual_spec.models.next_scale.scale_pruning import Apply, PrunedMaps, Sublayer, whole

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


def modulated(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """Return LayerNorm of `x [R, W, dim]` with gain 1 + `scale [R, dim]` and bias `shift [R, dim]`."""
    return F.layer_norm(x, x.shape[-1:], eps=_EPSILON) * (1 + scale[:, None]) + shift[:, None]


def sublayers(
    attention: CosineAttention, ffn: Mlp, modulation: Tensor, attend: Attend, turns: Turns | None = None
) -> tuple[Sublayer, Sublayer]:
    """Return the attention and the feed-forward layer under AdaLN's output `[R, 6, dim]`; `turns` of all places."""
    gain1, gain2, scale1, scale2, shift1, shift2 = modulation.unbind(1)  # [R, dim] each

    def mixed(x: Tensor, places: Tensor | None) -> Tensor:
        at = turns if turns is None or places is None else (turns[0][0][places], turns[1][0][places])
        q, k, v = attention.project(modulated(x, scale1, shift1), at)
        return attention.proj(attend(q, k, v).transpose(1, 2).flatten(2)) * gain1[:, None]

    def fed(x: Tensor, places: Tensor | None) -> Tensor:
        return ffn(modulated(x, scale2, shift2)) * gain2[:, None]

    return mixed, fed


class HeadNorm(nn.Module):
    def __init__(self, dim: int):
        super().__init__()
        self.ada_lin = nn.Sequential(nn.SiLU(), nn.Linear(dim, 2 * dim))

    def modulation(self, condition: Tensor) -> Tensor:
        """Return `[R, 2, dim]`, scale and shift, from the class embedding `[R, dim]`."""
        return self.ada_lin(condition).unflatten(-1, (2, -1))


class ScaleTransformer(SavedModel):
    """A `ScaleModel`, whatever its condition. A subclass has the attributes below, and defines the methods after them.

    Attributes:
        scales: the side, or (height, width), of each map, coarse to fine.
        offsets: the first slot of each scale, then L.
        code_dim: channels of an input map.
        blocks, word_embed, head_nm, head: layers, the embedding of a map, and the head.
    """

    prunes = True  # `prefill` takes `pruning`
    state_kind: type[VARState] = VARState

    scales: tuple[Side, ...]
    offsets: Sequence[int]
    code_dim: int
    blocks: nn.ModuleList
    word_embed: nn.Linear
    head_nm: HeadNorm
    head: nn.Linear
    pos_start: nn.Parameter

    def spread_of(self, name: str) -> float:
        """Return the standard deviation of a parameter's initial values."""
        return (3 * self.config["dim"]) ** -0.5

    def _initialise(self) -> None:
        """Initialise as in VAR's training: layers begin close to the identity, and laws close to uniform."""
        dim, depth = self.config["dim"], len(self.blocks)
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif not any(kept in name for kept in ("scale_mul", "norm", "ada_gss")):
                nn.init.trunc_normal_(parameter, std=self.spread_of(name))
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if name == "head.weight":
                    parameter *= 0.02
                elif name == "head_nm.ada_lin.1.weight":
                    parameter *= 0.5
                elif name.startswith("blocks.") and name.endswith(("proj.weight", "fc2.weight")):
                    parameter /= (2 * depth) ** 0.5
                elif name.startswith("blocks.") and name.endswith(("ada_lin.1.weight", "ada_gss")):
                    six = parameter.unflatten(0, (6, dim)) if parameter.ndim == 2 else parameter[0, 0]
                    six[:2] *= 1e-3  # the gains of attention and feed-forward layer
                    six[2:] *= 0.5

    def check_condition(self, condition: object, batch_size: int) -> None:
        """Refuse a condition of another kind (TypeError), or that does not fit this model (ValueError)."""
        raise NotImplementedError

    def read(
        self, condition: Any, *, guided: bool = False, dropped: Tensor | None = None
    ) -> tuple[Tensor, dict[str, object]]:
        """Return the vector of the condition `[R, dim]`, unconditional rows last, and further fields of the state.

        The vector is the first input, and the condition of AdaLN. `dropped`, bool `[B]`, marks rows that lose their
        condition (training for guidance).
        """
        raise NotImplementedError

    def _places(self, scale: int) -> Tensor:
        """Return what is added to the inputs of a scale: `[1, n * n, dim]`, or one vector `[dim]`."""
        raise NotImplementedError

    def _run(self, state: Any, hidden: Tensor, scales: range) -> Tensor:
        """Run all layers on the inputs `[R, places, dim]` of some scales."""
        raise NotImplementedError

    @property
    def num_layers(self) -> int:
        """Number of layers."""
        return len(self.blocks)

    # -- inputs and outputs ------------------------------------------------------------------------------------------

    def _check_map(self, map: Tensor, scale: int, batch_size: int) -> None:
        wanted = (batch_size, self.code_dim, *shape_of(self.scales[scale]))
        if map.shape != wanted:
            raise ValueError(
                f"an input map of shape {tuple(map.shape)} given for scale {scale}; this model takes {wanted}"
            )

    def _embed_map(self, map: Tensor, scale: int) -> Tensor:
        """Return `[B, n * n, dim]` for an input map `[B, D, n, n]`."""
        words = self.word_embed(rearrange(map, "b c h w -> b (h w) c").to(self.word_embed.weight.dtype))
        return words + self._places(scale)

    def _embed(self, vector: Tensor, maps: Sequence[Tensor]) -> Tensor:
        """Return inputs `[R, n, dim]` of scale 0, which gets the condition, and of the scales of `maps`."""
        for scale, map in enumerate(maps, 1):
            self._check_map(map, scale, len(maps[0]))
        first = vector[:, None] + self.pos_start + self._places(0)
        if not maps:
            return first
        words = torch.cat([self._embed_map(map, scale) for scale, map in enumerate(maps, 1)], 1)
        return torch.cat([first, words.repeat(len(vector) // len(words), 1, 1)], 1)

    def _modulations(self, vector: Tensor) -> Tensor:
        """Return AdaLN's output for the condition `[R, dim]`: `[layers, R, 6, dim]`."""
        if hasattr(self, "shared_ada_lin"):
            vector = self.shared_ada_lin(vector).unflatten(-1, (6, -1))
        return torch.stack([block.modulation(vector) for block in self.blocks])  # pyright: ignore[reportCallIssue]

    def _logits(self, hidden: Tensor, modulation: Tensor) -> Tensor:
        return wide(self.head(modulated(hidden, *modulation.unbind(1))))

    # -- decoding: the ScaleModel contract ---------------------------------------------------------------------------

    @decodes
    def prefill(
        self,
        condition: Any,
        *,
        batch_size: int,
        guided: bool,
        maps: Sequence[Tensor] = (),
        stop: int | None = None,
        cache: ScaleCache | None = None,
        pruning: Pruning | None = None,
    ) -> Any:
        """Run the condition and the known scales in one forward; see `ScaleModel.prefill`.

        The head is applied to the last of these scales only.

        Args:
            cache: an empty cache of another kind, made for these maps and `stop`; None: a static one that keeps
                everything. `CompressedVAR` passes its own.
            pruning: the parts of later maps that go through the layers; the scales of this forward are whole. Not with
                a `cache`.
        """
        self.check_condition(condition, batch_size)
        stop = checked_stop(maps, stop, self.scales)
        if maps:
            self._check_map(maps[0], 1, batch_size)
        # No scale reads the last one, so it is not cached; if this forward ends there, nothing is cached.
        kept = stop - 1 if len(maps) < stop - 1 else 0
        pruned = None
        if pruning is not None:
            pruned = PrunedMaps(pruning.starting_at(len(maps)), self.scales, len(self.blocks))
        settings: Any = dict(fed=len(maps) + 1 if kept else 0, stop=stop, pruned=pruned)
        hidden, state = self._begin(condition, maps, kept, cache, guided=guided, **settings)
        hidden = self._run(state, hidden, range(len(maps) + 1))
        state.logits = self._logits(hidden[:, self.offsets[len(maps)] :], state.head_modulation)
        return state

    def _begin(
        self,
        condition: Any,
        maps: Sequence[Tensor],
        kept: int = 0,
        cache: ScaleCache | None = None,
        **settings: Any,
    ) -> tuple[Tensor, Any]:
        """The inputs of the known scales, and a state whose own cache has room for the first `kept` scales."""
        guided, dropped = settings.pop("guided", False), settings.pop("dropped", None)
        vector, more = self.read(condition, guided=guided, dropped=dropped)
        hidden = self._embed(vector, maps)
        if cache is None:
            heads = self.config["num_heads"]
            shape = (len(self.blocks), len(vector), heads, self.offsets[kept], self.config["dim"] // heads)
            cache = WholeCache(StaticCache.allocate(hidden, shape), self.offsets, settings["pruned"])
        return hidden, self.state_kind(
            logits=hidden,  # until there are
            guided=guided,
            cache=cache,
            modulations=self._modulations(vector),
            head_modulation=self.head_nm.modulation(vector),
            **more,
            **settings,
        )

    @decodes
    def forward(self, state: Any, map: Tensor, scale: int) -> Tensor:
        """Feed the input map `[B, D, n, n]` of a scale; returns its logits. See `ScaleModel.__call__`.

        Raises:
            ValueError: the map has another shape, or the scale is not the next one, or is not below `stop`.
        """
        rows = len(state.head_modulation)
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

    # -- training ----------------------------------------------------------------------------------------------------

    def teacher_forced(self, maps: Sequence[Tensor], condition: Any, dropped: Tensor | None = None) -> Tensor:
        """Return the logits of every slot of scales 0 to `len(maps)`, with gradients.

        Args:
            maps: the input maps `[B, D, n, n]` of scales 1 on, from `ScaleTokenizer.next_map` on the true canvas: all
                of them, or of the scales that a drafter is trained for.
            condition: of B samples.
            dropped: bool `[B]`, rows that lose their condition.
        """
        hidden, state = self._begin(condition, maps, dropped=dropped, fed=0, stop=0, pruned=None)
        return self._logits(self._run(state, hidden, range(len(maps) + 1)), state.head_modulation)
