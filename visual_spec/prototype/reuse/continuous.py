"""Plain decoding of continuous tokens, some calls of which compute few places of a MAR; `mar` says how."""

from __future__ import annotations

from typing import Annotated, Any, NamedTuple

from torch import arange

from visual_spec.models.continuous.mar import MARTransformer
from visual_spec.models.core.continuous import AnyContinuousModel
from visual_spec.models.core.settings import AUTO, MOST_CALLS, SHARE, Graph, Within, register_to_config
from visual_spec.prototype.reuse.mar import ReusingMAR
from visual_spec.prototype.reuse.recap import full_calls, last_of_group
from visual_spec.samplers.continuous.base import Eta, FinalNoise, Guidance, HeadSteps, Order
from visual_spec.samplers.continuous.conditions import checked, step_edges
from visual_spec.samplers.continuous.continuous import ContinuousSampler, PlainState
from visual_spec.samplers.core.state import Run

REUSE = ("reuse", "reuse_from", "local_levels")


class SlotGroup(NamedTuple):
    """The slots that a local call computes, all samples alike.

    Attributes:
        past: slots of the group that are known.
        fresh: the last of these, which the call before drew.
        ahead: slots of the group that are still to be drawn.
    """

    past: int
    fresh: int
    ahead: int


class ReusedShape(NamedTuple):
    """A `CallShape` of a call that may reuse an earlier one.

    Attributes:
        group: of a local call, the slots that it computes; None: all of them.
        keep: whether local calls go on from this one.
    """

    count: int
    room: int
    levels: int
    group: SlotGroup | None = None
    keep: bool = False


class ReusingContinuousSampler(ContinuousSampler):
    """Draws as `ContinuousSampler`, and reuses in some calls of a MAR what an earlier one computed (ReCAP).

    Args:
        steps, order, guidance, head_steps, eta, final_noise, last_head_steps: as of `ContinuousSampler`.
        graph: as of `ContinuousSampler`; nothing is recorded with reuse.
        reuse: local calls after each full one. A local call computes the slots of its group only, those that it and the
            other local calls after the same full one draw; all other slots stay as the full call left them. 0: every
            call is full.
        reuse_from: share of the calls that are full before any reuse, from 0 to 1. (ReCAP's scripts: 0.5.)
        local_levels: share of their levels that the chains of local calls have, rounded down. (ReCAP's scripts: 0.4.)
    """

    law_names = (*ContinuousSampler.law_names, *REUSE)

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
        reuse: Annotated[int, Within(0)] = 0,
        reuse_from: Annotated[float, SHARE] = 0.0,
        local_levels: Annotated[float, Within(above=0, most=1)] = 1.0,
    ) -> None:
        self.records_steps = reuse == 0
        if reuse and graph is True:
            raise ValueError(
                "graph=True with reuse given; local calls are not recorded. Leave one of them out."
            )

    @property
    def law_settings(self) -> dict[str, Any]:
        """As of `Sampler`; those of reuse are None where nothing is reused."""
        return super().law_settings | ({} if self.config.reuse else dict.fromkeys(REUSE))

    def check_model(self, model: AnyContinuousModel) -> None:
        super().check_model(model)
        if self.config.reuse and not isinstance(model, MARTransformer):
            raise ValueError(
                f"reuse={self.config.reuse} given, but of a {type(model).__name__} no keys and values are held between "
                "its calls; leave reuse out."
            )

    def shapes(self, model: AnyContinuousModel) -> Any:
        """The shape of each call of a decode, the first included: `ReusedShape`s where calls are reused."""
        shapes = super().shapes(model)
        if not self.config.reuse:
            return shapes
        edges = step_edges(model.grid.num_tokens, len(shapes))
        full = full_calls(len(shapes), self.config.reuse, self.config.reuse_from)
        reused, start = [], 0
        for call, (shape, known) in enumerate(zip(shapes, edges, strict=False)):
            last = last_of_group(full, call)
            if full[call]:
                start = known
                reused.append(ReusedShape(*shape, keep=last > call))
            else:
                group = SlotGroup(known - start, known - edges[call - 1], edges[last + 1] - known)
                levels = max(1, int(shape.levels * self.config.local_levels + 1e-9))
                reused.append(ReusedShape(shape.count, shape.room, levels, group))
        return tuple(reused)

    def prepare(self, run: Run) -> PlainState:
        if self.config.reuse:
            run.model = ReusingMAR(run.model)
            run.model.holds = self.shapes(run.model)[0].keep
        return super().prepare(run)

    def step(self, run: Run, state: PlainState) -> None:
        shape: Any = state.width
        if self.config.reuse:
            run.model.holds = shape.keep
        if not self.config.reuse or shape.group is None:
            super().step(run, state)
            return
        state.round += 1
        group, places = shape.group, state.places
        slots = state.lengths[:, None] + arange(-group.past, group.ahead, device=places.device)
        at = places.gather(1, slots)  # [B, past + ahead]
        new = slice(group.past - group.fresh, group.past)
        fed = state.tokens.take_along_dim(slots[:, new, None], 1).to(run.model.dtype)
        z = checked(run.model, run.model.again(state.cache, fed, at[:, new], at), state.cache, *at.shape)
        run.lap("model")
        self.draw_plainly(run, state, z[:, group.past : group.past + shape.count])
