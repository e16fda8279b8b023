"""A tiny FlexVAR and its tokenizer, with weights that the public code was run on, too."""

from typing import Any

import torch
from torch import Tensor

from tests.helpers.var import block_shapes
from visual_spec.models.next_scale.flexvar import FlexVARTransformer, FlexVQModel, load_flexvar

SIDES = (1, 2, 3, 4)


def numbers(count: int, step: float) -> Tensor:
    """Numbers that look random, and that the public code was run on, too."""
    return torch.arange(1, count + 1, dtype=torch.float64).square() * step


def official_weights(
    dim: int = 16, layers: int = 2, heads: int = 2, shared: bool = False
) -> dict[str, Tensor]:
    """The weights of a tiny FlexVAR under the keys of the release."""
    shapes: dict[str, tuple[int, ...]] = {
        "pos_start": (1, 1, dim), "pos_1LC": (1, dim, 32, 32), "class_emb.weight": (6, dim),
        "word_embed.weight": (dim, 4), "word_embed.bias": (dim,), "head.weight": (12, dim), "head.bias": (12,),
        "head_nm.ada_lin.1.weight": (2 * dim, dim), "head_nm.ada_lin.1.bias": (2 * dim,),
    }  # fmt: skip
    shapes |= block_shapes(layers, dim, heads, shared)
    return {
        key: numbers(torch.Size(shape).numel(), 0.7 + 0.01 * index).sin().view(shape)
        * (0.6 if len(shape) > 1 else 0.3)
        for index, (key, shape) in enumerate(sorted(shapes.items()))
    }


def buffers(layers: int = 2) -> dict[str, Tensor]:
    """What official files hold beside the weights."""
    mask = torch.zeros(1, 1, 24, 24)  # of the scales of the last step of training
    return {"attn_bias_for_masking": mask} | {
        f"blocks.{layer}.attn.zero_k_bias": torch.zeros(16) for layer in range(layers)
    }


def tiny(scales: tuple[int, ...] = SIDES, **changes: Any) -> FlexVARTransformer:
    return load_flexvar(official_weights(**changes) | buffers(), scales=scales).eval()


def tiny_vq(**changes: Any) -> FlexVQModel:
    """Codes as the public code had them; pictures of 8 pixels."""
    torch.manual_seed(1)
    settings: dict[str, Any] = dict(
        latent_channels=4, codebook_size=12, codebook_dim=4, image_size=8, scales=SIDES
    )
    model = FlexVQModel(4, (1, 1), 1, **dict(settings, norm_groups=None) | changes).double().eval()
    model.quantize.embedding.weight.data = numbers(48, 1.3).cos().view(12, 4)
    return model.requires_grad_(False)


LATENTS = numbers(2 * 4 * 16, 0.9).sin().view(2, 4, 4, 4)
LABELS = torch.tensor([3, 0])
