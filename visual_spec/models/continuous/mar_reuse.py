"""What a full call of MAR leaves for the calls after it, which compute few of its places (ReCAP).

A full call holds the keys and values of every layer by place. A local call feeds the encoder the tokens that were drawn
since, and the decoder the places of its group; both attend to what is held, and replace it at their own places (ReCAP,
arXiv 2505.19089, there for tokens out of a vocabulary). Other places do not see the fresh tokens until the next full
call: that is the approximation.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass
class HeldLayers:
    """Keys and values [R, H, P, D] of some layers, by place."""

    keys: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)

    def hold(self, block: Any, x: Tensor, mask: Tensor | None, at: Tensor | None, places: int) -> Tensor:
        """Run a layer on `x [R, W, dim]` and hold its keys and values.

        Args:
            block: a `Block`.
            mask: of `Block.forward`.
            at: long [R, W], the places of x; None: all of them in order.
            places: P.
        """
        query, key, value = block.attn.project(block.norm1(x))
        for held, new in ((self.keys, key), (self.values, value)):
            whole = new if at is None else new.new_zeros(*new.shape[:2], places, new.shape[-1])
            held.append(whole if at is None else whole.scatter_(2, _by_head(at, new), new))
        return block.finish(x, query, key, value, mask)

    def replace(self, index: int, block: Any, x: Tensor, mask: Tensor | None, at: Tensor) -> Tensor:
        """Run layer `index` on `x [R, n, dim]` of the places `at`, long [R, n], which attend to all that is held."""
        query, key, value = block.attn.project(block.norm1(x))
        self.keys[index].scatter_(2, _by_head(at, key), key)
        self.values[index].scatter_(2, _by_head(at, value), value)
        return block.finish(x, query, self.keys[index], self.values[index], mask)

    def select(self, rows: Tensor) -> HeldLayers:
        return HeldLayers([part[rows] for part in self.keys], [part[rows] for part in self.values])


@dataclass
class Held:
    """What local calls go on from.

    Attributes:
        seen: bool [R, P], places that the encoder has read: of the class, and of known tokens.
        inputs: [R, P, dim], of the decoder, without its positions.
        encoder, decoder: what their layers hold.
    """

    seen: Tensor
    inputs: Tensor
    encoder: HeldLayers
    decoder: HeldLayers

    def select(self, rows: Tensor) -> Held:
        """Keep only some rows, long [N]."""
        return Held(self.seen[rows], self.inputs[rows], self.encoder.select(rows), self.decoder.select(rows))


def _by_head(at: Tensor, parts: Tensor) -> Tensor:
    """Places [R, n] as an index of parts [R, H, n, D]."""
    return at[:, None, :, None].expand_as(parts)


def at_places(table: Tensor, at: Tensor) -> Tensor:
    """Entries [R, n, C] of a table [R, P, C] at places long [R, n]."""
    return table.gather(1, at[..., None].expand(-1, -1, table.shape[-1]))


def put_at(table: Tensor, at: Tensor, parts: Tensor) -> Tensor:
    """The table [R, P, C] with parts [R, n, C] at places long [R, n]."""
    return torch.scatter(table, 1, at[..., None].expand_as(parts), parts)
