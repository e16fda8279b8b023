"""Self-Forcing's checkpoint files as diffusers' `WanTransformer3DModel`.

`self_forcing_dmd.pt` (guandeh17/Self-Forcing) holds the averaged weights under "generator_ema", with the keys of Wan's
own program behind a prefix "model."; files of training runs hold "generator", too, and names of FSDP's wrappers in the
keys. Wan's official files have the same keys without a prefix, and are read as well.

    transformer = load_self_forcing("self_forcing_dmd.pt")
    pipe = WanPipeline.from_pretrained("Wan-AI/Wan2.1-T2V-1.3B-Diffusers", transformer=transformer)
    visual_spec.accelerate(pipe, "deep-forcing")
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from diffusers.models.transformers.transformer_wan import WanTransformer3DModel
from torch import Tensor

from visual_spec.models.core.checkpoints import Checkpoint, Source, fill, read_checkpoint, some

HEAD_DIM = 128  # of all official sizes: 12 heads in the 1.3B, 40 in the 14B

_WRAPPERS = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")

# Parts of official keys, and what diffusers calls them.
_NAMES = {
    r"^text_embedding\.0\.": "condition_embedder.text_embedder.linear_1.",
    r"^text_embedding\.2\.": "condition_embedder.text_embedder.linear_2.",
    r"^time_embedding\.0\.": "condition_embedder.time_embedder.linear_1.",
    r"^time_embedding\.2\.": "condition_embedder.time_embedder.linear_2.",
    r"^time_projection\.1\.": "condition_embedder.time_proj.",
    r"^head\.head\.": "proj_out.",
    r"^head\.modulation$": "scale_shift_table",
    r"(^blocks\.\d+)\.modulation$": r"\1.scale_shift_table",
    r"(^blocks\.\d+)\.norm3\.": r"\1.norm2.",
    r"(^blocks\.\d+)\.ffn\.0\.": r"\1.ffn.net.0.proj.",
    r"(^blocks\.\d+)\.ffn\.2\.": r"\1.ffn.net.2.",
    r"(^blocks\.\d+)\.self_attn\.": r"\1.attn1.",
    r"(^blocks\.\d+)\.cross_attn\.": r"\1.attn2.",
    r"(\.attn[12])\.([qkv])\.": r"\1.to_\2.",
    r"(\.attn[12])\.o\.": r"\1.to_out.0.",
}


def is_wan(checkpoint: Checkpoint) -> bool:
    """Whether a file has the keys of Wan's own program."""
    return any(key.endswith("time_projection.1.weight") for key in checkpoint.weights)


def load_self_forcing(
    source: Source, *, head_dim: int = HEAD_DIM, dtype: torch.dtype | None = None
) -> WanTransformer3DModel:
    """Load Self-Forcing's transformer, or another one of Wan's layout that draws from text.

    Args:
        source: an official file, or its content.
        head_dim: channels of a head, which the file does not tell.
        dtype: to cast the weights to; None keeps that of the file.

    Raises:
        FileNotFoundError, IsADirectoryError, ValueError: there is no such file, it needs pickle, or its keys are not
            those of a Wan; the message lists missing, unexpected and mis-shaped ones, by their names in diffusers.
    """
    checkpoint = source if isinstance(source, Checkpoint) else read_checkpoint(source)
    name = str(checkpoint.path)
    if not is_wan(checkpoint):
        raise ValueError(
            f"{name} holds another architecture: none of its {len(checkpoint.weights)} keys "
            f"({some(checkpoint.weights)}) is time_projection.1.weight. Pass a file of Self-Forcing or of Wan 2.1; a "
            "folder of diffusers is loaded by WanTransformer3DModel.from_pretrained."
        )
    weights = _official(checkpoint)
    if pictures := [key for key in weights if key.startswith("img_emb.") or ".k_img." in key]:
        raise ValueError(
            f"{name} is a Wan that takes pictures ({some(pictures)}); pass one that draws from text alone, such as "
            "Self-Forcing's."
        )
    config = _config(weights, name, head_dim)
    with torch.device("meta"):
        model = WanTransformer3DModel(**config)
    # A buffer that is computed, not read.
    model.rope = type(model.rope)(head_dim, config["patch_size"], model.config["rope_max_seq_len"])
    return fill(
        model, {_renamed(key): value for key, value in weights.items()}, name, what="Wan", dtype=dtype
    )


def _official(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """The weights by their official keys, without prefixes and the names of wrappers."""
    found: dict[str, Tensor] = {}
    for key, value in checkpoint.weights.items():
        bare = key
        for wrapper in _WRAPPERS:
            bare = bare.replace(wrapper, "")
        bare = bare.removeprefix("model.")
        if bare in found:
            raise ValueError(f"{checkpoint.path} has {bare} twice, once as {key}; pass a file with one set.")
        found[bare] = value
    return found


def _renamed(key: str) -> str:
    for pattern, name in _NAMES.items():
        key = re.sub(pattern, name, key)
    return key


def _config(weights: Mapping[str, Tensor], name: str, head_dim: int) -> dict[str, Any]:
    """The sizes that the weights show."""

    def shape(key: str, axes: int) -> tuple[int, ...]:
        if key not in weights or weights[key].ndim != axes:
            what = "is missing" if key not in weights else f"is {list(weights[key].shape)}"
            raise ValueError(f"{name} does not fit Wan: {key} {what}; pass the official file.")
        return tuple(weights[key].shape)

    dim, channels, *patch = shape("patch_embedding.weight", 5)
    if dim % head_dim:
        raise ValueError(
            f"{name} is {dim} wide, no multiple of head_dim={head_dim}; the heads cannot be read off a file, so pass "
            "the head_dim it was made with."
        )
    blocks = {match[1] for key in weights if (match := re.match(r"blocks\.(\d+)\.", key))}
    patch_values = patch[0] * patch[1] * patch[2]
    return dict(
        patch_size=tuple(patch),
        num_attention_heads=dim // head_dim,
        attention_head_dim=head_dim,
        in_channels=channels,
        out_channels=shape("head.head.weight", 2)[0] // patch_values,
        text_dim=shape("text_embedding.0.weight", 2)[1],
        freq_dim=shape("time_embedding.0.weight", 2)[1],
        ffn_dim=shape("blocks.0.ffn.0.weight", 2)[0],
        num_layers=len(blocks),
        cross_attn_norm="blocks.0.norm3.weight" in weights,
        qk_norm="rms_norm_across_heads",
    )
