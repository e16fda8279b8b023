"""Weights that follow a formula, so that numbers of public code with the same weights can stand in a test."""

import zlib

import torch
from torch import nn


@torch.no_grad()
def write_weights(module: nn.Module, scale: float = 0.4) -> None:
    """Give each parameter numbers of (-scale, scale) that its name alone decides; norms lie around 1."""
    for name, weight in module.named_parameters():
        places = torch.arange(weight.numel(), dtype=torch.float64) + zlib.crc32(name.encode()) % 100_000
        noise = (places * 12.9898).sin().mul(43758.5453).frac().view_as(weight)
        weight.copy_(1 + 0.1 * noise if "norm" in name else scale * noise)
