"""diffusers' Wan at a tiny size, with random weights: 4 latent channels, patches of 2 x 2, 2 heads of 12."""

from typing import Any

import torch
from diffusers.models.transformers.transformer_wan import WanTransformer3DModel

SIZES: dict[str, Any] = dict(
    patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=12, in_channels=4, out_channels=4, text_dim=8,
    freq_dim=16, ffn_dim=24, num_layers=2, cross_attn_norm=True, qk_norm="rms_norm_across_heads", rope_max_seq_len=64,
)  # fmt: skip


def tiny_wan(seed: int = 0, **changes: Any) -> Any:
    """In float64, with weights that differ from each other and say something."""
    model = WanTransformer3DModel(**{**SIZES, **changes})
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            centre = 1.0 if "norm" in name and name.endswith("weight") else 0.0
            parameter.copy_(centre + 0.3 * torch.randn(parameter.shape, generator=generator))
    return model.double().eval()


def prompts(batch: int = 1, seed: int = 0) -> torch.Tensor:
    """[B, 3, 8]; sample b is the same in every batch."""
    generator = torch.Generator().manual_seed(seed)
    return torch.stack([torch.randn(3, 8, generator=generator, dtype=torch.float64) for _ in range(batch)])


def clips(batch: int, frames: int, seed: int = 1, size: int = 4) -> torch.Tensor:
    """[B, 4, frames, size, size]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, 4, frames, size, size, generator=generator, dtype=torch.float64)
