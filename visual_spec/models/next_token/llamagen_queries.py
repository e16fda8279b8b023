"""LlamaGen's transformer as an any-order model with LPD's position queries (Zhang et al., 2507.01957, section 3.1).

The blocks, keys and rotary positions are LlamaGen's; what a position sees is LPD's (`models.core.position_queries`).
A query is one learned embedding, turned by the rotary table at its slot, as an instruction of RandAR's. So the weights
of a raster model, which have such blocks, are a start. LPD's own architecture is `lpd.LPDTransformer`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from visual_spec.models.core.cache import StaticCache, seen_causally
from visual_spec.models.core.offload import decodes
from visual_spec.models.core.position_queries import (
    fed_and_asked,
    query_places,
    seen_by_queries,
    seen_in_groups,
)
from visual_spec.models.core.protocol import ANY_ORDER
from visual_spec.models.next_token.llamagen_any_order import LlamaGenAnyOrder
from visual_spec.models.next_token.llamagen_blocks import (
    LlamaGenState,
    TextCondition,
    TransformerBlock,
    turns_of,
)


class LlamaGenQueries(LlamaGenAnyOrder):
    """An `AnyOrderModel`: a LlamaGen of order "queries"."""

    def add_parts(self) -> None:
        super().add_parts()
        self.trained_order = ANY_ORDER

    def _first_asked(
        self, cache: StaticCache, prefix_mask: Tensor, asked: Tensor, window: int, together: bool
    ) -> tuple[Tensor, Tensor]:
        count = self.grid.num_tokens
        nothing = prefix_mask.new_zeros(*asked.shape, count)
        seen = seen_by_queries(prefix_mask, nothing, asked, 0, window, together)
        return query_places(prefix_mask.shape[1], asked, 0, count, window), seen

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
        """Answer a call of `AnyOrderModel`: logits `[R, W, V]`; with `together`, zeros for the positions fed."""
        if seen is None:
            raise ValueError("this model decodes in any order; pass seen.")
        cache, length, fed = state.cache, state.prefix_mask.shape[1], tokens.shape[1]
        tokens, slots, seen, skipped = fed_and_asked(
            tokens, slots, seen, guided=state.guided, together=together
        )
        mask = seen_by_queries(state.prefix_mask, seen, slots, fed, state.window, together)
        table = state.rotary[slots.clamp(max=len(state.rotary) - 1)]  # [R, F + Q, D / 2, 2]
        hidden = torch.cat([self.tok_embeddings(tokens), self.instructions(table[:, fed:])], 1)
        places = query_places(length, slots, fed, self.grid.num_tokens, state.window)
        cache.at(places, mask.shape[2])
        state.features = self._read(cache, hidden, mask, turns_of(table), state.prefix_mask)[:, fed:]
        return F.pad(self._head(state.features), (0, 0, skipped, 0))

    def teacher_forced_in_groups(
        self,
        tokens: Tensor,
        orders: Tensor,
        groups: Tensor,
        condition: TextCondition | Tensor,
        dropped: Tensor | None = None,
    ) -> Tensor:
        """Return logits `[B, L, V]` of whole pictures along `orders [B, L]`, in one pass. Gradients flow.

        Place p predicts slot `orders[b, p]` of `tokens [B, L]` as a call that draws all places of one number of
        `groups [L]` together. `dropped` as in `teacher_forced`.
        """
        prefix, prefix_mask = self.cls_embedding.prefix(condition, dropped=dropped)
        length, table = prefix.shape[1], self.rotary_table().to(tokens.device)
        turned = table[orders]  # [B, L, D / 2, 2]
        fed = self.tok_embeddings(tokens.gather(1, orders))
        hidden = torch.cat([prefix, fed, self.instructions(turned)], 1)
        unturned = self.unturned(table).expand(len(tokens), length, -1, -1)
        turns = turns_of(torch.cat([unturned, turned, turned], 1))
        words = prefix_mask[:, None].expand(-1, hidden.shape[1] - length, -1)
        picture = seen_in_groups(groups).expand(len(tokens), -1, -1)
        of_prefix = F.pad(seen_causally(prefix_mask), (0, picture.shape[2]))
        mask = torch.cat([of_prefix, torch.cat([words, picture], 2)], 1)[:, None]
        for block in self.layers:
            assert isinstance(block, TransformerBlock)
            hidden = block.whole(hidden, turns, mask)
        return self._head(self.norm(hidden[:, length + tokens.shape[1] :]))
