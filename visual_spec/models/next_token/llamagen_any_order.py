"""LlamaGen's transformer as an any-order model: RandAR's sequence of position-instruction tokens and image tokens.

RandAR (Pang et al., 2412.01827, section 3) puts a position-instruction token before every image token of a random
order: condition, instruction of the first slot, its token, instruction of the second slot, its token, and so on, causal
over the whole sequence. An instruction is one learned embedding, turned by the rotary table at the slot that is to be
predicted. Both tokens of a pair attend at the rotary index of their slot, and the head reads the instruction.

The cache is written by slot: tokens at the slots, instructions after them. Positions of one call that are only asked do
not see each other's instructions, as if each came next. With `together` they see those asked before them, as in the
causal mask of RandAR's public code.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from visual_spec.models.core.cache import StaticCache
from visual_spec.models.next_token.llamagen_blocks import Shared, Turns, rotate, turns_of
from visual_spec.models.next_token.llamagen_state import LlamaGenState


class Blocks(Protocol):
    """What these functions read of a LlamaGen transformer."""

    tok_embeddings: Any
    pos_instruct_embeddings: Any

    @property
    def config(self) -> Mapping[str, Any]: ...

    def unturned(self, table: Tensor) -> Tensor: ...

    def run(self, hidden: Tensor, cache: StaticCache, shared: Shared) -> tuple[Tensor, Tensor]: ...


def instructions(embedding: Tensor, table: Tensor, heads: int) -> Tensor:
    """Return position-instruction tokens [R, P, dim]: `embedding [1, dim]` turned by `table [R, P, D / 2, 2]`."""
    pairs = embedding.view(1, 1, 1, heads, -1).expand(*table.shape[:2], -1, -1, -1)  # [R, P, 1, H, D]
    return rotate(pairs, turns_of(table)).flatten(2)


def _run(
    model: Blocks,
    cache: StaticCache,
    hidden: Tensor,
    seen: Tensor,
    turns: Turns,
    prefix_mask: Tensor,
) -> Tensor:
    """Run `hidden [R, N, dim]` through all blocks, and return what the head reads. Writes the cache where it was set.

    Args:
        seen: bool [R, N, S], the places of the cache that each position attends to.
        turns: those of the positions' rotary indices.
    """
    mask = hidden.new_zeros(seen.shape).masked_fill_(~seen, -torch.inf)[:, None]  # [R, 1, N, S]
    return model.run(hidden, cache, Shared(turns, cache.places, mask, prefix_mask))[0]


def prefill(
    model: Blocks,
    cache: StaticCache,
    prefix: Tensor,
    prefix_mask: Tensor,
    table: Tensor,
    asked: Tensor,
) -> Tensor:
    """Run the prefix `[R, T, dim]` and the instructions of the slots `asked [B, P]` in one pass: [R, P, dim].

    Args:
        prefix_mask: bool [R, T], the prefix positions that others may attend to.
        table: [L, D / 2, 2], the rotary table of the slots.
    """
    (rows, length, _), places = prefix.shape, cache.num_slots
    asked = asked.repeat(rows // len(asked), 1)  # [R, P]
    told = table[asked.clamp(max=len(table) - 1)]  # [R, P, D / 2, 2]
    turns = turns_of(torch.cat([model.unturned(table).expand(rows, length, -1, -1), told], 1))
    hidden = torch.cat(
        [prefix, instructions(model.pos_instruct_embeddings, told, model.config["num_heads"])], 1
    )
    own = _instruction_places(cache, length, asked)
    positions = torch.arange(length, device=prefix.device)
    at = torch.cat([positions.expand(rows, -1), own], 1)  # [R, T + P]
    causal = torch.ones(length, length, dtype=torch.bool, device=prefix.device).tril() & prefix_mask[:, None]
    seen = torch.cat([causal, prefix_mask[:, None].expand(-1, asked.shape[1], -1)], 1)  # [R, T + P, T]
    seen = F.pad(seen, (0, places - length)).scatter(2, at[..., None], True)
    cache.at(at, places)
    return _run(model, cache, hidden, seen, turns, prefix_mask)[:, length:]


def forward(
    model: Blocks, state: LlamaGenState, tokens: Tensor, slots: Tensor, seen: Tensor, together: bool = False
) -> Tensor:
    """Answer a call of `AnyOrderModel`: what the head reads, [R, W, dim]."""
    cache, length, fed = state.cache, state.prefix_mask.shape[1], tokens.shape[1]
    if state.guided:
        tokens, slots, seen = tokens.repeat(2, 1), slots.repeat(2, 1), seen.repeat(2, 1, 1)
    own = _instruction_places(cache, length, slots)  # [R, W]
    held = F.pad(seen, (0, state.window))  # [R, W, L + window]
    seen = torch.cat([state.prefix_mask[:, None].expand(-1, slots.shape[1], -1), held, held], 2)
    seen = seen.scatter(2, own[..., None], True)
    if together:
        asked = own[:, fed:]  # [R, W - F]
        earlier = torch.ones(asked.shape[1], asked.shape[1], dtype=torch.bool, device=asked.device).tril()
        seen[:, fed:] = seen[:, fed:].scatter(
            2, asked[:, None].expand(-1, asked.shape[1], -1), earlier.expand(len(asked), -1, -1)
        )
    # A token that is fed sees its instruction and itself besides.
    places = length + slots[:, :fed]
    seen = torch.cat([seen, seen[:, :fed].scatter(2, places[..., None], True)], 1)  # [R, W + F, S]
    table = state.rotary[slots.clamp(max=len(state.rotary) - 1)]  # [R, W, D / 2, 2]
    told = instructions(model.pos_instruct_embeddings, table, model.config["num_heads"])
    hidden = torch.cat([told, model.tok_embeddings(tokens)], 1)  # [R, W + F, dim]
    cache.at(torch.cat([own, places], 1), cache.num_slots)
    turns = turns_of(torch.cat([table, table[:, :fed]], 1))
    return _run(model, cache, hidden, seen, turns, state.prefix_mask)[:, : slots.shape[1]]


def _instruction_places(cache: StaticCache, prefix: int, slots: Tensor) -> Tensor:
    """Return the cache places of the instructions of slots: after as many places of tokens."""
    return prefix + (cache.num_slots - prefix) // 2 + slots
