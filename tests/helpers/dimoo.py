"""A tiny Lumina-DiMOO: its official folder, its file of a shortcut, and its tokenizer. All weights follow a formula."""

from pathlib import Path
from typing import Any

import torch
from diffusers.models.autoencoders.vq_model import VQModel
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from tests.helpers.amused import VQ_SIZES
from tests.helpers.written_weights import write_weights, written
from visual_spec.files.documents import json_text
from visual_spec.models.masked.dimoo import FIRST_CODE, DimooTransformer

CODES, DIM, HEADS, HIDDEN, LAYERS, SHARE = 24, 32, 4, 48, 2, 64
# The ids that the release's tokenizer gives the marks of the template, and some words.
MARKS = {
    "<system>": 126332, "</system>": 126333, "<user>": 126334, "</user>": 126335, "<uncondition>": 126351,
}  # fmt: skip
_SENTENCE = "Generate an image according to the text prompt ."
WORDS = {word: 10 + index for index, word in enumerate([*_SENTENCE.split(), "a", "red", "fox", "blue", "?"])}
CONFIG: dict[str, Any] = dict(
    model_type="llada", n_heads=HEADS, n_kv_heads=HEADS, rope_theta=500000.0, block_type="llama", rope=True,
    activation_type="silu", layer_norm_type="rms", rms_norm_eps=1e-5,
)  # fmt: skip
SIZES = dict(q_proj=(DIM, DIM), k_proj=(DIM, DIM), v_proj=(DIM, DIM), attn_out=(DIM, DIM))
SIZES |= dict(
    ff_proj=(HIDDEN, DIM), up_proj=(HIDDEN, DIM), ff_out=(DIM, HIDDEN), attn_norm=(DIM,), ff_norm=(DIM,)
)
# What the release draws of 4 x 6 slots in 8 calls, see `tests/models/masked/test_dimoo.py`.
TOKENS = [6, 8, 10, 6, 15, 12, 10, 10, 1, 9, 12, 6, 15, 23, 14, 6, 6, 6, 19, 22, 7, 16, 12, 22]


def shapes() -> dict[str, tuple[int, ...]]:
    """Of the official model's weights, by their keys."""
    start, rows = "model.transformer.", FIRST_CODE + CODES
    layers = {
        f"{start}blocks.{index}.{part}.weight": shape
        for index in range(LAYERS)
        for part, shape in SIZES.items()
    }
    tables = {f"{start}{part}.weight": (rows, DIM) for part in ("wte", "ff_out")}
    return layers | tables | {f"{start}ln_f.weight": (DIM,)}


def shortcut_shapes() -> dict[str, tuple[int, ...]]:
    """Of the official shortcut's weights, half as wide, by their keys."""
    half = DIM // 2
    layers = {
        f"blocks.0.{layer}.{part}.weight": tuple(half if size == DIM else size for size in shape)
        for layer in ("cross_attn", "self_attn")
        for part, shape in SIZES.items()
    }
    linear = {
        "proj_in": (half, DIM), "proj_out": (DIM, half), "new_token_proj_in": (half, DIM),
        "time_embedder.mlp.0": (SHARE, 256), "time_embedder.mlp.2": (half, SHARE), "adaLN_modulation": (2 * half, half),
    }  # fmt: skip
    biases = {f"{part}.bias": shape[:1] for part, shape in linear.items()}
    return (
        layers
        | {f"{part}.weight": shape for part, shape in linear.items()}
        | biases
        | {"ln_f.weight": (half,)}
    )


def tiny_dimoo() -> DimooTransformer:
    """A picture of 4 x 4 tokens, and prompts of width 8."""
    model = DimooTransformer(
        vocab_size=CODES,
        dim=8,
        num_layers=2,
        num_heads=2,
        hidden=12,
        grid_height=4,
        grid_width=4,
        null_length=3,
    )
    write_weights(model, 1.0)
    return model.eval()


def official_weights() -> dict[str, Tensor]:
    return {key: written(key, shape, 1.0) for key, shape in shapes().items()}


def tokenizer() -> PreTrainedTokenizerFast:
    plain = Tokenizer(WordLevel(WORDS | MARKS, unk_token="?"))
    plain.pre_tokenizer = Whitespace()  # pyright: ignore
    read = PreTrainedTokenizerFast(tokenizer_object=plain, unk_token="?")
    read.add_special_tokens({"additional_special_tokens": [*MARKS]})
    return read


def write_folder(home: Path) -> Path:
    """Write the official folder, of two shards."""
    home.mkdir(parents=True, exist_ok=True)
    (home / "config.json").write_text(json_text(CONFIG))
    weights = official_weights()
    tables = [key for key in weights if key.endswith(("wte.weight", "transformer.ff_out.weight"))]
    save_file({key: weights.pop(key) for key in tables}, home / "model-00001-of-00002.safetensors")
    save_file(weights, home / "model-00002-of-00002.safetensors")
    tokenizer().save_pretrained(home)
    torch.manual_seed(0)
    VQModel(**VQ_SIZES).save_pretrained(home / "vqvae")
    (home / "model_index.json").write_text(json_text({"_class_name": "LuminaDiMOOPipeline"}))
    return home
