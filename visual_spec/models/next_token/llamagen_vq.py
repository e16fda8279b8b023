"""The VQ tokenizer of LlamaGen (Sun et al. 2024, section 3.1), after VQGAN (Esser et al. 2021).

One class serves the embedded size and the official VQ-16 / VQ-8 checkpoints: module names are the official keys.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from diffusers.configuration_utils import ConfigMixin, register_to_config
from diffusers.models.modeling_utils import ModelMixin
from torch import Tensor, nn

PRESETS: dict[str, dict] = {
    "vq-16": {"channel_multipliers": (1, 1, 2, 2, 4)},
    "vq-8": {"channel_multipliers": (1, 2, 2, 4)},
}


class PositionNorm(nn.GroupNorm):
    """Layer normalisation over the channels of each position: unlike group statistics, these stay local."""

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x.movedim(1, -1), x.shape[1:2], self.weight, self.bias, self.eps).movedim(-1, 1)


def _normalise(channels: int, groups: int | None) -> nn.GroupNorm:
    if groups is None:
        return PositionNorm(1, channels, eps=1e-6)
    return nn.GroupNorm(groups, channels, eps=1e-6)


class ResnetBlock(nn.Module):
    def __init__(self, in_channels: int, out_channels: int, groups: int | None):
        super().__init__()
        self.norm1 = _normalise(in_channels, groups)
        self.conv1 = nn.Conv2d(in_channels, out_channels, 3, padding=1)
        self.norm2 = _normalise(out_channels, groups)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, padding=1)
        if in_channels != out_channels:
            self.nin_shortcut = nn.Conv2d(in_channels, out_channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv1(F.silu(self.norm1(x)))
        h = self.conv2(F.silu(self.norm2(h)))
        return h + (self.nin_shortcut(x) if hasattr(self, "nin_shortcut") else x)


class AttentionBlock(nn.Module):
    """Single-head self-attention over all positions of a feature map."""

    def __init__(self, channels: int, groups: int | None):
        super().__init__()
        self.norm = _normalise(channels, groups)
        self.q = nn.Conv2d(channels, channels, 1)
        self.k = nn.Conv2d(channels, channels, 1)
        self.v = nn.Conv2d(channels, channels, 1)
        self.proj_out = nn.Conv2d(channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        q, k, v = (layer(h).flatten(2).mT[:, None] for layer in (self.q, self.k, self.v))  # [B, 1, H*W, C]
        h = F.scaled_dot_product_attention(q, k, v)[:, 0].mT.reshape(x.shape)
        return x + self.proj_out(h)


class Downsample(nn.Module):
    def __init__(self, channels: int):
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(F.pad(x, (0, 1, 0, 1)))  # the official network pads right and bottom only


class Upsample(nn.Module):
    def __init__(self, channels: int):
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(F.interpolate(x, scale_factor=2.0, mode="nearest"))


class _Stage(nn.Module):
    """One resolution: residual blocks, each followed by attention at the lowest resolution, then the resampler."""

    def __init__(self, widths: list[int], groups: int | None, attention: bool, resample: str | None):
        super().__init__()
        pairs = list(zip(widths[:-1], widths[1:], strict=True))
        self.res = nn.ModuleList(ResnetBlock(a, b, groups) for a, b in pairs)
        self.attn = (
            nn.ModuleList(AttentionBlock(b, groups) for _, b in pairs) if attention else nn.ModuleList()
        )
        if resample == "down":
            self.downsample = Downsample(widths[-1])
        elif resample == "up":
            self.upsample = Upsample(widths[-1])

    def forward(self, x: Tensor) -> Tensor:
        for index, block in enumerate(self.res):
            x = block(x)
            if len(self.attn):
                x = self.attn[index](x)
        if hasattr(self, "downsample"):
            x = self.downsample(x)
        if hasattr(self, "upsample"):
            x = self.upsample(x)
        return x


def _middle(width: int, groups: int | None) -> nn.ModuleList:
    attention = [] if groups is None else [AttentionBlock(width, groups)]
    return nn.ModuleList([ResnetBlock(width, width, groups), *attention, ResnetBlock(width, width, groups)])


class Encoder(nn.Module):
    def __init__(
        self, width: int, multipliers: tuple[int, ...], blocks: int, latent_channels: int, groups: int | None
    ):
        super().__init__()
        last = len(multipliers) - 1
        self.conv_in = nn.Conv2d(3, width, 3, padding=1)
        self.conv_blocks = nn.ModuleList()
        current = width
        for level, multiplier in enumerate(multipliers):
            widths = [current] + [width * multiplier] * blocks
            self.conv_blocks.append(
                _Stage(widths, groups, level == last and groups is not None, "down" if level < last else None)
            )
            current = widths[-1]
        self.mid = _middle(current, groups)
        self.norm_out = _normalise(current, groups)
        self.conv_out = nn.Conv2d(current, latent_channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv_in(x)
        for block in (*self.conv_blocks, *self.mid):
            x = block(x)
        return self.conv_out(F.silu(self.norm_out(x)))


class Decoder(nn.Module):
    def __init__(
        self, width: int, multipliers: tuple[int, ...], blocks: int, latent_channels: int, groups: int | None
    ):
        super().__init__()
        last = len(multipliers) - 1
        current = width * multipliers[-1]
        self.conv_in = nn.Conv2d(latent_channels, current, 3, padding=1)
        self.mid = _middle(current, groups)
        self.conv_blocks = nn.ModuleList()  # from the lowest resolution up
        for level, multiplier in reversed(list(enumerate(multipliers))):
            widths = [current] + [width * multiplier] * (blocks + 1)
            self.conv_blocks.append(
                _Stage(widths, groups, level == last and groups is not None, "up" if level > 0 else None)
            )
            current = widths[-1]
        self.norm_out = _normalise(current, groups)
        self.conv_out = nn.Conv2d(current, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv_in(x)
        for block in (*self.mid, *self.conv_blocks):
            x = block(x)
        return self.conv_out(F.silu(self.norm_out(x)))


class VectorQuantizer(nn.Module):
    """Nearest code on the unit sphere: codes and latents are L2-normalised at every look-up (LlamaGen, section 3.1)."""

    def __init__(self, codebook_size: int, codebook_dim: int):
        super().__init__()
        self.embedding = nn.Embedding(codebook_size, codebook_dim)
        nn.init.uniform_(self.embedding.weight, -1.0 / codebook_size, 1.0 / codebook_size)

    @property
    def codes(self) -> Tensor:
        """Unit-length codes `[V, D]`."""
        return F.normalize(self.embedding.weight, dim=-1)

    def nearest(self, latents: Tensor) -> Tensor:
        """Code ids `[B, H, W]` of latents `[B, D, H, W]`."""
        unit = F.normalize(latents, dim=1)
        return torch.einsum("bdhw,vd->bhwv", unit, self.codes).argmax(-1)

    def lookup(self, ids: Tensor) -> Tensor:
        """Codes `[B, D, H, W]` of ids `[B, H, W]`."""
        return F.normalize(self.embedding(ids), dim=-1).permute(0, 3, 1, 2).contiguous()


class VQModel(ModelMixin, ConfigMixin):
    """Pictures to tokens and back.

    Args:
        base_channels: width at full resolution (128 in the official checkpoints).
        channel_multipliers: width per resolution level; the picture shrinks by 2 between levels.
        blocks_per_level: residual blocks per encoder level; the decoder has one more.
        latent_channels: channels between the networks and the 1 x 1 quantiser projections.
        codebook_size, codebook_dim: number and length of the codes.
        norm_groups: groups of each GroupNorm. None makes a local tokenizer: every position is normalised by itself and
            there is no attention, so a token depends on its neighbourhood alone and equal patches get equal tokens.
            Group statistics and attention let every token vary with the whole picture, which a wide codebook bears and
            a small one pays for in noise.
        image_size: side of the pictures in pixels; fixes the token grid.
    """

    @register_to_config
    def __init__(
        self,
        base_channels: int = 128,
        channel_multipliers: tuple[int, ...] = (1, 1, 2, 2, 4),
        blocks_per_level: int = 2,
        latent_channels: int = 256,
        codebook_size: int = 16384,
        codebook_dim: int = 8,
        norm_groups: int | None = 32,
        image_size: int = 256,
    ):
        super().__init__()
        shape = (base_channels, tuple(channel_multipliers), blocks_per_level, latent_channels)
        self.encoder = Encoder(*shape, norm_groups)
        self.decoder = Decoder(*shape, norm_groups)
        self.quantize = VectorQuantizer(codebook_size, codebook_dim)
        self.quant_conv = nn.Conv2d(latent_channels, codebook_dim, 1)
        self.post_quant_conv = nn.Conv2d(codebook_dim, latent_channels, 1)

    @property
    def patch_size(self) -> int:
        """Pixels per token side."""
        return 2 ** (len(self.config["channel_multipliers"]) - 1)

    @property
    def tokens_per_side(self) -> int:
        """Tokens per picture side."""
        return self.config["image_size"] // self.patch_size

    def encode_latents(self, images: Tensor) -> Tensor:
        """Latents before quantisation `[B, D, h, w]` of pictures `[B, 3, H, W]` in [-1, 1]."""
        return self.quant_conv(self.encoder(images))

    def decode_latents(self, codes: Tensor) -> Tensor:
        """Pictures `[B, 3, H, W]` in about [-1, 1] of codes `[B, D, h, w]`."""
        return self.decoder(self.post_quant_conv(codes))

    def encode_tokens(self, images: Tensor) -> Tensor:
        """Token ids `[B, h * w]`, raster order, of pictures `[B, 3, H, W]` in [-1, 1]."""
        return self.quantize.nearest(self.encode_latents(images)).flatten(1)

    def decode_tokens(self, tokens: Tensor) -> Tensor:
        """Pictures `[B, 3, H, W]` clamped to [-1, 1] of token ids `[B, h * w]`.

        Raises:
            ValueError: if the number of tokens is not that of the grid, or an id is outside the codebook.
        """
        side = self.tokens_per_side
        if tokens.ndim != 2 or tokens.shape[1] != side * side:
            raise ValueError(
                f"tokens of shape {tuple(tokens.shape)} given; this tokenizer decodes [B, {side * side}]"
            )
        low, high = int(tokens.min()), int(tokens.max())
        if low < 0 or high >= self.config["codebook_size"]:
            raise ValueError(
                f"token ids from {low} to {high} given; allowed are 0 to {self.config['codebook_size'] - 1}"
            )
        return self.decode_latents(self.quantize.lookup(tokens.view(-1, side, side))).clamp(-1, 1)

    def forward(self, images: Tensor) -> Tensor:
        """Reconstruction `[B, 3, H, W]` of pictures `[B, 3, H, W]` in [-1, 1]."""
        return self.decode_tokens(self.encode_tokens(images))
