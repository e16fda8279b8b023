"""Official files of audiocraft: random weights in its layout, and plain functions that compute in that layout."""

import math
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

from visual_spec.models.next_token.llamagen import TextCondition

BOOKS, CODES, DIM, HEADS, LAYERS, TEXT, HIDDEN = 3, 8, 24, 4, 2, 10, 40
PROJECTION = "condition_provider.conditioners.description.output_proj"

# What the language models of all kinds share.
_LM: dict[str, Any] = {"num_heads": HEADS, "norm_first": True, "activation": "gelu"}
_LM |= {"positional_embedding": "sin", "past_context": None}
SETTINGS: dict[str, Any] = {
    "lm_model": "transformer_lm_magnet",
    "sample_rate": 400,
    "dataset": {"segment_duration": 2},
    "transformer_lm": {
        **_LM,
        **{"causal": False, "subcodes_context": 2, "compression_model_framerate": 4},
        **{"span_len": -1, "segment_duration": 0},
    },
    "codebooks_pattern": {"modeling": "parallel"},
    "masking": {"span_len": 3},
    "fuser": {"cross": ["description"], "sum": [], "prepend": [], "cross_attention_pos_emb": False},
    "conditioners": {"description": {"model": "t5", "t5": {"name": "t5-large"}}},
    "generate": {
        "lm": {
            **{"temp": 3.5, "top_k": 0, "top_p": 0.8},
            **{"max_cfg_coef": 20.0, "min_cfg_coef": 1.0, "decoding_steps": [5, 3, 2]},
        }
    },
}

# Those of a MusicGen, which differ.
MUSICGEN_SETTINGS: dict[str, Any] = {
    "lm_model": "transformer_lm",
    "sample_rate": 400,
    "dataset": {"segment_duration": 2},
    "transformer_lm": {**_LM, "num_layers": LAYERS, "causal": True},
    "codebooks_pattern": {
        "modeling": "delay",
        "delay": {"delays": [0, 1, 2], "flatten_first": 0, "empty_initial": 0},
    },
    "interleave_stereo_codebooks": {"use": False, "per_timestep": False},
    "fuser": SETTINGS["fuser"],
    "conditioners": {"description": {"model": "t5", "t5": {"name": "t5-base"}}},
    "generate": {"lm": {"use_sampling": True, "temp": 1.0, "top_k": 250, "top_p": 0.0}},
}
STEREO_SETTINGS: dict[str, Any] = {
    **MUSICGEN_SETTINGS,
    "codebooks_pattern": {"modeling": "delay", "delay": {"delays": [0, 0, 1, 1, 2, 2]}},
    "interleave_stereo_codebooks": {"use": True, "per_timestep": False},
}

# The settings as they are written: the codec's refer to each other.
_SEANET: dict[str, Any] = dict(
    dimension=6, channels="${channels}", causal="${encodec.causal}", n_filters=4, n_residual_layers=2,
    ratios=[3, 2], activation="ELU", activation_params={"alpha": 1.0}, norm="weight_norm", kernel_size=5,
    residual_kernel_size=3, last_kernel_size=3, dilation_base=2, pad_mode="constant", true_skip=True, compress=2,
    lstm=2, disable_norm_outer_blocks=0, decoder={"trim_right_ratio": 1.0, "final_activation": None}, encoder={},
)  # fmt: skip
CODEC_SETTINGS: dict[str, Any] = {
    "compression_model": "encodec",
    "sample_rate": 400,
    "channels": 1,
    "encodec": {
        "autoencoder": "seanet",
        "quantizer": "rvq",
        "sample_rate": "${sample_rate}",
        "channels": "${channels}",
        "causal": False,
        "renormalize": False,
    },
    "seanet": _SEANET,
    "rvq": {"n_q": BOOKS, "bins": CODES},
}


