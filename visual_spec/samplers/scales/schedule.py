"""What a next-scale decode leaves out, scale by scale: where it stops, where guidance ends, which places it prunes.

One record reproduces three published methods as far as they are schedules, and the control that none of them shows:

* SkipVAR (arXiv 2506.08908) ends a picture 1, 2 or 3 scales early and decodes the sum so far, which is `stop_after`, or
  drops the unconditional rows of the last 1, 2 or 3 scales, which is `guided_until`. Not reproduced: the classifier
  that chooses among these for each picture, by two decodes after scale 9. Preset "skipvar" is its longest skip.
* StageVAR (arXiv 2512.16483) draws the last scales without guidance: `guided_until`. Not reproduced: its random
  projection to fewer tokens. Here the conditional rows stay, as in SkipVAR.
* FastVAR (arXiv 2503.23367) sends a part of the places of large scales through the layers, `keep_share`, and, in its
  code, does not run the scales after these at all, `stop_after`. Preset "fastvar" has the numbers for Infinity-2B at
  1024 pixels; its layers 3 to 27 of 32 are given as parts of the depth.
* "just-stop" is the control: it stops where "fastvar" does, and does nothing else.

The presets count scales from the last, so they fit models with any number of scales. They are published for 13.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import groupby
from typing import Annotated, Any, Self

from visual_spec.models.core.pruning import Pruning
from visual_spec.models.core.settings import Within, read_fields

SCHEDULES: dict[str, dict[str, Any]] = {
    "just-stop": {"stop_after": -3},
    "skipvar": {"stop_after": -4},
    "stagevar": {"guided_until": -3},
    "fastvar": {"stop_after": -3, "keep_share": [0.6, 0.5], "pruned_layers": [3 / 32, 28 / 32]},
}


@dataclass(frozen=True)
class ScaleSchedule:
    """What is left out at each scale. Scales count from 0; a negative number counts from the last, which is -1.

    Args:
        stop_after: the last scale that is drawn; None: all are. The finished canvas is then the sum of the maps so far,
            each enlarged as the tokenizer always does, and nothing stands for the other maps. This is also what SkipVAR
            and FastVAR decode.
        guided_until: the first scale without guidance; None: the law says. From there on the unconditional rows leave
            the cache and the calls, and tokens are drawn from the conditional law. A ramp of guidance does not change
            before.
        keep_share: parts, in (0, 1], of the places that go through the layers, of the last scales that are drawn, the
            last entry of scale `stop_after`; scales before are whole. A number is a list of one. Scale 0 is whole.
            See `scale_pruning` for which places these are and what the others become.
        pruned_layers: the part of the depth that `keep_share` prunes: layer l of L if first <= l / L < stop.
    """

    stop_after: Annotated[int | None, Within(none="all scales")] = None
    guided_until: Annotated[int | None, Within(none="all scales")] = None
    keep_share: tuple[float, ...] = ()
    pruned_layers: tuple[float, float] = (0.0, 1.0)

    def __post_init__(self) -> None:
        read_fields(self)
        shares = self.keep_share if isinstance(self.keep_share, Sequence) else (self.keep_share,)
        if isinstance(shares, str) or not all(_number(share) and 0 < share <= 1 for share in shares):
            raise ValueError(
                f"keep_share={self.keep_share!r}; pass parts of the places above 0 and at most 1, the last one of the "
                "last scale that is drawn, such as [0.6, 0.5]."
            )
        layers = self.pruned_layers
        pair = isinstance(layers, Sequence) and len(layers) == 2 and all(map(_number, layers))
        if not (pair and 0 <= layers[0] < layers[1] <= 1):
            raise ValueError(
                f"pruned_layers={layers!r}; pass where pruning begins and ends as parts of the depth, from 0 to 1, "
                "such as [0.1, 0.9]."
            )
        object.__setattr__(self, "keep_share", tuple(float(share) for share in shares))
        object.__setattr__(self, "pruned_layers", (float(layers[0]), float(layers[1])))

    @classmethod
    def of(cls, setting: str | Mapping[str, Any] | None) -> Self:
        """Return the schedule of a sampler's setting: the name of a preset, values by name, or None for none.

        A mapping with a "preset" changes some values of that preset.

        Raises:
            ValueError: an unknown preset or name, or a value that the class refuses.
        """
        named = {} if setting is None else {"preset": setting}
        values = dict(setting) if isinstance(setting, Mapping) else named
        name = values.pop("preset", None)
        if name is not None and (not isinstance(name, str) or name not in SCHEDULES):
            raise ValueError(
                f"schedule={name!r}; pass one of {', '.join(SCHEDULES)}, or values of {', '.join(cls.names())}."
            )
        unknown = [key for key in values if key not in cls.names()]
        if unknown:
            raise ValueError(
                f"schedule has no setting {unknown[0]!r}; pass some of preset, {', '.join(cls.names())}."
            )
        return cls(**{**(SCHEDULES[name] if name else {}), **values})

    @classmethod
    def names(cls) -> list[str]:
        """Return what can be set."""
        return [field.name for field in fields(cls)]

    def at(self, num_scales: int) -> ScaleSchedule:
        """Return the same schedule with all its values for a model with this many scales: none is None or negative.

        Raises:
            ValueError: a scale that there is not, or more shares than scales are drawn.
        """
        last = num_scales - 1
        stop = last if self.stop_after is None else self.stop_after
        until = num_scales if self.guided_until is None else self.guided_until
        if not -num_scales <= stop <= last:
            raise ValueError(
                f"stop_after={stop}; pass the last scale to draw, from 0 to {last}, or from -{num_scales} to -1, which "
                "is the last."
            )
        if not -num_scales <= until <= num_scales:
            raise ValueError(
                f"guided_until={until}; pass the first scale without guidance, from 0 to {num_scales}, which guides "
                f"all, or from -{num_scales} to -1, which is the last."
            )
        stop, until = stop % num_scales, until if until >= 0 else until + num_scales
        missing = stop + 1 - len(self.keep_share)
        if missing < 0:
            raise ValueError(
                f"keep_share has {len(self.keep_share)} parts, but {stop + 1} scales are drawn; pass at most one a "
                "scale."
            )
        shares = (1.0,) * missing + self.keep_share
        if shares[0] < 1:
            raise ValueError(
                f"keep_share={shares[0]} for scale 0, before which there is nothing to restore places from; pass 1 "
                "there."
            )
        return replace(self, stop_after=stop, guided_until=until, keep_share=shares)

    def leaves_out(self, num_scales: int) -> bool:
        """Return whether anything is left out of a decode of this many scales."""
        full = self.at(num_scales)
        return (full.stop_after, full.guided_until) != (num_scales - 1, num_scales) or self.prunes

    @property
    def empty(self) -> bool:
        """Whether nothing is left out, however many scales there are."""
        return self.stop_after in (None, -1) and self.guided_until is None and not self.prunes

    @property
    def first_change(self) -> int:
        """The first scale that is drawn from another law, by a schedule `at` the number of scales; at most that."""
        pruned = [scale for scale, share in enumerate(self.keep_share) if share < 1]
        assert self.guided_until is not None
        return min([self.guided_until, *pruned])

    def guides(self, scale: int) -> bool:
        """Return whether a scale has the guidance of the law, by a schedule `at` the number of scales."""
        assert self.guided_until is not None
        return scale < self.guided_until

    @property
    def prunes(self) -> bool:
        """Whether a scale is not whole."""
        return any(share < 1 for share in self.keep_share)

    @property
    def pruning(self) -> Pruning | None:
        """What a model leaves out, by a schedule `at` its number of scales; None: nothing."""
        return Pruning(self.keep_share, self.pruned_layers) if self.prunes else None

    def pruned_runs(self, stages: Sequence[Any]) -> list[list[Any]]:
        """Return the stages of each model that draws scales which are not whole, by a schedule `at` their number."""
        runs = [list(run) for _, run in groupby(self.cut(stages), key=lambda stage: id(stage.model))]
        return [
            run
            for run in runs
            if any(share < 1 for share in self.keep_share[run[0].scales.start : run[-1].scales.stop])
        ]

    def cut(self, stages: Sequence[Any]) -> list[Any]:
        """Return the stages of the scales that are drawn, by a schedule `at` their number."""
        assert self.stop_after is not None
        kept = [stage for stage in stages if stage.scales.start <= self.stop_after]
        return [
            replace(stage, scales=range(stage.scales.start, min(stage.scales.stop, self.stop_after + 1)))
            for stage in kept
        ]


def _number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
