"""Official files of MAR and of its KL-16 tokenizer: read, check every key, build the model."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
from torch import Tensor

from visual_spec.models.continuous.mar import PRESETS, MARTransformer
from visual_spec.models.core.checkpoints import fill, plain_weights, read_content

Weights = str | os.PathLike | Mapping[str, Tensor]


def load_mar_checkpoint(
    source: Weights, *, num_heads: int | None = None, dtype: torch.dtype | None = None
) -> MARTransformer:
    """The model of an official file, `checkpoint-last.pth`, from its averaged weights.

    The released files also hold the arguments of the training run, a Python object that only pickle reads: they are
    refused, with a command that saves the weights alone.

    Args:
        source: the file, a safetensors file of its weights, or a state dict with official keys.
        num_heads: of a size that is none of `PRESETS`, which cannot be read off the weights.
        dtype: of the weights; None keeps that of the file.

    Raises:
        ValueError, OSError: as `read_content`; weights that are not MAR's; missing, unexpected or mis-shaped keys,
            which are listed.
    """
    weights, name = _weights_of(source, "model_ema")
    config = _read_config(weights, name, num_heads)
    with torch.device("meta"):
        model = MARTransformer(**config)
    return fill(model, weights, name, what=f"MAR of {config}", dtype=dtype)


def load_kl16_checkpoint(
    source: Weights, *, dtype: torch.dtype | None = None, **config: Any
) -> AutoencoderKL:
    """The tokenizer of an official file, `kl16.ckpt`, as diffusers' class, for pictures of 256 pixels.

    Args:
        source: the file, a safetensors file of its weights, or a state dict with its keys, latent diffusion's.
        dtype: of the weights; None keeps that of the file.
        config: arguments of `AutoencoderKL` that differ from `KL16`, e.g. `block_out_channels` of a tokenizer trained
            elsewhere.

    Raises:
        ValueError, OSError: as `load_mar_checkpoint`.
    """
    weights, name = _weights_of(source, "model")
    # A discriminator is part of the training, and the official loader leaves it out as well.
    config = {**KL16, **config}
    levels = len(config["block_out_channels"])
    weights = {kl16_key(key, levels): value for key, value in weights.items() if not key.startswith("loss.")}
    weights = {
        key: value[..., 0, 0] if _is_projection(key) and value.shape[2:] == (1, 1) else value
        for key, value in weights.items()
    }
    with torch.device("meta"):
        model = AutoencoderKL(**config)
    return fill(model, weights, name, what="KL-16", dtype=dtype)


def is_mar(weights: Mapping[str, Any]) -> bool:
    """Whether these keys are of a MAR."""
    return "diffusion_pos_embed_learned" in weights


def is_kl16(weights: Mapping[str, Any]) -> bool:
    """Whether these keys are of KL-16: latent diffusion's, without the codes of other tokenizers that have them."""
    return "post_quant_conv.weight" in weights and not any(key.startswith("quantize") for key in weights)


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

_ATTENTION = {"norm": "group_norm", "q": "to_q", "k": "to_k", "v": "to_v", "proj_out": "to_out.0"}


def kl16_key(key: str, levels: int = 5) -> str:
    """diffusers' name of a weight that latent diffusion calls `key`; names that are nobody's stay as they are.

    Args:
        levels: of resolution.
    """
    if found := re.fullmatch(r"(encoder|decoder)\.norm_out\.(\w+)", key):
        return f"{found[1]}.conv_norm_out.{found[2]}"
    if found := re.fullmatch(r"(encoder|decoder)\.(mid|down|up)\.(.+)", key):
        network, part, rest = found.groups()
        if part == "mid":
            rest = re.sub(
                r"^(block|attn)_(\d)\.",
                lambda m: f"{'resnets' if m[1] == 'block' else 'attentions'}.{int(m[2]) - 1}.",
                rest,
            )
            rest = f"{network}.mid_block.{rest}"
        else:
            level, _, rest = rest.partition(".")
            # Latent diffusion counts the decoder's levels from full resolution, diffusers from the latents.
            number = int(level) if part == "down" else levels - 1 - int(level)
            for ours, theirs in (("block.", "resnets."), ("attn.", "attentions.")):
                rest = theirs + rest.removeprefix(ours) if rest.startswith(ours) else rest
            rest = re.sub(r"^(down|up)sample\.", r"\1samplers.0.", rest)
            rest = f"{network}.{part}_blocks.{number}.{rest}"
        rest = rest.replace(".nin_shortcut.", ".conv_shortcut.")
        if ".attentions." in rest:
            head, _, kind = rest.rpartition(".")
            head, _, layer = head.rpartition(".")
            return f"{head}.{_ATTENTION.get(layer, layer)}.{kind}"
        return rest
    return key


