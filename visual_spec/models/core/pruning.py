"""Which places of a token map go through which layers of a next-scale model. Plain data."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from visual_spec.models.core.protocol import Side, area_of


@dataclass(frozen=True)
class Pruning:
    """The share of the places of each scale that goes through the layers (FastVAR, Guo et al. 2025).

    Args:
        shares: of the scales from 0 on, each in (0, 1]; later scales are whole. Scale 0 has 1.
        depth: the part of the depth that is pruned: layer l of L if depth[0] <= l / L < depth[1].
    """

    shares: tuple[float, ...]
    depth: tuple[float, float] = (0.0, 1.0)

    def starting_at(self, first: int) -> Pruning:
        """Return the same with scales up to `first` whole: a prefill that ends there runs all of them."""
        return replace(self, shares=(1.0,) * (first + 1) + self.shares[first + 1 :])

    def kept(self, scales: Sequence[Side]) -> tuple[int, ...]:
        """Return how many places of each scale go through a pruned layer: the share of all, rounded up."""
        shares = [*self.shares, *[1.0] * len(scales)]
        # Without the digits in which 0.6 * 25 is more than 15.
        return tuple(
            math.ceil(round(share * area_of(side), 6)) for side, share in zip(scales, shares, strict=False)
        )

    def layers(self, num_layers: int) -> range:
        """Return the pruned layers."""
        first, stop = (math.ceil(round(part * num_layers, 6)) for part in self.depth)
        return range(first, stop)

    def sources(self, scales: Sequence[Side]) -> dict[int, int]:
        """Return for every pruned scale the one that it is restored from: the last whole scale before it."""
        sources, whole = {}, 0
        for scale, (side, kept) in enumerate(zip(scales, self.kept(scales), strict=True)):
            if kept < area_of(side):
                sources[scale] = whole
            else:
                whole = scale
        return sources
