"""Any-order decoding: an any-order model along an order, one token or several a call."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from itertools import accumulate, pairwise
from operator import sub
from typing import Annotated, Any

import torch
from torch import Tensor

from visual_spec.models.core.orders import AnyOrderModel
from visual_spec.models.core.protocol import TokenGrid
from visual_spec.models.core.settings import MOST_CALLS, OneOf, Within, register_to_config
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.core.state import Run, State, draw_tokens
from visual_spec.samplers.core.trace import IDENTICAL, OTHER
from visual_spec.samplers.orders.along_order import (
    LOCALITY,
    AlongOrderSampler,
    GuidanceStart,
    SlotOrder,
    slots_in_order,
)
from visual_spec.samplers.orders.locality import group_sizes


def _randar(num_tokens: int, steps: int) -> list[int]:
    bounds = [0, 1]
    while bounds[-1] < num_tokens:
        share = 1 - math.cos(math.pi / 2 * len(bounds) / steps)
        bounds.append(min(max(int(share * num_tokens + 1), bounds[-1] + 1), num_tokens))
    return bounds


def _lpd(num_tokens: int, steps: int) -> list[int]:
    return list(accumulate(group_sizes(num_tokens, steps), initial=0))


def _arpg(num_tokens: int, steps: int, *, cosine: bool = False) -> list[int]:
    bounds = [0]
    for step in range(1, steps):
        share = math.cos(math.pi / 2 * step / steps) if cosine else math.acos(step / steps) / (math.pi * 0.5)
        left = max(1, min(num_tokens - bounds[-1] - 1, int(num_tokens * share)))
        bounds.append(num_tokens - left)
    return [*bounds, num_tokens]


# Of public codes: how many of so many places are drawn before each of so many calls, and after the last; and where the
# ramp of guidance is read, at the first place of a call, at each place, or after the last.
SCHEDULES: dict[str, tuple[Callable[[int, int], list[int]], str]] = {
    "randar": (_randar, "first"),
    "lpd": (_lpd, "each"),
    "arpg": (_arpg, "last"),
    "arpg-cosine": (partial(_arpg, cosine=True), "last"),
}


@dataclass
class AnyOrderState(State):
    """Attributes:
    bounds: long [B, C + 2], the places of each row that are decoded before each call, and after the last.
    widths: the most places of a row that each call decodes; the next call feeds them.
    """

    bounds: Tensor
    widths: tuple[int, ...]


class AnyOrderSampler(AlongOrderSampler):
    """Decodes an any-order model (RandAR, 2412.01827; LPD, 2507.01957; ARPG, 2503.10568) along an order.

    One token a call is the model's own law along the order, the reference for `SpeculativeAnyOrderSampler`. Several
    tokens of one call see all tokens of the calls before. Of each other a RandAR sees which slots were asked before
    its own, an LPD which slots are asked, and an ARPG nothing. That is a law of its own, which moves away from one
    token a call with every token that a call has more. LPD was trained for it; the others need no training.

    Args:
        order: "random" (of each sample its own), "halton", "rolled_halton", "raster", "locality" (LPD's section 3.2:
            likewise random, and made for the groups), or all slots of the grid in the order of decoding.
        steps: calls, at least 2 for more than one token; None: one a token.
        guidance_start: guidance at the first place, which rises linearly along the order up to the law's. None: the
            law's at every place.
        schedule: how the groups grow from call to call, and whose guidance a call has, as in three public codes.
            "randar": by a cosine from one token, the guidance of its first place (88 calls of 256 in the paper, from 1
            to 4). "lpd": by a cosine from one token, each place its own guidance (20 calls, from 1). "arpg": by an arc
            cosine, and "arpg-cosine" by a cosine, the guidance of the place after its last (64 calls, from 1).
        repulsion: of the order "locality": slots of a call are more than so many rows or columns apart as long as
            there are such. (The public code: 2, 3, and 4 of 1,024 tokens.)
    """

    @register_to_config
    def __init__(
        self,
        order: SlotOrder = "random",
        steps: Annotated[int | None, Within(1, MOST_CALLS, none="one call a token")] = None,
        guidance_start: GuidanceStart = None,
        schedule: Annotated[str, OneOf(tuple(SCHEDULES))] = "randar",
        repulsion: Annotated[int, Within(0, MOST_CALLS)] = 2,
    ) -> None:
        pass

    law_names = (*AlongOrderSampler.law_names, "steps", "schedule", "repulsion")

    @property
    def law_settings(self) -> dict[str, Any]:
        asked, known = super().law_settings, {}
        if self.config.steps is None:  # groups of one token do not read them
            known = {"schedule": None, "repulsion": None}
        elif self.config.order != LOCALITY:
            known = {"repulsion": None}
        return asked | known

    @property
    def keeps(self) -> str:
        return IDENTICAL if self.config.steps is None else OTHER

    def bounds(self, num_tokens: int) -> tuple[int, ...]:
        """Return how many places are decoded before each call and after the last: 0 to `num_tokens`."""
        steps = self.config.steps
        if steps is None:
            return tuple(range(num_tokens + 1))
        return _bounds(self.config.schedule, num_tokens, min(steps, num_tokens))

    def first_places(self, num_tokens: int) -> int:
        return self.bounds(num_tokens)[1]

    def order_of(self, grid: TokenGrid, keys: Tensor) -> Tensor:
        sizes = [after - before for before, after in pairwise(self.bounds(grid.num_tokens))]
        return slots_in_order(self.config.order, grid, keys, sizes, self.config.repulsion)

    def check(self, model: AnyOrderModel, law: TokenLaw, batch_size: int, parts: dict[str, Any]) -> None:
        super().check(model, law, batch_size, parts)
        steps, count = self.config.steps, model.grid.num_tokens
        least = min(count, 2)  # the first call draws one token
        if steps is not None and not least <= steps <= count:
            raise ValueError(
                f"steps={steps} for {count} tokens; pass {least} to {count}, or None for one a token."
            )

    def plan(self, run: Run) -> None:
        super().plan(run)
        along, bounds = run.model, self.bounds(run.num_tokens)
        along.grouped = self.config.steps is not None
        along.ends_group = along.grouped and SCHEDULES[self.config.schedule][1] == "last"
        # A call feeds the tokens of the call before and asks for its own.
        ends = (*bounds[2:], bounds[-1])
        run.window = max(after - before for before, after in zip(bounds, ends, strict=False))

    def planned_calls(self, model: AnyOrderModel, parts: dict[str, Any]) -> int:
        known = parts.get("known_tokens")
        rows = [0] if known is None else (known >= 0).flatten(1).sum(1).tolist()
        return max(len(self.bounds(model.grid.num_tokens - count)) for count in rows) - 1

    def prepare(self, run: Run) -> AnyOrderState:
        groups = self._groups(run)
        widths = tuple(max(map(sub, after, now)) for now, after in pairwise(zip(*groups, strict=True)))
        bounds = torch.tensor(groups, device=run.device)
        state = self.start(run, AnyOrderState, run.window, bounds=bounds, widths=widths)
        if run.model.first > 1:  # a group: its first token is drawn once more, and is the same
            begun, after = bounds[:, :1], bounds[:, 1:2]
            asked = torch.arange(run.model.first, device=run.device)
            asked = torch.where(begun + asked < after, begun + asked, run.num_tokens + asked)
            tokens = draw_tokens(run.law, run.noise, run.cache.logits, asked, run.guided)
            state.tokens.scatter_(1, asked, tokens)
            state.lengths = after[:, 0]
        return state

    def step(self, run: Run, state: AnyOrderState) -> None:
        """Make one call: feed the tokens of the call before, and draw the next group."""
        state.round += 1
        call, past = int(state.round), run.num_tokens
        before, now, after = state.bounds[:, call - 1 : call + 2, None].unbind(1)  # [B, 1] each
        fed, asked = (torch.arange(state.widths[place], device=run.device) for place in (call - 1, call))
        # Rows with smaller groups fill up with places past the grid.
        asked = torch.where(now + asked < after, now + asked, past + asked)  # [B, P]
        fed = torch.where(before + fed < now, before + fed, past)  # [B, F]
        places = torch.cat([fed, asked], 1)
        level = {"first": now, "each": places, "last": after}[SCHEDULES[self.config.schedule][1]]
        inputs = state.tokens.gather(1, fed)
        logits = run.model.ask(
            state.cache, inputs, places, places.clamp(max=now), level.expand_as(places), run.model.grouped
        )[:, fed.shape[1] :]
        run.lap("model")
        run.scored = logits, asked
        tokens = draw_tokens(run.law, run.noise, logits, asked, run.guided)
        state.tokens.scatter_(1, asked, tokens)
        state.commit_call.scatter_(1, asked, call)
        state.target_calls = state.target_calls + (state.lengths < past)
        state.lengths = after[:, 0]
        run.lap("verify")

    def _groups(self, run: Run) -> list[tuple[int, ...]]:
        """Return the `bounds` of each row, which starts after the tokens that it knows, all of one length."""
        known = [0] * run.batch_size if run.model.known is None else run.model.known.tolist()
        rows = [tuple(count + bound for bound in self.bounds(run.num_tokens - count)) for count in known]
        most = max(map(len, rows))
        return [row + row[-1:] * (most - len(row)) for row in rows]


@cache
def _bounds(schedule: str, num_tokens: int, steps: int) -> tuple[int, ...]:
    return tuple(SCHEDULES[schedule][0](num_tokens, steps))
