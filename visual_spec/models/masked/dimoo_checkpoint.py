"""The official folder of Lumina-DiMOO: read, check every key, build the model and the table of its prompts."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerFast

from visual_spec.models.core.checkpoints import Checkpoint, read_checkpoint
from visual_spec.models.core.layouts import KeyLayout, count_parts, loaded
from visual_spec.models.core.saved import read_settings
from visual_spec.models.masked.dimoo import AROUND, FIRST_CODE, DimooTransformer
from visual_spec.models.text.prompt_embeddings import NOTHING, PromptEmbeddings

LAYOUT = KeyLayout(
    "Lumina-DiMOO",
    "the folder of Alpha-VLLM/Lumina-DiMOO, with config.json, all model-*.safetensors, the tokenizer and vqvae",
    needed={"wte.weight": 2, "ff_out.weight": 2, "blocks.0.up_proj.weight": 2},
    renamed={r"^(model\.)?transformer\.": ""},
)
# What config.json says of the kind of layers; no weight tells it.
_LAYERS = {"block_type": "llama", "activation_type": "silu", "layer_norm_type": "rms", "rope": True}
_LAYERS |= {"rms_norm_eps": 1e-5, "scale_logits": False, "input_emb_norm": False}


def is_dimoo(source: Path | Checkpoint) -> bool:
    """Whether it is an official folder."""
    if isinstance(source, Checkpoint) or not (source / "config.json").is_file():
        return False
    return read_settings(source / "config.json").get("model_type") == "llada" and (source / "vqvae").is_dir()


def load_dimoo(
    folder: str | os.PathLike, *, dtype: torch.dtype | None = None
) -> tuple[DimooTransformer, PromptEmbeddings]:
    """The model of an official folder, and what embeds its prompts.

    The rows of the head for words are dropped: they answer questions, and draw nothing.

    Args:
        dtype: to cast the weights to; None keeps the file's.

    Raises:
        ValueError, OSError: a file is missing or damaged, or layers of another kind; `visual_spec.models.core.layouts`.
    """
    folder = Path(folder)
    said = read_settings(folder / "config.json")
    others = {key: said.get(key) for key, value in _LAYERS.items() if said.get(key, value) != value}
    heads = said.get("n_heads")
    if others or not isinstance(heads, int) or said.get("n_kv_heads") not in (None, heads):
        raise ValueError(
            f"{folder}/config.json says {others or said.get('n_kv_heads')} of {heads} heads; Lumina-DiMOO has "
            f"{_LAYERS}, and as many heads of keys as of queries. Pass {LAYOUT.file}."
        )
    official: dict[str, torch.Tensor] = {}
    for shard in sorted(folder.glob("model*.safetensors")):
        official |= read_checkpoint(shard).weights
    weights, name = LAYOUT.translated(official, str(folder)), str(folder)
    table, head = weights.pop("wte.weight"), weights.pop("ff_out.weight")
    if len(table) <= FIRST_CODE or head.shape != table.shape:
        raise ValueError(
            f"{name} has a table {tuple(table.shape)} and a head {tuple(head.shape)}; those of Lumina-DiMOO are alike, "
            f"and have codes from row {FIRST_CODE} on. Pass {LAYOUT.file}."
        )
    words = {"table.weight": table[:FIRST_CODE]}
    sizes = {"num_words": FIRST_CODE, "dim": table.shape[1]}
    reader = loaded(PromptEmbeddings, sizes, words, name, what="prompts", dtype=dtype)
    reader.with_tokenizer(PreTrainedTokenizerFast.from_pretrained(folder))
    null = torch.tensor(reader.ids(NOTHING))
    weights["null_prompt"] = table[null]
    weights["tok_emb.weight"] = torch.cat([table[FIRST_CODE:], table[list(AROUND)]])
    weights["head.weight"] = head[FIRST_CODE:]
    config = {
        "vocab_size": len(table) - FIRST_CODE,
        "dim": table.shape[1],
        "num_layers": count_parts(weights, "blocks."),
        "num_heads": heads,
        "hidden": len(weights["blocks.0.up_proj.weight"]),
        "null_length": len(null),
        "rotary_base": float(said.get("rope_theta", 10000.0)),
    }
    return loaded(DimooTransformer, config, weights, name, what="Lumina-DiMOO", dtype=dtype), reader