def changed(settings: dict[str, Any], name: str, value: Any) -> dict[str, Any]:
    """Settings with another value at a dotted name."""
    first, _, rest = name.partition(".")
    inner = changed(settings.get(first) or {}, rest, value) if rest else value
    return {**settings, first: inner}


def random(shapes: dict[str, tuple[int, ...]], seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=generator) * (0.4 if len(shape) > 1 else 0.2)
        + (1.0 if "norm" in name and name.endswith("weight") else 0.0)
        + (2.0 if name.endswith("weight_g") else 0.0)
        for name, shape in shapes.items()
    }


def language_model_weights(books: int = BOOKS) -> dict[str, Tensor]:
    shapes: dict[str, tuple[int, ...]] = {}
    for book in range(books):
        shapes[f"emb.{book}.weight"] = (CODES + 1, DIM)
        shapes[f"linears.{book}.weight"] = (CODES, DIM)
    for layer in range(LAYERS):
        start = f"transformer.layers.{layer}"
        for attention in ("self_attn", "cross_attention"):
            shapes[f"{start}.{attention}.in_proj_weight"] = (3 * DIM, DIM)
            shapes[f"{start}.{attention}.out_proj.weight"] = (DIM, DIM)
        shapes[f"{start}.linear1.weight"] = (HIDDEN, DIM)
        shapes[f"{start}.linear2.weight"] = (DIM, HIDDEN)
        for norm in ("norm1", "norm_cross", "norm2"):
            shapes[f"{start}.{norm}.weight"] = shapes[f"{start}.{norm}.bias"] = (DIM,)
    shapes["out_norm.weight"] = shapes["out_norm.bias"] = (DIM,)
    shapes[f"{PROJECTION}.weight"], shapes[f"{PROJECTION}.bias"] = (DIM, TEXT), (DIM,)
    return random(shapes)


