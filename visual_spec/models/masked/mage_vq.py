"""MAGE's tokenizer: the VQGAN that MaskGIT was published with (Chang et al. 2022), in its PyTorch layout.

Its blocks differ from taming-transformers': most convolutions have no bias, the encoder halves pictures by
averaging, and there is no attention. A block that changes the width adds its residual to a projection of that residual,
not of its input. Parameter names are the official keys.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from visual_spec.models.core.layouts import Given, KeyLayout, loaded, vqgan_sizes
from visual_spec.models.core.offload import loads_weights
from visual_spec.models.core.settings import Count, register_to_config
from visual_spec.models.core.vq_blocks import PictureTokenizer

PREFIX = "vqgan."  # of the tokenizer's keys in a file of MAGE


class Residual(nn.Module):
    """Two convolutions without biases, added to the input where the width stays."""

    def __init__(self, in_channels: int, out_channels: int, groups: int) -> None:
        super().__init__()
        self.norm1 = nn.GroupNorm(groups, in_channels, eps=1e-6)
        self.conv1 = nn.Conv2d(in_channels, out_channels, 3, padding=1, bias=False)
        self.norm2 = nn.GroupNorm(groups, out_channels, eps=1e-6)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, padding=1, bias=False)
        if in_channels != out_channels:
            self.nin_shortcut = nn.Conv2d(out_channels, out_channels, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv1(F.silu(self.norm1(x)))
        h = self.conv2(F.silu(self.norm2(h)))
        return h + (self.nin_shortcut(h) if hasattr(self, "nin_shortcut") else x)


class _Level(nn.Module):
    def __init__(self, widths: Sequence[int], groups: int, doubles: bool = False) -> None:
        super().__init__()
        self.block = nn.ModuleList(Residual(a, b, groups) for a, b in zip(widths, widths[1:], strict=False))
        if doubles:
            self.upsample = nn.ModuleDict({"conv": nn.Conv2d(widths[-1], widths[-1], 3, padding=1)})

    def forward(self, x: Tensor) -> Tensor:
        for block in self.block:
            x = block(x)
        if hasattr(self, "upsample"):
            x = self.upsample["conv"](F.interpolate(x, scale_factor=2.0, mode="nearest"))
        return x


def _middle(width: int, groups: int) -> nn.ModuleDict:
    return nn.ModuleDict({name: Residual(width, width, groups) for name in ("block_1", "block_2")})


class MageEncoder(nn.Module):
    """Pictures `[B, 3, H, W]` as latents `[B, D, h, w]`."""

    def __init__(self, width: int, multipliers: Sequence[int], blocks: int, dim: int, groups: int) -> None:
        super().__init__()
        self.conv_in = nn.Conv2d(3, width, 3, padding=1, bias=False)
        before = (1, *multipliers)
        self.down = nn.ModuleList(
            _Level([width * before[level], *[width * factor] * blocks], groups)
            for level, factor in enumerate(multipliers)
        )
        last = width * multipliers[-1]
        self.mid = _middle(last, groups)
        self.norm_out = nn.GroupNorm(groups, last, eps=1e-6)
        self.conv_out = nn.Conv2d(last, dim, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv_in(x)
        for index, level in enumerate(self.down):
            x = level(x)
            if index < len(self.down) - 1:
                x = F.avg_pool2d(x, 2)
        for block in self.mid.values():
            x = block(x)
        return self.conv_out(F.silu(self.norm_out(x)))


class MageDecoder(nn.Module):
    """Codes `[B, D, h, w]` as pictures `[B, 3, H, W]`."""

    def __init__(self, width: int, multipliers: Sequence[int], blocks: int, dim: int, groups: int) -> None:
        super().__init__()
        current = width * multipliers[-1]
        self.conv_in = nn.Conv2d(dim, current, 3, padding=1)
        self.mid = _middle(current, groups)
        levels: list[nn.Module] = []
        for level in reversed(range(len(multipliers))):
            widths = [current, *[width * multipliers[level]] * blocks]
            levels.insert(0, _Level(widths, groups, doubles=level > 0))
            current = widths[-1]
        self.up = nn.ModuleList(levels)
        self.norm_out = nn.GroupNorm(groups, current, eps=1e-6)
        self.conv_out = nn.Conv2d(current, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv_in(x)
        for block in self.mid.values():
            x = block(x)
        for level in reversed(self.up):
            x = level(x)
        return self.conv_out(F.silu(self.norm_out(x)))


class MageQuantizer(nn.Module):
    """The codes; the nearest one by distance."""

    def __init__(self, codebook_size: int, dim: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(codebook_size, dim)

    @property
    def codes(self) -> Tensor:
        """Codes `[V, D]`."""
        return self.embedding.weight

    def nearest(self, latents: Tensor) -> Tensor:
        """Code ids `[B, h, w]` of latents `[B, D, h, w]`."""
        flat = latents.movedim(1, -1)
        return (self.codes.square().sum(-1) - 2 * flat @ self.codes.T).argmin(-1)


class MageVQModel(PictureTokenizer):
    """Maps pictures to tokens and back; the contract of `visual_spec.models.next_token.llamagen_vq.VQModel`.

    Args:
        base_channels, channel_multipliers: width at full resolution, and its factor at each level.
        blocks_per_level: residual blocks of a level, in the decoder too.
        codebook_size, codebook_dim: number and length of the codes.
        norm_groups: groups of each norm.
        image_size: side of the pictures in pixels.
    """

    @register_to_config
    def __init__(
        self,
        base_channels: int = 128,
        channel_multipliers: tuple[int, ...] = (1, 1, 2, 2, 4),
        blocks_per_level: int = 2,
        codebook_size: Count = 1024,
        codebook_dim: int = 256,
        norm_groups: int = 32,
        image_size: Count = 256,
    ):
        super().__init__()
        shape = (base_channels, channel_multipliers, blocks_per_level, codebook_dim, norm_groups)
        self.encoder, self.decoder = MageEncoder(*shape), MageDecoder(*shape)
        self.quantize = MageQuantizer(codebook_size, codebook_dim)

    @loads_weights
    def encode_tokens(self, images: Tensor) -> Tensor:
        """Token ids `[B, h * w]`, raster order, of pictures `[B, 3, H, W]` in [-1, 1]."""
        return self.quantize.nearest(self.encoder((images + 1) / 2)).flatten(1)  # it knows pictures in [0, 1]

    @loads_weights
    def decode_tokens(self, tokens: Tensor) -> Tensor:
        """Pictures `[B, 3, H, W]` clamped to [-1, 1] of token ids `[B, h * w]`.

        Raises:
            ValueError: as in `ids_in_grid`.
        """
        codes = self.quantize.codes[self.ids_in_grid(tokens)].movedim(3, 1)
        return (2 * self.decoder(codes) - 1).clamp(-1, 1)


def is_mage_tokenizer(weights: Mapping[str, Tensor]) -> bool:
    """Return whether these are the keys of the tokenizer's own file, or of a file of MAGE, which holds it too."""
    start = PREFIX if any(key.startswith(PREFIX) for key in weights) else ""
    return f"{start}encoder.down.0.block.0.conv1.weight" in weights and (
        f"{start}encoder.down.0.block.0.conv1.bias" not in weights
    )


