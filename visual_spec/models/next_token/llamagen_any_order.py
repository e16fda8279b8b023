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

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from visual_spec.models.core.cache import StaticCache, seen_causally
from visual_spec.models.core.offload import decodes
from visual_spec.models.next_token.llamagen import LlamaGenTransformer
from visual_spec.models.next_token.llamagen_blocks import (
    LlamaGenState,
    Shared,
    TextCondition,
    TransformerBlock,
    Turns,
    rotate,
    turns_of,
)


class LlamaGenAnyOrder(LlamaGenTransformer):
    """An `AnyOrderModel`: a LlamaGen of order "any"."""

    def add_parts(self) -> None:
        self.pos_instruct_embeddings = nn.Parameter(torch.randn(1, self.config["dim"]) * 0.02)

    def num_places(self, window: int) -> int:
        """Places of tokens, then as many of instructions."""
        return 2 * super().num_places(window)

    @decodes
    def prefill(
        self,
        condition: TextCondition | Tensor,
        *,
        batch_size: int,
        guided: bool,
        window: int,
        asked: Tensor | None = None,
        together: bool = False,
    ) -> LlamaGenState:
        """Run the prefix and the instructions of the slots `asked [B, P]` in one pass; see `AnyOrderModel`."""
        if asked is None:
            raise ValueError("this model decodes in any order; pass asked, the first slots to predict.")
        prompt = self.prompt_of(condition, batch_size=batch_size)
        return self.run_prompt(prompt, guided=guided, window=window, asked=asked, together=together)

    @decodes
    def run_prompt(
        self,
        prompt: tuple[Tensor, ...],
        *,
        guided: bool,
        window: int,
        held: LlamaGenState | None = None,
        asked: Tensor | None = None,
        together: bool = False,
    ) -> LlamaGenState:
        """Run the prefix of a checked condition, see `PromptModel`; `asked` and `together` as in `prefill`."""
        assert asked is not None
        prefix, prefix_mask, cache, table = self._begin(prompt, guided, window, held)
        rows, length, _ = prefix.shape
        asked = asked.to(prefix.device)
        asked = asked.repeat(rows // len(asked), 1)  # [R, P]
        rotations = table[asked.clamp(max=len(table) - 1)]  # [R, P, D / 2, 2]
        turns = turns_of(torch.cat([self.unturned(table).expand(rows, length, -1, -1), rotations], 1))
        hidden = torch.cat([prefix, self.instructions(rotations)], 1)
        own, seen = self._first_asked(cache, prefix_mask, asked, window, together)
        seen = torch.cat([F.pad(seen_causally(prefix_mask), (0, seen.shape[2] - length)), seen], 1)
        positions = torch.arange(length, device=prefix.device).expand(rows, -1)
        cache.at(torch.cat([positions, own], 1), seen.shape[2])
        features = self._read(cache, hidden, seen, turns, prefix_mask)[:, length:]  # [R, P, dim]
        return LlamaGenState(self._head(features), guided, window, cache, table, prefix_mask, features)

    def _first_asked(
        self, cache: StaticCache, prefix_mask: Tensor, asked: Tensor, window: int, together: bool
    ) -> tuple[Tensor, Tensor]:
        """Of the instructions of a prefill their cache places [R, P], and what they see, bool [R, P, S]."""
        own = _instruction_places(cache, prefix_mask.shape[1], asked)
        seen = F.pad(prefix_mask, (0, cache.num_slots - prefix_mask.shape[1]))[:, None]
        seen = seen.expand(-1, asked.shape[1], -1).scatter(2, own[..., None], True)
        return own, _seen_in_turn(seen, own) if together else seen

    @decodes
    def forward(
        self,
        state: LlamaGenState,
        tokens: Tensor,
        slots: Tensor,
        *,
        seen: Tensor | None = None,
        together: bool = False,
    ) -> Tensor:
        """Answer a call of `AnyOrderModel`: logits `[R, W, V]`."""
        if seen is None:
            raise ValueError("this model decodes in any order; pass seen.")
        cache, length, fed = state.cache, state.prefix_mask.shape[1], tokens.shape[1]
        if state.guided:
            tokens, slots, seen = tokens.repeat(2, 1), slots.repeat(2, 1), seen.repeat(2, 1, 1)
        own = _instruction_places(cache, length, slots)  # [R, W]
        held = F.pad(seen, (0, state.window))  # [R, W, L + window]
        seen = torch.cat([state.prefix_mask[:, None].expand(-1, slots.shape[1], -1), held, held], 2)
        seen = seen.scatter(2, own[..., None], True)
        if together:
            seen[:, fed:] = _seen_in_turn(seen[:, fed:], own[:, fed:])
        # A token that is fed sees its instruction and itself besides.
        places = length + slots[:, :fed]
        seen = torch.cat([seen, seen[:, :fed].scatter(2, places[..., None], True)], 1)  # [R, W + F, S]
        table = state.rotary[slots.clamp(max=len(state.rotary) - 1)]  # [R, W, D / 2, 2]
        instructions = self.instructions(table)
        hidden = torch.cat([instructions, self.tok_embeddings(tokens)], 1)  # [R, W + F, dim]
        cache.at(torch.cat([own, places], 1), cache.num_slots)
        turns = turns_of(torch.cat([table, table[:, :fed]], 1))
        features = self._read(cache, hidden, seen, turns, state.prefix_mask)
        state.features = features[:, : slots.shape[1]]
        return self._head(state.features)

    def teacher_forced_along(
        self, tokens: Tensor, orders: Tensor, condition: TextCondition | Tensor, dropped: Tensor | None = None
    ) -> Tensor:
        """Return logits `[B, L, V]` along `orders`, long `[B, L]`, of whole pictures `tokens [B, L]`, in one pass.

        Gradients flow. Place p predicts slot `orders[b, p]` from the tokens of the slots before it, as one token a call
        does. `dropped` as in `teacher_forced`.
        """
        prefix, prefix_mask = self.cls_embedding.prefix(condition, dropped=dropped)
        length, table = prefix.shape[1], self.rotary_table().to(tokens.device)
        turned = table[orders]  # [B, L, D / 2, 2]
        embedded = self.tok_embeddings(tokens.gather(1, orders))
        # [B, 2 L - 1, dim]
        pairs = torch.stack([self.instructions(turned), embedded], 2).flatten(1, 2)[:, :-1]
        hidden = torch.cat([prefix, pairs], 1)
        unturned = self.unturned(table).expand(len(tokens), length, -1, -1)
        turns = turns_of(torch.cat([unturned, turned.repeat_interleave(2, 1)[:, :-1]], 1))
        mask = seen_causally(F.pad(prefix_mask, (0, hidden.shape[1] - length), value=True))[:, None]
        for block in self.layers:
            assert isinstance(block, TransformerBlock)
            hidden = block.whole(hidden, turns, mask)
        return self._head(self.norm(hidden[:, length::2]))

    def instructions(self, table: Tensor) -> Tensor:
        """Return position-instruction tokens [R, P, dim]: the learned one turned by `table [R, P, D / 2, 2]`."""
        pairs = self.pos_instruct_embeddings.view(1, 1, 1, self.config["num_heads"], -1)
        return rotate(pairs.expand(*table.shape[:2], -1, -1, -1), turns_of(table)).flatten(2)

    def _read(
        self, cache: StaticCache, hidden: Tensor, seen: Tensor, turns: Turns, prefix_mask: Tensor
    ) -> Tensor:
        """Run `hidden [R, N, dim]` at places that see bool `seen [R, N, S]`, and return what the head reads."""
        mask = hidden.new_zeros(seen.shape).masked_fill_(~seen, -torch.inf)[:, None]  # [R, 1, N, S]
        return self.run(hidden, cache, Shared(turns, cache.places, mask, prefix_mask))[0]


def _seen_in_turn(seen: Tensor, asked: Tensor) -> Tensor:
    """Return `seen [R, P, S]` of instructions at places `asked [R, P]`, which see those before them too."""
    count = asked.shape[1]
    earlier = torch.ones(count, count, dtype=torch.bool, device=asked.device).tril()
    return seen.scatter(2, asked[:, None].expand(-1, count, -1), earlier.expand(len(asked), -1, -1))


def _instruction_places(cache: StaticCache, prefix: int, slots: Tensor) -> Tensor:
    """Return the cache places of the instructions of slots: after as many places of tokens."""
    return prefix + (cache.num_slots - prefix) // 2 + slots
