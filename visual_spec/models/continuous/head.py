"""The network that draws a token from its condition: an MLP whose norms the condition and the time modulate.

It is MAR's (Li et al. 2024, section 3.3 and appendix B; the modulation is DiT's, Peebles and Xie 2023). Three
fifths of its weights turn condition and time into modulations, and neither changes with the point x. So a sampler
computes the modulations of all levels in one product before the loop, and `denoise` is what is left to do in it.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

FREQUENCIES = 256


def time_features(times: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Cosines, then sines, [..., 256], of times [...] at frequencies from 1 down to 1e-4."""
    half = FREQUENCIES // 2
    steps = torch.arange(half, dtype=dtype, device=times.device)
    angles = times[..., None].to(dtype) * (-math.log(10000.0) * steps / half).exp()
    return torch.cat([angles.cos(), angles.sin()], -1)


class TimeEmbedding(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(FREQUENCIES, width), nn.SiLU(), nn.Linear(width, width))

    def forward(self, times: Tensor) -> Tensor:
        weight: Any = self.mlp[0].weight
        wide = torch.promote_types(weight.dtype, torch.float32)  # half precision is too coarse for angles
        return self.mlp(time_features(times, wide).to(weight.dtype))


class ResidualBlock(nn.Module):
    """x + gate * mlp(norm(x) * (1 + scale) + shift)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.in_ln = nn.LayerNorm(width, eps=1e-6)
        self.mlp = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 3 * width))

    def forward(self, x: Tensor, shift: Tensor, scale: Tensor, gate: Tensor) -> Tensor:
        return x + gate * self.mlp(self.in_ln(x) * (1.0 + scale) + shift)


class FinalLayer(nn.Module):
    """linear(norm(x) * (1 + scale) + shift), the norm without weights."""

    def __init__(self, width: int, outputs: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, outputs)
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 2 * width))

    def forward(self, x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
        return self.linear(F.layer_norm(x, x.shape[-1:], eps=1e-6) * (1.0 + scale) + shift)


class DiffusionHead(nn.Module):
    """The head. Parameters are named as in the official checkpoints under `diffloss.net`.

    Args:
        token_dim: numbers of a token, d.
        condition_dim: of the conditions z.
        width, depth: of its layers.
        outputs: 2 d for `DiffusionSchedule`, d for `FlowSchedule`.
    """

    def __init__(self, token_dim: int, condition_dim: int, width: int, depth: int, outputs: int) -> None:
        super().__init__()
        self.width = width
        self.time_embed = TimeEmbedding(width)
        self.cond_embed = nn.Linear(condition_dim, width)
        self.input_proj = nn.Linear(token_dim, width)
        self.res_blocks = nn.ModuleList(ResidualBlock(width) for _ in range(depth))
        self.final_layer = FinalLayer(width, outputs)

    @property
    def modulation_size(self) -> int:
        """M: shift, scale and gate of each block, then shift and scale of the last layer."""
        return self.width * (3 * len(self.res_blocks) + 2)

    def modulations(self, z: Tensor, times: Tensor) -> Tensor:
        """All that `denoise` needs beside the point: [T, N, M], for conditions `z [N, dim]` at times [T].

        M is `modulation_size`.
        """
        return self._modulate(self.time_embed(times)[:, None] + self.cond_embed(z))

    def _modulate(self, mixed: Tensor) -> Tensor:
        hidden = F.silu(mixed)
        layers = [*self.res_blocks, self.final_layer]
        # [1] is the linear layer after the SiLU, which all layers share.
        return torch.cat([layer.adaLN_modulation[1](hidden) for layer in layers], -1)  # pyright: ignore

    def denoise(self, x: Tensor, modulations: Tensor) -> Tensor:
        """The head's output [N, outputs] at points `x [N, d]`, with the modulations [N, M] of one time."""
        parts = modulations.split(self.width, -1)
        hidden = self.input_proj(x)
        for index, block in enumerate(self.res_blocks):
            hidden = block(hidden, *parts[3 * index : 3 * index + 3])
        return self.final_layer(hidden, *parts[-2:])

    def step_weights(self) -> list[Tensor] | None:
        """What `kernels.head_step` reads: weights and biases of the input projection, of each block (norm, first and
        second product), and of the last layer; None where layers were replaced or hooked, and must be called.
        """
        layers: list[Any] = [self.input_proj]
        for block in self.res_blocks:
            layers += [block.in_ln, block.mlp[0], block.mlp[2]]  # pyright: ignore
        layers.append(self.final_layer.linear)
        plain = all(
            type(layer) in (nn.Linear, nn.LayerNorm)
            and not (layer._forward_hooks or layer._forward_pre_hooks or hasattr(layer, "_hf_hook"))
            for layer in layers
        )
        return [weight for layer in layers for weight in (layer.weight, layer.bias)] if plain else None

    def forward(self, x: Tensor, times: Tensor, z: Tensor) -> Tensor:
        """The same in one call: points `x [N, d]` at times [N], or one for all, with conditions `z [N, dim]`."""
        return self.denoise(x, self._modulate(self.time_embed(times) + self.cond_embed(z)))

    def initialise(self) -> None:
        """As published: every block starts as the identity, and the output as nothing."""
        for layer in self.modules():
            if isinstance(layer, nn.Linear):
                nn.init.xavier_uniform_(layer.weight)
                nn.init.zeros_(layer.bias)
        for layer in (self.time_embed.mlp[0], self.time_embed.mlp[2]):
            nn.init.normal_(layer.weight, std=0.02)  # pyright: ignore[reportArgumentType]
        for layer in [*self.res_blocks, self.final_layer]:
            nn.init.zeros_(layer.adaLN_modulation[1].weight)  # pyright: ignore
        nn.init.zeros_(self.final_layer.linear.weight)
