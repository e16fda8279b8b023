"""MoVQGAN's picture decoder (Zheng et al. 2022, arXiv 2209.09002), which draws the codes of Lumina-mGPT 2.0.

It is VQGAN's, with norms that the codes modulate at every place. Parameters are named as in the official
`movqgan_270M.ckpt` of github.com/ai-forever/MoVQGAN.
"""

from __future__ import annotations

import os
import re
from typing import Any, Self

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from visual_spec.models.core.checkpoints import fill
from visual_spec.models.core.offload import decodes
from visual_spec.models.core.saved import SavedModel
from visual_spec.models.core.settings import Count, register_to_config
from visual_spec.models.core.vq_blocks import AttentionBlock, Decoder, Design
from visual_spec.models.next_token.chameleon_vq import decoder_weights


class SpatialNorm(nn.Module):
    """A norm whose scale and shift at a place follow from the code there: `codes [B, D, h, w]`, set before a call."""

    def __init__(self, norm: nn.GroupNorm, codebook_dim: int) -> None:
        super().__init__()
        self.norm_layer = norm
        self.conv_y = nn.Conv2d(codebook_dim, norm.num_channels, 1)
        self.conv_b = nn.Conv2d(codebook_dim, norm.num_channels, 1)
        self.codes = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        codes = F.interpolate(self.codes, x.shape[-2:], mode="nearest")
        return self.norm_layer(x) * self.conv_y(codes) + self.conv_b(codes)


class MoVQDecoder(SavedModel):
    """Maps codes to pictures, 8 pixels a side for a code. The defaults are those of the official network of 270M.

    The arguments are those of `visual_spec.models.next_token.llamagen_vq.VQModel`.
    """

    @register_to_config
    def __init__(
        self,
        base_channels: int = 256,
        channel_multipliers: tuple[int, ...] = (1, 2, 2, 4),
        blocks_per_level: int = 2,
        latent_channels: int = 4,
        codebook_size: Count = 16384,
        codebook_dim: int = 4,
        norm_groups: int = 32,
    ) -> None:
        super().__init__()
        sizes = base_channels, tuple(channel_multipliers), blocks_per_level, latent_channels, norm_groups
        self.decoder = Decoder(Design(*sizes, AttentionBlock))
        for part in list(self.decoder.modules()):
            for name, child in list(part.named_children()):
                if isinstance(child, nn.GroupNorm):
                    setattr(part, name, SpatialNorm(child, codebook_dim))
        self.post_quant_conv = nn.Conv2d(codebook_dim, latent_channels, 1)
        self.quantize = nn.ModuleDict({"embedding": nn.Embedding(codebook_size, codebook_dim)})

    @classmethod
    def from_file(cls, path: str | os.PathLike, dtype: torch.dtype | None = None) -> Self:
        """Read the decoder of an official file, `movqgan_67M.ckpt`, `_102M` or `_270M`; its encoder is ignored.

        Args:
            dtype: of the weights; None keeps the file's.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: the file is not a plain state dict, or lacks tensors of the decoder; the message lists them.
        """
        weights = decoder_weights(path)
        sizes: dict[str, Any] = {}
        if "decoder.conv_in.weight" in weights:
            blocks = sum(bool(re.fullmatch(r"decoder\.up\.0\.block\..*conv1\.bias", key)) for key in weights)
            base = len(weights["decoder.conv_in.weight"]) // 4
            sizes = dict(base_channels=base, blocks_per_level=blocks - 1)
        with torch.device("meta"):
            model = cls(**sizes)
        return fill(model, weights, str(path), what="a decoder of this size", dtype=dtype)

    @decodes
    def decode_codes(self, codes: Tensor) -> Tensor:
        """Return pictures `[B, 3, 8 h, 8 w]` in [-1, 1] of codes, long `[B, h, w]`."""
        quantised = rearrange(self.quantize["embedding"](codes.to(self.device)), "b h w d -> b d h w")
        norms = [part for part in self.modules() if isinstance(part, SpatialNorm)]
        for norm in norms:
            norm.codes = quantised
        picture = self.decoder(self.post_quant_conv(quantised)).clamp(-1, 1)
        for norm in norms:
            norm.codes = quantised.new_zeros(())
        return picture
