"""Official files of MAR and of its KL-16 tokenizer: read, check every key, build the model."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL

from visual_spec.models.continuous.mar import PRESETS, MARTransformer
from visual_spec.models.core.checkpoints import Checkpoint
from visual_spec.models.core.layouts import Given, KeyLayout, count_parts, known_heads, loaded

_MAR = KeyLayout(
    "MAR",
    "the weights under 'model_ema' of checkpoint-last.pth",
    needed={
        "z_proj.weight": 2,
        "class_emb.weight": 2,
        "encoder_pos_embed_learned": 3,
        "diffusion_pos_embed_learned": 3,
        "diffloss.net.input_proj.weight": 2,
        "diffloss.net.final_layer.linear.weight": 2,
    },
    container="model_ema",
)


def unpack_mar(path: Path, content: object) -> Checkpoint | None:
    """The averaged weights in the content of a file of MAR; None: it holds none."""
    averaged = content.get("model_ema") if isinstance(content, Mapping) else None
    return _MAR.contained(path, content) if isinstance(averaged, Mapping) and is_mar(averaged) else None


def load_mar_checkpoint(
    source: Given, *, num_heads: int | None = None, dtype: torch.dtype | None = None
) -> MARTransformer:
    """The model of an official file, `checkpoint-last.pth`, from its averaged weights.

    The released files also hold the arguments of the training run, a Python object that only pickle reads: it is read
    past.
    `source`, `dtype` and errors: see `visual_spec.models.core.layouts`.

    Args:
        num_heads: of a size that is none of `PRESETS`, which cannot be read off the weights.
    """
    weights, name = _MAR.read(source)
    dim, token_dim = weights["z_proj.weight"].shape
    length = weights["diffusion_pos_embed_learned"].shape[1]
    layers = count_parts(weights, "encoder_blocks.")
    kinds = {2 * token_dim: "noise", token_dim: "flow"}
    outputs = weights["diffloss.net.final_layer.linear.weight"].shape[0]
    if outputs not in kinds or round(length**0.5) ** 2 != length:
        raise ValueError(
            f"{name} has {length} slots, and a head of {outputs} outputs for tokens of {token_dim} numbers; a MAR has "
            f"a square of slots, and {2 * token_dim} outputs, or {token_dim} with flow matching."
        )
    config = {
        "grid_size": round(length**0.5),
        "token_dim": token_dim,
        "dim": dim,
        "num_layers": layers,
        "num_heads": known_heads(PRESETS, dim, layers, num_heads, name),
        "head_width": weights["diffloss.net.input_proj.weight"].shape[0],
        "head_depth": count_parts(weights, "diffloss.net.res_blocks."),
        "num_classes": weights["class_emb.weight"].shape[0],
        "buffer_size": weights["encoder_pos_embed_learned"].shape[1] - length,
        "head_kind": kinds[outputs],
    }
    return loaded(MARTransformer, config, weights, name, what="MAR", dtype=dtype)


def load_kl16_checkpoint(source: Given, *, dtype: torch.dtype | None = None, **config: Any) -> AutoencoderKL:
    """The tokenizer of an official file, `kl16.ckpt`, as diffusers' class, for pictures of 256 pixels.

    `source`, `dtype` and errors: see `visual_spec.models.core.layouts`. Official keys are latent diffusion's.

    Args:
        config: arguments of `AutoencoderKL` that differ from `KL16`, e.g. `block_out_channels` of a tokenizer trained
            elsewhere.
    """
    settings = {**KL16, **config}
    weights, name = kl16_layout(len(settings["block_out_channels"])).read(source)
    # diffusers has matrices where latent diffusion has 1 x 1 convolutions.
    matrices = re.compile(r".*\.attentions\..*\.to_.*\.weight")
    weights = {
        key: value[..., 0, 0] if matrices.fullmatch(key) and value.shape[2:] == (1, 1) else value
        for key, value in weights.items()
    }
    return loaded(AutoencoderKL, settings, weights, name, what="KL-16", dtype=dtype)


def is_mar(weights: Mapping[str, object]) -> bool:
    """Return whether these keys are of a MAR. FlowAR's have the same trunk, and another head."""
    return "diffusion_pos_embed_learned" in weights and "flownet.input_proj.weight" not in weights


# Five levels; attention in the last level of the encoder and in the middle of both networks, as in latent diffusion's
# f = 16 autoencoder (Rombach et al. 2022, table 8).
KL16: dict[str, Any] = dict(
    down_block_types=("DownEncoderBlock2D",) * 4 + ("AttnDownEncoderBlock2D",),
    up_block_types=("UpDecoderBlock2D",) * 5,
    block_out_channels=(128, 128, 256, 256, 512),
    layers_per_block=2,
    latent_channels=16,
    norm_num_groups=32,
    sample_size=256,
    scaling_factor=0.2325,
)

_PARTS = {"block": "resnets", "attn": "attentions"}


def kl16_layout(levels: int = 5) -> KeyLayout:
    """Latent diffusion's names of the weights of a KL autoencoder, and diffusers'.

    diffusers' own conversion leaves out the attention inside of a level, and drops keys that it does not know.

    Args:
        levels: of resolution. Latent diffusion counts the decoder's from full resolution, diffusers from the
            latents.
    """
    return KeyLayout(
        "KL-16",
        "kl16.ckpt",
        container="model",
        dropped=(r"loss\..*",),  # a discriminator is part of the training
        renamed={
            r"^(encoder|decoder)\.norm_out\.": r"\1.conv_norm_out.",
            r"\.mid\.(block|attn)_(\d)\.": lambda at: f".mid_block.{_PARTS[at[1]]}.{int(at[2]) - 1}.",
            r"\.down\.(\d+)\.": r".down_blocks.\1.",
            r"\.up\.(\d+)\.": lambda at: f".up_blocks.{levels - 1 - int(at[1])}.",
            r"(_blocks\.-?\d+)\.(block|attn)\.": lambda at: f"{at[1]}.{_PARTS[at[2]]}.",
            r"\.(down|up)sample\.": r".\1samplers.0.",
            r"\.nin_shortcut\.": ".conv_shortcut.",
            r"(\.attentions\.\d+)\.norm\.": r"\1.group_norm.",
            r"(\.attentions\.\d+)\.([qkv])\.": r"\1.to_\2.",
            r"(\.attentions\.\d+)\.proj_out\.": r"\1.to_out.0.",
        },
    )
