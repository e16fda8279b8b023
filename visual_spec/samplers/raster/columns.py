"""Plain decoding of several codebooks: one target call a column. The reference for the samplers of columns."""

from __future__ import annotations

from visual_spec.models.core.configuration import register_to_config
from visual_spec.models.core.settings import Graph
from visual_spec.samplers.core.base import Run
from visual_spec.samplers.core.checks import check_exact_width
from visual_spec.samplers.core.drafts import rows_of
from visual_spec.samplers.core.graph import AUTO
from visual_spec.samplers.core.noise import TOKEN
from visual_spec.samplers.raster.column_base import ColumnSampler, ColumnState


class ColumnAutoregressiveSampler(ColumnSampler):
    """Draws the tokens of each column from the model's laws, step by step, each with the noise of its entry.

    Args:
        graph, exact_width: as in `AutoregressiveSampler`.
    """

    promise = "identical"

    @register_to_config
    def __init__(self, graph: Graph = AUTO, exact_width: bool = False) -> None:
        check_exact_width(exact_width, "identical", 1)

    def num_calls(self, run: Run) -> int:
        return run.num_tokens - 1  # the prefill has predicted step 0

    def prepare(self, run: Run) -> ColumnState:
        state = ColumnState.begin(run, scratch=1)
        run.lap("verify")
        return state

    def step(self, run: Run, state: ColumnState) -> None:
        steps = state.next_slots(1)  # [B, 1]
        newest = run.pattern.with_special(rows_of(state.tokens, steps - 1), steps - 1)  # [B, 1, K]
        logits = run.score(state.cache, newest, steps - 1)  # [R, 1, K, V]
        run.lap("model")
        state.round += 1
        target = run.pattern.laws(run.law, logits, steps, run.guided)  # [B, 1, K, V]
        state.write(steps, run.pattern.draw(run.noise, target, steps, TOKEN))
        state.commit(steps, state.lengths.new_ones(()), run.num_tokens)
        run.lap("verify")
