"""Any-order decoding: an any-order model in a random, raster, Halton or given order, one token or several a call."""

from __future__ import annotations

from functools import cache
from typing import Annotated, Any

import torch
from torch import Tensor

from visual_spec.samplers.core.any_order import AlongOrderSampler, SlotOrder, check_slot_order
from visual_spec.samplers.core.base import Run, State
from visual_spec.samplers.core.configuration import register_to_config
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.core.masking import hidden_counts, hidden_shares
from visual_spec.samplers.core.settings import MOST_CALLS, Within
from visual_spec.samplers.core.verification import draw_tokens


class AnyOrderSampler(AlongOrderSampler):
    """Decodes an any-order model (RandAR, 2412.01827) along an order.

    One token a call is the model's own law along the order, the reference for `SpeculativeAnyOrderSampler`. RandAR's
    parallel decoding (section 3.3) asks for several tokens in a call and draws each as if it came next: they see all
    tokens of the calls before, and nothing of each other. That is a law of its own, which moves away from the model's
    with every token that a call has more. The model needs no training for it.

    Args:
        order: "random" (of each sample its own), "halton", "rolled_halton", "raster", or all slots of the grid in the
            order of decoding.
        steps: calls; None: one a token. The number of tokens grows from call to call by MaskGIT's cosine schedule.
            (The paper decodes 256 tokens in 88 calls.)

    Raises:
        ValueError: a setting has another value.
    """

    @register_to_config
    def __init__(
        self,
        order: SlotOrder = "random",
        steps: Annotated[int | None, Within(1, MOST_CALLS, none="one call a token")] = None,
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

    def first_places(self, num_tokens: int) -> int:
        return self.bounds(num_tokens)[1]

    def check(self, model: Any, law: TokenLaw, batch_size: int, parts: dict[str, Any]) -> None:
        super().check(model, law, batch_size, parts)
        steps, count = self.config.steps, model.grid.num_tokens
        if steps is not None and steps > count:
            raise ValueError(
                f"steps={steps} for {count} tokens; pass at most {count}, or None for one a token."
            )

    def window_of(self, model: Any) -> int:
        bounds = self.bounds(model.grid.num_tokens)
        # A call feeds the tokens of the call before and asks for its own.
        return max(after - before for before, after in zip(bounds, (*bounds[2:], bounds[-1]), strict=False))

    def num_calls(self, run: Run) -> int:
        return len(self.bounds(run.num_tokens)) - 2  # the prefill decodes the first places

    def prepare(self, run: Run) -> State:
        state = State.begin(run, scratch=0)
        if run.cache.logits.shape[1] > 1:
            self._draw(run, state, 1, run.cache.logits[:, 1:])
        return state

    def step(self, run: Run, state: State) -> None:
        """Make one call: feed the tokens of the call before, and draw the next group."""
        state.round += 1
        before, now, after = self.bounds(run.num_tokens)[int(state.round) - 1 :][:3]
        places = torch.arange(before, after, device=run.device).expand(len(state.tokens), -1)  # [B, F + P]
        logits = run.model.ask(state.cache, state.tokens[:, before:now], places, places.clamp(max=now))
        run.lap("model")
        state.target_calls = state.target_calls + 1
        self._draw(run, state, now, logits[:, now - before :])

    def _draw(self, run: Run, state: State, first: int, logits: Tensor) -> None:
        """Draw the places that logits [R, P, V] predict, from place `first` on, each with its own noise."""
        count = logits.shape[1]
        places = torch.arange(first, first + count, device=run.device).expand(len(state.tokens), -1)
        state.tokens.scatter_(1, places, draw_tokens(run.law, run.noise, logits, places, run.guided))
        state.commit_call[:, first : first + count].fill_(int(state.round))
        state.lengths = torch.full_like(state.lengths, first + count)
        run.lap("verify")


@cache
def _bounds(num_tokens: int, steps: int | None) -> tuple[int, ...]:
    if steps is None:
        return tuple(range(num_tokens + 1))
    shares = hidden_shares("cosine", "maskgit", steps)
    hidden = hidden_counts(shares, "maskgit", torch.tensor([num_tokens]))
    return (*(num_tokens - int(count) for count in hidden), num_tokens)
