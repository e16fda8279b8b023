"""What LlamaGen keeps between the calls of one decode."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from visual_spec.models.core.cache import StaticCache
from visual_spec.models.core.protocol import DecodeState


@dataclass
class LlamaGenState(DecodeState):
    """Static cache of one decoding run.

    Attributes:
        cache: places of a row: the T positions of the prefix, the slots of the grid, and `window` more for slots past
            it. The nodes of a tree are written there until `keep` copies the accepted ones to their slots.
        rotary: `[L, D / 2, 2]`, at least float32: half precision is too coarse for angles.
        prefix_mask: bool `[R, T]`, the prefix positions that image tokens may attend to.
        features: `[R, W, dim]`, the head's input in the last call (prefill: W = 1), for drafters that read it.
        side: what is added to the positions that predict each slot, see `entered`; None: nothing.
    """

    cache: StaticCache
    rotary: Tensor
    prefix_mask: Tensor
    features: Tensor
    side: Tensor | None = None

    def select(self, samples: Tensor) -> None:
        rows = self.rows(samples)
        self.cache.select(rows)
        self.logits, self.prefix_mask = self.logits[rows], self.prefix_mask[rows]
        self.features = self.features[rows]
        self.side = None if self.side is None else self.side[rows]

    def buffers(self) -> list[Tensor]:
        return [*self.cache.buffers(), self.prefix_mask, *([] if self.side is None else [self.side])]

    def narrow(self, width: int) -> None:
        self.features = self.features[:, :width]
