"""How far the models of a next-scale decode are from the first one, guided and whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from visual_spec.samplers.core.checks import check_returned
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.core.state import Run
from visual_spec.samplers.scales.stages import Stage, prefill, stage_law


def law_at_scale(law: TokenLaw, ratio: float) -> TokenLaw:
    """Return the law with guidance at `ratio` of the way from none, 0, to the law's own scale, 1."""
    return replace(law, guidance_scale=1 + (law.guidance_scale - 1) * ratio) if law.guided else law


@dataclass
class Reference:
    """The first model, which also scores the scales that others draw, or that a schedule changes.

    Attributes:
        stage: its last stage.
        first: the first scale whose law differs from the first model's, guided and whole.
        moved: float [B], total variation summed over the measured slots.
        cache: its state. With a schedule that leaves something out it has its own prefill, at scale `first`; until then
            None.
    """

    stage: Stage
    first: int
    moved: Tensor
    cache: Any

    def measure(
        self,
        run: Run,
        maps: Sequence[Tensor],
        stage: Stage,
        scale: int,
        target: Tensor,
        slots: Tensor,
        grown: float,
    ) -> None:
        """Add the distance of the laws `target [B, n * n, V]`, which `stage` drew a scale from.

        Args:
            maps: [B, D, n, n] each, the input maps so far.
            grown: the share of the guidance at this scale.
        """
        own, usual = stage.law or run.law_given, run.law_given
        if scale >= self.stage.scales.stop:
            # A refiner that learned guided laws draws without guidance, but the first model's law is guided.
            own = replace(own, guidance_scale=(self.stage.law or usual).guidance_scale)
        run.law.law = law_at_scale(own, grown)
        if self.cache is None:
            self.cache = prefill(run.model, run.condition, usual.guided, run.batch_size, maps)
            logits = self.cache.logits
        else:
            logits = self.stage.model(self.cache, maps[-1], scale)
        check_returned(logits, len(slots), self.cache.guided, slots.shape[1], stage.model.vocab_size)
        other = stage_law(logits, slots, run.law, stage)
        self.moved = self.moved + (target.exp() - other.exp()).abs().sum((1, 2)) / 2
