"""What a next-scale decode returns, and what it costs: calls, places and bytes of each model."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from visual_spec.models.core.protocol import area_of
from visual_spec.models.core.pruning import Pruning
from visual_spec.samplers.core.trace import DecodeTrace, SampleResult


@dataclass
class ScaleTrace(DecodeTrace):
    """A `DecodeTrace` of a next-scale decode.

    `target_calls` counts the forwards of all models, one a scale; a prefill yields the first scale of its model.
    `commit_call` is the scale of each slot. If the sampler measures, `divergence` and `moved_mass` are the total
    variation distance between the law that a token was drawn from and the first model's law, under the same settings
    and the first model's guidance. `divergence` is the mean over the slots after the first model's stages. `moved_mass`
    is their sum; its mean over samples bounds the distance between the laws of whole pictures.

    With a schedule that leaves something out, the mean and the sum are over the slots from the first scale on that it
    changes: guided and whole there. Scales that are not drawn have no law, and are in no figure.

    Attributes:
        model_calls: forwards of each model, in the order of the schedule, without those that only measure.
        layer_places: places that went through a layer, summed over layers, forwards and rows, of one picture and of
            each model, without forwards that only measure. A model without `num_layers` counts as one layer.
        cache_bytes: size of each model's key and value cache. Each is freed before the next is allocated, except the
            first model's if the sampler measures.
    """

    model_calls: tuple[int, ...] = ()
    cache_bytes: tuple[int, ...] = ()
    layer_places: tuple[int, ...] = ()


@dataclass
class ScaleResult(SampleResult):
    """A `SampleResult` with the finished canvas [B, D, h, w], which `ScaleTokenizer.decode_canvas` turns into pictures.
    With `smooth` the tokens alone do not determine the pictures."""

    trace: ScaleTrace
    canvas: Tensor


@dataclass
class ScaleCosts:
    """What the models of a decode cost so far, one entry a model, see `ScaleTrace`."""

    cache_bytes: list[int] = field(default_factory=list)
    layer_places: list[int] = field(default_factory=list)

    def count(self, model: Any, cache: Any, scales: range, sides: Any, pruning: Pruning | None) -> None:
        """Count a forward of these scales, each of n * n places; the first one of a model has all, from 0 on."""
        num_layers = getattr(model, "num_layers", 1)
        if scales.start == 0:
            pruning = None
            self.cache_bytes.append(cache.cache_bytes)
            self.layer_places.append(0)
        pruned = 0 if pruning is None else len(pruning.layers(num_layers))
        areas = [area_of(side) for side in sides]
        kept = areas if pruning is None else pruning.kept(sides)
        places = sum((num_layers - pruned) * areas[scale] + pruned * kept[scale] for scale in scales)
        self.layer_places[-1] += places * (2 if cache.guided else 1)
