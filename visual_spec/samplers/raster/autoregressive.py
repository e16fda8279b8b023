"""Plain autoregressive sampling: one target call a token. The reference every other sampler is measured against."""

from __future__ import annotations

from typing import Any

import torch

from visual_spec.models.core.protocol import NextTokenModel
from visual_spec.models.core.settings import AUTO, Graph, register_to_config
from visual_spec.samplers.core import acceptance
from visual_spec.samplers.core.base import Sampler
from visual_spec.samplers.core.state import Run, State
from visual_spec.samplers.core.trace import IDENTICAL


class AutoregressiveSampler(Sampler[NextTokenModel, State]):
    """Draws the token of each slot from the model's law, with the slot's own noise, in raster order.

    Args:
        graph: replay the calls as a CUDA graph, see `visual_spec.samplers.core.graph`; the tokens are the same. "auto"
            replays them wherever possible. A number: so many calls a graph, with fewer stops of the host between them.
        exact_width: call the model with the 32 positions of which every call with this setting has, though one counts:
            the reference for samplers with `exact_width` (see `SpeculativeJacobiSampler`).
    """

    keeps = IDENTICAL
    reads_text = gives_logprobs = True

    @register_to_config
    def __init__(self, graph: Graph = AUTO, exact_width: bool = False) -> None:
        pass

    def rule(
        self, model: NextTokenModel, parts: dict[str, Any], device: torch.device
    ) -> acceptance.AcceptanceRule:
        # So near-ties are counted: there another loop over the same model may draw another token.
        return acceptance.IDENTICAL

    def planned_calls(self, model: NextTokenModel, parts: dict[str, Any]) -> int:
        return model.grid.num_tokens

    def prepare(self, run: Run) -> State:
        state = State.begin(run, scratch=1)
        run.lap("verify")
        return state

    def step(self, run: Run, state: State) -> None:
        plain_step(run, state)


def plain_step(run: Run, state: State) -> None:
    """Make one call for the next slot of every row, and commit what it draws."""
    slots = state.lengths[:, None]  # [B, 1]
    logits = run.score(state.cache, state.tokens.gather(1, slots - 1), slots - 1)  # [R, 1, V]
    run.lap("model")
    state.round += 1
    drawn, near = run.draw(logits, slots)
    state.tokens.scatter_(1, slots, drawn)
    state.commit(slots, torch.ones_like(state.lengths), run.num_tokens, near)
    run.lap("verify")
