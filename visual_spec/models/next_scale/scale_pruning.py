"""Sub-layers on a part of the places of a map; the rest is restored from an earlier map (FastVAR).

FastVAR (Guo et al. 2025, arXiv 2503.23367) prunes every sub-layer (attention, cross-attention, feed-forward) of a
large map by itself. The places whose input is farthest from the mean of the map go through it: score |x - mean(x)|^2,
summed over the channels, in every row alone. Elsewhere its output, with AdaLN's gain, comes from the same sub-layer at
the last whole map, resized by area. Pruned places of attention have neither queries nor keys nor values, so that later
maps do not see them.

Below float64, rounding may decide between places of equal scores, such as a map of one code has.

Departures from the published code: maps need not be squares, and the map that is restored from is the last whole one
(there: side 24, the last whole one).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch.nn.functional as F
from torch import Tensor

from visual_spec.models.core.cache import largest
from visual_spec.models.core.protocol import Side, area_of, shape_of, wide
from visual_spec.models.core.pruning import Pruning
from visual_spec.models.next_scale.scale_budget import offsets_of

# A sub-layer: its output [R, n, dim] for inputs [R, n, dim] at places long [R, n] of the map; None: at all of them.
Sublayer = Callable[[Tensor, Tensor | None], Tensor]
# Runs a sub-layer, given its number in the layer and its input.
Apply = Callable[[int, Tensor, Sublayer], Tensor]


def whole(part: int, x: Tensor, sublayer: Sublayer) -> Tensor:
    """Run a sub-layer on all places."""
    return sublayer(x, None)


def distinct_places(x: Tensor, count: int) -> Tensor:
    """Return the `count` places of `x [R, n, dim]` farthest from its mean, long [R, count], ascending."""
    values = wide(x)
    return largest((values - values.mean(1, keepdim=True)).square().sum(-1), count)


class PrunedMaps:
    """Runs the sub-layers of one decode on the places that a `Pruning` keeps.

    Args:
        pruning: which they are.
        scales: of the model.
        num_layers: of the model.
    """

    def __init__(self, pruning: Pruning, scales: Sequence[Side], num_layers: int) -> None:
        self._scales, self._kept = tuple(scales), pruning.kept(scales)
        self.layers, self._sources = pruning.layers(num_layers), pruning.sources(scales)
        self._restoring = set(self._sources.values())
        # Outputs of the sub-layers at the last whole map that is restored from: [R, n * n, dim].
        self._outputs: dict[tuple[int, int], Tensor] = {}

    def offsets(self, layer: int) -> tuple[int, ...]:
        """Return the first cached place of each scale in a layer, then their number."""
        return offsets_of([(1, kept) for kept in self._kept] if layer in self.layers else self._scales)

    def apply(self, layer: int, scales: range, part: int, x: Tensor, sublayer: Sublayer) -> Tensor:
        """Return the output `[R, places, dim]` of a sub-layer for all places.

        Args:
            scales: the scales of `x [R, places, dim]`. Only a scale that is fed alone is pruned.
            part: number of the sub-layer in its layer.
        """
        if layer not in self.layers:
            return sublayer(x, None)
        scale = scales.stop - 1
        area = area_of(self._scales[scale])
        if scale not in self._sources:
            output = sublayer(x, None)
            if scale in self._restoring:
                self._outputs[layer, part] = output[:, -area:]
            return output
        places = distinct_places(x, self._kept[scale])
        index = places[..., None].expand(-1, -1, x.shape[-1])
        output = sublayer(x.gather(1, index), places)
        held = self._outputs[layer, part].mT.unflatten(2, shape_of(self._scales[self._sources[scale]]))
        restored = F.interpolate(held, size=shape_of(self._scales[scale]), mode="area").flatten(2).mT
        return restored.scatter(1, index, output)

    def keep_rows(self, count: int) -> None:
        """Keep the first `count` rows only."""
        self._outputs = {key: output[:count].clone() for key, output in self._outputs.items()}
