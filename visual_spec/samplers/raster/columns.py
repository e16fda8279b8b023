"""Plain decoding of several codebooks: one target call a column. The reference for the samplers of columns."""

from __future__ import annotations

from torch import Tensor

from visual_spec.models.core.settings import AUTO, Graph, register_to_config
from visual_spec.samplers.core.state import Run
from visual_spec.samplers.raster.autoregressive import AutoregressiveSampler
from visual_spec.samplers.raster.column_base import ColumnSampler


class ColumnAutoregressiveSampler(ColumnSampler, AutoregressiveSampler):
    """Draws the tokens of each column from the model's laws, step by step, each with the noise of its entry.

    Args:
        graph, exact_width: as in `AutoregressiveSampler`.
    """

    @register_to_config
    def __init__(self, graph: Graph = AUTO, exact_width: bool = False) -> None:
        pass

    def draw(self, run: Run, logits: Tensor, slots: Tensor) -> tuple[Tensor, Tensor | None]:
        """As of tokens: logits [R, 1, K, V]; a column is a near-tie if an entry is one."""
        drawn = run.view.draw(run.law, run.noise, logits, slots, run.guided)
        if run.unit is None:
            return drawn, None
        target = run.view.laws(run.law, logits, slots, run.guided)
        return drawn, self._near_ties(run, target, logits, slots)
