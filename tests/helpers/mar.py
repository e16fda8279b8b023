"""Random weights in the official layouts of MAR and of the KL autoencoder of latent diffusion."""

import math

import torch
from torch import Tensor

from tests.helpers import vqgan


def ldm_shapes(base: int, multipliers: tuple[int, ...], latents: int, attention_at: int) -> vqgan.Shapes:
    """Keys and shapes of latent diffusion's autoencoder, written down from its description."""
    attends = rf"down\.{attention_at}$|mid"
    shapes = vqgan.networks(base, multipliers, 2, 2 * latents, latents, attends=attends)
    shapes |= vqgan.convolution("quant_conv", 2 * latents, 2 * latents)
    return shapes | vqgan.convolution("post_quant_conv", latents, latents)


def random_weights(shapes: dict[str, tuple]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        key: torch.randn(shape, generator=generator) / max(1.0, math.prod(shape[1:])) ** 0.5
        + (1.0 if "norm" in key and key.endswith("weight") else 0.0)
        for key, shape in shapes.items()
    }
