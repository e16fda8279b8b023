"""The layers of VAR, computed without a cache."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.helpers.tiny_scales import SIDES


def silu(x: Tensor) -> Tensor:
    return x / (1 + torch.exp(-x))


def gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def normed(v: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    centred = v - v.mean(-1, keepdim=True)
    unit = centred / (centred.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()
    return unit * (1 + scale) + shift


def block_shapes(depth: int, dim: int, heads: int, shared: bool = False) -> dict[str, tuple[int, ...]]:
    """Keys and shapes of the released blocks, and of the modulations that they share."""
    linear = {"attn.mat_qkv": (3 * dim, dim), "attn.proj": (dim, dim)}
    linear |= {"ffn.fc1": (4 * dim, dim), "ffn.fc2": (dim, 4 * dim)}
    block: dict[str, tuple[int, ...]] = {"attn.scale_mul_1H11": (1, heads, 1, 1)}
    block |= {f"{name}.weight": shape for name, shape in linear.items()}
    block |= {f"{name}.bias": shape[:1] for name, shape in linear.items() if name != "attn.mat_qkv"}
    block |= {"attn.q_bias": (dim,), "attn.v_bias": (dim,)}
    modulation: dict[str, tuple[int, ...]] = {
        "ada_lin.1.weight": (6 * dim, dim),
        "ada_lin.1.bias": (6 * dim,),
    }
    block |= {"ada_gss": (1, 1, 6, dim)} if shared else modulation
    shapes = {f"blocks.{layer}.{key}": shape for layer in range(depth) for key, shape in block.items()}
    return shapes | ({f"shared_{key}": shape for key, shape in modulation.items()} if shared else {})


def straight_layers(
    model: Any,
    x: Tensor,
    label: int,
    sees: Callable[[int, int], bool],
    between: Callable[[int], Tensor] = lambda layer: torch.tensor(0.0),
) -> Tensor:
    """All layers on inputs x [L, dim] of one picture: loops over heads and tokens. Place i sees j if `sees(i, j)`.

    `between(layer)` is added between attention and feed-forward layer.
    """
    w = model.state_dict()
    dim, heads = model.config["dim"], model.config["num_heads"]
    size, condition = dim // heads, silu(w["class_emb.weight"][label])
    for layer in range(model.config["num_layers"]):
        p = f"blocks.{layer}."
        if model.config.get("shared_adaln"):
            six = w["shared_ada_lin.1.weight"] @ condition + w["shared_ada_lin.1.bias"]
            six = six.view(6, dim) + w[p + "ada_gss"][0, 0]
        else:
            six = (w[p + "ada_lin.1.weight"] @ condition + w[p + "ada_lin.1.bias"]).view(6, dim)
        gamma1, gamma2, scale1, scale2, shift1, shift2 = six
        h = normed(x, scale1, shift1) @ w[p + "attn.mat_qkv.weight"].T
        q, k, v = h.chunk(3, 1)
        q, v = q + w[p + "attn.q_bias"], v + w[p + "attn.v_bias"]
        mixed = torch.zeros_like(x)
        for head in range(heads):
            part = slice(head * size, (head + 1) * size)
            sharpness = min(math.exp(w[p + "attn.scale_mul_1H11"][0, head, 0, 0]), 100.0)
            for i in range(len(x)):
                seen = [j for j in range(len(x)) if sees(i, j)]
                cosines = [(q[i, part] @ k[j, part]) / (q[i, part].norm() * k[j, part].norm()) for j in seen]
                mixed[i, part] = (sharpness * torch.stack(cosines)).softmax(0) @ v[seen][:, part]
        x = x + (mixed @ w[p + "attn.proj.weight"].T + w[p + "attn.proj.bias"]) * gamma1
        x = x + between(layer)
        h = normed(x, scale2, shift2) @ w[p + "ffn.fc1.weight"].T + w[p + "ffn.fc1.bias"]
        x = x + (gelu(h) @ w[p + "ffn.fc2.weight"].T + w[p + "ffn.fc2.bias"]) * gamma2
    return x


# The class stands in front, as a scale of its own.
LEVELS = [0] + [scale for scale, side in enumerate(SIDES, 1) for _ in range(side * side)]


def student_logits(model: Any, label: int, vectors: Tensor, known: int) -> tuple[Tensor, Tensor]:
    """Logits [L, V] and vectors [L, D] of every slot of one picture, from tokens [L, D] of which `known` are drawn."""
    w = model.state_dict()
    start = w["class_emb.weight"][label]
    rows = [start + w["pos_start"][0, 0]]
    rows += [w["word_embed.weight"] @ vector + w["word_embed.bias"] for vector in vectors]
    # The class and the tokens after it that are known are told from noise.
    told = torch.stack([w["n_d_embed.weight"][1 if place <= known else 0] for place in range(len(rows))])
    x = torch.stack([row + w["lvl_embed.weight"][level] for row, level in zip(rows, LEVELS, strict=True)])
    x = x + w["pos_1LC"][0] + told

    def moved(layer: int) -> Tensor:
        return told @ w[f"layerwise_n_d_embed.{layer}.weight"].T + w[f"layerwise_n_d_embed.{layer}.bias"]

    x = straight_layers(model, x, label, lambda i, j: LEVELS[j] < LEVELS[i] or i == j, moved)
    x = (x + moved(2))[1:]
    condition = silu(start)
    scale, shift = (w["head_nm.ada_lin.1.weight"] @ condition + w["head_nm.ada_lin.1.bias"]).view(2, 16)
    logits = normed(x, scale, shift) @ w["head.weight"].T + w["head.bias"]
    shift, scale = w["final_layer_conti.scale_shift_table"] + start
    drawn = normed(x, scale, shift) @ w["final_layer_conti.linear.weight"].T
    return logits, drawn + w["final_layer_conti.linear.bias"]
