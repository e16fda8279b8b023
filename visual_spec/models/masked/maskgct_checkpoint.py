"""Official files of MaskGCT (`amphion/MaskGCT`): read, check every key, build the models."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from visual_spec.models.core.checkpoints import Checkpoint, Source
from visual_spec.models.core.layouts import KeyLayout, count_parts, loaded
from visual_spec.models.masked.maskgct import AcousticNetwork, SemanticNetwork
from visual_spec.models.masked.maskgct_codec import AcousticCodec, SemanticCodec

# Weights that tell each kind of file; files hold others, too.
_LAYOUTS = {
    kind: KeyLayout(f"{kind} of MaskGCT", "the official file", dict.fromkeys(telling, 0), tuple(dropped))
    for kind, telling, *dropped in (
        ("semantic network", ("phone_emb.weight", "to_logit.weight")),
        ("acoustic network", ("layer_emb.weight", "token_emb.0.weight")),
        ("acoustic encoder", ("block.0.weight_v", "block.1.block.0.block.0.alpha")),
        ("acoustic decoder", ("quantizer.quantizers.0.codebook.weight", "model.head.out.weight")),
        # The decoder, which makes features of codes, is of training only.
        (
            "semantic codec",
            ("quantizer.quantizers.0.codebook.weight", "encoder.0.embed.weight"),
            r"decoder\..*",
        ),
        ("statistics", ("mean", "var")),
    )
}


def kind_of(checkpoint: Checkpoint) -> str | None:
    """Return which of MaskGCT's files it is, a key of `_LAYOUTS`; None: another model's."""
    kinds = [kind for kind, layout in _LAYOUTS.items() if layout.needed.keys() <= checkpoint.weights.keys()]
    return kinds[0] if kinds else None


def load_semantic_network(
    source: Source, *, num_heads: int = 16, dtype: torch.dtype | None = None
) -> SemanticNetwork:
    """The text-to-semantic network, of `t2s_model/model.safetensors`.

    `source`, `dtype` and errors: see `visual_spec.models.core.layouts`.

    Args:
        num_heads: cannot be read off the weights; the default is the official one.
    """
    weights, name = _LAYOUTS["semantic network"].read(source)
    vocab, dim = weights["to_logit.weight"].shape
    config = {
        "vocab_size": vocab,
        "hidden_size": dim,
        "num_layers": count_parts(weights, "diff_estimator.layers."),
        "num_heads": num_heads,
        "phones": len(weights["phone_emb.weight"]),
    }
    return loaded(SemanticNetwork, config, weights, name, what="MaskGCT's text-to-semantic", dtype=dtype)


def load_acoustic_network(
    source: Source, *, num_heads: int = 16, dtype: torch.dtype | None = None
) -> AcousticNetwork:
    """A semantic-to-acoustic network, of `s2a_model/s2a_model_1layer/model.safetensors` or `s2a_model_full`.

    Arguments and errors as `load_semantic_network`.
    """
    weights, name = _LAYOUTS["acoustic network"].read(source)
    vocab, dim = weights["token_emb.0.weight"].shape
    config = {
        "codebooks": len(weights["layer_emb.weight"]),
        "vocab_size": vocab,
        "semantic_codes": len(weights.get("cond_emb.weight", ())),
        "hidden_size": dim,
        "num_layers": count_parts(weights, "diff_estimator.layers."),
        "num_heads": num_heads,
    }
    # The official network is a LlamaModel for 0 words.
    if weights.get("diff_estimator.embed_tokens.weight", torch.ones(1)).numel() == 0:
        del weights["diff_estimator.embed_tokens.weight"]
    return loaded(AcousticNetwork, config, weights, name, what="MaskGCT's semantic-to-acoustic", dtype=dtype)


def load_acoustic_codec(
    encoder: Source, decoder: Source, *, sampling_rate: int = 24_000, dtype: torch.dtype | None = None
) -> AcousticCodec:
    """The acoustic codec, of `acoustic_codec/model.safetensors` and `acoustic_codec/model_1.safetensors`.

    The sampling rate cannot be read off the weights. The rest is as in `load_semantic_network`.
    """
    inward, name = _LAYOUTS["acoustic encoder"].read(encoder)
    weights, other = _LAYOUTS["acoustic decoder"].read(decoder)
    window = weights.pop("model.head.istft.window", None)
    frame = len(weights["model.head.out.weight"]) - 2
    if window is not None and not torch.allclose(window.float(), torch.hann_window(frame), atol=1e-6):
        raise ValueError(
            f"{other}: model.head.istft.window is no Hann window of {frame}; pass the official file."
        )
    blocks = count_parts(inward, "block.") - 3
    strides = [inward[f"block.{i}.block.4.weight_v"].shape[-1] // 2 for i in range(1, blocks + 1)]
    books, codes = (
        count_parts(weights, "quantizer.quantizers."),
        weights["quantizer.quantizers.0.codebook.weight"],
    )
    hidden, dim = weights["model.backbone.convnext.0.pwconv1.weight"].shape
    config = {
        "codebooks": books,
        "vocab_size": len(codes),
        "code_dim": codes.shape[1],
        "latent_dim": weights["model.backbone.embed.weight"].shape[1],
        "encoder_dim": len(inward["block.0.weight_v"]),
        "strides": strides,
        "vocos_dim": dim,
        "vocos_hidden": hidden,
        "vocos_layers": count_parts(weights, "model.backbone.convnext."),
        "frame_size": frame,
        "sampling_rate": sampling_rate,
    }
    inner = {
        f"encoder.{key}": value for key, value in _encoder(blocks).translated(_folded(inward), name).items()
    }
    parts, files = _folded(weights) | inner, f"{name} with {other}"
    return loaded(AcousticCodec, config, parts, files, what="MaskGCT's acoustic codec", dtype=dtype)


def load_semantic_codec(
    source: Source, statistics: Source, *, feature_layer: int = 17, dtype: torch.dtype | None = None
) -> SemanticCodec:
    """The codec of semantic codes, of `semantic_codec/model.safetensors` and `wav2vec2bert_stats.pt`.

    The layer of the features cannot be read off the weights. The rest is as in `load_semantic_network`.
    """
    weights, name = _LAYOUTS["semantic codec"].read(source)
    moments, _ = _LAYOUTS["statistics"].read(statistics)
    codes = weights["quantizer.quantizers.0.codebook.weight"]
    hidden, dim = weights["encoder.0.convnext.0.pwconv1.weight"].shape
    config = {
        "vocab_size": len(codes),
        "code_dim": codes.shape[1],
        "feature_dim": weights["encoder.0.embed.weight"].shape[1],
        "feature_layer": feature_layer,
        "vocos_dim": dim,
        "vocos_hidden": hidden,
        "vocos_layers": count_parts(weights, "encoder.0.convnext."),
    }
    weights |= {"mean": moments["mean"], "deviation": moments["var"].sqrt()}
    return loaded(SemanticCodec, config, _folded(weights), name, what="MaskGCT's semantic codec", dtype=dtype)


def _folded(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights with their norms: each `weight_v`, scaled to the length `weight_g` by row, is a `weight`."""
    folded = {key: value for key, value in weights.items() if not key.endswith((".weight_g", ".weight_v"))}
    for key, direction in weights.items():
        if not key.endswith(".weight_v"):
            continue
        length = weights.get(f"{key[:-1]}g")
        if length is None:
            raise ValueError(f"the weights hold {key}, and no {key[:-1]}g; pass the official file.")
        norm = direction.flatten(1).norm(dim=1).view_as(length)
        folded[key.removesuffix("_v")] = direction * (length / norm)
    return folded


def _encoder(blocks: int) -> KeyLayout:
    """transformers' names of the official encoder, a list in lists."""
    parts = {"0": "snake1", "1": "conv1", "2": "snake2", "3": "conv2"}
    return KeyLayout(
        "acoustic encoder of MaskGCT",
        "the official file",
        renamed={
            r"^block\.(\d+)\.block\.([012])\.block\.([0123])\.": lambda at: (
                f"block.{int(at[1]) - 1}.res_unit{int(at[2]) + 1}.{parts[at[3]]}."
            ),
            r"^block\.(\d+)\.block\.([34])\.(?=\w+$)": lambda at: (
                f"block.{int(at[1]) - 1}.{'snake1' if at[2] == '3' else 'conv1'}."
            ),
            r"^block\.0\.(?=\w+$)": "conv1.",
            rf"^block\.{blocks + 1}\.(?=\w+$)": "snake1.",
            rf"^block\.{blocks + 2}\.(?=\w+$)": "conv2.",
        },
    )
