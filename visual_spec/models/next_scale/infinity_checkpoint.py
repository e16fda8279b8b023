"""Official files of Infinity's transformer: read, check every key, build the model."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from visual_spec.models.core.checkpoints import Checkpoint, Source, fill, plain_weights, read_checkpoint
from visual_spec.models.core.protocol import Side
from visual_spec.models.next_scale.infinity import InfinityTransformer
from visual_spec.models.next_scale.infinity_scales import scales_for

# Masks of the official training, which depend only on the schedule.
_DROPPED = ("lvl_1L", "attn_bias_for_masking", "Infinity_visible_kvlen", "Infinity_invisible_qlen")
_CHUNK = re.compile(r"block_chunks\.(\d+)\.module\.(\d+)\.")


def load_infinity_checkpoint(
    source: Source | Mapping[str, Tensor],
    *,
    scales: Sequence[Side] = scales_for(1024),
    rope_grid: Side | None = None,
    dtype: torch.dtype | None = None,
) -> InfinityTransformer:
    """Return the transformer of an official file (`infinity_2b_reg.pth`) or folder of shards (`infinity_8b_weights`).

    Sizes are read off the weights. Constants that the official files carry (the zero bias of keys) are checked and
    dropped.

    Args:
        source: the file, the folder with its index, the result of `read_checkpoint`, or a state dict.
        scales: places per side of each map; no weight depends on them, but a model is trained for some picture sizes
            (`infinity_8b_512x512_weights` for `scales_for(512)`).
        rope_grid: see `InfinityTransformer`.
        dtype: dtype of the weights; None keeps that of the file.

    Raises:
        ValueError, OSError: as in `read_checkpoint`; or the weights are not Infinity's; or keys are missing, unexpected
            or mis-shaped, which the message lists.
    """
    if isinstance(source, Mapping):
        given, name = plain_weights(source, "the state dict"), "the state dict"
    elif isinstance(source, Checkpoint):
        given, name = dict(source.weights), str(source.path)
    else:
        given, name = _read(Path(source)), str(source)
    weights = _renamed(given, name)
    config = _read_config(weights, name)
    with torch.device("meta"):
        model = InfinityTransformer(**config, scales=scales, rope_grid=rope_grid)
    places = [f"blocks.{layer}.{part}" for layer in range(len(model.blocks)) for part in ("sa", "ca")]
    zeros = {
        f"{place}.zero_k_bias": torch.zeros(config["dim"]) for place in (*places, "text_proj_for_sos.ca")
    }
    return fill(model, weights, name, what=f"Infinity of {config}", constants=zeros, dtype=dtype)


def _read(path: Path) -> dict[str, Tensor]:
    """Return the weights of a file, or of all shards in a folder's index."""
    if not path.is_dir():
        return read_checkpoint(path).weights
    indices = sorted(path.glob("*.index.json"))
    if len(indices) != 1 or (path / "config.json").exists():
        raise ValueError(
            f"{path} holds {len(indices)} index files of shards; pass an official folder such as infinity_8b_weights, "
            "which holds one, an official file, or load what save_pretrained wrote with from_pretrained."
        )
    weights: dict[str, Tensor] = {}
    for shard in _shards(indices[0]):
        weights |= read_checkpoint(path / shard).weights
    return weights


def _shards(index: Path) -> list[str]:
    """Return the file names of an index; all these files are in its folder."""
    try:
        return sorted({Path(name).name for name in json.loads(index.read_text())["weight_map"].values()})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{index} is no index of shards: it has no weight_map from keys to files; copy or download it again."
        ) from error


def _renamed(given: Mapping[str, Tensor], name: str) -> dict[str, Tensor]:
    """Return the weights under our names: official layers are in chunks of equal size, ours are not.

    Raises:
        ValueError: the chunks have unequal sizes, so a layer is missing, perhaps the last.
    """
    given = {key: value for key, value in given.items() if key not in _DROPPED}
    chunked = {key: match for key in given if (match := _CHUNK.match(key))}
    layers: dict[int, set[int]] = {}
    for match in chunked.values():
        layers.setdefault(int(match[1]), set()).add(int(match[2]))
    sizes = {chunk: len(found) for chunk, found in sorted(layers.items())}
    per_chunk = max(sizes.values(), default=0)
    if set(sizes) != set(range(len(sizes))) or min(sizes.values(), default=0) < per_chunk:
        raise ValueError(
            f"{name} lacks layers: its chunks (block_chunks.*) have {', '.join(f'{c}: {n}' for c, n in sizes.items())} "
            "of them, and all have as many in official files; copy or download it again."
        )

    def ours(key: str) -> str:
        match = chunked.get(key)
        if match is None:
            return key
        return f"blocks.{int(match[1]) * per_chunk + int(match[2])}.{key[match.end() :]}"

    return {ours(key): value for key, value in given.items()}


def _read_config(weights: Mapping[str, Tensor], name: str) -> dict[str, Any]:
    needed = {
        "word_embed.weight": 2,
        "lvl_embed.weight": 2,
        "cfg_uncond": 2,
        "text_proj_for_sos.ca.mat_q": 3,
        "blocks.0.ffn.fc1.weight": 2,
        "blocks.0.sa.scale_mul_1H11": 4,
    }
    absent = [key for key, rank in needed.items() if key not in weights or weights[key].ndim != rank]
    if absent:
        raise ValueError(
            f"{name} is no Infinity transformer: it lacks {', '.join(absent)}, or has them in other shapes; pass a "
            "file such as infinity_2b_reg.pth."
        )
    dim, bits = weights["word_embed.weight"].shape
    length, width = weights["cfg_uncond"].shape
    return {
        "bits": bits,
        "dim": dim,
        "num_layers": len({key.split(".")[1] for key in weights if key.startswith("blocks.")}),
        "num_heads": weights["blocks.0.sa.scale_mul_1H11"].shape[1],
        "ffn_dim": weights["blocks.0.ffn.fc1.weight"].shape[0],
        "caption_dim": width,
        "caption_length": length,
        "pool_heads": weights["text_proj_for_sos.ca.mat_q"].shape[1],
        "num_levels": weights["lvl_embed.weight"].shape[0],
    }
