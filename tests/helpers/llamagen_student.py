"""A student's logits, computed without a cache."""

import torch
from torch import Tensor

from tests.helpers.tiny_students import DIM, SIDE
from tests.models.next_token import straight

SLOTS = SIDE * SIDE


def straight_line(
    weights: dict[str, Tensor], label: int, vectors: Tensor, known: int
) -> tuple[Tensor, Tensor]:
    """Logits [L, V] and vectors [L, D] of every slot of one picture, from tokens [L, D] of which `known` are drawn."""
    start = weights["cls_embedding.embedding_table.weight"][label]
    words = vectors @ weights["tok_embeddings.weight"].T + weights["tok_embeddings.bias"]
    x = torch.cat([start[None], words])
    for place in range(len(x)):
        # The class and the tokens after it that are known are told from noise.
        x[place] = x[place] + weights["n_d_embed.weight"][1 if place <= known else 0]
    size = DIM // 2
    turn = straight.turns(torch.arange(SLOTS) // SIDE, torch.arange(SLOTS) % SIDE, size)
    turn = torch.cat([torch.zeros_like(turn[:1]), turn])[:, None]  # of the class nothing is left
    mask = torch.ones(len(x), len(x), dtype=torch.bool).tril()
    for index in range(2):
        x = straight.layer(weights, index, x, mask, turn)
    x = x[1:]
    logits = straight.norm(weights, x, "norm") @ weights["output.weight"].T
    shift, scale = weights["final_layer_conti.scale_shift_table"] + start
    centred = x - x.mean(-1, keepdim=True)
    normed = centred * (centred.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt()
    moved = normed * (1 + scale) + shift
    drawn = moved @ weights["final_layer_conti.linear.weight"].T + weights["final_layer_conti.linear.bias"]
    return logits, drawn
