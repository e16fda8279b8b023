"""What a next-scale decode returns, and what it costs: calls, places and bytes of each model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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

    `logprobs` are under the law of the stage that drew a token, `model_logprobs` under its model: of several (CoDe) the
    one that drew the scale.

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


def layer_places(
    forwards: Sequence[tuple[int, range, bool]], sides: Sequence[Any], pruning: Pruning | None
) -> tuple[int, ...]:
    """Return the places that went through a layer, of each model, see `ScaleTrace`.

    Args:
        forwards: of every forward its layers, its scales, and whether it had unconditional rows. The first of a model
            has all scales from 0 on, and prunes none.
        sides: of all scales, n * n places each.
    """
    areas, places = [area_of(side) for side in sides], []
    kept = areas if pruning is None else pruning.kept(sides)
    for layers, scales, guided in forwards:
        pruned = 0
        if scales.start == 0:
            places.append(0)
        elif pruning is not None:
            pruned = len(pruning.layers(layers))
        count = sum((layers - pruned) * areas[scale] + pruned * kept[scale] for scale in scales)
        places[-1] += count * (2 if guided else 1)
    return tuple(places)
