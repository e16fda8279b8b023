"""Any decoding order: one loop over the steps of an order that is plain data (`orders.tables`)."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any

import torch
from torch import Tensor

from visual_spec.models.core.protocol import ANY_ORDER, RASTER_ORDER, NextTokenModel, trained_order
from visual_spec.models.core.settings import OneOf, register_to_config
from visual_spec.samplers.core.base import Sampler
from visual_spec.samplers.core.checks import check_request, check_returned
from visual_spec.samplers.core.drafters import start_drafter
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.core.state import Run, State, draw_tokens
from visual_spec.samplers.core.trace import LOSSLESS
from visual_spec.samplers.orders.rows import check_order_model
from visual_spec.samplers.orders.tables import ORDERS, Step, TokenOrder, order_of, steps_on

TRAINED, APPROXIMATE = "trained", "approximate"


class OrderedState(State):
    """A batch between two calls. `lengths` counts tokens; after the grid `tokens` holds the learned ones."""


class OrderedSampler(Sampler[NextTokenModel, OrderedState]):
    """Decodes a picture in any order: every step feeds its slots in one call, and draws all that it emits at once.

    Given what was fed before, the tokens of one step are independent of each other. Near-to-far models (NAR, FlashAR)
    and models of regions (PAR) are *defined* like that: in the order that a model was trained for, the samples follow
    the model's own law exactly. A raster model defines the law of a token given *all* tokens before it, and in another
    order some of them are missing: the result is an approximation, of unknown distance. `fidelity` says which it is,
    and an approximation is refused unless `allow_approximate` is set.

    Args:
        order: "raster", "diagonal" (ZipAR with window 1), "nar" or "flashar" (near to far), "par4" or "par16" (4 or 16
            regions), "blocks2" or "blocks4" (blocks of 2 x 2 or 4 x 4 tokens); None: the order that the model was
            trained for.
        allow_approximate: also decode models in an order that they were not trained for.
    """

    @register_to_config
    def __init__(
        self, order: Annotated[str | None, OneOf(tuple(ORDERS))] = None, allow_approximate: bool = False
    ) -> None:
        pass

    law_names = ("order",)
    keeps = LOSSLESS
    gives_logprobs = True

    @property
    def law_settings(self) -> dict[str, Any]:
        """None: an order that is not refused is the model's own, unless another one is allowed."""
        return {"order": self.config.order if self.config.allow_approximate else None}

    def law_settings_in(self, run: Run) -> dict[str, Any]:
        return {"order": None if self.fidelity(run.model) == TRAINED else self.name_for(run.model)}

    def name_for(self, model: NextTokenModel) -> str:
        """Return the name of the order in which this model is decoded."""
        return self.config.order or trained_order(model)

    def order_for(self, model: NextTokenModel) -> TokenOrder:
        """Return the order in which this model is decoded."""
        return order_of(self.name_for(model), model.grid)

    def fidelity(self, model: NextTokenModel) -> str:
        """Return "trained" if the model was trained for this order, so that its law is exact, else "approximate"."""
        return TRAINED if self.name_for(model) == trained_order(model) else APPROXIMATE

    def check(self, model: NextTokenModel, law: TokenLaw, batch_size: int, parts: dict[str, Any]) -> None:
        check_request(model, law, any_order=True)
        own = trained_order(model)
        if own == ANY_ORDER:
            raise ValueError(
                f"{type(model).__name__} was trained for any order; use AnyOrderSampler(order=...)."
            )
        name = self.name_for(model)
        if own not in ORDERS:
            raise ValueError(
                f"trained_order of {type(model).__name__}={own!r}; pass one of {', '.join(ORDERS)}."
            )
        asked, order = order_of(own, model.grid), self.order_for(model)
        who = f"{type(model).__name__} was trained for order {own!r}"
        if (asked.heads, asked.learned) != (order.heads, order.learned):
            advice = ", or a model trained for this one."
            if own == RASTER_ORDER:
                advice = (
                    ", or order='diagonal' with allow_approximate=True: raster models along anti-diagonals."
                )
            raise ValueError(
                f"{who}, and order {name!r} needs heads or learned tokens that it lacks (heads {_listed(order)}; it "
                f"has {_listed(asked)}). Pass order=None for its own order{advice}"
            )
        if self.fidelity(model) == APPROXIMATE and not self.config.allow_approximate:
            raise ValueError(
                f"{who}; in order {name!r} its positions do not see all tokens that they were trained to see, so the "
                "samples follow another law than the model's, at a distance that nobody knows. Pass order=None for its "
                "own order, or allow_approximate=True if an approximation will do."
            )
        if own == RASTER_ORDER:
            check_order_model(model, type(self).__name__)

    def plan(self, run: Run) -> None:
        run.window = self.order_for(run.model).width

    def planned_calls(self, model: NextTokenModel, parts: dict[str, Any]) -> int:
        return len(self.order_for(model).steps)

    def prepare(self, run: Run) -> OrderedState:
        learned = self.order_for(run.model).learned
        state = OrderedState.begin(run, scratch=learned)
        state.tokens[:, run.num_tokens :] = run.model.vocab_size + torch.arange(learned, device=run.device)
        first = steps_on(self.name_for(run.model), run.model.grid, run.device)[0].emitted
        if len(first) > 1:  # slot 0 is drawn
            rest = first[1:].expand(len(state.tokens), -1)
            drawn = draw_tokens(run.law, run.noise, run.cache.logits[:, 1:], rest, run.guided)
            state.tokens.scatter_(1, rest, drawn)
            state.lengths = state.lengths + len(first) - 1
            run.scored = run.cache.logits, first.expand(len(state.tokens), -1)
        run.lap("verify")
        return state

    def step(self, run: Run, state: OrderedState) -> None:
        """Make one target call: feed the step's slots, and draw all that it emits."""
        state.round += 1
        step = steps_on(self.name_for(run.model), run.model.grid, run.device)[int(state.round)]
        logits = self._score(run, state, step)  # [R, P, V]
        run.lap("model")
        emitted = step.emitted.expand(len(state.tokens), -1)  # [B, P]
        run.scored = logits, emitted
        drawn = draw_tokens(run.law, run.noise, logits, emitted, run.guided)
        state.tokens.scatter_(1, emitted, drawn)
        state.commit_call.index_fill_(1, step.emitted, int(state.round))
        state.target_calls = state.target_calls + 1
        state.lengths = state.lengths + len(step.emitted)
        run.lap("verify")

    def _score(self, run: Run, state: OrderedState, step: Step) -> Tensor:
        """Feed a step. Returns logits [R, P, V] of the slots that it emits."""
        size, fed = len(state.tokens), state.tokens[:, step.sources]  # [B, W]
        slots, seen = step.slots.expand(size, -1), step.seen.expand(size, -1, -1)
        if trained_order(run.model) != RASTER_ORDER:
            emitted = step.emitted.expand(size, -1)
            return run.model(state.cache, fed, slots, seen=seen, predicted=emitted, answers=step.answers)
        # One head: each position answers for one slot at most, or for a place past the grid.
        answers = step.answers[:, 0]
        predicted = run.num_tokens + torch.arange(len(step.slots), device=run.device)
        predicted = predicted.index_copy(0, answers, step.emitted).expand(size, -1)
        logits = run.model(state.cache, fed, slots, seen=seen, predicted=predicted)
        return check_returned(logits, size, run.guided, len(step.slots), run.model.vocab_size)[:, answers]

    def committed(self, run: Run, state: OrderedState) -> Tensor:
        steps = steps_on(self.name_for(run.model), run.model.grid, run.device)[: int(state.round) + 1]
        done = torch.zeros(run.num_tokens, dtype=torch.bool, device=run.device)
        done.index_fill_(0, torch.cat([step.emitted for step in steps]), True)
        return done.expand(len(state.tokens), -1)


def whole_picture(run: Run, first: Tensor) -> Tensor:
    """Draw whole samples from the drafter, in its own order: long [B, L].

    Every slot is drawn with the noise that draws it in plain decoding, so where both models have similar laws, they
    draw the same token.

    Args:
        first: long [B], the tokens of slot 0, which the target has drawn.

    Raises:
        FloatingPointError: the drafter's logits define no law.
    """
    sampler = OrderedSampler()
    own = replace(run, model=run.drafter)
    sampler.plan(own)
    own.cache = start_drafter(run, window=own.window)
    try:
        state = sampler.prepare(own)
        state.tokens[:, 0] = first
        for _ in range(sampler.planned_calls(run.drafter, {}) - 1):  # the prefill is step 0
            sampler.step(own, state)
    except FloatingPointError as error:
        raise FloatingPointError(f"in the drafter: {error}") from error
    return state.tokens[:, : run.num_tokens]


def _listed(order: TokenOrder) -> str:
    return ", ".join(order.heads) + (f" and {order.learned} learned tokens" if order.learned else "")
