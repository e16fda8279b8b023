"""A tiny student in the released layout, written from its description, with random weights; and its pipeline."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.official import random_weights, transformer_shapes
from visual_spec.models.next_token.llamagen_student import LlamaGenStudent

CLASSES, VOCAB, LENGTH, SIDE, DIM = 7, 12, 4, 4, 16
SIZE: dict[str, Any] = {
    "num_layers": 2,
    "num_heads": 2,
    "dim": DIM,
    "grid_size": SIDE,
    "first_continuous": 9,
    "restart": 6,
}


def student_shapes() -> dict[str, tuple[int, ...]]:
    """Keys and shapes of a student: LlamaGen's, but for the embedding of tokens, and two parts more."""
    shapes = transformer_shapes(2, DIM, vocab=VOCAB, classes=CLASSES)
    return shapes | {
        "tok_embeddings.weight": (DIM, LENGTH),
        "tok_embeddings.bias": (DIM,),
        "n_d_embed.weight": (2, DIM),
        "final_layer_conti.linear.weight": (LENGTH, DIM),
        "final_layer_conti.linear.bias": (LENGTH,),
        "final_layer_conti.scale_shift_table": (2, DIM),
    }


def student_weights(dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    return random_weights(student_shapes(), dtype)


def tiny_student(dtype: torch.dtype = torch.float64, **changes: Any) -> Any:
    model: Any = LlamaGenStudent(VOCAB, LENGTH, num_classes=CLASSES, **{**SIZE, **changes})
    model = model.to(dtype).eval()
    model.load_state_dict(student_weights(dtype))
    return model


def tiny_text_student(**changes: Any) -> Any:
    """A student of captions whose slots all hold codes, over the tokens of `tests.tiny`."""
    torch.manual_seed(5)
    size = {**SIZE, "first_continuous": SIDE * SIDE, **changes}
    model = LlamaGenStudent(
        VOCAB, LENGTH, num_classes=None, caption_dim=8, prefix_length=6, zero_prefix_keys=False, **size
    )
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return model.eval()


def write_student(folder: Path, **container: Any) -> Path:
    """A file like the released ones, which hold averaged weights beside the last ones."""
    path = folder / "llamagen-tiny.pt"
    last = {key: value + 1 for key, value in student_weights(torch.float32).items()}
    torch.save({"ema": student_weights(torch.float32), "model": last, **container}, path)
    return path
