"""Budgets of ScaleKV: how many tokens each layer of a next-scale transformer may keep, and the bytes they take.

ScaleKV (Li et al. 2025, arXiv 2505.19602): some layers, the drafters, attend to all maps so far; the others, the
refiners, attend mostly to the current map. So refiners get a budget that shrinks from scale to scale, and drafters get
the rest. The sum over layers stays what it would be if all layers had the same budget.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Self

import torch

from visual_spec.models.core.protocol import Side, area_of, shape_of, sides_of

WINDOW = 4  # the observation window: the centres of a grid of 4 x 4 over the newest map


def offsets_of(scales: Sequence[Side]) -> tuple[int, ...]:
    """Return the first place of each scale, then the number of places."""
    return (0, *accumulate(map(area_of, scales)))


def window_size(side: Side) -> int:
    """Return the size of the observation window of a map of this side: at most the whole map."""
    height, width = shape_of(side)
    return min(height, WINDOW) * min(width, WINDOW)


@dataclass(frozen=True)
class ScaleBudget:
    """The number of cached tokens that each layer may read at each scale. The current map is not counted.

    Args:
        scales: tokens per side of each map, or (height, width), coarse to fine.
        tokens: [scales][layers]. A scale can read only what was kept after the previous scale, so entry k is applied
            then. Entry 0 is not used: there is nothing to read.
        drafters: [scales], the drafter layers that the budget was made for; empty: none. For reports only.

    Raises:
        ValueError: the table has another shape, or an entry is below the observation window of the previous scale,
            which is always kept: 16 tokens, or the whole map if it is smaller.
    """

    scales: tuple[Side, ...]
    tokens: tuple[tuple[int, ...], ...]
    drafters: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        widths = {len(row) for row in self.tokens}
        if len(self.tokens) != len(self.scales) or len(widths) != 1 or widths == {0}:
            raise ValueError(
                f"a table of {len(self.tokens)} rows with {sorted(widths)} entries given for {len(self.scales)} "
                "scales; pass one row a scale, each with one entry a layer."
            )
        if self.drafters and len(self.drafters) != len(self.scales):
            raise ValueError(
                f"drafters of {len(self.drafters)} scales given for {len(self.scales)} scales; pass a list of layers "
                "for every scale, or none."
            )
        for scale in range(1, len(self.scales)):
            least, row = window_size(self.scales[scale - 1]), self.tokens[scale]
            if min(row) < least:
                raise ValueError(
                    f"{min(row)} tokens given for layer {row.index(min(row))} at scale {scale}; pass at least "
                    f"{least}, the observation window, which is always kept."
                )

    @classmethod
    def full(cls, scales: Sequence[Side], num_layers: int) -> Self:
        """Return the budget that evicts nothing."""
        return cls(sides_of(scales), tuple((first,) * num_layers for first in offsets_of(scales)[:-1]))

    @classmethod
    def from_share(
        cls,
        scales: Sequence[Side],
        num_layers: int,
        share: float,
        *,
        drafters: Mapping[int, Collection[int]] | None = None,
        decay: float = 0.1,
    ) -> Self:
        """Return the paper's budget: layers share the same total at every scale; refiners get less from scale to scale.

        Args:
            scales: tokens per side of each map.
            num_layers: layers of the model.
            share: share of the full cache, which holds all scales but the last, in (0, 1].
            drafters: the drafter layers, by scale. At a scale without drafters, layers share equally.
            decay: what refiners lose with each scale from the first at which the budget binds, as a part of an equal
                share. They never get less than the observation window. In the published tables of a tenth they lose
                0.11 (2B) and 0.17 (8B) a scale on average.

        Raises:
            ValueError: the share is outside (0, 1], or too small for the observation window; the decay is negative; or
                a drafter is not a layer.
        """
        scales = sides_of(scales)
        offsets = offsets_of(scales)
        if not 0 < share <= 1:
            raise ValueError(f"share={share}; pass a part of the full cache above 0 and at most 1.")
        if not (math.isfinite(decay) and decay >= 0):
            raise ValueError(f"decay={decay}; pass a finite number of at least 0.")
        named = {scale: sorted(set(layers)) for scale, layers in (drafters or {}).items()}
        known = range(num_layers)
        if any(
            scale not in range(len(scales)) or set(layers) - set(known) for scale, layers in named.items()
        ):
            raise ValueError(
                f"drafters {named} given; the model has {num_layers} layers and {len(scales)} scales, counted from 0."
            )
        total = int(share * num_layers * offsets[-2])
        mean = total / num_layers
        binding = [scale for scale in range(len(scales)) if offsets[scale] > mean]
        if binding and mean < (least := window_size(scales[binding[-1] - 1])):
            raise ValueError(
                f"share={share} leaves {mean:.1f} tokens a layer, but {least} are always kept (the observation "
                f"window); pass a share of at least {math.ceil(1e4 * least / offsets[-2]) / 1e4}."
            )
        rows, made_for = [], []
        for scale in range(len(scales)):
            step = binding.index(scale) + 1 if scale in binding else 0
            chosen = named.get(scale, []) if step else []
            small = max(window_size(scales[scale - 1]), math.floor(mean * (1 - decay * step)))
            amount = total if step else num_layers * offsets[scale]
            rows.append(_row(amount, num_layers, chosen, small, offsets[scale]))
            made_for.append(tuple(chosen))
        return cls(scales, tuple(rows), tuple(made_for))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Return the budget from the output of `to_dict`, also after a round trip through JSON.

        Raises:
            ValueError: as in the class; or entries are missing.
        """
        missing = [name for name in ("scales", "tokens") if name not in values]
        if missing:
            raise ValueError(
                f"a budget without {', '.join(missing)} given; pass what ScaleBudget.to_dict made."
            )
        return cls(
            sides_of(values["scales"]),
            tuple(tuple(row) for row in values["tokens"]),
            tuple(tuple(row) for row in values.get("drafters", ())),
        )

    def to_dict(self) -> dict[str, object]:
        """Return plain lists, for JSON."""
        return {
            "scales": list(self.scales),
            "tokens": [list(row) for row in self.tokens],
            "drafters": [list(row) for row in self.drafters],
        }

    @property
    def num_layers(self) -> int:
        return len(self.tokens[0])

    def held(self) -> tuple[tuple[int, ...], ...]:
        """[scales][layers]: how many cached tokens a layer does read, at most those that exist."""
        rows = [(0,) * self.num_layers]
        for side, budget in zip(self.scales, self.tokens[1:], strict=False):
            rows.append(tuple(min(b, kept + area_of(side)) for b, kept in zip(budget, rows[-1], strict=True)))
        return tuple(rows)

    @property
    def share(self) -> float:
        """The most that is ever cached, as a part of the full cache."""
        full = self.num_layers * offsets_of(self.scales)[-2]
        return max(map(sum, self.held())) / full if full else 0.0


