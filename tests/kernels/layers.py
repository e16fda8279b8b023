"""Cases for the kernels of transformer layers, and what they compute, by loops in float64."""

import math
from typing import NamedTuple

import torch
from torch import Tensor


class WindowCase(NamedTuple):
    """Arguments of `window_attention`, and what it must return, in float64."""

    queries: Tensor
    keys: Tensor
    values: Tensor
    places: Tensor
    prefix_mask: Tensor
    scale: float
    expected: Tensor

    @property
    def arguments(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, float]:
        return self[:6]


def window_case(
    places: list[list[int]],
    *,
    heads: int = 4,
    groups: int = 2,
    dim: int = 12,
    size: int = 40,
    prefix: int = 7,
    dtype: torch.dtype = torch.float32,
    scale: float | None = None,
    stale: float = math.nan,
) -> WindowCase:
    """Queries at some places of a cache; what stands after their text is `stale`, and must not be read."""
    draw = torch.Generator().manual_seed(len(places) + heads)
    shape = (len(places), len(places[0]), heads, dim)
    queries = torch.randn(shape, generator=draw).to(dtype)
    # Views of a larger cache, as those of one of several layers.
    held = torch.randn(2, 3, len(places), groups, size, dim, generator=draw).to(dtype)
    keys, values = held[:, 1]
    for row, own in enumerate(places):
        keys[row, :, max(own) + 1 :] = values[row, :, max(own) + 1 :] = stale
    mask = torch.rand(len(places), prefix, generator=draw) > 0.4
    factor = dim**-0.5 if scale is None else scale
    expected = torch.zeros(shape, dtype=torch.float64)
    for row, own in enumerate(places):
        for position, place in enumerate(own):
            seen = [s for s in range(place) if s >= prefix or mask[row, s]] + [place]
            for head in range(heads):
                group = head * groups // heads
                query = queries[row, position, head].double()
                scores = [float(query @ keys[row, group, s].double()) * factor for s in seen]
                weights = [math.exp(score - max(scores)) for score in scores]
                for s, weight in zip(seen, weights, strict=True):
                    expected[row, position, head] += weight / sum(weights) * values[row, group, s].double()
    return WindowCase(queries, keys, values, torch.tensor(places), mask, factor, expected)


# Of rows that are at different lengths: inside the prefix, after it, far beyond it, in any order.
PLACES = {
    "window": [[9, 10, 11, 12, 13], [2, 3, 4, 5, 6], [33, 34, 35, 36, 37]],
    "one": [[7], [39]],
    "any order": [[30, 8, 21, 39]],
    "prompt": [[0, 1, 2, 3, 4, 5, 6], [0, 1, 2, 3, 4, 5, 6]],
}


class WriteCase(NamedTuple):
    """Arguments of `rotary_write`, and queries, keys and values as they must be then, in float64."""

    projected: Tensor
    turns: tuple[Tensor, Tensor]
    keys: Tensor
    values: Tensor
    places: Tensor
    expected: tuple[Tensor, Tensor, Tensor]


def write_case(
    rows: int = 3,
    heads: int = 4,
    groups: int = 2,
    dim: int = 12,
    *,
    one_turn: bool = False,
    dtype: torch.dtype = torch.float32,
) -> WriteCase:
    """A window of 5 tokens; pairs are turned as complex numbers."""
    draw = torch.Generator().manual_seed(rows * heads)
    projected = torch.randn(rows, 5, heads + 2 * groups, dim, generator=draw).to(dtype)
    angles = 6.0 * torch.rand(1 if one_turn else rows, 5, dim // 2, generator=draw)
    held = torch.randn(2, 2, rows, groups, 11, dim, generator=draw).to(dtype)
    keys, values = held[:, 1]
    places = torch.stack([torch.randperm(11, generator=draw)[:5] for _ in range(rows)])
    pairs = torch.view_as_complex(projected.double().unflatten(-1, (-1, 2)))
    turn = torch.polar(torch.ones_like(angles.double()), angles.double())[:, :, None]
    turned = torch.view_as_real(pairs * turn).flatten(-2)
    expected = turned[:, :, :heads], keys.double().clone(), values.double().clone()
    for row in range(rows):
        for position, place in enumerate(places[row].tolist()):
            for group in range(groups):
                expected[1][row, group, place] = turned[row, position, heads + group]
                expected[2][row, group, place] = projected[row, position, heads + groups + group].double()
    cosine, sine = (part[:, :, None, None] for part in (angles.cos(), angles.sin()))
    turns = torch.stack([cosine, cosine], -1), torch.stack([-sine, sine], -1)
    return WriteCase(projected, turns, keys, values, places, expected)


def summed(hidden: Tensor, change: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """What `add_norm` computes, in float64."""
    total = hidden.double() + change.double()
    return total, total / (total.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight.double()


def opened(gate: Tensor, up: Tensor) -> Tensor:
    """What `gated` computes, in float64."""
    return gate.double() * torch.special.expit(gate.double()) * up.double()
