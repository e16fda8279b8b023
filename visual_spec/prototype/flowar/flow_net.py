"""The layers of FlowAR, and its network that draws a whole map by flow matching (Ren et al. 2024, arXiv 2412.15205).

The network sees all places of a map at once: its layers attend among them, and each place's own condition and the time
modulate its norms ("spatial-adaLN", section 3.4). Parameters are named as in the released files.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from visual_spec.kernels.rotary_write import Turns, rotate
from visual_spec.models.continuous.head import TimeEmbedding
from visual_spec.models.core.cache import Places

FLOW_HEAD_DIM = 64  # of the network's heads, at any width
_EPSILON = 1e-6  # of every norm
_Held = tuple[Tensor, Tensor]


def turns_of_maps(sides: Sequence[int], grid: int, head_dim: int, like: Tensor) -> Turns:
    """Rotations of all places of square maps, one map after the other, see `rotate`.

    Half of a head turns with the row and half with the column. Places of every map are spread over the largest one,
    which has `grid` places a side.

    Args:
        like: tells device and dtype; the turns have at least single precision.
    """
    dtype = torch.promote_types(like.dtype, torch.float32)
    half = head_dim // 2
    speeds = 10000.0 ** -(torch.arange(0, half, 2, dtype=dtype, device=like.device) / half)
    maps = []
    for side in sides:
        angles = (torch.arange(side, dtype=dtype, device=like.device) / side * grid)[:, None] * speeds
        rows, columns = angles[:, None].expand(-1, side, -1), angles[None].expand(side, -1, -1)
        maps.append(torch.cat([rows, columns], -1).flatten(0, 1))
    turned = torch.cat(maps)[None, :, None, None]  # [1, W, 1, 1, D / 2]
    cosine, sine = turned.cos(), turned.sin()
    return torch.stack([cosine, cosine], -1), torch.stack([-sine, sine], -1)


class FlowARAttention(nn.Module):
    """Self-attention whose queries and keys turn with their place."""

    def __init__(self, dim: int, heads: int, bias: bool) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim, bias=bias)
        self.proj = nn.Linear(dim, dim)

    def forward(
        self,
        x: Tensor,
        turns: Turns,
        mask: Tensor | None = None,
        held: _Held | None = None,
        places: Places | None = None,
    ) -> Tensor:
        """`x [R, W, dim]`, each place attending to what a bool mask [W, S] allows, or to all.

        Args:
            held: keys and values [R, H, S, D] of a cache; None: only x is seen.
            places: where the keys and values of x are written; None: they follow those held, and are not kept.
        """
        heads = self.qkv(x).unflatten(-1, (3, self.heads, -1))  # [R, W, 3, H, D]
        query, key = rotate(heads[:, :, :2], turns).unbind(2)
        value = heads[:, :, 2]
        if held is not None and places is not None:
            key, value = places.write(held, key, value)
        else:
            key, value = key.transpose(1, 2), value.transpose(1, 2)
            if held is not None:
                key, value = torch.cat([held[0], key], 2), torch.cat([held[1], value], 2)
        return self.proj(_attended(query, key, value, mask))


class FlowARCrossAttention(nn.Module):
    """Attention of places to their conditions; both turn with their place."""

    def __init__(self, dim: int, condition_dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q = nn.Linear(dim, dim, bias=False)
        self.kv = nn.Linear(condition_dim, 2 * dim, bias=False)
        self.proj = nn.Linear(dim, dim)

    def hold(self, conditions: Tensor, turns: Turns) -> _Held:
        """Keys and values [R, H, N, D] of conditions [R, N, condition_dim]."""
        heads = self.kv(conditions).unflatten(-1, (2, self.heads, -1))  # [R, N, 2, H, D]
        key = rotate(heads[:, :, :1], turns)[:, :, 0]
        return key.transpose(1, 2), heads[:, :, 1].transpose(1, 2)

    def forward(self, x: Tensor, held: _Held, turns: Turns) -> Tensor:
        query = rotate(self.q(x).unflatten(-1, (1, self.heads, -1)), turns)[:, :, 0]
        return self.proj(_attended(query, *held, None))


def _attended(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    """Return [R, W, H D] of queries [R, W, H, D], and keys and values [R, H, S, D]."""
    out = F.scaled_dot_product_attention(query.transpose(1, 2), key, value, attn_mask=mask)
    return out.transpose(1, 2).flatten(2)


class GatedMlp(nn.Module):
    """Two layers of 8 / 3 the width, and an exact GELU on the gates."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        hidden = int(dim * 4 * 2 / 3)
        self.fc1_g, self.fc1_x, self.fc2 = (
            nn.Linear(dim, hidden),
            nn.Linear(dim, hidden),
            nn.Linear(hidden, dim),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1_g(x)) * self.fc1_x(x))


