"""Plain decoding of several codebooks: one target call a column. The reference for the samplers of columns."""

from __future__ import annotations

import torch

from visual_spec.models.core.settings import AUTO, Graph, register_to_config
from visual_spec.samplers.core.noise import TOKEN
from visual_spec.samplers.core.state import Run, State
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

    def step(self, run: Run, state: State) -> None:
        view, steps = run.view, state.lengths[:, None]  # [B, 1]
        places = steps[..., None].expand(-1, -1, view.codebooks)  # [B, 1, K]
        newest = view.with_special(state.tokens.gather(1, places - 1), steps - 1)
        logits = run.score(state.cache, newest, steps - 1)  # [R, 1, K, V]
        run.lap("model")
        state.round += 1
        laws = view.laws(run.law, logits, steps, run.guided)  # [B, K, V]
        drawn = run.noise.categorical(laws, view.entries(steps), TOKEN)  # [B, K]
        # A column is a near-tie if an entry is one.
        near = None if run.unit is None else self._near_ties(run, laws, logits, steps)
        state.tokens.scatter_(1, places, drawn[:, None])
        state.commit(steps, torch.ones_like(state.lengths), run.num_tokens, near)
        run.lap("verify")
