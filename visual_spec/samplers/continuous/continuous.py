"""Plain decoding of continuous tokens: a chain of the head for each token, given all tokens of earlier calls.

A masked model (MAR: Li et al. 2024, section 3.4) fills its slots in random, raster or given order; a call fills several
of them, as many as the published cosine schedule says. A causal model draws one token a call, in its own order.

Fewer calls, fewer levels, levels that fall from call to call (DiSA: Zhao et al. 2025, section 3), and calls of a masked
model that compute few of its places (ReCAP: Zhang et al. 2025) are settings: each changes the law, and none is measured
against another here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

from visual_spec.models.core.orders import hidden_after
from visual_spec.models.core.settings import (
    AUTO,
    MOST_CALLS,
    SHARE,
    Graph,
    Within,
    register_to_config,
    with_groups,
)
from visual_spec.samplers.continuous import conditions
from visual_spec.samplers.continuous.base import ContinuousLaw, ContinuousState, ContinuousTokenSampler
from visual_spec.samplers.continuous.conditions import SlotGroup
from visual_spec.samplers.core.checks import wants_graph
from visual_spec.samplers.core.state import Run
from visual_spec.samplers.core.trace import IDENTICAL

# Recorded calls of a masked model have room for a multiple of so many known tokens, so that few graphs serve all calls.
_ROOM = 64


class CallShape(NamedTuple):
    """What a call's tensors depend on: one graph is recorded for each.

    Attributes:
        count: N, tokens that it draws for a sample.
        room: of a masked model, known tokens that it has room for.
        levels: T, of the chains.
        group: of a local call, the slots that it computes; None: all of them.
        keep: whether local calls go on from this one.
    """

    count: int
    room: int
    levels: int
    group: SlotGroup | None = None
    keep: bool = False


@dataclass
class PlainState(ContinuousState):
    """A `ContinuousState` with the shape of the next call."""

    width: CallShape


class ContinuousSampler(ContinuousTokenSampler):
    """Draws the tokens of each call by the head's chain.

    Args:
        steps: calls of a masked model, at most one a token; None: one a token. A causal model has no choice.
        last_head_steps: levels of the chains of the last call; they fall evenly to it from `head_steps`, the levels of
            the first call (DiSA: Zhao et al. 2025, section 3, from 50 to 5). None: all calls have `head_steps`.
        reuse: of a masked model, local calls after each full one. A local call computes the slots of its group only,
            those that it and the other local calls after the same full one draw; all other slots stay as the full call
            left them. 0: every call is full, as published.
        reuse_from: share of the calls that are full before any reuse, from 0 to 1. (ReCAP's scripts: 0.5.)
        local_levels: share of their levels that the chains of local calls have, rounded down. (ReCAP's scripts: 0.4.)
        graph: replay the calls as CUDA graphs, see `visual_spec.samplers.core.graph`. "auto": wherever possible,
            and never with reuse.
        groups: by their names, the settings of `ContinuousLaw`.

    A call takes the `law`'s guidance scale and temperature; the temperature multiplies the noise of the chain's steps,
    or, if the chain is deterministic, its start. It returns tokens float [B, L, d] in raster order, with a
    `ContinuousTrace`. Noise belongs to a sample, a place and a level, so a token depends on no batch.
    """

    keeps: Any = IDENTICAL

    @register_to_config
    @with_groups(ContinuousLaw)
    def __init__(
        self,
        steps: Annotated[int | None, Within(1, MOST_CALLS, none="one a token")] = None,
        *,
        last_head_steps: Annotated[int | None, Within(1, 1000, none="as many in all calls")] = None,
        graph: Graph = AUTO,
        reuse: Annotated[int, Within(0)] = 0,
        reuse_from: Annotated[float, SHARE] = 0.0,
        local_levels: Annotated[float, Within(above=0, most=1)] = 1.0,
        **groups: Any,
    ) -> None:
        self.records_steps = reuse == 0
        if reuse and graph is True:
            raise ValueError(
                "graph=True with reuse given; local calls are not recorded. Leave one of them out."
            )

    def num_steps(self, model: Any) -> int:
        return model.grid.num_tokens if self.config.steps is None else self.config.steps

    def check_model(self, model: Any) -> None:
        super().check_model(model)
        steps = self.config.steps
        if steps is not None and conditions.is_causal(model):
            raise ValueError(
                f"steps={steps} given, but a causal model draws one token a call; leave steps out."
            )
        if self.config.get("reuse") and not hasattr(model, "again"):
            raise ValueError(
                f"reuse={self.config.reuse} given, but {type(model).__name__} holds no keys and values between its "
                "calls; leave reuse out."
            )
        if steps is not None:
            hidden_after(model.grid.num_tokens, steps)  # refuses another number

    def planned_calls(self, model: Any, parts: dict[str, Any]) -> int:
        return self.num_steps(model)

    def chain_lengths(self, model: Any) -> list[int]:
        """Levels of the chains of each call."""
        calls, first = self.num_steps(model), self.chain_settings(model.chain).head_steps
        last = self.config.get("last_head_steps") or first  # a method built on this one may not have it
        levels = [round(first + (last - first) * call / max(1, calls - 1)) for call in range(calls)]
        share, (full, _) = self.config.get("local_levels", 1.0), self._groups(calls)
        return [
            count if whole else max(1, int(count * share + 1e-9))
            for count, whole in zip(levels, full, strict=True)
        ]

    def _groups(self, calls: int) -> tuple[list[bool], Sequence[int]]:
        """Which calls are full, and for each the last of those that reuse it."""
        if not self.config.get("reuse"):
            return [True] * calls, range(calls)
        from visual_spec.samplers.core.masking import full_calls, last_of_group

        full = full_calls(calls, self.config.reuse, self.config.reuse_from)
        return full, [last_of_group(full, call) for call in range(calls)]

    def shapes(self, model: Any) -> list[CallShape]:
        """The shape of each call of a decode, the first included."""
        edges = conditions.step_edges(model.grid.num_tokens, self.num_steps(model))
        unit = _ROOM if wants_graph(self.config.get("graph", False), model) else 1
        rooms = [
            0 if conditions.is_causal(model) else min(-(-known // unit) * unit, edges[-1]) for known in edges
        ]
        counts = [end - first for first, end in zip(edges, edges[1:], strict=False)]
        levels = self.chain_lengths(model)
        full, ends = self._groups(len(counts))
        shapes, start = [], 0
        for call, (count, last) in enumerate(zip(counts, ends, strict=True)):
            if full[call]:
                start, group = edges[call], None
            else:
                group = SlotGroup(edges[call] - start, counts[call - 1], edges[last + 1] - edges[call])
            shapes.append(CallShape(count, rooms[call], levels[call], group, full[call] and last > call))
        return shapes

    def chain_levels(self, state: PlainState) -> int:
        return state.width.levels

    def prepare(self, run: Run) -> PlainState:
        shape = self.shapes(run.model)[0]
        return self.open(run, PlainState, scratch=0, first=shape.count, keep=shape.keep, width=shape)

    def paced(self, advance: Callable[[], None], run: Run, state: PlainState) -> Callable[[], None]:
        shapes = iter(self.shapes(run.model)[1:])

        def call() -> None:
            state.width = next(shapes)
            advance()

        return call

    def step(self, run: Run, state: PlainState) -> None:
        shape, known = state.width, (state.tokens, state.places, state.lengths)
        state.round += 1
        if shape.group is None:
            z = conditions.step_conditions(
                run.model, state.cache, *known, shape.count, shape.room, keep=shape.keep
            )
        else:
            z = conditions.group_conditions(run.model, state.cache, *known, shape.count, shape.group)
        run.lap("model")
        self.draw_plainly(run, state, z)