def modulated(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """Return x [R, N, dim] over its root mean square, scaled by 1 + `scale` and shifted; both [R, 1 or N, dim]."""
    return F.rms_norm(x, x.shape[-1:], eps=_EPSILON) * (1 + scale) + shift


class AdaLayer(nn.Module):
    """Attention and a gated MLP under the output of `ada_lin`."""

    def __init__(self, dim: int, heads: int, ada_lin: nn.Module, bias: bool) -> None:
        super().__init__()
        self.attn = FlowARAttention(dim, heads, bias)
        self.mlp = GatedMlp(dim)
        self.ada_lin = ada_lin

    def forward(
        self,
        x: Tensor,
        modulation: Tensor,
        turns: Turns,
        mask: Tensor | None = None,
        held: _Held | None = None,
        places: Places | None = None,
    ) -> Tensor:
        """`x [R, W, dim]` under a modulation [R, 1 or W, 6 dim]; see `FlowARAttention`."""
        gain1, gain2, scale1, scale2, shift1, shift2 = modulation.chunk(6, -1)
        x = x + gain1 * self.attn(modulated(x, scale1, shift1), turns, mask, held, places)
        return x + gain2 * self.mlp(modulated(x, scale2, shift2))


class ScaleLayer(AdaLayer):
    """A layer of the transformer, which the class modulates."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__(dim, heads, nn.Sequential(nn.SiLU(), nn.Linear(dim, 6 * dim)), bias=True)


class FlowLayer(AdaLayer):
    """A layer of the flow network, which time and conditions modulate."""

    def __init__(self, dim: int) -> None:
        super().__init__(dim, dim // FLOW_HEAD_DIM, nn.Linear(dim, 6 * dim), bias=False)

    def hold(self, conditions: Tensor, turns: Turns) -> None:
        """Nothing of this layer depends on the conditions alone."""

    def forward(self, x: Tensor, time: Tensor, mixed: Tensor, held: None, turns: Turns) -> Tensor:  # pyright: ignore
        """`x [R, N, dim]`, with the embedded time [R, 1, dim], alone and `mixed` with the conditions [R, N, dim]."""
        return super().forward(x, self.ada_lin(F.silu(mixed)), turns)


class CrossFlowLayer(nn.Module):
    """The layer of the large sizes: time modulates the attention, and places also attend to all conditions."""

    def __init__(self, dim: int, condition_dim: int) -> None:
        super().__init__()
        heads = dim // FLOW_HEAD_DIM
        self.attn = FlowARAttention(dim, heads, bias=False)
        self.crossattn = FlowARCrossAttention(dim, condition_dim, heads)
        self.norm2_1, self.norm2_2 = nn.RMSNorm(dim, eps=_EPSILON), nn.RMSNorm(condition_dim, eps=_EPSILON)
        self.mlp = GatedMlp(dim)
        self.ada_lin_attn, self.ada_lin_mlp = nn.Linear(dim, 3 * dim), nn.Linear(dim, 3 * dim)

    def hold(self, conditions: Tensor, turns: Turns) -> _Held:
        """Keys and values of the conditions, which are the same at all levels."""
        return self.crossattn.hold(self.norm2_2(conditions), turns)

    def forward(self, x: Tensor, time: Tensor, mixed: Tensor, held: _Held, turns: Turns) -> Tensor:
        """See `FlowLayer.forward`."""
        gain, scale, shift = self.ada_lin_attn(F.silu(time)).chunk(3, -1)
        x = x + gain * self.attn(modulated(x, scale, shift), turns)
        x = x + self.crossattn(self.norm2_1(x), held, turns)
        gain, scale, shift = self.ada_lin_mlp(F.silu(mixed)).chunk(3, -1)
        return x + gain * self.mlp(modulated(x, scale, shift))


class FlowFinalLayer(nn.Module):
    """linear(norm(x) * (1 + scale) + shift), the norm without weights."""

    def __init__(self, width: int, outputs: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, outputs)
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 2 * width))

    def forward(self, x: Tensor, mixed: Tensor) -> Tensor:
        shift, scale = self.adaLN_modulation(mixed).chunk(2, -1)
        return self.linear(modulated(x, scale, shift))


@dataclass(frozen=True)
class FlowInputs:
    """What all levels of a map's flow read, see `FlowNet.inputs`.

    Attributes:
        embedded: [R, N, width], the conditions.
        turns: of the places.
        held: what each layer made of the conditions.
    """

    embedded: Tensor
    turns: Turns
    held: Sequence[_Held | None]

    def first(self, rows: int) -> FlowInputs:
        """Only the first rows: of guided inputs, half of them are the conditional ones."""
        held = [pair and (pair[0][:rows], pair[1][:rows]) for pair in self.held]
        return replace(self, embedded=self.embedded[:rows], held=held)


class FlowNet(nn.Module):
    """Velocities of the points of a map, noise minus token.

    Args:
        token_dim: numbers of a token, d.
        condition_dim: of the conditions z.
        width, depth: of its layers; the width is a multiple of 64, the size of a head.
        cross: whether layers attend to the conditions, as in the large sizes.
        grid: places a side of the largest map.

    Raises:
        ValueError: a width that has no heads of 64 numbers.
    """

    def __init__(
        self, token_dim: int, condition_dim: int, width: int, depth: int, cross: bool, grid: int
    ) -> None:
        super().__init__()
        if width % FLOW_HEAD_DIM:
            raise ValueError(
                f"a flow network of width {width}; pass a multiple of {FLOW_HEAD_DIM}, its heads."
            )
        self.grid = grid
        self.time_embed = TimeEmbedding(width)
        self.cond_embed = nn.Linear(condition_dim, width)
        self.input_proj = nn.Linear(token_dim, width)
        layers = (CrossFlowLayer(width, condition_dim) if cross else FlowLayer(width) for _ in range(depth))
        self.res_blocks = nn.ModuleList(layers)
        self.final_layer = FlowFinalLayer(width, token_dim)

    def inputs(self, z: Tensor, side: int) -> FlowInputs:
        """What `forward` needs of conditions `z [R, N, condition_dim]` of a map of `side` places a side."""
        turns = turns_of_maps([side], self.grid, FLOW_HEAD_DIM, z)
        return FlowInputs(self.cond_embed(z), turns, [layer.hold(z, turns) for layer in self.res_blocks])  # pyright: ignore

    def forward(self, x: Tensor, times: Tensor, inputs: FlowInputs) -> Tensor:
        """Velocities [R, N, d] of points `x [R, N, d]` with a share of noise `times [R or 1]`, from 0 to 1.

        The network reads the thousandths of the share, rounded down in single precision.
        """
        time = self.time_embed((times.float() * 1000).long())[:, None]  # [R or 1, 1, width]
        mixed = time + inputs.embedded
        hidden = self.input_proj(x)
        for layer, held in zip(self.res_blocks, inputs.held, strict=True):
            hidden = layer(hidden, time, mixed, held, inputs.turns)
        return self.final_layer(hidden, mixed)
