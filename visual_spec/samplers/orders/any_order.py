"""Any-order decoding: an any-order model in a random, raster, Halton or given order, one token or several a call."""

from __future__ import annotations

import math
from functools import cache
from typing import Annotated, Any

import torch

from visual_spec.models.core.settings import MOST_CALLS, Within, register_to_config
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.core.state import Run, State
from visual_spec.samplers.core.verification import draw_tokens
from visual_spec.samplers.orders.along_order import (
    AlongOrderSampler,
    GuidanceStart,
    SlotOrder,
    check_slot_order,
)


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

    Raises:
        ValueError: a setting has another value.
    """

    @register_to_config
    def __init__(
        self,
        order: SlotOrder = "random",
        steps: Annotated[int | None, Within(1, MOST_CALLS, none="one call a token")] = None,
        guidance_start: GuidanceStart = None,
    ) -> None:
        check_slot_order(order)

    @property
    def identical(self) -> bool:
        return self.config.steps is None

    @property
    def lossless(self) -> bool:
        return self.config.steps is None

    def bounds(self, num_tokens: int) -> tuple[int, ...]:
        """Return how many places are decoded before each call and after the last: 0 to `num_tokens`."""
        return _bounds(num_tokens, self.config.steps)

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

    def num_calls(self, run: Run) -> int:
        return len(self.bounds(run.num_tokens)) - 2  # the prefill decodes the first place

    def prepare(self, run: Run) -> State:
        return State.begin(run, scratch=0)

    def step(self, run: Run, state: State) -> None:
        """Make one call: feed the tokens of the call before, and draw the next group."""
        state.round += 1
        before, now, after = self.bounds(run.num_tokens)[int(state.round) - 1 :][:3]
        places = torch.arange(before, after, device=run.device).expand(len(state.tokens), -1)  # [B, F + P]
        together = self.config.steps is not None
        known = places.clamp(max=now)
        logits = run.model.ask(state.cache, state.tokens[:, before:now], places, known, together)
        run.lap("model")
        state.target_calls = state.target_calls + 1
        asked = places[:, now - before :]
        tokens = draw_tokens(run.law, run.noise, logits[:, now - before :], asked, run.guided)
        state.tokens.scatter_(1, asked, tokens)
        state.commit_call[:, now:after].fill_(int(state.round))
        state.lengths = torch.full_like(state.lengths, after)
        run.lap("verify")


@cache
def _bounds(num_tokens: int, steps: int | None) -> tuple[int, ...]:
    if steps is None:
        return tuple(range(num_tokens + 1))
    bounds = [0, 1]
    while bounds[-1] < num_tokens:
        share = 1 - math.cos(math.pi / 2 * len(bounds) / steps)
        bounds.append(min(max(int(share * num_tokens + 1), bounds[-1] + 1), num_tokens))
    return tuple(bounds)
