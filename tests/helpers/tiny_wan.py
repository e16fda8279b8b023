"""diffusers' Wan at a tiny size, with random weights: 4 latent channels, patches of 2 x 2, 2 heads of 12."""

from typing import Any

import torch
from diffusers.models.transformers.transformer_wan import WanTransformer3DModel

SIZES: dict[str, Any] = dict(
    patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=12, in_channels=4, out_channels=4, text_dim=8,
    freq_dim=16, ffn_dim=24, num_layers=2, cross_attn_norm=True, qk_norm="rms_norm_across_heads", rope_max_seq_len=64,
)  # fmt: skip
DIM, FFN, HEAD_DIM = 24, 24, 12


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


def official(layers: int = 2) -> dict[str, torch.Tensor]:
    """Random weights by the keys of Wan's own program, at the size of `tiny_wan`."""
    generator = torch.Generator().manual_seed(0)
    shapes: dict[str, tuple[int, ...]] = {
        "patch_embedding.weight": (DIM, 4, 1, 2, 2),
        "patch_embedding.bias": (DIM,),
        "head.head.weight": (16, DIM),
        "head.head.bias": (16,),
        "head.modulation": (1, 2, DIM),
    }

    def linear(name: str, wide: int, narrow: int) -> None:
        shapes.update({f"{name}.weight": (wide, narrow), f"{name}.bias": (wide,)})

    linear("text_embedding.0", DIM, 8)
    linear("text_embedding.2", DIM, DIM)
    linear("time_embedding.0", DIM, 16)
    linear("time_embedding.2", DIM, DIM)
    linear("time_projection.1", 6 * DIM, DIM)
    for layer in range(layers):
        for attention in ("self_attn", "cross_attn"):
            for part in "qkvo":
                linear(f"blocks.{layer}.{attention}.{part}", DIM, DIM)
            for part in "qk":
                shapes[f"blocks.{layer}.{attention}.norm_{part}.weight"] = (DIM,)
        shapes |= {f"blocks.{layer}.norm3.{name}": (DIM,) for name in ("weight", "bias")}
        linear(f"blocks.{layer}.ffn.0", FFN, DIM)
        linear(f"blocks.{layer}.ffn.2", DIM, FFN)
        shapes[f"blocks.{layer}.modulation"] = (1, 6, DIM)
    return {key: 0.3 * torch.randn(shape, generator=generator) for key, shape in shapes.items()}


def saved(tmp_path, weights, **more):
    """A file as Self-Forcing's."""
    content = {"generator_ema": {f"model.{key}": value for key, value in weights.items()}, **more}
    torch.save(content, tmp_path / "self_forcing_dmd.pt")
    return tmp_path / "self_forcing_dmd.pt"
