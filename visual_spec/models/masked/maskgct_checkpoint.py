"""Official files of MaskGCT (`amphion/MaskGCT`): read, check every key, build the models."""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import Tensor

from visual_spec.models.core.checkpoints import Checkpoint, Source, fill, read_checkpoint
from visual_spec.models.masked.maskgct import AcousticNetwork, SemanticNetwork
from visual_spec.models.masked.maskgct_codec import AcousticCodec, SemanticCodec

# By what the keys of each kind of file are told.
_MARKS = {
    "semantic network": ("phone_emb.weight", "to_logit.weight"),
    "acoustic network": ("layer_emb.weight", "token_emb.0.weight"),
    "acoustic encoder": ("block.0.weight_v", "block.1.block.0.block.0.alpha"),
    "acoustic decoder": ("quantizer.quantizers.0.codebook.weight", "model.head.out.weight"),
    "semantic codec": ("quantizer.quantizers.0.codebook.weight", "encoder.0.embed.weight"),
    "statistics": ("mean", "var"),
}


def kind_of(checkpoint: Checkpoint) -> str | None:
    """Return which of MaskGCT's files it is, a key of `_MARKS`; None: another model's."""
    found = [kind for kind, keys in _MARKS.items() if all(key in checkpoint.weights for key in keys)]
    return found[0] if found else None


def load_semantic_network(
    source: Source, *, num_heads: int = 16, dtype: torch.dtype | None = None
) -> SemanticNetwork:
    """The text-to-semantic network, of `t2s_model/model.safetensors`.

    Args:
        source: the file, or the result of `read_checkpoint`.
        num_heads: cannot be read off the weights; the default is that of the official ones.
        dtype: of the weights; None keeps that of the file.

    Raises:
        ValueError, OSError: as `read_checkpoint`; another model's file; or keys that are missing, unexpected or
            mis-shaped, which are listed.
    """
    weights, name = _of_kind(source, "semantic network")
    vocab, dim = weights["to_logit.weight"].shape
    config = {
        "vocab_size": vocab,
        "hidden_size": dim,
        "num_layers": _count(weights, "diff_estimator.layers."),
        "num_heads": num_heads,
        "phones": len(weights["phone_emb.weight"]),
    }
    with torch.device("meta"):
        network = SemanticNetwork(**config)
    return fill(network, weights, name, what=f"MaskGCT's text-to-semantic of {config}", dtype=dtype)


def load_acoustic_network(
    source: Source, *, num_heads: int = 16, dtype: torch.dtype | None = None
) -> AcousticNetwork:
    """A semantic-to-acoustic network, of `s2a_model/s2a_model_1layer/model.safetensors` or `s2a_model_full`.

    Args, raises: as `load_semantic_network`.
    """
    weights, name = _of_kind(source, "acoustic network")
    vocab, dim = weights["token_emb.0.weight"].shape
    config = {
        "codebooks": len(weights["layer_emb.weight"]),
        "vocab_size": vocab,
        "semantic_codes": len(weights.get("cond_emb.weight", ())),
        "hidden_size": dim,
        "num_layers": _count(weights, "diff_estimator.layers."),
        "num_heads": num_heads,
    }
    # The official network is a LlamaModel for 0 words.
    if weights.get("diff_estimator.embed_tokens.weight", torch.ones(1)).numel() == 0:
        del weights["diff_estimator.embed_tokens.weight"]
    with torch.device("meta"):
        network = AcousticNetwork(**config)
    return fill(network, weights, name, what=f"MaskGCT's semantic-to-acoustic of {config}", dtype=dtype)


def load_acoustic_codec(
    encoder: Source, decoder: Source, *, sampling_rate: int = 24_000, dtype: torch.dtype | None = None
) -> AcousticCodec:
    """The acoustic codec, of `acoustic_codec/model.safetensors` and `acoustic_codec/model_1.safetensors`.

    Args:
        encoder, decoder: the files, or the results of `read_checkpoint`.
        sampling_rate: cannot be read off the weights.
        dtype: as in `load_semantic_network`.

    Raises:
        ValueError, OSError: as `load_semantic_network`.
    """
    inward, name = _of_kind(encoder, "acoustic encoder")
    weights, other = _of_kind(decoder, "acoustic decoder")
    window = weights.pop("model.head.istft.window", None)
    frame = len(weights["model.head.out.weight"]) - 2
    if window is not None and not torch.allclose(window.float(), torch.hann_window(frame), atol=1e-6):
        raise ValueError(
            f"{other}: model.head.istft.window is no Hann window of {frame}; pass the official file."
        )
    blocks = _count(inward, "block.") - 3
    strides = [inward[f"block.{i}.block.4.weight_v"].shape[-1] // 2 for i in range(1, blocks + 1)]
    books, codes = _count(weights, "quantizer.quantizers."), weights["quantizer.quantizers.0.codebook.weight"]
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
        "vocos_layers": _count(weights, "model.backbone.convnext."),
        "frame_size": frame,
        "sampling_rate": sampling_rate,
    }
    with torch.device("meta"):
        codec = AcousticCodec(**config)
    renamed = {f"encoder.{_encoder_key(key, blocks)}": value for key, value in _folded(inward).items()}
    return fill(
        codec,
        _folded(weights) | renamed,
        f"{name} with {other}",
        what=f"MaskGCT's acoustic codec of {config}",
        dtype=dtype,
    )


