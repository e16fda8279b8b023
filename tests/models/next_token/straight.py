"""LlamaGen's layers in straight lines, for one row without a cache, from weights by their official names."""

from collections.abc import Mapping

import torch
from torch import Tensor

Weights = Mapping[str, Tensor]


def norm(weights: Weights, x: Tensor, name: str) -> Tensor:
    return x * (x.pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt() * weights[f"{name}.weight"]


def turns(rows: Tensor, columns: Tensor, size: int) -> Tensor:
    """Complex [N, size / 2] by which the pairs of a head turn: the first half by the row, the others by the column."""
    frequencies = 10000.0 ** (-torch.arange(0, size // 2, 2, dtype=torch.float64) / (size // 2))
    angles = torch.cat([rows[:, None] * frequencies, columns[:, None] * frequencies], 1)
    return torch.polar(torch.ones_like(angles), angles)


def layer(weights: Weights, at: int | str, x: Tensor, mask: Tensor, turn: Tensor, heads: int = 2) -> Tensor:
    """`x [N, dim]` through the layer of a number or key, under a mask [N, N], turned by `turn [N, 1, D / 2]`."""

    def rotated(v: Tensor) -> Tensor:
        pairs = torch.view_as_complex(v.unflatten(-1, (-1, 2)).contiguous())
        return torch.view_as_real(pairs * turn).flatten(-2)

    own, size = f"layers.{at}." if isinstance(at, int) else at, x.shape[1] // heads
    parts = (norm(weights, x, own + "attention_norm") @ weights[own + "attention.wqkv.weight"].T).chunk(3, -1)
    q, k, v = (part.unflatten(-1, (heads, size)) for part in parts)
    scores = torch.einsum("qhd,khd->hqk", rotated(q), rotated(k)) / size**0.5
    shares = scores.masked_fill(~mask, -torch.inf).softmax(-1)
    x = x + torch.einsum("hqk,khd->qhd", shares, v).flatten(1) @ weights[own + "attention.wo.weight"].T
    y = norm(weights, x, own + "ffn_norm")
    gate, up = (y @ weights[f"{own}feed_forward.w{number}.weight"].T for number in (1, 3))
    return x + (gate * gate.sigmoid() * up) @ weights[own + "feed_forward.w2.weight"].T
