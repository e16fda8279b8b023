"""Weights that follow a formula, so that numbers of public code with the same weights can stand in a test."""

import zlib
from collections.abc import Sequence

import torch
from torch import Tensor, nn


def written(name: str, shape: Sequence[int], scale: float = 0.4) -> Tensor:
    """Numbers of (-scale, scale) that a name alone decides; those of norms lie around 1."""
    places = (
        torch.arange(torch.Size(shape).numel(), dtype=torch.float64) + zlib.crc32(name.encode()) % 100_000
    )
    noise = (places * 12.9898).sin().mul(43758.5453).frac().view(*shape)
    return (1 + 0.1 * noise if "norm" in name else scale * noise).float()


@torch.no_grad()
def write_weights(module: nn.Module, scale: float = 0.4) -> None:
    """Give each parameter the numbers that its name alone decides."""
    for name, weight in module.named_parameters():
        weight.copy_(written(name, weight.shape, scale))
