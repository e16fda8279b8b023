"""Official files of ACDiT: the weights under 'model', and the arguments of the training run, which no weight tells."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch

from visual_spec.models.core.checkpoints import Checkpoint, read_by
from visual_spec.models.core.layouts import Given, KeyLayout, count_parts, loaded
from visual_spec.models.core.settings import whole
from visual_spec.prototype.acdit.model import ACDiTTransformer

_ACDIT = KeyLayout(
    "ACDiT",
    "an official file, such as ACDiT-XL-img.pt",
    needed={
        "x_embedder.weight": 2,
        "y_embedder.embedding_table.weight": 2,
        "t_embedder.mlp.0.weight": 2,
        "blocks.0.attn.q_norm.weight": 1,
    },
    keep='{"model": c["model"], "args": c["args"]}',
)
_ARGUMENTS = ("block_size", "image_size", "vae_patch_pixels", "patch_size", "num_frames")
_HEAD = 64  # numbers of an attention head, in every release


def load_acdit_checkpoint(
    source: Given, *, arguments: Mapping[str, Any] | None = None, dtype: torch.dtype | None = None
) -> ACDiTTransformer:
    """The model of an official file, `ACDiT-XL-img.pt`, of pictures or clips.

    Its arguments are an argparse.Namespace, which is read as plain attributes; any other Python object is refused.
    `source`, `dtype` and errors: see `visual_spec.models.core.layouts`.

    Args:
        arguments: of the training run, by name, where the source does not hold them: block_size, image_size,
            vae_patch_pixels, patch_size, num_frames; nd_split, if it was set.
    """
    if not isinstance(source, Mapping):
        source = read_by(source, lambda path, content: None, _ACDIT.keep)
    weights, name = _ACDIT.read(source)
    held = source.arguments if isinstance(source, Checkpoint) else {}
    said = held if arguments is None else arguments
    absent = [key for key in _ARGUMENTS if key not in said]
    if absent:
        raise ValueError(
            f"{name} does not hold {', '.join(absent)} of its training run, which no weight tells; pass the official "
            "file with its 'args', or arguments={...} with their values."
        )
    sizes = {key: whole(key, said[key]) for key in _ARGUMENTS}
    split = said.get("nd_split")
    if split is not None and not re.fullmatch(r"\d+(_\d+)*", str(split)):
        raise ValueError(f"{name} has nd_split={split!r}; it is numbers with _ between them, as 1_1.")
    dim, token_dim = weights["x_embedder.weight"].shape
    config = {
        "grid_size": sizes["image_size"] // sizes["vae_patch_pixels"] // sizes["patch_size"],
        "token_dim": token_dim,
        "block_size": sizes["block_size"],
        "frames": sizes["num_frames"],
        "dim": dim,
        "num_layers": count_parts(weights, "blocks."),
        "num_heads": dim // _HEAD,
        "num_classes": weights["y_embedder.embedding_table.weight"].shape[0] - 1,
        "axis_shares": None if split is None else [int(part) for part in str(split).split("_")],
    }
    return loaded(ACDiTTransformer, config, weights, name, what="ACDiT", dtype=dtype)


def is_acdit(weights: Mapping[str, Any]) -> bool:
    """Return whether these keys are of an ACDiT."""
    return {"x_embedder.weight", "blocks.0.attn.q_norm.weight", "y_embedder.embedding_table.weight"} <= {
        *weights
    }
