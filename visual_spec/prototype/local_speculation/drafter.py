"""The drafter of multi-scale local speculative decoding: a small picture first, then a draft of every large token.

MuLo-SD (Peruzzo et al., Qualcomm AI Research 2026) drafts at low resolution and turns the low-resolution tokens into
candidates for the high-resolution ones by a learned up-sampler. This module holds both.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from visual_spec.models.core.offload import loads_weights
from visual_spec.models.core.saved import SavedModel
from visual_spec.models.core.settings import register_to_config
from visual_spec.models.next_token.llamagen import LlamaGenTransformer


class _ConvBlock(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.norm = nn.GroupNorm(1, width)
        self.conv1 = nn.Conv2d(width, width, 3, padding=1)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv2(F.gelu(self.conv1(self.norm(x))))


class TokenUpsampler(SavedModel):
    """Predicts logits of each high-resolution token independently, from the low-resolution tokens.

    Args:
        vocab_size: codes; both resolutions share the tokenizer.
        low_side, factor: tokens per side of the small grid, and the factor to the large grid.
        width, num_blocks: channels, and residual blocks at each resolution.
    """

    @register_to_config
    def __init__(
        self, vocab_size: int = 1024, low_side: int = 8, factor: int = 2, width: int = 96, num_blocks: int = 2
    ):
        super().__init__()
        self.num_tokens = (low_side * factor) ** 2  # of the large grid
        self.embedding = nn.Embedding(vocab_size, width)
        self.low = nn.ModuleList(_ConvBlock(width) for _ in range(num_blocks))
        self.spread = nn.Conv2d(width, width * factor**2, 1)
        self.high = nn.ModuleList(_ConvBlock(width) for _ in range(num_blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab_size)

    @loads_weights
    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits `[B, (low_side * factor)^2, V]`, raster order, from low-resolution tokens `[B, low_side^2]`."""
        side = self.config["low_side"]
        x = rearrange(self.embedding(tokens), "b (h w) c -> b c h w", h=side)
        for block in self.low:
            x = block(x)
        x = F.pixel_shuffle(self.spread(x), self.config["factor"])
        for block in self.high:
            x = block(x)
        return self.head(self.norm(rearrange(x, "b c h w -> b (h w) c")))


class MultiscaleDrafter(SavedModel):
    """A low-resolution transformer and the up-sampler that reads its tokens.

    Args:
        transformer_config, upsampler_config: the settings of `LlamaGenTransformer` and `TokenUpsampler`.

    Raises:
        ValueError: the up-sampler and the transformer have different grids or vocabularies.
    """

    @register_to_config
    def __init__(self, transformer_config: dict[str, Any], upsampler_config: dict[str, Any]):
        super().__init__()
        self.transformer = LlamaGenTransformer(**transformer_config)
        self.upsampler = TokenUpsampler(**upsampler_config)
        writes = (self.transformer.vocab_size, self.transformer.grid.width)
        reads = (self.upsampler.config["vocab_size"], self.upsampler.config["low_side"])
        if writes != reads:
            raise ValueError(
                f"the transformer writes {writes[1]} x {writes[1]} tokens out of {writes[0]}, but the up-sampler "
                f"reads {reads[1]} x {reads[1]} out of {reads[0]}; both must be of one grid and vocabulary."
            )
