"""Decoding of next-scale models for tests: maps for all kinds of them, and one call a scale."""

from typing import Any

import torch
from torch import Tensor

from visual_spec.models.core.protocol import shape_of


def random_maps(model: Any, batch_size: int = 3, seed: int = 1) -> list[Tensor]:
    """The maps [B, D, h, w] of scales 1 on."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(batch_size, model.code_dim, *shape_of(side)) for side in model.scales[1:]]
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def decoded(
    model: Any, condition: Any, maps: list[Tensor], guided: bool = True, known: int = 0, **settings: Any
) -> list[Tensor]:
    """Logits of every scale from `known` on, one call a scale."""
    state = model.prefill(condition, batch_size=len(maps[0]), guided=guided, maps=maps[:known], **settings)
    return [state.logits] + [model(state, maps[k - 1], k) for k in range(known + 1, len(model.scales))]
