"""Random weights in the official layouts of MAR and of the KL autoencoder of latent diffusion."""

import math

import torch
from torch import Tensor


def ldm_shapes(base: int, multipliers: tuple[int, ...], latents: int, attention_at: int) -> dict[str, tuple]:
    """Keys and shapes of latent diffusion's autoencoder, written down from its description."""
    shapes: dict[str, tuple] = {}

    def conv(name: str, inward: int, outward: int, size: int = 3) -> None:
        shapes.update({f"{name}.weight": (outward, inward, size, size), f"{name}.bias": (outward,)})

    def normed(name: str, width: int) -> None:
        shapes.update({f"{name}.weight": (width,), f"{name}.bias": (width,)})

    def block(name: str, inward: int, outward: int) -> None:
        normed(f"{name}.norm1", inward)
        conv(f"{name}.conv1", inward, outward)
        normed(f"{name}.norm2", outward)
        conv(f"{name}.conv2", outward, outward)
        if inward != outward:
            conv(f"{name}.nin_shortcut", inward, outward, 1)

    def attention(name: str, width: int) -> None:
        normed(f"{name}.norm", width)
        for part in ("q", "k", "v", "proj_out"):
            conv(f"{name}.{part}", width, width, 1)

    def middle(name: str, width: int) -> None:
        block(f"{name}.block_1", width, width)
        attention(f"{name}.attn_1", width)
        block(f"{name}.block_2", width, width)

    widths = [base * m for m in multipliers]
    last = len(widths) - 1
    conv("encoder.conv_in", 3, base)
    for level, width in enumerate(widths):
        for i in (0, 1):
            block(f"encoder.down.{level}.block.{i}", widths[max(0, level - 1)] if i == 0 else width, width)
            if level == attention_at:
                attention(f"encoder.down.{level}.attn.{i}", width)
        if level < last:
            conv(f"encoder.down.{level}.downsample.conv", width, width)
    middle("encoder.mid", widths[-1])
    normed("encoder.norm_out", widths[-1])
    conv("encoder.conv_out", widths[-1], 2 * latents)
    conv("quant_conv", 2 * latents, 2 * latents, 1)
    conv("post_quant_conv", latents, latents, 1)
    conv("decoder.conv_in", latents, widths[-1])
    middle("decoder.mid", widths[-1])
    for level in reversed(range(last + 1)):
        for i in (0, 1, 2):
            above = widths[min(last, level + 1)]
            block(f"decoder.up.{level}.block.{i}", above if i == 0 else widths[level], widths[level])
        if level:
            conv(f"decoder.up.{level}.upsample.conv", widths[level], widths[level])
    normed("decoder.norm_out", base)
    conv("decoder.conv_out", base, 3)
    return shapes


def random_weights(shapes: dict[str, tuple]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        key: torch.randn(shape, generator=generator) / max(1.0, math.prod(shape[1:])) ** 0.5
        + (1.0 if "norm" in key and key.endswith("weight") else 0.0)
        for key, shape in shapes.items()
    }
