"""FlowAR: a picture's latents map after map, each drawn as a whole by Euler steps of a flow (2412.15205, section 3).

Guidance grows with the maps, from none at the first one to the law's scale at the last, and only points with little
noise are guided. The levels, their spacing and both these rules are as in DiSA's code (Qinyu-Allen-Zhao/DiSA), which
draws with the released weights; so is the falling number of levels (2505.20297, section 3).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Annotated, Any

import torch
from torch import Tensor

from visual_spec.models.core.continuous import FlowScaleModel
from visual_spec.models.core.settings import SHARE, Within, register_to_config
from visual_spec.samplers.continuous.base import ContinuousTrace, VectorSampler
from visual_spec.samplers.core.checks import check_guided, check_returned
from visual_spec.samplers.core.noise import CHAIN
from visual_spec.samplers.core.state import Run
from visual_spec.samplers.core.trace import LOSSY

_LEVELS = Within(2, 1000)


def noise_shares(levels: int) -> list[float]:
    """Shares of noise at the levels of a map, from 1 to 0.

    As released: half of the steps lie above a share of .25, half below, and an odd number is one less; 50 are even.
    """
    half = levels // 2
    if levels == 50:
        return [1 - step / levels for step in range(levels + 1)]
    above = [1 - 0.7 * step / max(1, half - 1) for step in range(half)]
    return [*above, *(0.25 * (half - step) / half for step in range(half + 1))]


@dataclass
class FlowScaleTrace(ContinuousTrace):
    """A `ContinuousTrace` of maps, whose head is the flow network. `commit_call` is the last map drawn.

    Attributes:
        levels: Euler steps of each map.
    """

    levels: tuple[int, ...] = ()


@dataclass
class FlowScaleState:
    """A batch between two maps.

    Attributes:
        map: [B, d, n, n], the last one drawn; None before the first.
        tokens: [B, L, d], the same at the size of the grid.
        levels: Euler steps of each map so far.
        round: of the noise; maps have one.
    """

    map: Any = None
    tokens: Any = None
    levels: list[int] = field(default_factory=list)
    round: int = 0

    @property
    def target_calls(self) -> Tensor:
        """Calls of the transformer, one a map, long [B]."""
        return torch.full((len(self.map),), len(self.levels))

    @property
    def commit_call(self) -> Tensor:
        """The last map drawn, long [B, L]."""
        return torch.full(self.tokens.shape[:2], len(self.levels) - 1)


class FlowScaleSampler(VectorSampler[FlowScaleModel, FlowScaleState]):
    """Draws the maps of a `FlowScaleModel`, coarse to fine.

    Args:
        levels: Euler levels of a map, see `noise_shares`. Released: 25, and 50 for the largest size.
        last_levels: of the last map; from `levels` at the first one they fall evenly to it, rounded down (DiSA: 15).
            None: all maps have `levels`.
        guided_from: share of noise from which on, down to 0, velocities are guided. Released: 0.9, and 0.7 for the
            largest size.

    A call takes the `law`'s guidance scale and temperature, which multiplies the noise that a map starts from. It
    returns tokens float [B, L, d] in raster order, with a `FlowScaleTrace`. The callback gets the places of the last
    map, long [B]; where it ends the decode, the tokens are that map, enlarged. Noise belongs to a sample and a place
    of a map, so a picture depends on no batch.
    """

    law_names = ("levels", "last_levels", "guided_from")
    keeps = LOSSY  # a law of its own
    records_steps = False

    @register_to_config
    def __init__(
        self,
        levels: Annotated[int, _LEVELS] = 25,
        last_levels: Annotated[int | None, Within(2, 1000, none="as many for all maps")] = None,
        guided_from: Annotated[float, SHARE] = 0.9,
    ) -> None: ...

    def shares(self, scale: int, count: int) -> list[float]:
        """Shares of noise at the levels of map number `scale` of `count`."""
        first, last = self.config.levels, self.config.last_levels or self.config.levels
        left = (count - 1 - scale) / max(1, count - 1)
        return noise_shares(int((first - last) * left + last))

    def planned_calls(self, model: FlowScaleModel, parts: dict[str, Any]) -> int:
        return len(model.scales)

    # -- the loop

    def prefill(self, run: Run) -> Any:
        cache = run.model.prefill(run.condition, batch_size=run.batch_size, guided=run.guided)
        return check_guided(cache, run.guided)

    def prepare(self, run: Run) -> FlowScaleState:
        """Draw the first map, which the prefill predicts."""
        state = FlowScaleState()
        self._draw(run, state, run.cache.conditions)
        return state

    def step(self, run: Run, state: FlowScaleState) -> None:
        """Feed the last map to the model, and draw the next one."""
        self._draw(run, state, run.model(run.cache, state.map, len(state.levels)))

    def _draw(self, run: Run, state: FlowScaleState, z: Tensor) -> None:
        """Draw the next map from the conditions `z [R, n * n, dim]` of its places."""
        model, law, size, scale = run.model, run.law_given, run.batch_size, len(state.levels)
        side, count = model.scales[scale], len(model.scales)
        check_returned(z, size, law.guided, side * side, model.condition_dim)
        run.lap("model")
        every = model.flownet.inputs(z, side)
        conditional = every.first(size)
        strength = 1 + (law.guidance_scale - 1) * scale / max(1, count - 1) if law.guided else 1.0
        shares = self.shares(scale, count)
        slots = torch.arange(*model.offsets[scale : scale + 2], device=run.device).expand(size, -1)
        x = run.noise.normal(slots, model.token_dim, CHAIN, 0, torch.promote_types(z.dtype, torch.float32))
        x = x * law.temperature
        for share, later in pairwise(shares):
            time = torch.full((1,), share, device=run.device)  # filled there: a copy would wait
            if strength > 1 and share <= self.config.guided_from:
                both = model.flownet(x.to(z.dtype).repeat(2, 1, 1), time, every)
                with_class, without = both.chunk(2)
                velocity = without + strength * (with_class - without)
            else:
                velocity = model.flownet(x.to(z.dtype), time, conditional)
            x = x + (later - share) * velocity
        state.map = x.mT.unflatten(2, (side, side))
        state.tokens = model.enlarged(state.map).flatten(2).mT if scale < count - 1 else x
        state.levels.append(len(shares) - 1)
        run.lap("head")

    # -- after each map, and at the end

    def progress(self, run: Run, state: FlowScaleState) -> Tensor:
        return torch.full((run.batch_size,), state.map.shape[-1] ** 2, device=run.device)

    def committed(self, run: Run, state: FlowScaleState) -> Tensor:
        return torch.ones_like(state.commit_call, dtype=torch.bool)  # every map is the whole picture

    def trace_of(self, state: FlowScaleState, trace: dict[str, Any]) -> FlowScaleTrace:
        calls = torch.full((len(state.tokens),), sum(state.levels))
        return FlowScaleTrace(**trace, head_calls=calls, levels=tuple(state.levels))
