"""Official files of Infinity's transformer: read, check every key, build the model."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from visual_spec.models.core.checkpoints import Checkpoint, read_checkpoint
from visual_spec.models.core.layouts import Given, KeyLayout, count_parts, loaded
from visual_spec.models.core.protocol import Side
from visual_spec.models.next_scale.infinity import InfinityTransformer
from visual_spec.models.next_scale.infinity_scales import scales_for

_INFINITY = KeyLayout(
    "Infinity transformer",
    "a file such as infinity_2b_reg.pth",
    needed={"word_embed.weight": 2, "lvl_embed.weight": 2, "cfg_uncond": 2, "text_proj_for_sos.ca.mat_q": 3},
    # Masks of the official training, which depend only on the schedule.
    dropped=("lvl_1L|attn_bias_for_masking|Infinity_(visible_kvlen|invisible_qlen)",),
)
# Once its layers are numbered from the first (`_numbered`).
_LAYERS = KeyLayout(
    _INFINITY.model, _INFINITY.file, needed={"blocks.0.ffn.fc1.weight": 2, "blocks.0.sa.scale_mul_1H11": 4}
)
_CHUNK = re.compile(r"block_chunks\.(\d+)\.module\.(\d+)\.")


def load_infinity_checkpoint(
    source: Given,
    *,
    scales: Sequence[Side] = scales_for(1024),
    rope_grid: Side | None = None,
    dtype: torch.dtype | None = None,
) -> InfinityTransformer:
    """Return the transformer of an official file (`infinity_2b_reg.pth`) or folder of shards (`infinity_8b_weights`).

    Sizes are read off the weights. Constants that the official files carry (the zero bias of keys) are checked and
    dropped. `source` may also be the folder with its index.
    `source`, `dtype` and errors: see `visual_spec.models.core.layouts`.

    Args:
        scales: places per side of each map; no weight depends on them, but a model is trained for some picture sizes
            (`infinity_8b_512x512_weights` for `scales_for(512)`).
        rope_grid: see `InfinityTransformer`.
    """
    if isinstance(source, str | os.PathLike) and Path(source).is_dir():
        source = Checkpoint(Path(source), _read_shards(Path(source)))
    chunked, name = _INFINITY.read(source)
    weights = _LAYERS.translated(_numbered(chunked, name), name)
    dim, bits = weights["word_embed.weight"].shape
    length, width = weights["cfg_uncond"].shape
    config = {
        "bits": bits,
        "dim": dim,
        "num_layers": count_parts(weights, "blocks."),
        "num_heads": weights["blocks.0.sa.scale_mul_1H11"].shape[1],
        "ffn_dim": weights["blocks.0.ffn.fc1.weight"].shape[0],
        "caption_dim": width,
        "caption_length": length,
        "pool_heads": weights["text_proj_for_sos.ca.mat_q"].shape[1],
        "scales": scales,
        "rope_grid": rope_grid,
        "num_levels": weights["lvl_embed.weight"].shape[0],
    }

    def constants(model: InfinityTransformer) -> dict[str, Tensor]:
        places = [f"blocks.{layer}.{part}" for layer in range(len(model.blocks)) for part in ("sa", "ca")]
        return {f"{place}.zero_k_bias": torch.zeros(model.dim) for place in (*places, "text_proj_for_sos.ca")}

    what = "Infinity"
    return loaded(InfinityTransformer, config, weights, name, what=what, constants=constants, dtype=dtype)


def _read_shards(path: Path) -> dict[str, Tensor]:
    """Return the weights of all shards in a folder's index."""
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


def _numbered(official: Mapping[str, Tensor], name: str) -> dict[str, Tensor]:
    """The weights with their layers numbered from the first: official ones are in chunks of equal size."""
    chunked = {key: match for key in official if (match := _CHUNK.match(key))}
    layers: dict[int, set[int]] = {}
    for match in chunked.values():
        layers.setdefault(int(match[1]), set()).add(int(match[2]))
    sizes = {chunk: len(numbers) for chunk, numbers in sorted(layers.items())}
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

    return {ours(key): value for key, value in official.items()}