def codec_weights() -> dict[str, Tensor]:
    shapes: dict[str, tuple[int, ...]] = {}

    def conv(name: str, inputs: int, outputs: int, kernel: int) -> None:
        shapes[f"{name}.weight_g"] = (outputs, 1, 1)
        shapes[f"{name}.weight_v"] = (outputs, inputs, kernel)
        shapes[f"{name}.bias"] = (outputs,)

    def residual(name: str, channels: int) -> None:
        conv(f"{name}.block.1.conv.conv", channels, channels // 2, 3)
        conv(f"{name}.block.3.conv.conv", channels // 2, channels, 1)

    def lstm(name: str, channels: int) -> None:
        for layer in range(2):
            for part in ("ih", "hh"):
                shapes[f"{name}.lstm.weight_{part}_l{layer}"] = (4 * channels, channels)
                shapes[f"{name}.lstm.bias_{part}_l{layer}"] = (4 * channels,)

    conv("encoder.model.0.conv.conv", 1, 4, 5)
    for place, channels, ratio in ((1, 4, 2), (5, 8, 3)):
        residual(f"encoder.model.{place}", channels)
        residual(f"encoder.model.{place + 1}", channels)
        conv(f"encoder.model.{place + 3}.conv.conv", channels, 2 * channels, 2 * ratio)
    lstm("encoder.model.9", 16)
    conv("encoder.model.11.conv.conv", 16, 6, 3)
    conv("decoder.model.0.conv.conv", 6, 16, 5)
    lstm("decoder.model.1", 16)
    for place, channels, ratio in ((3, 16, 3), (7, 8, 2)):
        name = f"decoder.model.{place}.convtr.convtr"
        conv(name, channels // 2, channels, 2 * ratio)  # a transposed convolution has its inputs first
        shapes[f"{name}.bias"] = (channels // 2,)
        residual(f"decoder.model.{place + 1}", channels // 2)
        residual(f"decoder.model.{place + 2}", channels // 2)
    conv("decoder.model.11.conv.conv", 4, 1, 3)
    for book in range(BOOKS):
        start = f"quantizer.vq.layers.{book}._codebook"
        shapes |= {f"{start}.inited": (1,), f"{start}.cluster_size": (CODES,)}
        shapes |= {f"{start}.embed": (CODES, 6), f"{start}.embed_avg": (CODES, 6)}
    return random(shapes, 1)


def write(folder: Path, name: str, weights: dict[str, Tensor], settings: dict[str, Any] | None) -> Path:
    content: dict[str, Any] = {"best_state": weights, "version": "1.4.0a1", "exported": True}
    if settings is not None:
        content["xp.cfg"] = yaml.safe_dump(settings)
    path = folder / name
    torch.save(content, path)
    return path


def write_language_model(
    folder: Path,
    settings: dict[str, Any] | None = SETTINGS,
    changes: dict[str, Any] | None = None,
    books: int = BOOKS,
) -> Path:
    weights = language_model_weights(books)
    weights.update(changes or {})
    return write(folder, "state_dict.bin", {k: v for k, v in weights.items() if v is not None}, settings)


def straight_logits(
    weights: dict[str, Tensor], codes: Tensor, features: Tensor, mask: Tensor, allowed: Tensor
) -> Tensor:
    """Logits [T, K, V] for inputs [K, T] of one clip, with text features [S, C]; in float64.

    allowed: bool [T, T], the frames that each frame sees.
    """
    w = {name: value.double() for name, value in weights.items()}
    books, count = codes.shape
    half = torch.arange(DIM // 2, dtype=torch.float64)
    phase = torch.arange(count, dtype=torch.float64)[:, None] / 10_000 ** (half / (DIM // 2 - 1))
    x = torch.cat([phase.cos(), phase.sin()], 1)
    for book in range(books):
        x = x + w[f"emb.{book}.weight"][codes[book]]
    text = (features.double() @ w[f"{PROJECTION}.weight"].T + w[f"{PROJECTION}.bias"]) * mask[:, None]

    def norm(name: str, x: Tensor) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        return (
            centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt() * w[f"{name}.weight"]
            + w[f"{name}.bias"]
        )

    def attention(name: str, queries: Tensor, keys: Tensor, allowed: Tensor) -> Tensor:
        packed = w[f"{name}.in_proj_weight"]
        q, k, v = queries @ packed[:DIM].T, keys @ packed[DIM : 2 * DIM].T, keys @ packed[2 * DIM :].T
        size, outputs = DIM // HEADS, []
        for head in range(HEADS):
            at = slice(head * size, (head + 1) * size)
            scores = q[:, at] @ k[:, at].T / math.sqrt(size)
            outputs.append(scores.masked_fill(~allowed, -math.inf).softmax(-1) @ v[:, at])
        return torch.cat(outputs, 1) @ w[f"{name}.out_proj.weight"].T

    for layer in range(LAYERS):
        start = f"transformer.layers.{layer}"
        normed = norm(f"{start}.norm1", x)
        x = x + attention(f"{start}.self_attn", normed, normed, allowed)
        everything = torch.ones(count, len(text), dtype=torch.bool)  # padding is attended to, as zeros
        x = x + attention(f"{start}.cross_attention", norm(f"{start}.norm_cross", x), text, everything)
        hidden = norm(f"{start}.norm2", x) @ w[f"{start}.linear1.weight"].T
        hidden = hidden * (1 + torch.erf(hidden / math.sqrt(2))) / 2
        x = x + hidden @ w[f"{start}.linear2.weight"].T
    x = norm("out_norm", x)
    return torch.stack([x @ w[f"linears.{book}.weight"].T for book in range(books)], 1)


def clips() -> tuple[TextCondition, Tensor]:
    """Two captions, one with padding, and clips of 8 frames with hidden codes."""
    generator = torch.Generator().manual_seed(5)
    features = torch.randn(2, 4, TEXT, generator=generator)
    mask = torch.tensor([[True, True, True, True], [True, True, False, False]])
    codes = torch.randint(0, CODES + 1, (2, BOOKS, 8), generator=generator)
    return TextCondition(features, mask), codes
