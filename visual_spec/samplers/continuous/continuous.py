"""Plain decoding of continuous tokens: a chain of the head for each token, given all tokens of earlier calls.

A masked model (MAR: Li et al. 2024, section 3.4) fills its slots in random, raster or given order; a call fills several
of them, as many as the published cosine schedule says. A causal model draws one token a call, in its own order.

Fewer calls, fewer levels, and levels that fall from call to call (DiSA: Zhao et al. 2025, section 3) are settings: each
changes the law, and none is measured against another here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

from visual_spec.models.core.continuous import AnyContinuousModel
from visual_spec.models.core.orders import hidden_after
from visual_spec.models.core.settings import (
    AUTO,
    MOST_CALLS,
    Graph,
    Within,
    register_to_config,
)
from visual_spec.samplers.continuous import conditions
from visual_spec.samplers.continuous.base import (
    ContinuousState,
    ContinuousTokenSampler,
    Eta,
    FinalNoise,
    Guidance,
    HeadSteps,
    Order,
)
from visual_spec.samplers.continuous.conditions import CallShape, call_shapes
from visual_spec.samplers.core.checks import wants_graph
from visual_spec.samplers.core.state import Run
from visual_spec.samplers.core.trace import IDENTICAL


@dataclass
class PlainState(ContinuousState):
    """A `ContinuousState` with the shapes of all calls, and of the next one."""

    shapes: tuple[CallShape, ...]
    width: CallShape


class ContinuousSampler(ContinuousTokenSampler[PlainState]):
    """Draws the tokens of each call by the head's chain.

    Args:
        steps: calls of a masked model, at most one a token; None: one a token. A causal model has no choice.
        last_head_steps: levels of the chains of the last call; they fall evenly to it from `head_steps`, the levels of
            the first call (DiSA: Zhao et al. 2025, section 3, from 50 to 5). None: all calls have `head_steps`.
        graph: replay the calls as CUDA graphs, see `visual_spec.samplers.core.graph`. "auto": wherever possible.

    The other settings are of the law (`ContinuousTokenSampler`).

    A call takes the `law`'s guidance scale and temperature; the temperature multiplies the noise of the chain's steps,
    or, if the chain is deterministic, its start. It returns tokens float [B, L, d] in raster order, with a
    `ContinuousTrace`. Noise belongs to a sample, a place and a level, so a token depends on no batch.
    """

    keeps: Any = IDENTICAL

    @register_to_config
    def __init__(
        self,
        steps: Annotated[int | None, Within(1, MOST_CALLS, none="one a token")] = None,
        order: Order = None,
        guidance: Guidance = "linear",
        head_steps: HeadSteps = None,
        eta: Eta = None,
        final_noise: FinalNoise = None,
        last_head_steps: Annotated[int | None, Within(1, 1000, none="as many in all calls")] = None,
        graph: Graph = AUTO,
    ) -> None:
        pass

    def num_steps(self, model: AnyContinuousModel) -> int:
        return model.grid.num_tokens if self.config.steps is None else self.config.steps

    def check_model(self, model: AnyContinuousModel) -> None:
        super().check_model(model)
        steps = self.config.steps
        if steps is not None and conditions.is_causal(model):
            raise ValueError(
                f"steps={steps} given, but a causal model draws one token a call; leave steps out."
            )
        if steps is not None:
            hidden_after(model.grid.num_tokens, steps)  # refuses another number

    def planned_calls(self, model: AnyContinuousModel, parts: dict[str, Any]) -> int:
        return self.num_steps(model)

    def shapes(self, model: AnyContinuousModel) -> tuple[CallShape, ...]:
        """The shape of each call of a decode, the first included."""
        setting = self.config.get  # a method built on this one may not have all
        first = self.chain_settings(model.chain).head_steps
        return call_shapes(
            model.grid.num_tokens,
            self.num_steps(model),
            levels=(first, setting("last_head_steps") or first),
            causal=conditions.is_causal(model),
            recorded=wants_graph(setting("graph", False), model),
        )

    def chain_levels(self, state: PlainState) -> int:
        return state.width.levels

    def plan(self, run: Run) -> None:
        super().plan(run)
        run.pace = by_shapes

    def prepare(self, run: Run) -> PlainState:
        shapes = self.shapes(run.model)
        first, lengths = shapes[0], [shape.levels for shape in shapes]
        more: dict[str, Any] = dict(lengths=lengths, shapes=shapes, width=first)
        return self.open(run, PlainState, scratch=0, first=first.count, **more)

    def step(self, run: Run, state: PlainState) -> None:
        shape, known = state.width, (state.tokens, state.places, state.lengths)
        state.round += 1
        z = conditions.step_conditions(run.model, state.cache, *known, shape.count, shape.room)
        run.lap("model")
        self.draw_plainly(run, state, z)


def by_shapes(advance: Callable[[], None], run: Run, state: PlainState) -> Callable[[], None]:
    """Return `advance`, with the shape of each call set before it."""
    later = iter(state.shapes[1:])

    def call() -> None:
        state.width = next(later)
        advance()

    return call
