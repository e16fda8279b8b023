"""Official files of the Halton sampler's MaskGIT: read, check every key, build the model."""

from __future__ import annotations

import torch

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
    outputs, dim = weights["tok_emb.weight"].shape
    length, layers = len(weights["pos_emb.weight"]), count_parts(weights, "transformer.layers.")
    if round(length**0.5) ** 2 != length:
        raise ValueError(f"{name} has {length} positions; a MaskGIT has a square of them.")
    config = {
        "vocab_size": outputs - 1,
        "dim": dim,
        "num_layers": layers,
        "num_heads": known_heads(PRESETS, dim, layers, num_heads, name),
        "grid_size": round(length**0.5),
        "proj": 2 if "in_proj.weight" in weights else 1,
        "registers": len(weights.get("reg_tokens.weight", ())),
        "num_classes": len(weights["cls_emb.weight"]) - 1,
    }
    head = weights.pop(_TIED, None)
    if head is not None and not torch.equal(head, weights["tok_emb.weight"]):
        raise ValueError(
            f"{name}: {_TIED} differs from tok_emb.weight, to which the official head is tied; this is another model."
        )
    return loaded(MaskedImageTransformer, config, weights, name, what="MaskGIT", dtype=dtype)
