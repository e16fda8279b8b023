"""MAGE's tokenizer: the VQGAN that MaskGIT was published with (Chang et al. 2022), in its PyTorch layout.

Its blocks differ from taming-transformers' (`Design.maskgit`), and there is no attention. Parameter names are the
official keys.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from visual_spec.models.core.layouts import Given, KeyLayout, loaded, vqgan_sizes
from visual_spec.models.core.offload import loads_weights
from visual_spec.models.core.settings import Count, register_to_config
from visual_spec.models.core.vq_blocks import Decoder, Design, Encoder, PictureTokenizer

PREFIX = "vqgan."  # of the tokenizer's keys in a file of MAGE


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
        blocks_per_level: residual blocks of a level, in the decoder too. The other arguments are `VQModel`'s.
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
        shape = base_channels, tuple(channel_multipliers), blocks_per_level, codebook_dim, norm_groups
        design = Design(*shape, maskgit=True)
        self.encoder, self.decoder = Encoder(design), Decoder(design)
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
    here, others = (
        f"{start}encoder.down.0.block.0.conv1.weight",
        (f"{start}encoder.down.0.block.0.conv1.bias", "decoder.adaptive.0.gamma.weight"),  # of BitDance's
    )
    return here in weights and not any(key in weights for key in others)


def load_mage_tokenizer(
    source: Given, *, image_size: int = 256, norm_groups: int = 32, dtype: torch.dtype | None = None
) -> MageVQModel:
    """The tokenizer of an official file: of MAGE itself, such as `mage-vitb-1600.pth`, or `vqgan_jax_strongaug.ckpt`.

    `source`, `dtype` and errors: see `visual_spec.models.core.layouts`.

    Args:
        image_size: side of the pictures in pixels.
        norm_groups: cannot be read off the weights.
    """
    weights, name = KeyLayout("tokenizer of MAGE", "a file of MAGE").read(source)
    if not is_mage_tokenizer(weights):
        raise ValueError(
            f"{name} holds no tokenizer of MAGE; pass a file of MAGE, or vqgan_jax_strongaug.ckpt."
        )
    if any(key.startswith(PREFIX) for key in weights):
        weights = {key.removeprefix(PREFIX): part for key, part in weights.items() if key.startswith(PREFIX)}
    codes, dim = weights["quantize.embedding.weight"].shape
    config = vqgan_sizes(weights, name) | {"codebook_size": codes, "codebook_dim": dim}
    config |= {"image_size": image_size, "norm_groups": norm_groups}
    return loaded(MageVQModel, config, weights, name, what="MAGE's tokenizer", dtype=dtype)
