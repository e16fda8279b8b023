"""Conditions of a tiny LlamaGen, and its logits when slots are written in other orders."""

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from visual_spec.models.core.checkpoints import Checkpoint
from visual_spec.models.next_token.llamagen import LlamaGenTransformer, TextCondition


def make(**changes) -> LlamaGenTransformer:
    torch.manual_seed(0)
    settings: dict[str, Any] = dict(
        vocab_size=40,
        dim=32,
        num_layers=2,
        num_heads=2,
        grid_size=4,
        prefix_length=5,
        num_classes=None,
        caption_dim=12,
    )
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

    def norm(v: Tensor, weight: Tensor) -> Tensor:
        return v / (v.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight

    angles = torch.zeros(len(x), size // 2, dtype=torch.float64)
    length = (torch.arange(len(x)) >= start).double()[:, None]  # zero over the prefix: it has no keys
    for i, (_, slot, _) in enumerate(events):
        for pair in range(size // 2):
            place = divmod(slot, side)[0 if pair < size // 4 else 1]
            angles[start + i, pair] = place * 10000.0 ** (-2 * (pair % (size // 4)) / (size / 2))
    turn = torch.polar(length.expand_as(angles).contiguous(), angles)

    def turned(v: Tensor) -> Tensor:
        return torch.view_as_real(
            torch.view_as_complex(v.unflatten(-1, (-1, 2)).contiguous()) * turn
        ).flatten(-2)

    for layer in range(model.config["num_layers"]):
        name = f"layers.{layer}."
        h = norm(x, weights[name + "attention_norm.weight"])
        q, k, v = (h @ weights[name + "attention.wqkv.weight"].T).split(dim, -1)
        mixed = []
        for head in range(heads):
            part = slice(head * size, (head + 1) * size)
            scores = turned(q[:, part]) @ turned(k[:, part]).T / math.sqrt(size)
            mixed.append(scores.masked_fill(~mask, -torch.inf).softmax(-1) @ v[:, part])
        x = x + torch.cat(mixed, -1) @ weights[name + "attention.wo.weight"].T
        h = norm(x, weights[name + "ffn_norm.weight"])
        gate = h @ weights[name + "feed_forward.w1.weight"].T
        up = h @ weights[name + "feed_forward.w3.weight"].T
        x = x + (gate * torch.sigmoid(gate) * up) @ weights[name + "feed_forward.w2.weight"].T
    return (norm(x, weights["norm.weight"]) @ weights["output.weight"].T)[start:]
