"""The VQ tokenizer of LlamaGen (Sun et al. 2024, section 3.1), after VQGAN (Esser et al. 2021).

One class serves the embedded size and the official VQ-16 / VQ-8 checkpoints: module names are the official keys.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from visual_spec.models.core.offload import loads_weights
from visual_spec.models.core.settings import Count, register_to_config
from visual_spec.models.core.vq_blocks import (
    LLAMAGEN,
    AttentionBlock,
    Decoder,
    Design,
    Encoder,
    PictureTokenizer,
)

PRESETS: dict[str, dict] = {
    "vq-16": {"channel_multipliers": (1, 1, 2, 2, 4)},
    "vq-8": {"channel_multipliers": (1, 2, 2, 4)},
}


class VectorQuantizer(nn.Module):
    """Nearest code on the unit sphere: codes and latents are L2-normalised at every lookup (LlamaGen, section 3.1)."""

    def __init__(self, codebook_size: int, codebook_dim: int):
        super().__init__()
        self.embedding = nn.Embedding(codebook_size, codebook_dim)
        nn.init.uniform_(self.embedding.weight, -1.0 / codebook_size, 1.0 / codebook_size)

    @property
    def codes(self) -> Tensor:
        """Unit-length codes `[V, D]`."""
        return F.normalize(self.embedding.weight, dim=-1)

    def nearest(self, latents: Tensor) -> Tensor:
        """Return code ids `[B, H, W]` of latents `[B, D, H, W]`."""
        unit = F.normalize(latents, dim=1)
        return torch.einsum("bdhw,vd->bhwv", unit, self.codes).argmax(-1)

    def lookup(self, ids: Tensor) -> Tensor:
        """Return codes `[B, D, H, W]` of ids `[B, H, W]`."""
        return rearrange(F.normalize(self.embedding(ids), dim=-1), "b h w d -> b d h w").contiguous()


class VQModel(PictureTokenizer):
    """Maps pictures to tokens and back.

    Args:
        base_channels: width at full resolution (128 in the official checkpoints).
        channel_multipliers: width per resolution level; the picture shrinks by 2 between levels.
        blocks_per_level: residual blocks per encoder level; the decoder has one more.
        latent_channels: channels between the networks and the 1 x 1 quantiser projections.
        codebook_size, codebook_dim: number and length of the codes.
        norm_groups: groups of each GroupNorm. None makes a local tokenizer: every position is normalised separately and
            there is no attention, so a token depends only on its neighbourhood, and equal patches get equal tokens.
            Group statistics and attention make every token vary with the whole picture. A wide codebook can absorb
            that; in a small one it shows as noise.
        image_size: side of the pictures in pixels; determines the token grid.
        decoder_norm_groups: of the decoder, where they differ.
    """

    @register_to_config
    def __init__(
        self,
        base_channels: int = 128,
        channel_multipliers: tuple[int, ...] = (1, 1, 2, 2, 4),
        blocks_per_level: int = 2,
        latent_channels: int = 256,
        codebook_size: Count = 16384,
        codebook_dim: int = 8,
        norm_groups: int | None = 32,
        image_size: Count = 256,
        decoder_norm_groups: int | None = None,
    ):
        super().__init__()
        design = Design(
            base_channels,
            tuple(channel_multipliers),
            blocks_per_level,
            latent_channels,
            norm_groups,
            attention=None if norm_groups is None else AttentionBlock,
            layout=LLAMAGEN,
        )
        self.encoder = Encoder(design)
        self.decoder = Decoder(replace(design, groups=decoder_norm_groups or norm_groups))
        self.quantize = VectorQuantizer(codebook_size, codebook_dim)
        self.quant_conv = nn.Conv2d(latent_channels, codebook_dim, 1)
        self.post_quant_conv = nn.Conv2d(codebook_dim, latent_channels, 1)

    @loads_weights
    def encode_latents(self, images: Tensor) -> Tensor:
        """Return latents before quantisation `[B, D, h, w]` of pictures `[B, 3, H, W]` in [-1, 1]."""
        return self.quant_conv(self.encoder(images))

    @loads_weights
    def decode_latents(self, codes: Tensor) -> Tensor:
        """Return pictures `[B, 3, H, W]` in about [-1, 1] of codes `[B, D, h, w]`."""
        return self.decoder(self.post_quant_conv(codes))

    @loads_weights
    def encode_tokens(self, images: Tensor) -> Tensor:
        """Return token ids `[B, h * w]`, raster order, of pictures `[B, 3, H, W]` in [-1, 1]."""
        return rearrange(self.quantize.nearest(self.encode_latents(images)), "b h w -> b (h w)")

    @loads_weights
    def decode_tokens(self, tokens: Tensor, size: tuple[int, int] | None = None) -> Tensor:
        """Return pictures `[B, 3, H, W]` clamped to [-1, 1] of token ids `[B, h * w]`.

        Args:
            size: h and w; None: `image_size`'s.

        Raises:
            ValueError: as in `ids_in_grid`.
        """
        return self.decode_latents(self.quantize.lookup(self.ids_in_grid(tokens, size))).clamp(-1, 1)

    def forward(self, images: Tensor) -> Tensor:
        """Return the reconstruction `[B, 3, H, W]` of pictures `[B, 3, H, W]` in [-1, 1]."""
        return self.decode_tokens(self.encode_tokens(images))