def load_semantic_codec(
    source: Source, statistics: Source, *, feature_layer: int = 17, dtype: torch.dtype | None = None
) -> SemanticCodec:
    """The codec of semantic codes, of `semantic_codec/model.safetensors` and `wav2vec2bert_stats.pt`.

    Args:
        source, statistics: the files, or the results of `read_checkpoint`.
        feature_layer: cannot be read off the weights.
        dtype: as in `load_semantic_network`.

    Raises:
        ValueError, OSError: as `load_semantic_network`.
    """
    weights, name = _of_kind(source, "semantic codec")
    moments, _ = _of_kind(statistics, "statistics")
    # The decoder, which makes features of codes, is of training only.
    weights = {key: value for key, value in weights.items() if not key.startswith("decoder.")}
    codes = weights["quantizer.quantizers.0.codebook.weight"]
    hidden, dim = weights["encoder.0.convnext.0.pwconv1.weight"].shape
    config = {
        "vocab_size": len(codes),
        "code_dim": codes.shape[1],
        "feature_dim": weights["encoder.0.embed.weight"].shape[1],
        "feature_layer": feature_layer,
        "vocos_dim": dim,
        "vocos_hidden": hidden,
        "vocos_layers": _count(weights, "encoder.0.convnext."),
    }
    weights |= {"mean": moments["mean"], "deviation": moments["var"].sqrt()}
    with torch.device("meta"):
        codec = SemanticCodec(**config)
    return fill(codec, _folded(weights), name, what=f"MaskGCT's semantic codec of {config}", dtype=dtype)


def _of_kind(source: Source, kind: str) -> tuple[dict[str, Tensor], str]:
    checkpoint = source if isinstance(source, Checkpoint) else read_checkpoint(source)
    absent = [key for key in _MARKS[kind] if key not in checkpoint.weights]
    if absent:
        raise ValueError(f"{checkpoint.path} is no {kind} of MaskGCT: it lacks {', '.join(absent)}.")
    return dict(checkpoint.weights), str(checkpoint.path)


def _folded(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights with their norms: each `weight_v`, scaled to the length `weight_g` by row, is a `weight`."""
    found = {key: value for key, value in weights.items() if not key.endswith((".weight_g", ".weight_v"))}
    for key, direction in weights.items():
        if not key.endswith(".weight_v"):
            continue
        length = weights.get(f"{key[:-1]}g")
        if length is None:
            raise ValueError(f"the weights hold {key}, and no {key[:-1]}g; pass the official file.")
        norm = direction.flatten(1).norm(dim=1).view_as(length)
        found[key.removesuffix("_v")] = direction * (length / norm)
    return found


_UNIT = {"0": "snake1", "1": "conv1", "2": "snake2", "3": "conv2"}


def _encoder_key(key: str, blocks: int) -> str:
    """transformers' name of a tensor of the official encoder, a list in lists."""
    if unit := re.fullmatch(r"block\.(\d+)\.block\.([012])\.block\.([0123])\.(\w+)", key):
        return f"block.{int(unit[1]) - 1}.res_unit{int(unit[2]) + 1}.{_UNIT[unit[3]]}.{unit[4]}"
    if inner := re.fullmatch(r"block\.(\d+)\.block\.([34])\.(\w+)", key):
        return f"block.{int(inner[1]) - 1}.{'snake1' if inner[2] == '3' else 'conv1'}.{inner[3]}"
    if outer := re.fullmatch(r"block\.(\d+)\.(\w+)", key):
        names = {0: "conv1", blocks + 1: "snake1", blocks + 2: "conv2"}
        return f"{names.get(int(outer[1]), key)}.{outer[2]}"
    return key


def _count(weights: Mapping[str, Tensor], start: str) -> int:
    return len({key[len(start) :].split(".")[0] for key in weights if key.startswith(start)})
