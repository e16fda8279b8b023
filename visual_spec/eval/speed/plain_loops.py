"""Plain decoding by loops of its own: as a straight loop without checks, and without a cache.

The straight loop of a LlamaGen transformer is what the decoding itself costs, and nothing beside it. It is a row of
`visual-spec bench`, so that no speed-up is measured against an idle baseline. All samples of a batch are at the same
slot, the noise of all slots is drawn beforehand, and nothing is checked, timed, counted or called back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from visual_spec.kernels.philox import philox_log_exponential
from visual_spec.models.next_token.llamagen import LlamaGenTransformer, TextCondition
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.core.noise import TOKEN, CounterNoise, draw_keys

if TYPE_CHECKING:
    from visual_spec.models.core.protocol import NextTokenModel

STRAIGHT = "straight loop, no checks"
NO_CACHE = "autoregressive, no cache"


def fits(model: object) -> bool:
    """Return whether the straight loop decodes this model: a LlamaGen transformer of pictures."""
    return isinstance(model, LlamaGenTransformer) and model.grid.frames == 1


@torch.no_grad()
def straight_loop(
    model: LlamaGenTransformer,
    condition: TextCondition | Tensor,
    *,
    law: TokenLaw,
    generator: torch.Generator | Sequence[torch.Generator] | None,
    batch_size: int,
) -> Tensor:
    """Decode a batch. Noise and tokens equal `AutoregressiveSampler`'s.

    Args:
        model: fits, see `fits`.
        condition: as for the model's `prefill`, `batch_size` rows of it.
        law: how logits become the distribution a token is drawn from.
        generator: one for the batch, or one a sample.

    Returns:
        tokens, long [B, L].
    """
    state = model.prefill(condition, batch_size=batch_size, guided=law.guided, window=1)
    logits, rows, device = state.logits, len(state.logits), state.logits.device
    length, prefix, heads = model.grid.num_tokens, state.prefix_mask.shape[1], model.config["num_heads"]
    layers: Any = list(zip(model.layers, state.cache.keys, state.cache.values, strict=True))
    turns = torch.view_as_complex(state.rotary)  # [L, D / 2]
    mask = torch.zeros(rows, 1, 1, prefix + length, dtype=model.dtype, device=device)
    mask[..., :prefix].masked_fill_(~state.prefix_mask[:, None, None], -torch.inf)
    slots = torch.arange(length, device=device).expand(batch_size, -1)
    keys = draw_keys(generator, batch_size).to(device)
    times = philox_log_exponential(keys, slots, model.vocab_size, TOKEN, dtype=logits.dtype)  # [B, L, V]
    tokens = torch.empty_like(slots)
    for slot in range(length):
        if slot:
            place, end = prefix + slot - 1, prefix + slot
            x = model.tok_embeddings(tokens[:, slot - 1])
            x = x.repeat(rows // batch_size, 1)  # [R, dim]
            for block, keys, values in layers:
                qkv = block.attention.wqkv(block.attention_norm(x)).view(rows, 3, heads, -1)
                pairs = qkv[:, :2].to(turns.real.dtype).unflatten(-1, (-1, 2))
                turned = torch.view_as_real(torch.view_as_complex(pairs) * turns[slot - 1]).flatten(-2)
                q, k = turned.to(x.dtype).unbind(1)
                keys[:, :, place], values[:, :, place] = k, qkv[:, 2]
                seen = keys[:, :, :end], values[:, :, :end]
                y = F.scaled_dot_product_attention(q[:, :, None], *seen, attn_mask=mask[..., :end])
                x = x + block.attention.wo(y.flatten(1))
                x = x + block.feed_forward(block.ffn_norm(x))
            logits = model.output(model.norm(x))
        scores = law(logits[:, None], law.guided, slots[:, slot, None])  # [B, 1, V]
        tokens[:, slot] = (times[:, slot] - scores[:, 0]).argmin(-1)
    return tokens


@torch.no_grad()
def decode_without_cache(
    model: NextTokenModel,
    condition: object,
    *,
    law: TokenLaw,
    generator: torch.Generator | Sequence[torch.Generator] | None,
    batch_size: int,
) -> Tensor:
    """Tokens [B, L] of plain decoding that runs the whole prefix anew for every token: what a cache saves.

    Noise and tokens equal `AutoregressiveSampler`'s.
    """
    length = model.grid.num_tokens
    keys = draw_keys(generator, batch_size)
    noise, tokens = None, None
    for slot in range(length):
        state = model.prefill(condition, batch_size=batch_size, guided=law.guided, window=max(slot, 1))
        if noise is None or tokens is None:
            noise = CounterNoise(keys, state.logits.device)
            tokens = torch.zeros(batch_size, length, dtype=torch.long, device=state.logits.device)
        logits = state.logits[:, None]  # [R, 1, V]
        if slot:
            slots = torch.arange(slot, device=tokens.device).expand(batch_size, -1)
            logits = model(state, tokens[:, :slot], slots)[:, -1:]
        here = torch.full((batch_size, 1), slot, device=tokens.device)
        tokens[:, slot] = noise.categorical(law(logits, law.guided, here), here, TOKEN)[:, 0]
    assert tokens is not None  # a grid has at least one slot
    return tokens
