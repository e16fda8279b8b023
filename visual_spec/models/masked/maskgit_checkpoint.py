"""Official files of the Halton sampler's MaskGIT: read, check every key, build the model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from visual_spec.models.core.layouts import Given, KeyLayout, count_parts, known_heads, loaded
from visual_spec.models.masked.maskgit import PRESETS, MaskedImageTransformer

_TIED = "head.weight"  # the official module has it twice: as the head and as the embedding
_MASKGIT = KeyLayout(
    "MaskGIT of the Halton sampler",
    "the weights under 'model_state_dict' of an official file",
    needed={"tok_emb.weight": 2, "pos_emb.weight": 2, "cls_emb.weight": 2, "head.bias": 1},
)


def load_maskgit_checkpoint(
    source: Given, *, num_heads: int | None = None, dtype: torch.dtype | None = None
) -> MaskedImageTransformer:
    """The transformer of an official file, such as `ImageNet_384_large.pth`.

    Its tokens come from LlamaGen's class-conditional VQ-16, `vq_ds16_c2i.pt`. A head that differs from the embedding it
    is tied to is refused.
    `source`, `dtype` and errors: see `visual_spec.models.core.layouts`.

    Args:
        num_heads: of a size that is none of `PRESETS`, which cannot be read off the weights.
    """
    weights, name = _MASKGIT.read(source)
    config = _config(weights, name, num_heads)
    head = weights.pop(_TIED, None)
    if head is not None and not torch.equal(head, weights["tok_emb.weight"]):
        raise ValueError(
            f"{name}: {_TIED} differs from tok_emb.weight, to which the official head is tied; this is another model."
        )
    return loaded(MaskedImageTransformer, config, weights, name, what="MaskGIT", dtype=dtype)


def _config(weights: Mapping[str, Tensor], name: str, num_heads: int | None) -> dict[str, Any]:
    outputs, dim = weights["tok_emb.weight"].shape
    length = weights["pos_emb.weight"].shape[0]
    if round(length**0.5) ** 2 != length:
        raise ValueError(f"{name} has {length} positions; a MaskGIT has a square of them.")
    layers = count_parts(weights, "transformer.layers.")
    return {
        "vocab_size": outputs - 1,
        "dim": dim,
        "num_layers": layers,
        "num_heads": known_heads(PRESETS, dim, layers, num_heads, name),
        "grid_size": round(length**0.5),
        "proj": 2 if "in_proj.weight" in weights else 1,
        "registers": len(weights["reg_tokens.weight"]) if "reg_tokens.weight" in weights else 0,
        "num_classes": weights["cls_emb.weight"].shape[0] - 1,
    }