def _is_projection(key: str) -> bool:
    """Whether diffusers has a matrix where latent diffusion has a 1 x 1 convolution."""
    return ".attentions." in key and ".to_" in key and key.endswith(".weight")


def _weights_of(source: Weights, container: str) -> tuple[dict[str, Tensor], str]:
    """Tensors by key, and what to call the source."""
    if isinstance(source, Mapping):
        return plain_weights(source, "the state dict"), "the state dict"
    path = Path(source)
    content = read_content(path, keep=f'{{"{container}": c["{container}"]}}')
    inner = content.get(container, content) if isinstance(content, Mapping) else content
    if not isinstance(inner, Mapping) or not all(isinstance(value, Tensor) for value in inner.values()):
        held = ", ".join(map(str, content)) if isinstance(content, Mapping) else type(content).__name__
        raise ValueError(
            f"{path} holds no dict of weights, neither under {container!r} nor by itself, but {held}; keep the key "
            f"{container!r} of the official file."
        )
    return plain_weights(inner, str(path)), str(path)


def _read_config(weights: Mapping[str, Tensor], name: str, num_heads: int | None) -> dict[str, Any]:
    needed = {
        "z_proj.weight": 2,
        "class_emb.weight": 2,
        "encoder_pos_embed_learned": 3,
        "diffusion_pos_embed_learned": 3,
        "diffloss.net.input_proj.weight": 2,
        "diffloss.net.final_layer.linear.weight": 2,
    }
    absent = [key for key, rank in needed.items() if key not in weights or weights[key].ndim != rank]
    if absent:
        raise ValueError(
            f"{name} is no MAR: it lacks {', '.join(absent)}, or has them in other shapes; pass the weights under "
            "'model_ema' of checkpoint-last.pth."
        )
    dim, token_dim = weights["z_proj.weight"].shape
    length = weights["diffusion_pos_embed_learned"].shape[1]
    layers = _count(weights, "encoder_blocks.")
    if num_heads is None:
        found = [p["num_heads"] for p in PRESETS.values() if (p["dim"], p["num_layers"]) == (dim, layers)]
        if not found:
            raise ValueError(
                f"{name} has width {dim} and {layers} layers, and is none of MAR-{', MAR-'.join(PRESETS)}; pass "
                "num_heads, which cannot be read off the weights."
            )
        num_heads = found[0]
    kinds = {2 * token_dim: "noise", token_dim: "flow"}
    outputs = weights["diffloss.net.final_layer.linear.weight"].shape[0]
    if outputs not in kinds or round(length**0.5) ** 2 != length:
        raise ValueError(
            f"{name} has {length} slots, and a head of {outputs} outputs for tokens of {token_dim} numbers; a MAR has "
            f"a square of slots, and {2 * token_dim} outputs, or {token_dim} with flow matching."
        )
    return {
        "grid_size": round(length**0.5),
        "token_dim": token_dim,
        "dim": dim,
        "num_layers": layers,
        "num_heads": num_heads,
        "head_width": weights["diffloss.net.input_proj.weight"].shape[0],
        "head_depth": _count(weights, "diffloss.net.res_blocks."),
        "num_classes": weights["class_emb.weight"].shape[0],
        "buffer_size": weights["encoder_pos_embed_learned"].shape[1] - length,
        "head_kind": kinds[outputs],
    }


def _count(weights: Mapping[str, Tensor], start: str) -> int:
    return len({key[len(start) :].split(".")[0] for key in weights if key.startswith(start)})
