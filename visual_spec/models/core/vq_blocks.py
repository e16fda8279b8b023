"""The convolutional encoder and decoder of VQGAN (Esser et al. 2021, arXiv 2012.09841), for our tokenizers.

LlamaGen, Chameleon, VAR, Infinity and MAGE use these networks. They differ in the place of attention, in the names of
the parts, and MAGE's in its blocks. Module names are the official keys: a `Layout` holds those that differ.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from visual_spec.models.core.protocol import check_ids
from visual_spec.models.core.saved import SavedModel


@dataclass(frozen=True)
class Layout:
    """The names of a network's parts in official files.

    Attributes:
        blocks: the residual blocks of a level.
        down, up: the levels of the encoder and of the decoder.
        middle: the two residual blocks at the lowest resolution and the attention between them; None: they are
            numbered.
        highest_first: whether the decoder's levels are numbered from the highest resolution, which runs last.
    """

    blocks: str = "block"
    down: str = "down"
    up: str = "up"
    middle: tuple[str, str, str] | None = ("block_1", "attn_1", "block_2")
    highest_first: bool = True


TAMING = Layout()  # the original code: Chameleon, VAR, Infinity, MAGE
LLAMAGEN = Layout(blocks="res", down="conv_blocks", up="conv_blocks", middle=None, highest_first=False)


# -- blocks -----------------------------------------------------------------------------------------------------------


class PositionNorm(nn.GroupNorm):
    """Layer normalisation over the channels of each position: unlike group statistics, these stay local."""

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x.movedim(1, -1), x.shape[1:2], self.weight, self.bias, self.eps).movedim(-1, 1)


def normalise(channels: int, groups: int | None) -> nn.GroupNorm:
    """Return the norm of all blocks: over this many groups of channels, or `PositionNorm` for None."""
    if groups is None:
        return PositionNorm(1, channels, eps=1e-6)
    return nn.GroupNorm(groups, channels, eps=1e-6)


class ResnetBlock(nn.Module):
    """Two convolutions of a feature map beside a shortcut.

    MaskGIT's have no biases, and a shortcut that changes the width projects their result, not their input. BitDance's
    have no biases either (`bias`).
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        groups: int | None,
        maskgit: bool = False,
        bias: bool | None = None,
    ):
        super().__init__()
        self.maskgit, bias = maskgit, not maskgit if bias is None else bias
        self.norm1 = normalise(in_channels, groups)
        self.conv1 = nn.Conv2d(in_channels, out_channels, 3, padding=1, bias=bias)
        self.norm2 = normalise(out_channels, groups)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, padding=1, bias=bias)
        if in_channels != out_channels:
            projected = out_channels if maskgit else in_channels
            self.nin_shortcut = nn.Conv2d(projected, out_channels, 1, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv1(F.silu(self.norm1(x)))
        h = self.conv2(F.silu(self.norm2(h)))
        if hasattr(self, "nin_shortcut"):
            x = self.nin_shortcut(h if self.maskgit else x)
        return h + x


class AttentionBlock(nn.Module):
    """Single-head self-attention over all positions of a feature map."""

    def __init__(self, channels: int, groups: int | None):
        super().__init__()
        self.norm = normalise(channels, groups)
        self.q = nn.Conv2d(channels, channels, 1)
        self.k = nn.Conv2d(channels, channels, 1)
        self.v = nn.Conv2d(channels, channels, 1)
        self.proj_out = nn.Conv2d(channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        return x + self.proj_out(_attend(self.q(h), self.k(h), self.v(h)))


class FusedAttentionBlock(nn.Module):
    """`AttentionBlock` with one projection for queries, keys and values."""

    def __init__(self, channels: int, groups: int | None):
        super().__init__()
        self.norm = normalise(channels, groups)
        self.qkv = nn.Conv2d(channels, 3 * channels, 1)
        self.proj_out = nn.Conv2d(channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.proj_out(_attend(*self.qkv(self.norm(x)).chunk(3, 1)))


def _attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return attention from every position of `[B, C, H, W]` to all positions, `[B, C, H, W]`."""
    height = q.shape[2]
    q, k, v = (rearrange(part, "b c h w -> b 1 (h w) c") for part in (q, k, v))
    return rearrange(F.scaled_dot_product_attention(q, k, v), "b 1 (h w) c -> b c h w", h=height)


class Downsample(nn.Module):
    """Halves a feature map."""

    def __init__(self, channels: int):
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(F.pad(x, (0, 1, 0, 1)))  # the official network pads right and bottom only


class Upsample(nn.Module):
    """Doubles a feature map."""

    def __init__(self, channels: int):
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(F.interpolate(x, scale_factor=2.0, mode="nearest"))


Attention = type[AttentionBlock] | type[FusedAttentionBlock]


# -- networks ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Design:
    """The numbers that define an encoder and its decoder.

    Attributes:
        width: channels at full resolution.
        multipliers: width factor of each resolution level; the picture shrinks by 2 between levels.
        blocks: residual blocks per level of the encoder; the decoder has one more.
        latent_channels: channels between encoder and decoder.
        groups: see `normalise`.
        attention: the block class at the lowest resolution; None: no attention.
        level_attention: whether the lowest level has attention after each of its blocks, not only in the middle.
        layout: the names.
        maskgit: whether it is MaskGIT's network (Chang et al. 2022): see `ResnetBlock`; it halves maps by averaging,
            and the decoder has as many blocks as the encoder.
    """

    width: int
    multipliers: tuple[int, ...]
    blocks: int
    latent_channels: int
    groups: int | None
    attention: Attention | None = None
    level_attention: bool = True
    layout: Layout = TAMING
    maskgit: bool = False

    @property
    def lowest(self) -> int:
        """Index of the level of lowest resolution."""
        return len(self.multipliers) - 1

    def block(self, in_channels: int, out_channels: int) -> ResnetBlock:
        """Make a residual block."""
        return ResnetBlock(in_channels, out_channels, self.groups, self.maskgit)


class Level(nn.Module):
    """One resolution: residual blocks, each followed by attention if there is any, then the resampler."""

    def __init__(self, design: Design, level: int, widths: Sequence[int], resample: str | None):
        super().__init__()
        pairs = list(pairwise(widths))
        self._blocks = design.layout.blocks
        self.add_module(self._blocks, nn.ModuleList(design.block(a, b) for a, b in pairs))
        block = design.attention if design.level_attention and level == design.lowest else None
        self.attn = nn.ModuleList([] if block is None else [block(b, design.groups) for _, b in pairs])
        if resample == "down":
            self.downsample = nn.AvgPool2d(2) if design.maskgit else Downsample(widths[-1])
        elif resample == "up":
            self.upsample = Upsample(widths[-1])

    def forward(self, x: Tensor) -> Tensor:
        for index, block in enumerate(getattr(self, self._blocks)):
            x = block(x)
            if len(self.attn):
                x = self.attn[index](x)
        if hasattr(self, "downsample"):
            x = self.downsample(x)
        if hasattr(self, "upsample"):
            x = self.upsample(x)
        return x


def _middle(design: Design, width: int) -> nn.Sequential:
    named = design.layout.middle is not None
    first, between, second = design.layout.middle or ("0", "1", "2")
    parts: OrderedDict[str, nn.Module] = OrderedDict({first: design.block(width, width)})
    if design.attention is not None:
        parts[between] = design.attention(width, design.groups)
    parts[second if named else str(len(parts))] = design.block(width, width)
    return nn.Sequential(parts)


class Encoder(nn.Module):
    """Maps pictures `[B, 3, H, W]` to latents `[B, latent_channels, h, w]`."""

    def __init__(self, design: Design):
        super().__init__()
        self.conv_in = nn.Conv2d(3, design.width, 3, padding=1, bias=not design.maskgit)
        levels, current = nn.ModuleList(), design.width
        for level, multiplier in enumerate(design.multipliers):
            widths = [current] + [design.width * multiplier] * design.blocks
            levels.append(Level(design, level, widths, "down" if level < design.lowest else None))
            current = widths[-1]
        self._levels = design.layout.down
        self.add_module(self._levels, levels)
        self.mid = _middle(design, current)
        self.norm_out = normalise(current, design.groups)
        size = 1 if design.maskgit else 3
        self.conv_out = nn.Conv2d(current, design.latent_channels, size, padding=size // 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv_in(x)
        for level in getattr(self, self._levels):
            x = level(x)
        return self.conv_out(F.silu(self.norm_out(self.mid(x))))


class Decoder(nn.Module):
    """Maps latents `[B, latent_channels, h, w]` to pictures `[B, 3, H, W]` in about [-1, 1]."""

    def __init__(self, design: Design):
        super().__init__()
        current = design.width * design.multipliers[-1]
        self.conv_in = nn.Conv2d(design.latent_channels, current, 3, padding=1)
        self.mid = _middle(design, current)
        levels = []
        for level in range(design.lowest, -1, -1):
            widths = [current] + [design.width * design.multipliers[level]] * (
                design.blocks + (not design.maskgit)
            )
            levels.append(Level(design, level, widths, "up" if level > 0 else None))
            current = widths[-1]
        self._levels, self._reversed = design.layout.up, design.layout.highest_first
        self.add_module(self._levels, nn.ModuleList(reversed(levels) if self._reversed else levels))
        self.norm_out = normalise(current, design.groups)
        self.conv_out = nn.Conv2d(current, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.mid(self.conv_in(x))
        levels = getattr(self, self._levels)
        for level in reversed(levels) if self._reversed else levels:
            x = level(x)
        return self.conv_out(F.silu(self.norm_out(x)))


class PictureTokenizer(SavedModel):
    """A tokenizer of square pictures with the settings `channel_multipliers`, `image_size` and `codebook_size`."""

    @property
    def patch_size(self) -> int:
        """Pixels per token side."""
        return 2 ** (len(self.config["channel_multipliers"]) - 1)

    @property
    def tokens_per_side(self) -> int:
        """Tokens per picture side."""
        return self.config["image_size"] // self.patch_size

    def ids_in_grid(self, tokens: Tensor, size: tuple[int, int] | None = None) -> Tensor:
        """Return token ids long `[B, h * w]` as `[B, h, w]`.

        Args:
            size: h and w; None: `image_size`'s.

        Raises:
            ValueError: the number of tokens does not fit the grid, or an id is outside the codebook.
        """
        height, width = size or (self.tokens_per_side, self.tokens_per_side)
        if tokens.ndim != 2 or tokens.shape[1] != height * width:
            raise ValueError(
                f"tokens of shape {tuple(tokens.shape)} given; this tokenizer decodes [B, {height * width}]"
            )
        check_ids("token ids", tokens, self.config["codebook_size"])
        return tokens.unflatten(1, (height, width))
