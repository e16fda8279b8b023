"""BitDance's tokenizer: a convolutional autoencoder whose latents are signs (Ai et al. 2026, arXiv 2602.14041).

The quantiser has no table: every channel of a latent is its sign (Mentzer et al. 2024, Yu et al. 2024). The decoder is
Open-MAGVIT2's (Luo et al. 2024): before each level a norm without weights is scaled and moved by the deviation and the
mean of every latent channel over the picture.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from diffusers.models.autoencoders.vae import DecoderOutput, IdentityDistribution
from diffusers.models.modeling_outputs import AutoencoderKLOutput
from einops import rearrange
from torch import Tensor, nn

from visual_spec.models.core.layouts import Given, KeyLayout, count_parts, loaded
from visual_spec.models.core.saved import SavedModel
from visual_spec.models.core.settings import Count, register_to_config
from visual_spec.models.core.vq_blocks import ResnetBlock, normalise


def _blocks(width: int, out: int, count: int, groups: int) -> nn.ModuleList:
    widths = [width, *[out] * count]
    pairs = zip(widths, widths[1:], strict=False)
    return nn.ModuleList(ResnetBlock(*pair, groups, bias=False) for pair in pairs)


class BinaryEncoder(nn.Module):
    """Pictures [B, 3, H, W] to latents before their signs, [B, d, h, w]."""

    def __init__(self, latent: int, widths: Sequence[int], count: int, groups: int) -> None:
        super().__init__()
        self.conv_in = nn.Conv2d(3, widths[0], 3, padding=1, bias=False)
        self.down = nn.ModuleList()
        for level, width in enumerate(widths):
            parts: dict[str, nn.Module] = {"block": _blocks(widths[max(0, level - 1)], width, count, groups)}
            if level + 1 < len(widths):
                parts["downsample"] = nn.Conv2d(width, width, 3, stride=2, padding=1)
            self.down.append(nn.ModuleDict(parts))
        self.mid_block = _blocks(widths[-1], widths[-1], count, groups)
        self.norm_out, self.conv_out = normalise(widths[-1], groups), nn.Conv2d(widths[-1], latent, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv_in(x)
        for level in self.down:
            for block in level["block"]:  # pyright: ignore
                x = block(x)
            x = level["downsample"](x) if "downsample" in level else x  # pyright: ignore
        for block in self.mid_block:
            x = block(x)
        return self.conv_out(F.silu(self.norm_out(x)))


class AdaptiveGroupNorm(nn.Module):
    """A group norm scaled and moved by what the latents are over the whole picture."""

    def __init__(self, latent: int, width: int, groups: int) -> None:
        super().__init__()
        self.groups = groups
        self.gamma, self.beta = nn.Linear(latent, width), nn.Linear(latent, width)

    def forward(self, x: Tensor, latents: Tensor) -> Tensor:
        flat = latents.flatten(2)
        scale = self.gamma((flat.var(-1) + 1e-6).sqrt())[..., None, None]
        return scale * F.group_norm(x, self.groups, eps=1e-6) + self.beta(flat.mean(-1))[..., None, None]


class BinaryDecoder(nn.Module):
    """Latents [B, d, h, w] to pictures [B, 3, H, W]."""

    def __init__(self, latent: int, widths: Sequence[int], count: int, groups: int) -> None:
        super().__init__()
        self.conv_in = nn.Conv2d(latent, widths[-1], 3, padding=1)
        self.mid_block = _blocks(widths[-1], widths[-1], count, groups)
        self.up, self.adaptive = nn.ModuleList(), nn.ModuleList()
        for level, width in enumerate(widths):  # from full resolution on; they run from the last
            before = widths[min(level + 1, len(widths) - 1)]
            parts: dict[str, nn.Module] = {"block": _blocks(before, width, count, groups)}
            if level:
                parts["upsample"] = nn.ModuleDict({"conv1": nn.Conv2d(width, 4 * width, 3, padding=1)})
            self.up.append(nn.ModuleDict(parts))
            self.adaptive.append(AdaptiveGroupNorm(latent, before, groups))
        self.norm_out, self.conv_out = normalise(widths[0], groups), nn.Conv2d(widths[0], 3, 3, padding=1)

    def forward(self, latents: Tensor) -> Tensor:
        x = self.conv_in(latents)
        for block in self.mid_block:
            x = block(x)
        for level, adaptive in zip(reversed(self.up), reversed(self.adaptive), strict=True):
            x = adaptive(x, latents)
            for block in level["block"]:  # pyright: ignore
                x = block(x)
            if "upsample" in level:  # pyright: ignore
                x = level["upsample"]["conv1"](x)  # pyright: ignore
                x = rearrange(x, "b (p q c) h w -> b c (h p) (w q)", p=2, q=2)
        return self.conv_out(F.silu(self.norm_out(x)))


class BinaryAutoencoder(SavedModel):
    """The tokenizer, with the calls of diffusers' `AutoencoderKL`. The defaults are those of `ae_d16c32.pt`.

    Args:
        latent_channels: numbers of a latent, d.
        block_out_channels: widths of the levels, from full resolution on; each but the last halves the picture.
        layers_per_block: residual blocks of a level.
        norm_num_groups: of the group norms.
    """

    @register_to_config
    def __init__(
        self,
        latent_channels: Count = 32,
        block_out_channels: Sequence[int] = (256, 256, 512, 512, 1024),
        layers_per_block: Count = 4,
        norm_num_groups: Count = 32,
    ):
        super().__init__()
        sizes = latent_channels, tuple(block_out_channels), layers_per_block, norm_num_groups
        self.encoder, self.decoder = BinaryEncoder(*sizes), BinaryDecoder(*sizes)

    def encode(self, pictures: Tensor) -> AutoencoderKLOutput:
        """Signs [B, d, h, w] of pictures [B, 3, H, W] in [-1, 1], as a law of that one value."""
        signs = torch.where(self.encoder(pictures) > 0, 1.0, -1.0).to(pictures)
        distribution: Any = IdentityDistribution(signs)
        return AutoencoderKLOutput(latent_dist=distribution)

    def decode(self, latents: Tensor) -> DecoderOutput:
        """Pictures [B, 3, H, W], about [-1, 1], of latents [B, d, h, w], of which the signs count."""
        return DecoderOutput(sample=self.decoder(latents.sign()))


_TOKENIZER = KeyLayout(
    "tokenizer of BitDance",
    "ae_d16c32.pt",
    needed={
        "encoder.conv_in.weight": 4,
        "decoder.conv_in.weight": 4,
        "decoder.conv_out.weight": 4,
        "decoder.adaptive.0.gamma.weight": 2,
    },
    dropped=(r"(?!encoder\.|decoder\.).*",),  # of training
    container="state_dict",
)


def load_binary_autoencoder(source: Given, *, dtype: torch.dtype | None = None) -> BinaryAutoencoder:
    """The tokenizer of an official file, `ae_d16c32.pt`, for pictures of any size.

    `source`, `dtype` and errors: see `visual_spec.models.core.layouts`.
    """
    weights, name = _TOKENIZER.read(source)
    latent = weights["decoder.conv_in.weight"].shape[1]
    widths = []
    for level in range(count_parts(weights, "encoder.down.")):
        key = f"encoder.down.{level}.block.0.conv2.weight"
        if key not in weights:
            raise ValueError(f"{name} lacks {key}; pass the official file.")
        widths.append(weights[key].shape[0])
    config = {
        "latent_channels": latent,
        "block_out_channels": widths,
        "layers_per_block": count_parts(weights, "encoder.down.0.block."),
        "norm_num_groups": min(32, *widths),
    }
    return loaded(BinaryAutoencoder, config, weights, name, what="BitDance's tokenizer", dtype=dtype)
