"""A tiny ControlAR in the released layout, written from its description, with random weights."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers.official import random_weights, transformer_shapes
from visual_spec.models.next_token import llamagen
from visual_spec.models.next_token.llamagen import TextCondition

VOCAB, SIDE, WORDS, CHANNELS, DIM, ADAPTER = 12, 4, 6, 8, 16, 64
TRAINED = 5  # tokens per side of the largest picture of the training: the null table has a row for each of its slots
LAYERS = 3
PIXELS = 16 * SIDE


def add_preset(monkeypatch: pytest.MonkeyPatch) -> None:
    size = {"num_layers": LAYERS, "num_heads": 2, "dim": DIM}
    monkeypatch.setitem(llamagen.PRESETS, "tiny, three layers", size)


def controlar_shapes(table: int = TRAINED * TRAINED) -> dict[str, tuple[int, ...]]:
    """Keys and shapes of a file: LlamaGen's, a DINOv2 by its older names, and the layers between them."""
    shapes = transformer_shapes(LAYERS, DIM, vocab=VOCAB, caption=(WORDS, CHANNELS))
    dino: dict[str, tuple[int, ...]] = {
        "embeddings.cls_token": (1, 1, ADAPTER),
        "embeddings.mask_token": (1, ADAPTER),
        "embeddings.position_embeddings": (1, 1 + SIDE * SIDE, ADAPTER),
        "embeddings.patch_embeddings.projection.weight": (ADAPTER, 3, 14, 14),
        "embeddings.patch_embeddings.projection.bias": (ADAPTER,),
        "layernorm.weight": (ADAPTER,),
        "layernorm.bias": (ADAPTER,),
    }
    for name in (
        "attention.attention.query",
        "attention.attention.key",
        "attention.attention.value",
        "attention.output.dense",
    ):
        dino[f"encoder.layer.0.{name}.weight"] = (ADAPTER, ADAPTER)
        dino[f"encoder.layer.0.{name}.bias"] = (ADAPTER,)
    for number in (1, 2):
        dino[f"encoder.layer.0.norm{number}.weight"] = (ADAPTER,)
        dino[f"encoder.layer.0.norm{number}.bias"] = (ADAPTER,)
        dino[f"encoder.layer.0.layer_scale{number}.lambda1"] = (ADAPTER,)
    for name, inward, outward in (("fc1", ADAPTER, 4 * ADAPTER), ("fc2", 4 * ADAPTER, ADAPTER)):
        dino[f"encoder.layer.0.mlp.{name}.weight"] = (outward, inward)
        dino[f"encoder.layer.0.mlp.{name}.bias"] = (outward,)
    shapes |= {f"adapter.model.{key}": shape for key, shape in dino.items()}
    shapes |= {"adapter_mlp.fc1.weight": (DIM, ADAPTER), "adapter_mlp.fc2.weight": (DIM, DIM)}
    for name in ("condition_mlp.cap_proj", *(f"condition_layers.{third}" for third in range(3))):
        shapes |= {f"{name}.fc1.weight": (DIM, DIM), f"{name}.fc2.weight": (DIM, DIM)}
    # The last table is in every file of the official program, and no forward reads it.
    return shapes | {
        "condition_mlp.uncond_embedding": (table, DIM),
        "condition_embeddings.weight": (VOCAB, DIM),
    }


def controlar_weights(dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    return random_weights(controlar_shapes(), dtype)


def write_controlar(folder: Path, name: str = "depth_tiny.pt", dtype: torch.dtype = torch.float64) -> Path:
    torch.save(controlar_weights(dtype), folder / name)
    return folder / name


def captions(rows: int, dtype: torch.dtype = torch.float64) -> dict[str, Any]:
    """Features and mask of captions, the second of which is short."""
    mask = torch.ones(rows, WORDS, dtype=torch.bool)
    mask[1:, :3] = False
    generator = torch.Generator().manual_seed(2)
    condition = TextCondition(torch.randn(rows, WORDS, CHANNELS, dtype=dtype, generator=generator), mask)
    return {"features": condition.features, "mask": condition.mask}


def controls(rows: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Pictures in [-1, 1]."""
    generator = torch.Generator().manual_seed(6)
    return 2 * torch.rand(rows, 3, PIXELS, PIXELS, dtype=dtype, generator=generator) - 1
