"""Tiny students in the released layouts, written from their description, with random weights."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.helpers.official import random_weights, transformer_shapes
from tests.helpers.tiny_scales import SIDES
from tests.helpers.var import block_shapes
from visual_spec.prototype.students.llamagen import LlamaGenStudent
from visual_spec.prototype.students.var import VARStudent

CLASSES, VOCAB, LENGTH, SIDE, DIM = 7, 12, 4, 4, 16
SIZE: dict[str, Any] = dict(num_layers=2, num_heads=2, dim=DIM, grid_size=SIDE, first_continuous=9, restart=6)


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
    """A student of captions whose slots all hold codes, over the tokens of `tests.helpers.tiny`."""
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


# -- of VAR: over the tokens of `tests.helpers.tiny_scales` ----------------------------------------------------------

VAR_SLOTS = sum(side * side for side in SIDES)  # 1 + 4 + 9 + 16
VAR_SIZE: dict[str, Any] = {"first_continuous": 14, "restart": 5}


def var_student_shapes(
    depth: int = 2,
    dim: int = 16,
    heads: int = 2,
    *,
    vocab: int = 12,
    token_dim: int = 2,
    classes: int = 5,
    sides: tuple[int, ...] = SIDES,
) -> dict[str, tuple[int, ...]]:
    """Keys and shapes of a student of VAR: VAR's, with one more scale of one token, and four parts more."""
    length = 1 + sum(side * side for side in sides)
    shapes: dict[str, tuple[int, ...]] = {
        "pos_start": (1, 1, dim),
        "pos_1LC": (1, length, dim),
        "word_embed.weight": (dim, token_dim),
        "word_embed.bias": (dim,),
        "class_emb.weight": (classes + 1, dim),
        "lvl_embed.weight": (len(sides) + 1, dim),
        "head_nm.ada_lin.1.weight": (2 * dim, dim),
        "head_nm.ada_lin.1.bias": (2 * dim,),
        "head.weight": (vocab, dim),
        "head.bias": (vocab,),
        "n_d_embed.weight": (2, dim),
        "final_layer_conti.linear.weight": (token_dim, dim),
        "final_layer_conti.linear.bias": (token_dim,),
        "final_layer_conti.scale_shift_table": (2, dim),
    }
    for layer in range(depth + 1):
        shapes[f"layerwise_n_d_embed.{layer}.weight"] = (dim, dim)
        shapes[f"layerwise_n_d_embed.{layer}.bias"] = (dim,)
    return shapes | block_shapes(depth, dim, heads)


def var_student_weights(dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """Weights so large that nothing is uniform by accident."""
    generator = torch.Generator().manual_seed(11)
    return {
        key: torch.randn(shape, dtype=dtype, generator=generator) * (0.3 if len(shape) == 2 else 0.6)
        for key, shape in var_student_shapes().items()
    }


def tiny_var_student(dtype: torch.dtype = torch.float64, **changes: Any) -> Any:
    size: dict[str, Any] = dict(dim=16, num_layers=2, num_heads=2, num_classes=5, scales=SIDES)
    model: Any = VARStudent(12, 2, **{**size, **VAR_SIZE, **changes})
    model = model.to(dtype).eval()
    model.load_state_dict(var_student_weights(dtype))
    return model


def write_var_student(folder: Path, **more: Any) -> Path:
    """A file like the released ones: averaged weights beside the last ones, which carry the constants."""
    path = folder / "var-tiny.pth"
    averaged = var_student_weights(torch.float32)
    levels = torch.arange(5).repeat_interleave(torch.tensor([1, *(side * side for side in SIDES)]))
    last = {key: value + 1 for key, value in averaged.items()} | {"lvl_1L": levels[None]}
    torch.save({"trainer": {"ema_parameters": averaged, "var_wo_ddp": last}, **more}, path)
    return path
