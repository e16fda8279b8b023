"""Files of causal students of Wan as diffusers' `WanTransformer3DModel`: Self-Forcing and those with its layout.

All have the keys of Wan's own program after a prefix "model.", and where FSDP saved them names of its wrappers in the
keys; Wan's official files have no prefix, and are read as well. What differs is where the weights stand:

| release | file | weights |
|:--|:--|:--|
| Self-Forcing (guandeh17) | `self_forcing_dmd.pt` | "generator_ema" |
| Causal-Forcing (thu-ml) | `causal_forcing.pt`, `framewise-2step.pt` | "generator_ema", or else "generator" |
| LongLive (NVlabs, 1.0) | `longlive_base.pt` and `lora.pt` | "generator"; and "generator_lora" of PEFT, added here |
| LongLive 2.0 (a Wan 2.2 of 5B) | `model_bf16.pt` | "generator" |
| Krea realtime (14B) | `krea-realtime-video-14b.safetensors` | bare |

    transformer = load_self_forcing("longlive_base.pt", lora="lora.pt")
    pipe = WanPipeline.from_pretrained("Wan-AI/Wan2.1-T2V-1.3B-Diffusers", transformer=transformer)
    visual_spec.accelerate(pipe, "sink-window:sink=3,window=12")

Chunks and steps of each: `docs/MODELS.md`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from diffusers.models.transformers.transformer_wan import WanTransformer3DModel
from torch import Tensor

from visual_spec.models.core.checkpoints import Checkpoint, Source, fill, read_checkpoint
from visual_spec.models.core.layouts import KeyLayout, count_parts
from visual_spec.models.core.saved import some

HEAD_DIM = 128  # of all official sizes: 12 heads in the 1.3B, 40 in the 14B

_WAN = KeyLayout(
    "Wan",
    "a file of Self-Forcing or of Wan 2.1; a folder of diffusers is loaded by WanTransformer3DModel.from_pretrained",
    needed={
        "patch_embedding.weight": 5,
        "proj_out.weight": 2,
        "condition_embedder.time_proj.weight": 2,
        "condition_embedder.text_embedder.linear_1.weight": 2,
        "condition_embedder.time_embedder.linear_1.weight": 2,
        "blocks.0.ffn.net.0.proj.weight": 2,
    },
    renamed={
        r"^(base_model\.model\.)?(model\.)?": "",
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
    },
)


def is_wan(checkpoint: Checkpoint) -> bool:
    """Return whether a file has the keys of Wan's own program."""
    return any(key.endswith("time_projection.1.weight") for key in checkpoint.weights)


def is_lora(checkpoint: Checkpoint) -> bool:
    """Return whether a file has low-rank changes of a Wan, as LongLive's `lora.pt`."""
    return any(".lora_A." in key and "blocks." in key for key in checkpoint.weights)


def load_self_forcing(
    source: Source,
    *,
    lora: Source | None = None,
    lora_scale: float = 1.0,
    head_dim: int = HEAD_DIM,
    dtype: torch.dtype | None = None,
) -> WanTransformer3DModel:
    """Load Self-Forcing's transformer, or another one of Wan's layout that draws from text.

    `source`, `dtype` and errors: see `visual_spec.models.core.layouts`. Keys are listed by their names in diffusers.

    Args:
        lora: a file of low-rank changes to add to the weights, or its content.
        lora_scale: alpha / rank of these, which the file does not tell; 1 of LongLive.
        head_dim: channels of a head, which the file does not tell.
    """
    weights, name = _WAN.read(source)
    if lora is not None:
        _add_lora(weights, lora if isinstance(lora, Checkpoint) else read_checkpoint(lora), lora_scale)
    if pictures := [key for key in weights if key.startswith("img_emb.") or ".k_img." in key]:
        raise ValueError(
            f"{name} is a Wan that takes pictures ({some(pictures)}); pass one that draws from text alone, such as "
            "Self-Forcing's."
        )
    dim, channels, *patch = weights["patch_embedding.weight"].shape
    if dim % head_dim:
        raise ValueError(
            f"{name} is {dim} wide, no multiple of head_dim={head_dim}; the heads cannot be read off a file, so pass "
            "the head_dim it was made with."
        )
    patch_values = patch[0] * patch[1] * patch[2]
    config: dict[str, Any] = dict(
        patch_size=tuple(patch),
        num_attention_heads=dim // head_dim,
        attention_head_dim=head_dim,
        in_channels=channels,
        out_channels=len(weights["proj_out.weight"]) // patch_values,
        text_dim=weights["condition_embedder.text_embedder.linear_1.weight"].shape[1],
        freq_dim=weights["condition_embedder.time_embedder.linear_1.weight"].shape[1],
        ffn_dim=len(weights["blocks.0.ffn.net.0.proj.weight"]),
        num_layers=count_parts(weights, "blocks."),
        cross_attn_norm="blocks.0.norm2.weight" in weights,
        qk_norm="rms_norm_across_heads",
    )
    with torch.device("meta"):
        model = WanTransformer3DModel(**config)
    # A buffer that is computed, not read.
    model.rope = type(model.rope)(head_dim, config["patch_size"], model.config["rope_max_seq_len"])
    return fill(model, weights, name, what="Wan", dtype=dtype)


def _add_lora(weights: dict[str, Tensor], lora: Checkpoint, scale: float) -> None:
    """Add products of low-rank pairs, in the accuracy of float32, to the weights that they change."""
    parts = replace(_WAN, needed={}).translated(lora.weights, str(lora.path))
    changed: dict[str, Tensor] = {}
    for key, down in parts.items():
        if key.endswith(".lora_B.weight"):
            continue
        name, up = key.removesuffix(".lora_A.weight"), parts.get(key.replace(".lora_A.", ".lora_B."))
        weight = weights.get(f"{name}.weight")
        if (
            weight is None
            or up is None
            or weight.shape != (len(up), down.shape[-1])
            or len(down) != up.shape[-1]
        ):
            raise ValueError(
                f"{lora.path} does not fit: {key} {list(down.shape)} changes no weight of the transformer; pass the "
                "LoRA that was trained on it."
            )
        changed[f"{name}.weight"] = (weight.float() + scale * (up.float() @ down.float())).to(weight.dtype)
    if len(changed) * 2 != len(parts):
        raise ValueError(
            f"{lora.path} has {len(parts)} tensors, no pairs of lora_A and lora_B; pass such a file."
        )
    weights |= changed
