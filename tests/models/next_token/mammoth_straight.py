"""MammothModa2's official loop, written anew without a cache: every step reads the whole text again."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def _features(model: Any, ids: Tensor, mask: Tensor) -> Tensor:
    """Layer by layer: text ids go to `mlp`, image ids to `gen_mlp`; one token and expert at a time."""
    decoder: Any = model.llm_model.model.language_model
    first = decoder.embed_tokens.num_embeddings
    image = ids >= first
    rows = [
        torch.stack(
            [
                decoder.gen_embed_tokens.weight[token - first]
                if token >= first
                else decoder.embed_tokens.weight[token]
                for token in row
            ]
        )
        for row in ids.tolist()
    ]
    hidden = torch.stack(rows)
    length = ids.shape[1]
    positions = (mask.cumsum(-1) - 1).clamp_min(0)
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    sees = causal & (mask[:, None].bool() | torch.eye(length, dtype=torch.bool))
    rotary = decoder.rotary_emb(hidden, positions.expand(3, -1, -1))
    bias = torch.zeros(sees.shape, dtype=hidden.dtype).masked_fill(~sees, torch.finfo(hidden.dtype).min)[
        :, None
    ]
    layers: Any = list(decoder.layers)
    for layer in layers:
        attended = layer.self_attn(
            hidden_states=layer.input_layernorm(hidden), position_embeddings=rotary, attention_mask=bias
        )[0]
        hidden = hidden + attended
        normed = layer.post_attention_layernorm(hidden)
        out = torch.zeros_like(hidden)
        for row in range(len(ids)):
            for place in range(length):
                drawn = bool(image[row, place]) and layer.gen_mlp is not None
                expert: Any = layer.gen_mlp if drawn else layer.mlp
                out[row, place] = expert(normed[row, place])
        hidden = hidden + out
    return decoder.norm(hidden)


@torch.no_grad()
def straight(
    model: Any,
    ids: Tensor,
    mask: Tensor,
    height: int,
    width: int,
    cfg_scale: float,
    sample: bool,
    top_k: int = 0,
) -> Tensor:
    """Return ids [B, T + height * (width + 1)] of the pairs `ids` [B, T]; draws from PyTorch's generator."""
    config = model.generation_config
    first = model.llm_model.model.language_model.embed_tokens.num_embeddings
    half, mask = len(ids) // 2, mask.clone()
    if cfg_scale > 1:
        mask[half:, :-10] = 0
    for _ in range(height):
        for column in range(width + 1):
            logits = model.llm_model.gen_head(_features(model, ids, mask)[:, -1]).float()
            logits = torch.cat([logits.new_zeros(len(ids), first), logits], 1)
            if cfg_scale > 1:
                guided = logits[half:] + (logits[:half] - logits[half:]) * cfg_scale
                logits = torch.cat([guided, guided])
            logits[:, : config.visual_token_start_id] = -torch.inf
            if top_k:
                logits[logits < logits.topk(top_k).values[:, -1:]] = -torch.inf
            new = torch.multinomial(F.softmax(logits, -1), 1) if sample else logits.argmax(-1, keepdim=True)
            if cfg_scale > 1:
                new[half:] = new[:half]
            if column == width:
                new[:] = config.eol_token_id
            ids, mask = torch.cat([ids, new], 1), torch.cat([mask, torch.ones_like(new)], 1)
    return ids
