"""Self-speculative masked decoding: a causal layer gives a group of tokens a joint law, and the model drafts for it.

Masked decoding draws a group of tokens as if they were independent. Here a call of the model knows the tokens of all
earlier groups, and a causal layer on top of it scores the tokens of its own group one given the other. The law of a
picture is the law of its groups in a fixed order: a product of the layer's conditionals. It is a law of its own,
neither masked decoding's nor the law of one token a call, and it does not depend on how its tokens are drafted.

The model's own laws of the call, which cost nothing more, are the drafts. One pass of the layer scores the rest of the
group, and the longest prefix that passes stands (Leviathan et al. 2023, algorithm 1, or the identity of tokens). Passes
of the layer go on until the group is complete; the next call of the model begins the next one.

Self-speculative masked diffusion (2510.03929) calls the model again after a few passes, complete or not. Then the law
of a token depends on how many drafts before it were refused. Groups with fixed ends have one law, which can be tested.
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass, field
from typing import Annotated, Any

import torch
from torch import Tensor

from visual_spec.kernels.law import NO_DRAFT
from visual_spec.models.core.masked_protocol import MaskedModel, MaskedState
from visual_spec.models.core.settings import CALLS, OneOf, Within, register_to_config
from visual_spec.samplers.core.base import Sampler
from visual_spec.samplers.core.checks import Acceptance, check_guided, check_returned
from visual_spec.samplers.core.drafts import Draft, Label, rows_of, with_bonus
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.core.masking import (
    FIXED_ORDERS,
    SCHEDULES,
    Spans,
    fixed_order,
    hidden_counts,
    hidden_shares,
)
from visual_spec.samplers.core.noise import DRAFT, TOKEN
from visual_spec.samplers.core.state import Run, State
from visual_spec.samplers.core.trace import LOSSY, DecodeTrace, SampleResult
from visual_spec.samplers.core.verification import verify
from visual_spec.samplers.masked.speculative import check_in_order
from visual_spec.samplers.masked.unmasking import check_masked_model
from visual_spec.samplers.orders.along_order import placed_in_grid


@dataclass
class SelfSpeculativeTrace(DecodeTrace):
    """A `DecodeTrace` of calls of the model. There is no prefill: call 0 is the first forward of the model.

    `commit_call` is the call whose group held the slot.

    Attributes:
        layer_calls: long [B], passes of the causal layer.
    """

    layer_calls: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.long))

    @property
    def law_in_words(self) -> str:
        """The output law in words."""
        return f"the causal layer's law, {self.layer_calls.float().mean():.1f} passes of it"


@dataclass
class Group(MaskedState):
    """The groups that are being decoded, one of each sample. G is the size of the largest group.

    Attributes:
        features: [R, G, C], of the model's last call at the group's slots.
        laws: [B, G, V], the model's laws there, log-probabilities.
        slots: long [B, G].
        start, end: long [B], the places of the group: start to end - 1.
    """

    features: Tensor
    laws: Tensor
    slots: Tensor
    start: Tensor
    end: Tensor

    def select(self, samples: Tensor) -> None:
        self.features = self.features[self.rows(samples, len(self.features))]
        self.laws, self.slots = self.laws[samples], self.slots[samples]
        self.start, self.end = self.start[samples], self.end[samples]


@dataclass
class SelfSpeculativeState(State):
    """A `State` between two passes of the layer, by place along the order; `round` counts them.

    Attributes:
        order: long [B, L], the slot of the grid at each place.
        bounds: where the groups end, in order.
        layer_calls: long [B].
        group: None before the first call.
    """

    order: Tensor
    bounds: tuple[int, ...]
    layer_calls: Tensor
    group: Group | None = None


class SelfSpeculativeMaskedSampler(Sampler[MaskedModel, SelfSpeculativeState]):
    """Decodes a masked model in groups, each from the joint law of a causal layer.

    Args:
        steps: groups, and calls of the model.
        schedule: of the hidden share, one of `masking.SCHEDULES`; it gives the sizes of the groups.
        order: one of `masking.FIXED_ORDERS`, the order of the slots.
        num_drafts: most drafts that a pass of the layer tests. None: all that are left of the group. 0 drafts nothing:
            one token a pass.
        acceptance: "identical" (the tokens of `num_drafts=0` for the same generator) or "exact" (the same law).

    A call takes `causal_layer`, a `CausalLayer` made for the model.
    """

    takes = ("causal_layer",)
    law_names = ("steps", "schedule", "order")
    keeps = LOSSY  # beside one token a call: its law is the layer's
    counts_prefill = False
    records_steps = False
    gives_logprobs = True

    @register_to_config
    def __init__(
        self,
        steps: Annotated[int, CALLS] = 8,
        schedule: Annotated[str, OneOf(tuple(SCHEDULES))] = "arccos",
        order: Annotated[str, OneOf(FIXED_ORDERS)] = "halton",
        num_drafts: Annotated[int | None, Within(0, none="all")] = None,
        acceptance: Acceptance = "identical",
    ) -> None:
        pass

    def check(self, model: MaskedModel, law: TokenLaw, batch_size: int, parts: dict[str, Any]) -> None:
        check_masked_model(model, law)
        _check_causal_layer(model, parts.get("causal_layer"))

    def prefill(self, run: Run) -> Any:
        cache = run.model.prepare(run.condition, batch_size=run.batch_size, guided=run.guided)
        return check_guided(cache, run.guided)

    def prepare(self, run: Run) -> SelfSpeculativeState:
        length, device = run.num_tokens, run.device
        slots = torch.arange(length, device=device).expand(run.batch_size, -1)
        score = fixed_order(self.config.order, run.model.grid, Spans(length, 1), run.noise, slots)
        order = score.sort(dim=1, descending=True, stable=True).indices
        order = run.tables["order"] = order.expand(run.batch_size, -1)
        bounds = self._bounds(length)
        width = max(end - start for start, end in zip((0, *bounds), bounds, strict=False))
        tokens = torch.zeros(run.batch_size, length + width + 1, dtype=torch.long, device=device)
        zero = torch.zeros_like(tokens[:, 0])
        return SelfSpeculativeState.blank(run, tokens, order=order, bounds=bounds, layer_calls=zero)

    def step(self, run: Run, state: SelfSpeculativeState) -> None:
        """One pass of the layer over all groups; samples whose group is complete first take a call of the model."""
        # Whose group is complete is read on the host, as a call of the model is too dear to be made for nothing.
        complete = state.lengths == (0 if state.group is None else state.group.end)
        begin = (complete & (state.lengths < run.num_tokens)).nonzero()[:, 0]
        if len(begin):
            self._begin_groups(run, state, begin)
        state.round += 1
        assert state.group is not None
        group, width = state.group, state.group.slots.shape[1]
        count = width if self.config.num_drafts is None else min(self.config.num_drafts, width)
        places = self._places(run, state, count + 1)  # [B, N + 1], those past the group are past the grid
        draft = with_bonus(self._draft(run, state, places[:, :-1]))
        at = (places - group.start[:, None]).clamp(max=width - 1)
        logits = _at(self._logits(run, state), at)  # [R, N + 1, V]
        run.scored = logits, places
        run.lap("model")
        verdict = verify(
            run.law,
            run.noise,
            logits,
            places,
            draft,
            run.guided,
            rule=run.rule,
            round=state.round,
        )
        state.tokens.scatter_(1, places, verdict.tokens)
        call = (state.target_calls - 1)[:, None].expand_as(places)
        state.commit_call.scatter_(1, places, call)
        state.layer_calls += state.lengths < group.end
        state.lengths = torch.minimum(state.lengths + verdict.kept + 1, group.end)
        run.lap("verify")

    def _begin_groups(self, run: Run, state: SelfSpeculativeState, samples: Tensor) -> None:
        """Call the model for some samples, long [N], and draft their next groups."""
        length = run.num_tokens
        bounds = torch.tensor((0, *state.bounds), device=run.device)
        start = state.lengths[samples]
        end = bounds[torch.searchsorted(bounds, start, right=True)]
        step = torch.arange(int(bounds.diff().max()), device=run.device)
        places = start[:, None] + step  # [N, G]
        slots = state.order[samples].gather(1, places.clamp(max=length - 1))
        known = torch.arange(length, device=run.device) < start[:, None]
        fed = state.tokens[samples, :length].where(known, run.model.mask_id)
        grid = torch.empty_like(fed).scatter_(1, state.order[samples], fed)
        inner = copy(state.cache)
        inner.select(samples)
        logits = run.model(inner, grid[..., None], 0, keep=0)  # [R, L, V]
        check_returned(logits, len(samples), run.guided, length, run.model.vocab_size)
        laws = run.law.law(_at(logits, slots), run.guided, places)  # verification checks the layer's logits
        fresh = Group(run.guided, run.device, _at(inner.features, slots), laws, slots, start, end)
        if state.group is None:
            state.group = fresh
        else:
            _put(state.group, fresh, samples)
        state.target_calls[samples] += 1
        if run.rule.identical:
            begun = torch.zeros_like(state.lengths, dtype=torch.bool)
            begun[samples] = True
            inside = begun[:, None] & (state.lengths[:, None] + step < state.group.end[:, None])
            places = torch.where(inside, state.lengths[:, None] + step, length + step)  # [B, G]
            drawn = run.noise.categorical(state.group.laws, places, TOKEN)
            state.tokens.scatter_(1, places, drawn)

    def _places(self, run: Run, state: SelfSpeculativeState, count: int) -> Tensor:
        """The next places of each sample, long [B, count]; where its group is over, places past the grid."""
        assert state.group is not None
        step = torch.arange(count, device=run.device)
        places = state.lengths[:, None] + step
        return torch.where(places < state.group.end[:, None], places, run.num_tokens + step)

    def _draft(self, run: Run, state: SelfSpeculativeState, places: Tensor) -> Draft:
        """Drafts for `places [B, N]`. Under "identical" they are what the slot's own noise drew last."""
        group = state.group
        assert group is not None
        there = places < run.num_tokens
        rows = (places - group.start[:, None]).clamp(max=group.slots.shape[1] - 1)
        if not run.rule.identical:
            drawn = run.noise.categorical(rows_of(group.laws, rows), places, DRAFT, state.round)
            state.tokens.scatter_(1, places, drawn)
        tokens = state.tokens.gather(1, places).masked_fill(~there, -1)
        label = Label(group.laws, rows.masked_fill(~there, NO_DRAFT), (0, run.model.vocab_size))
        return Draft(tokens, label, "the masked model")

    def _logits(self, run: Run, state: SelfSpeculativeState) -> Tensor:
        """Logits `[R, G, V]` of the groups' tokens, each given the committed tokens and drafts before it."""
        group = state.group
        assert group is not None
        repeats = len(group.features) // len(group.slots)
        places = group.start[:, None] + torch.arange(group.slots.shape[1], device=run.device)
        tokens = state.tokens.gather(1, places).repeat(repeats, 1)
        features = run.parts["causal_layer"](group.features, tokens, group.slots.repeat(repeats, 1))
        asked = len(group.slots), run.guided, group.slots.shape[1]
        check_returned(features, *asked, group.features.shape[-1], who="the causal layer")
        return check_returned(run.model.scores(state.cache, features, 0), *asked, run.model.vocab_size)

    def _bounds(self, length: int) -> tuple[int, ...]:
        """Where the groups end. There are fewer groups than steps if there are fewer tokens."""
        shares = hidden_shares(self.config.schedule, "halton", self.config.steps)
        counts = [int(count) for count in hidden_counts(shares, "halton", torch.tensor([length]))]
        return tuple(sorted({length - count for count in counts[1:]} | {length}))

    def result(self, run: Run, state: Any, tokens: Tensor, trace: dict[str, Any]) -> SampleResult:
        return placed_in_grid(run.tables["order"], tokens, trace, SelfSpeculativeTrace)


def _at(values: Tensor, slots: Tensor) -> Tensor:
    """Values `[R, L, D]` at slots, long [N, G], of which R holds one or two halves: `[R, G, D]`."""
    return rows_of(values, slots.repeat(len(values) // len(slots), 1))


def _put(group: Group, fresh: Group, samples: Tensor) -> None:
    """Write the groups `fresh` of some samples, long [N], into the groups of the batch."""
    group.features[group.rows(samples, len(group.features))] = fresh.features
    for name in ("laws", "slots", "start", "end"):
        getattr(group, name)[samples] = getattr(fresh, name)


def _check_causal_layer(model: MaskedModel, layer: Any) -> None:
    """Refuse a model that keeps no features, and a layer that is missing or does not fit."""
    check_in_order(model)
    if not hasattr(model, "scores"):
        raise ValueError(
            f"a {type(model).__name__} keeps nothing of a call, which a causal layer reads; use MaskedSampler."
        )
    if layer is None:
        raise ValueError(
            "this sampler needs causal_layer, a CausalLayer trained for this model (in a checkout: "
            "python scripts/train causal_layer)."
        )
    layer.check_fits(model)
