"""Any-order decoding: an any-order model in a random, raster, Halton or given order, one token or several a call."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from operator import sub
from typing import Annotated, Any

import torch
from torch import Tensor

from visual_spec.models.core.settings import MOST_CALLS, Within, register_to_config
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.core.state import Run, State
from visual_spec.samplers.core.trace import IDENTICAL, OTHER
from visual_spec.samplers.core.verification import draw_tokens
from visual_spec.samplers.orders.along_order import AlongOrderSampler, GuidanceStart, SlotOrder


@dataclass
class AnyOrderState(State):
    """Attributes:
    bounds: long [B, C + 2], the places of each row that are decoded before each call, and after the last.
    widths: the most places of a row that each call decodes; the next call feeds them.
    """

    bounds: Tensor
    widths: tuple[int, ...]


class AnyOrderSampler(AlongOrderSampler):
    """Decodes an any-order model (RandAR, 2412.01827) along an order.

    One token a call is the model's own law along the order, the reference for `SpeculativeAnyOrderSampler`. RandAR's
    parallel decoding (section 3.3) asks for several tokens in a call. They see all tokens of the calls before, and of
    each other only which slots were asked before their own, as in the public code. That is a law of its own, which
    moves away from the model's with every token that a call has more. The model needs no training for it.

    Args:
        order: "random" (of each sample its own), "halton", "rolled_halton", "raster", or all slots of the grid in the
            order of decoding.
        steps: calls, at least 2 for more than one token; None: one a token. As in the public code, the first call draws
            one token, and the number grows from call to call by a cosine. (The paper decodes 256 tokens in 88 calls.)
        guidance_start: guidance at the first place, which rises linearly along the order up to the law's; all tokens of
            a call have the guidance of its first place. None: the law's at every place. (The public code: from 1 to 4.)
    """

    @register_to_config
    def __init__(
        self,
        order: SlotOrder = "random",
        steps: Annotated[int | None, Within(1, MOST_CALLS, none="one call a token")] = None,
        guidance_start: GuidanceStart = None,
    ) -> None:
        pass

    law_names = (*AlongOrderSampler.law_names, "steps")

    @property
    def keeps(self) -> str:
        return IDENTICAL if self.config.steps is None else OTHER

    def bounds(self, num_tokens: int) -> tuple[int, ...]:
        """Return how many places are decoded before each call and after the last: 0 to `num_tokens`."""
        steps = self.config.steps
        return _bounds(num_tokens, None if steps is None else min(steps, num_tokens))

    def check(self, model: Any, law: TokenLaw, batch_size: int, parts: dict[str, Any]) -> None:
        super().check(model, law, batch_size, parts)
        steps, count = self.config.steps, model.grid.num_tokens
        least = min(count, 2)  # the first call draws one token
        if steps is not None and not least <= steps <= count:
            raise ValueError(
                f"steps={steps} for {count} tokens; pass {least} to {count}, or None for one a token."
            )

    def window_of(self, model: Any) -> int:
        bounds = self.bounds(model.grid.num_tokens)
        # A call feeds the tokens of the call before and asks for its own.
        return max(after - before for before, after in zip(bounds, (*bounds[2:], bounds[-1]), strict=False))

    def planned_calls(self, model: Any, parts: dict[str, Any]) -> int:
        known = parts.get("known_tokens")
        rows = [0] if known is None else (known >= 0).flatten(1).sum(1).tolist()
        return max(len(self.bounds(model.grid.num_tokens - count)) for count in rows) - 1

    def prepare(self, run: Run) -> AnyOrderState:
        groups = self._groups(run)
        widths = tuple(max(map(sub, after, now)) for now, after in pairwise(zip(*groups, strict=True)))
        bounds = torch.tensor(groups, device=run.device)
        return self.start(run, AnyOrderState, self.window_of(run.model), bounds=bounds, widths=widths)

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
        together = self.config.steps is not None
        inputs = state.tokens.gather(1, fed)
        logits = run.model.ask(state.cache, inputs, places, places.clamp(max=now), together)[
            :, fed.shape[1] :
        ]
        run.lap("model")
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
def _bounds(num_tokens: int, steps: int | None) -> tuple[int, ...]:
    if steps is None:
        return tuple(range(num_tokens + 1))
    bounds = [0, 1]
    while bounds[-1] < num_tokens:
        share = 1 - math.cos(math.pi / 2 * len(bounds) / steps)
        bounds.append(min(max(int(share * num_tokens + 1), bounds[-1] + 1), num_tokens))
    return tuple(bounds)
