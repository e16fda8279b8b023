"""Plain decoding of continuous tokens: a chain of the head for each token, given all tokens of earlier calls.

A masked model (MAR: Li et al. 2024, section 3.4) fills its slots in random, raster or given order; a call fills several
of them, as many as the published cosine schedule says. A causal model draws one token a call, in its own order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from visual_spec.models.core.fill_order import hidden_after
from visual_spec.samplers.core import trunks
from visual_spec.samplers.core.base import Run
from visual_spec.samplers.core.configuration import register_to_config
from visual_spec.samplers.core.latent_base import LatentSampler, LatentState


class ContinuousSampler(LatentSampler):
    """Draws the tokens of each call by the head's chain.

    Args:
        steps: calls of a masked model, at most one a token; None: one a token. A causal model has no choice.
        order: of a masked model: "random", "raster", or all places of the grid, each once; None: random.
        guidance: "linear", growing with the share of slots that are filled, as published, or "constant".
        head_steps, eta, final_noise: of the chain of a token (`ChainSettings`); None: the model's own.

    A call takes the `law`'s guidance scale and temperature; the temperature multiplies the noise of the chain's steps,
    or, if the chain is deterministic, its start. It returns tokens float [B, L, d] in raster order, with a
    `LatentTrace`. Noise belongs to a sample, a place and a level, so a token depends on no batch.

    Raises:
        ValueError: a setting out of its range.
    """

    promise = "identical"

    @register_to_config
    def __init__(
        self,
        steps: int | None = None,
        order: str | Sequence[int] | None = None,
        guidance: str = "linear",
        head_steps: int | None = None,
        eta: float | None = None,
        final_noise: float | None = None,
    ) -> None:
        self._check_law_settings()

    def num_steps(self, model: Any) -> int:
        return model.grid.num_tokens if self.config.steps is None else self.config.steps

    def check_model(self, model: Any) -> None:
        super().check_model(model)
        steps = self.config.steps
        if steps is not None and trunks.is_causal(model):
            raise ValueError(
                f"steps={steps} given, but a causal model draws one token a call; leave steps out."
            )
        if steps is not None:
            hidden_after(model.grid.num_tokens, steps)  # refuses another number

    def num_calls(self, run: Run) -> int:
        return self.num_steps(run.model) - 1  # `prepare` makes the first

    def prepare(self, run: Run) -> LatentState:
        edges = trunks.step_edges(run.num_tokens, self.num_steps(run.model))
        return self.open(run, LatentState, scratch=0, first=edges[1])

    def step(self, run: Run, state: LatentState) -> None:
        assert isinstance(state.round, int)
        edges = trunks.step_edges(run.num_tokens, self.num_steps(run.model))
        state.round += 1
        first, end = edges[state.round : state.round + 2]
        z = trunks.step_conditions(run.model, state.cache, state.tokens, state.places, first, end - first)
        run.lap("model")
        self.draw_plainly(run, state, z)