def _row(total: int, num_layers: int, drafters: Sequence[int], small: int, most: int) -> tuple[int, ...]:
    """Divide `total` over the layers: `small` per refiner, the rest for drafters; what they cannot use goes back."""
    refiners = [layer for layer in range(num_layers) if layer not in drafters]
    row = dict.fromkeys(range(num_layers), 0)
    if drafters and refiners:
        row |= zip(drafters, _spread(total - small * len(refiners), len(drafters), most), strict=True)
    rest = refiners or drafters
    row |= zip(rest, _spread(total - sum(row.values()), len(rest), most), strict=True)
    return tuple(row.values())


def _spread(amount: int, count: int, most: int) -> list[int]:
    """Divide `amount` into `count` parts that differ by at most 1, larger ones first, none above `most`."""
    part, rest = divmod(amount, count)
    return [min(most, part + (index < rest)) for index in range(count)]


@dataclass(frozen=True)
class CacheBytes:
    """Bytes of keys and values in one decode.

    Attributes:
        by_scale: bytes held from earlier scales while each scale is predicted; 0 for the prefill's.
        held: the largest of them, equal to `ScaleState.cache_bytes`.
        joined: the largest transient copy: cached keys and values of one layer joined with the current map's.
        peak: the most at any time: the caches of all layers, some before and some after this scale, and the copies of
            the current layer.
        full: held by an uncompressed cache.

    Activations are not counted, nor the current map's own keys and values before they are joined.
    """

    by_scale: tuple[int, ...]
    held: int
    joined: int
    peak: int
    full: int


def cache_bytes(
    config: Mapping[str, Any],
    budget: ScaleBudget | None,
    batch_size: int,
    guided: bool,
    dtype: torch.dtype,
    *,
    known: int = 0,
    stop: int | None = None,
) -> CacheBytes:
    """Return the bytes that `VARTransformer` allocates for keys and values, by arithmetic alone.

    Args:
        config: config of the transformer: scales, dim and num_layers.
        budget: None is the plain cache, allocated once.
        batch_size, guided, dtype: of the decode; guidance doubles the rows.
        known: number of input maps given to the prefill.
        stop: the first scale that is not predicted; None: all are.

    Raises:
        ValueError: the budget is for another model.
    """
    scales, layers = sides_of(config["scales"]), config["num_layers"]
    stop = len(scales) if stop is None else stop
    if budget is not None:
        check_budget(budget, scales, layers)
    token = 2 * config["dim"] * (2 if guided else 1) * batch_size * dtype.itemsize  # of one layer
    offsets = offsets_of(scales)
    last = offsets[stop - 1] if known < stop - 1 else 0
    full = layers * last
    if budget is None:
        joined = offsets[stop] if last else 0
        by_scale = [full if known < scale < stop else 0 for scale in range(len(scales))]
        return CacheBytes(
            tuple(token * n for n in by_scale),
            token * full,
            token * joined,
            token * (full + joined),
            token * full,
        )
    held = budget.held()
    by_scale = [sum(held[scale]) if known < scale < stop else 0 for scale in range(len(scales))]
    now = [0] * layers
    largest = peak = 0
    for call in [range(known + 1), *(range(scale, scale + 1) for scale in range(known + 1, stop))]:
        for layer in range(layers):
            others = sum(now) - now[layer]
            for scale in call:
                joined = now[layer] + area_of(scales[scale])
                kept = held[scale + 1][layer] if scale < stop - 1 else 0
                copied = kept if kept < joined else 0
                largest = max(largest, joined)
                peak = max(peak, others + joined + max(now[layer], copied))
                now[layer] = kept
    return CacheBytes(
        tuple(token * n for n in by_scale), token * max(by_scale), token * largest, token * peak, token * full
    )


def check_budget(budget: ScaleBudget, scales: Sequence[Side], num_layers: int) -> None:
    """Refuse a budget that was made for another model, by ValueError."""
    if (budget.scales, budget.num_layers) != (sides_of(scales), num_layers):
        raise ValueError(
            f"a budget for scales {budget.scales} of {budget.num_layers} layers given, but the model has scales "
            f"{tuple(scales)} and {num_layers} layers; make one for it, with calibrate or ScaleBudget.from_share."
        )
