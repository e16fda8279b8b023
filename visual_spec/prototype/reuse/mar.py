"""What a full call of MAR leaves for the calls after it, which compute few of its places (ReCAP).

A full call holds the keys and values of every layer by place. A local call feeds the encoder the tokens that were drawn
since, and the decoder the places of its group; both attend to what is held, and replace it at their own places (ReCAP,
arXiv 2505.19089, there for tokens out of a vocabulary). Other places do not see the fresh tokens until the next full
call: that is the approximation.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from visual_spec.models.continuous.mar import MARState, MARTransformer


class ReusingMAR:
    """A `MARTransformer` in one decode, called as it is. P places are those of the class, then those of the tokens.

    Attributes:
        holds: whether the next full call holds what local ones go on from.
    """

    def __init__(self, model: MARTransformer) -> None:
        self.model, self.holds = model, False
        self._held: dict[Any, list[Tensor]] = {}  # keys and values [R, H, P, D] of each layer, by place
        self._seen = torch.empty(0)  # bool [R, P], places that the encoder has read
        self._inputs = torch.empty(0)  # [R, P, dim], of the decoder's first layer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def __call__(self, state: MARState, tokens: Tensor, known: Tensor, room: int | None = None) -> Tensor:
        if not self.holds:
            return self.model(state, tokens, known, room)
        rows = known.repeat(2, 1) if state.guided else known
        self._seen = torch.cat([rows.new_ones(len(rows), self.model.config["buffer_size"]), rows], 1)
        return self.model(state, tokens, known, room, layer=self._hold)

    def _hold(self, block: Any, x: Tensor, mask: Tensor | None, at: Tensor | None) -> Tensor:
        """Run a layer, see `mar.Layer`, and hold its keys and values."""
        query, key, value = block.attn.project(block.norm1(x))
        if at is None:
            self._held[block] = [key, value]
            if block is self.model.decoder_blocks[0]:
                self._inputs = x
        else:
            shape, index = (*key.shape[:2], self._seen.shape[1], key.shape[-1]), _by_head(at, key)
            self._held[block] = [new.new_zeros(shape).scatter_(2, index, new) for new in (key, value)]
        return block.finish(x, query, key, value, mask)

    def again(self, state: MARState, tokens: Tensor, fresh: Tensor, places: Tensor) -> Tensor:
        """Conditions z [R, n, dim] of some places only, after a call that held; all others stay as that left them.

        Args:
            tokens: [B, m, d], those that have become known since the last call.
            fresh: long [B, m], their places.
            places: long [B, n], places of the decoder that are computed anew.
        """
        assert self._held, "no keys and values are held"
        model: Any = self.model
        if state.guided:
            tokens, fresh, places = tokens.repeat(2, 1, 1), fresh.repeat(2, 1), places.repeat(2, 1)
        fresh, at = fresh + model.config["buffer_size"], places + model.config["buffer_size"]
        hidden = model.z_proj_ln(model.z_proj(tokens) + model.encoder_pos_embed_learned[0, fresh])
        self._seen = self._seen.scatter(1, fresh, True)
        for block in model.encoder_blocks:
            hidden = self._replace(block, hidden, self._seen[:, None, None], fresh)
        hidden = model.decoder_embed(model.encoder_norm(hidden)) + model.decoder_pos_embed_learned[0, fresh]
        self._inputs = self._inputs.scatter(1, fresh[..., None].expand_as(hidden), hidden)
        hidden = self._inputs.gather(1, at[..., None].expand(-1, -1, hidden.shape[-1]))
        for block in model.decoder_blocks:
            hidden = self._replace(block, hidden, None, at)
        return model.decoder_norm(hidden) + model.diffusion_pos_embed_learned[0, places]

    def _replace(self, block: Any, x: Tensor, mask: Tensor | None, at: Tensor) -> Tensor:
        """Run a layer on `x [R, n, dim]` of the places `at`, long [R, n], which attend to all that is held."""
        query, *new = block.attn.project(block.norm1(x))
        key, value = (
            held.scatter_(2, _by_head(at, one), one) for held, one in zip(self._held[block], new, strict=True)
        )
        return block.finish(x, query, key, value, mask)


def _by_head(at: Tensor, parts: Tensor) -> Tensor:
    """Places [R, n] as an index of parts [R, H, n, D]."""
    return at[:, None, :, None].expand_as(parts)
