"""Neighbouring and gated models of LlamaGen, computed token by token without a cache."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tests.helpers.official import transformer_shapes
from tests.models.next_token import straight
from visual_spec.models.next_token.llamagen import LlamaGenTransformer, TextCondition
from visual_spec.samplers.orders.tables import Step

SIDE, VOCAB, CLASSES, WORDS = 5, 12, 7, 4
TOKENS = torch.randint(VOCAB, (3, SIDE * SIDE), generator=torch.Generator().manual_seed(1))
LABELS = torch.tensor([3, 0, 6])


def nar_shapes(layers: int, dim: int, branch: int = 1, **more: Any) -> dict[str, tuple[int, ...]]:
    """Keys and shapes of a release: a transformer with the lower head's blocks at the end of its layers."""
    shapes = transformer_shapes(layers + branch, dim, **more)
    return shapes | {"medusa_norm.weight": (dim,), "medusa_output.weight": shapes["output.weight"]}


def captions(valid: list[int]) -> TextCondition:
    mask = torch.arange(WORDS) >= WORDS - torch.tensor(valid)[:, None]
    generator = torch.Generator().manual_seed(2)
    return TextCondition(torch.randn(len(valid), WORDS, 8, dtype=torch.float64, generator=generator), mask)


# What a model makes of the predictions of its right and lower head, [V] each.
Merge = Callable[[dict[str, Tensor], Tensor, Tensor], Tensor]


def mean(weights: dict[str, Tensor], right: Tensor, below: Tensor) -> Tensor:
    return (right + below) / 2


def straight_line(
    weights: dict[str, Tensor],
    prefix: Tensor,
    words: Tensor,
    tokens: Tensor,
    merge: Merge = mean,
    branch: int = 2,
) -> Tensor:
    """Logits [L, V] of all slots of one picture, in one pass over prefix [T, dim] and tokens [L]: no cache, no calls.

    Two layers before the right head; the lower one's leave them before layer `branch`; two attention heads.
    """
    size, start, side = prefix.shape[1] // 2, len(prefix), math.isqrt(len(tokens))
    x = torch.cat([prefix, weights["tok_embeddings.weight"][tokens]])
    row, column = torch.arange(len(tokens)) // side, torch.arange(len(tokens)) % side
    mask = torch.ones(len(x), len(x), dtype=torch.bool).tril()
    mask[start:, start:] = (row + column)[:, None] >= row + column
    mask[:, :start] &= words
    mask |= torch.eye(len(x), dtype=torch.bool)
    turn = torch.cat([torch.zeros(start, size // 2), straight.turns(row, column, size)])[:, None]

    taps = [x]
    for layer in range(2):
        taps.append(straight.layer(weights, layer, taps[-1], mask, turn))
    x = taps[branch]
    for layer in range(2, sum(name.endswith("attention.wo.weight") for name in weights)):
        x = straight.layer(weights, layer, x, mask, turn)
    right = straight.norm(weights, taps[2], "norm")[start - 1 :] @ weights["output.weight"].T
    below = straight.norm(weights, x, "medusa_norm")[start - 1 :] @ weights["medusa_output.weight"].T
    found = [merge(weights, right[0], below[0])]
    for slot in range(1, len(tokens)):
        left, up = right[slot], below[slot - side + 1] if slot >= side else None
        if up is None:
            found.append(left)
        else:
            found.append(merge(weights, left, up) if slot % side else up)
    return torch.stack(found)


def expected(
    weights: dict[str, Tensor], condition: Any, tokens: Tensor, merge: Merge = mean, branch: int = 2
) -> Tensor:
    """`straight_line` of a batch, conditional rows, then unconditional ones: [2B, L, V]."""
    found = []
    for guided in (False, True):
        for sample in range(len(tokens)):
            if isinstance(condition, Tensor):
                label = CLASSES if guided else int(condition[sample])
                prefix, words = weights["cls_embedding.embedding_table.weight"][[label]], torch.ones(1).bool()
            else:
                words = condition.mask[sample]
                features = condition.features[sample] * words[:, None]
                features = weights["cls_embedding.uncond_embedding"] if guided else features
                inner = features @ weights["cls_embedding.cap_proj.fc1.weight"].T
                inner = torch.nn.functional.gelu(inner, approximate="tanh")
                prefix = inner @ weights["cls_embedding.cap_proj.fc2.weight"].T
            found.append(straight_line(weights, prefix, words, tokens[sample], merge, branch))
    return torch.stack(found)


def scores(
    model: LlamaGenTransformer, condition: Any, tokens: Tensor, steps: Sequence[Step], guided: bool = True
) -> Tensor:
    """Logits [R, L, V] of given tokens, from the calls of these steps."""
    count, window = len(tokens), max(len(step.slots) for step in steps)
    state = model.prefill(condition, batch_size=count, guided=guided, window=window)
    found = state.logits.new_full((len(state.logits), tokens.shape[1], model.vocab_size), torch.nan)
    found[:, 0] = state.logits
    for step in steps:
        slots, emitted = step.slots.expand(count, -1), step.emitted.expand(count, -1)
        seen = step.seen.expand(count, -1, -1)
        fed = tokens[:, step.sources]
        found[:, step.emitted] = model(state, fed, slots, seen=seen, predicted=emitted, answers=step.answers)
    return found


def gated(weights: dict[str, Tensor], right: Tensor, below: Tensor) -> Tensor:
    """The merge, number by number, as the notes give it."""
    both = [*right.tolist(), *below.tolist()]
    middle = sum(both) / len(both)
    size = (sum((value - middle) ** 2 for value in both) / len(both)) ** 0.5
    read = [max(-6.0, min(6.0, (value - middle) / size)) for value in both]
    inner = [
        sum(w * x for w, x in zip(row, read, strict=True)) for row in weights["hv_gate_mlp.0.weight"].tolist()
    ]
    active = torch.tensor([x / (1 + math.exp(-x)) for x in inner], dtype=torch.float64)
    logit = float(weights["hv_gate_mlp.2.weight"][0] @ active + weights["hv_gate_mlp.2.bias"][0])
    share = 1 / (1 + math.exp(-logit))
    return share * right + (1 - share) * below
