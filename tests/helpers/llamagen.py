"""Conditions of a tiny LlamaGen, and its logits when slots are written in other orders."""

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.models.next_token import straight
from visual_spec.models.core.checkpoints import Checkpoint
from visual_spec.models.next_token.llamagen import LlamaGenTransformer, TextCondition


def make(**changes) -> LlamaGenTransformer:
    torch.manual_seed(0)
    settings: dict[str, Any] = dict(vocab_size=40, dim=32, num_layers=2, num_heads=2, grid_size=4)
    settings |= dict(prefix_length=5, num_classes=None, caption_dim=12)
    model = LlamaGenTransformer(**(settings | changes)).double().eval()
    for parameter in model.parameters():  # weights of order one, so that attention is not uniform by accident
        parameter.data = torch.randn_like(parameter) * (0.25 if parameter.ndim == 2 else 1.0)
    return model


def text_condition(batch_size: int, valid: list[int], length: int = 5, width: int = 12) -> TextCondition:
    mask = torch.arange(length) >= length - torch.tensor(valid)[:, None]
    return TextCondition(torch.randn(batch_size, length, width, dtype=torch.float64), mask)


def caption_prefix(model: LlamaGenTransformer, features: torch.Tensor) -> torch.Tensor:
    weights = model.state_dict()
    h = features @ weights["cls_embedding.cap_proj.fc1.weight"].T
    h = 0.5 * h * (1 + torch.tanh(math.sqrt(2 / math.pi) * (h + 0.044715 * h**3)))
    return h @ weights["cls_embedding.cap_proj.fc2.weight"].T


def on_meta(shapes) -> Checkpoint:
    weights = {key: torch.empty(shape, device="meta") for key, shape in shapes.items()}
    return Checkpoint(Path("weights.pt"), weights)


def condition(rows: int) -> TextCondition:
    torch.manual_seed(5)
    mask = torch.ones(rows, 6, dtype=torch.bool)
    mask[0, :2] = False
    return TextCondition(torch.randn(rows, 6, 8, dtype=torch.float64), mask)


def event_logits(
    model: LlamaGenTransformer,
    condition: TextCondition,
    row: int,
    guided: bool,
    events: list[tuple[int, int, set[int]]],
) -> Tensor:
    """Logits [E, V] of everything that was ever fed, in one pass without a cache, under an explicit mask.

    Args:
        row: the sample; `guided`: its unconditional row instead.
        events: (token, slot, events seen) in the order of feeding; an event always sees itself and the condition.
    """
    weights = model.state_dict()
    heads, dim = model.config["num_heads"], model.config["dim"]
    size, side = dim // heads, model.config["grid_size"]
    words = condition.mask[row]
    features = condition.features[row] * words[:, None]
    if guided:
        features = weights["cls_embedding.uncond_embedding"]
    prefix = caption_prefix(model, features)
    start = len(prefix)
    x = torch.cat([prefix, weights["tok_embeddings.weight"][[token for token, _, _ in events]]])
    mask = torch.eye(len(x), dtype=torch.bool)
    for i in range(start):
        mask[i, : i + 1] |= words[: i + 1]
    for i, (_, _, seen) in enumerate(events):
        mask[start + i, :start] = words
        mask[start + i, [start + j for j in seen]] = True

    slots = torch.tensor([slot for _, slot, _ in events], dtype=torch.long)
    still = torch.zeros(start, size // 2)  # the prefix has no keys
    turn = torch.cat([still, straight.turns(slots // side, slots % side, size)])[:, None]
    for layer in range(model.config["num_layers"]):
        x = straight.layer(weights, layer, x, mask, turn, heads)
    return (straight.norm(weights, x, "norm") @ weights["output.weight"].T)[start:]
