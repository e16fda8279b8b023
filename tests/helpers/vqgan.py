"""Blocks of a VQGAN in straight lines, by the official key layout: what tests compare tokenizers with."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def norm(x: Tensor, weights: dict[str, Tensor], name: str, groups: int) -> Tensor:
    b, c, h, w = x.shape
    parts = x.reshape(b, groups, -1)
    mean, variance = parts.mean(-1, keepdim=True), parts.var(-1, keepdim=True, unbiased=False)
    x = ((parts - mean) / (variance + 1e-6).sqrt()).reshape(b, c, h, w)
    return x * weights[f"{name}.weight"][:, None, None] + weights[f"{name}.bias"][:, None, None]


def conv(x: Tensor, weights: dict[str, Tensor], name: str, stride: int = 1, padding: int = 1) -> Tensor:
    return F.conv2d(x, weights[f"{name}.weight"], weights[f"{name}.bias"], stride, padding)


def swish(x: Tensor) -> Tensor:
    return x / (1 + (-x).exp())


def res_block(x: Tensor, weights: dict[str, Tensor], name: str, groups: int) -> Tensor:
    h = conv(swish(norm(x, weights, f"{name}.norm1", groups)), weights, f"{name}.conv1")
    h = conv(swish(norm(h, weights, f"{name}.norm2", groups)), weights, f"{name}.conv2")
    shortcut = f"{name}.nin_shortcut"
    return h + (conv(x, weights, shortcut, padding=0) if f"{shortcut}.weight" in weights else x)


def mean_matrix(size: int, target: int) -> Tensor:
    """Means over bins, which overlap where the sizes do not divide: `[target, size]`."""
    matrix = torch.zeros(target, size, dtype=torch.float64)
    for i in range(target):
        first, end = i * size // target, -(-(i + 1) * size // target)
        matrix[i, first:end] = 1 / (end - first)
    return matrix
