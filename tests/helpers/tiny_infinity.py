"""A tiny Infinity: transformer, tokenizer and captions, with weights so large that nothing is alike by accident."""

from typing import Any

import torch
from torch import Tensor, nn

from visual_spec.models.next_scale.infinity import InfinityTransformer
from visual_spec.models.next_scale.infinity_vq import BitwiseVQModel
from visual_spec.models.next_token.llamagen import TextCondition

SIDES = (1, 2, 3, 4)
LENGTHS = (4, 2, 5)


def tiny_infinity(seed: int = 0, dtype: torch.dtype = torch.float64, **changes: Any) -> InfinityTransformer:
    """Two layers over (1 + 4 + 9 + 16) places of three bits."""
    settings: dict[str, Any] = dict(
        bits=3, dim=16, num_layers=2, num_heads=2, ffn_dim=24, caption_dim=6, caption_length=7, pool_heads=4,
        scales=SIDES, num_levels=6,
    )  # fmt: skip
    torch.manual_seed(seed)
    model = InfinityTransformer(**{**settings, **changes}).eval()
    nn.Module.to(model, dtype)
    for name, parameter in model.named_parameters():
        small = parameter.ndim == 2 and name not in ("word_embed.weight", "lvl_embed.weight", "cfg_uncond")
        parameter.data = torch.randn_like(parameter) * (0.3 if small else 0.7)
        if name.endswith("norm.weight"):
            parameter.data += 1
    return model


def tiny_bits(seed: int = 0, dtype: torch.dtype = torch.float64, **changes: Any) -> BitwiseVQModel:
    """The tokenizer to it; pictures are two pixels wide for each place."""
    settings: dict[str, Any] = dict(
        bits=3, base_channels=4, channel_multipliers=(1, 2), blocks_per_level=1, scales=SIDES, norm_groups=2
    )
    torch.manual_seed(seed)
    model = BitwiseVQModel(**{**settings, **changes}).eval().requires_grad_(False)
    nn.Module.to(model, dtype)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.data += torch.randn_like(parameter) * 0.2
    return model


def captions(seed: int = 5, lengths: tuple[int, ...] = LENGTHS, width: int = 6) -> TextCondition:
    """Captions of these lengths, each at the end of its row, with garbage before it."""
    generator = torch.Generator().manual_seed(seed)
    words = max(lengths) + 1
    mask = torch.arange(words) >= words - torch.tensor(lengths)[:, None]
    features = torch.randn(len(lengths), words, width, generator=generator, dtype=torch.float64)
    return TextCondition(features, mask)


def some(condition: TextCondition, rows: Tensor) -> TextCondition:
    """Some of the captions."""
    return TextCondition(condition.features[rows], condition.mask[rows])
