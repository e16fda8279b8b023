"""Straight-line computations of the continuous models: one row at a time, from weights by their official names."""

import math
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

Weights = Mapping[str, Tensor]


def linear(w: Weights, name: str, x: Tensor) -> Tensor:
    return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]


def norm(x: Tensor, w: Weights | None = None, name: str = "") -> Tensor:
    wide = (x - x.mean(-1, keepdim=True)) / (x.var(-1, correction=0, keepdim=True) + 1e-6).sqrt()
    return wide if w is None else wide * w[f"{name}.weight"] + w[f"{name}.bias"]


def block(w: Weights, name: str, x: Tensor, heads: int, causal: bool = False) -> Tensor:
    """`x [W, dim]`: attention by explicit softmax, head by head."""
    q, k, v = linear(w, f"{name}.attn.qkv", norm(x, w, f"{name}.norm1")).chunk(3, -1)
    parts = []
    for query, key, value in zip(q.chunk(heads, -1), k.chunk(heads, -1), v.chunk(heads, -1), strict=True):
        scores = query @ key.T / math.sqrt(query.shape[-1])
        if causal:
            scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -math.inf)
        parts.append(scores.softmax(-1) @ value)
    x = x + linear(w, f"{name}.attn.proj", torch.cat(parts, -1))
    hidden = linear(w, f"{name}.mlp.fc1", norm(x, w, f"{name}.norm2"))
    hidden = 0.5 * hidden * (1 + torch.erf(hidden / math.sqrt(2)))
    return x + linear(w, f"{name}.mlp.fc2", hidden)


def head(w: Weights, name: str, x: Tensor, time: float, z: Tensor) -> Tensor:
    """One point [d] at a time with a condition [dim]."""
    frequencies = [10000 ** (-i / 128) for i in range(128)]
    features = torch.tensor(
        [math.cos(time * f) for f in frequencies] + [math.sin(time * f) for f in frequencies], dtype=x.dtype
    )
    mixed = linear(w, f"{name}.time_embed.mlp.2", F.silu(linear(w, f"{name}.time_embed.mlp.0", features)))
    mixed = F.silu(mixed + linear(w, f"{name}.cond_embed", z))
    x = linear(w, f"{name}.input_proj", x)
    depth = len({key.split(".res_blocks.")[1].split(".")[0] for key in w if f"{name}.res_blocks." in key})
    for i in range(depth):
        part = f"{name}.res_blocks.{i}"
        shift, scale, gate = linear(w, f"{part}.adaLN_modulation.1", mixed).chunk(3)
        hidden = norm(x, w, f"{part}.in_ln") * (1 + scale) + shift
        x = x + gate * linear(w, f"{part}.mlp.2", F.silu(linear(w, f"{part}.mlp.0", hidden)))
    shift, scale = linear(w, f"{name}.final_layer.adaLN_modulation.1", mixed).chunk(2)
    return linear(w, f"{name}.final_layer.linear", norm(x) * (1 + scale) + shift)


def mar(w: Weights, heads: int, label: int | None, tokens: Tensor, known: Tensor) -> Tensor:
    """Conditions [L, dim] of one picture, `tokens [L, d]` of which bool [L] are known. None: the null class."""
    length = len(tokens)
    places = w["encoder_pos_embed_learned"][0]
    buffer = len(places) - length
    label_row = w["fake_latent"][0] if label is None else w["class_emb.weight"][label]
    visible = [*range(buffer), *(buffer + int(i) for i in known.nonzero()[:, 0])]
    everything = torch.cat([label_row.expand(buffer, -1), linear(w, "z_proj", tokens)])
    x = norm(everything + places, w, "z_proj_ln")[visible]
    for i in range(layers(w, "encoder_blocks")):
        x = block(w, f"encoder_blocks.{i}", x, heads)
    x = linear(w, "decoder_embed", norm(x, w, "encoder_norm"))
    padded = w["mask_token"][0].repeat(len(places), 1)
    padded[visible] = x
    x = padded + w["decoder_pos_embed_learned"][0]
    for i in range(layers(w, "decoder_blocks")):
        x = block(w, f"decoder_blocks.{i}", x, heads)
    return norm(x, w, "decoder_norm")[buffer:] + w["diffusion_pos_embed_learned"][0]


def causal(w: Weights, heads: int, label: int | None, tokens: Tensor, places: list[int]) -> Tensor:
    """Conditions [n + 1, dim] of the slots up to the one after `tokens [n, d]`, which stand at places in order."""
    following = [*places, len(places)]
    label_row = w["fake_latent"][0] if label is None else w["class_emb.weight"][label]
    x = label_row + w["prefix_embed"]
    x[-1] = x[-1] + w["next_place_embed"][following[0]]
    rows = [*x]
    for slot, token in enumerate(tokens):
        hidden = linear(w, "z_proj", token) + w["place_embed"][places[slot]]
        rows.append(norm(hidden, w, "z_proj_ln") + w["next_place_embed"][following[slot + 1]])
    x = torch.stack(rows)
    for i in range(layers(w, "blocks")):
        x = block(w, f"blocks.{i}", x, heads, causal=True)
    prefix = len(w["prefix_embed"])
    told = torch.stack([w["diffusion_pos_embed"][place] for place in following[: len(tokens) + 1]])
    return norm(x[prefix - 1 :], w, "norm") + told


def layers(w: Weights, name: str) -> int:
    return len({key.split(".")[1] for key in w if key.startswith(f"{name}.")})