def load_mage_tokenizer(
    source: Given,
    *,
    image_size: int = 256,
    norm_groups: int = 32,
    dtype: torch.dtype | None = None,
) -> MageVQModel:
    """The tokenizer of an official file: of MAGE itself, such as `mage-vitb-1600.pth`, or `vqgan_jax_strongaug.ckpt`.

    Args:
        source: the file, the result of `read_checkpoint`, or a state dict.
        image_size: side of the pictures in pixels.
        norm_groups: cannot be read off the weights.
        dtype: of the weights; None keeps the file's.

    Raises:
        ValueError, OSError: as `read_checkpoint`; weights that are not this tokenizer's; keys that are missing,
            unexpected or mis-shaped, which are listed.
    """
    weights, name = KeyLayout("tokenizer of MAGE", "a file of MAGE").read(source)
    if not is_mage_tokenizer(weights):
        raise ValueError(
            f"{name} holds no tokenizer of MAGE; pass a file of MAGE, or vqgan_jax_strongaug.ckpt."
        )
    if any(key.startswith(PREFIX) for key in weights):
        weights = {key.removeprefix(PREFIX): part for key, part in weights.items() if key.startswith(PREFIX)}
    config: dict[str, Any] = _config(weights, name) | {"image_size": image_size, "norm_groups": norm_groups}
    return loaded(MageVQModel, config, weights, name, what="MAGE's tokenizer", dtype=dtype)


def _config(weights: Mapping[str, Tensor], name: str) -> dict[str, Any]:
    codes, dim = weights["quantize.embedding.weight"].shape
    return {**vqgan_sizes(weights, name), "codebook_size": codes, "codebook_dim": dim}
