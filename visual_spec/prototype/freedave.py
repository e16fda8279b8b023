"""FreeDave: masked decoding in fewer calls, with the tokens of every step as they are (Wu and Zhang, 2510.00294).

A call of a masked model scores what is still hidden. Its scores serve twice. They make the next step, as in
`MaskedSampler`, and they draft the steps after it, as if no step would change them. The next call scores the state
before each of these steps, in rows of one batch. While a step leads to the state that was drafted for it, that state's
scores stand, too, and make the next step; the first step that leads elsewhere is taken, and drafts begin anew.

Here the noise of a step depends on the sample, the slot and the step alone, so this holds for drawn tokens, orders with
noise, and laws that change from step to step, not for the likeliest tokens only as in the public code
(cychomatica/FreeDave). A call costs as much as its rows: on a GPU that waits for launches they are free, on a processor
each costs as much as a call.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

import torch
from torch import Tensor

from visual_spec.models.core.masked_protocol import MaskedModel
from visual_spec.models.core.settings import CALLS, COUNT, MOST_CALLS, OneOf, Within, register_to_config
from visual_spec.samplers.core.base import Sampler
from visual_spec.samplers.core.checks import check_returned
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.core.masking import SPAN_SCORES
from visual_spec.samplers.core.state import Run
from visual_spec.samplers.core.trace import IDENTICAL, SampleResult
from visual_spec.samplers.masked.masked import MaskedSampler
from visual_spec.samplers.masked.policies import Choice, LawByStep, Schedule
from visual_spec.samplers.masked.unmasking import MaskedRunState, MaskedTrace, Unmasking


@dataclass
class FreeDaveTrace(MaskedTrace):
    """A `MaskedTrace`.

    Attributes:
        scored_states: long [B], the states that the calls of each sample scored; one a call without drafts.
    """

    scored_states: Tensor = field(default_factory=lambda: torch.zeros(0))

    @property
    def law_in_words(self) -> str:
        """The output law in words."""
        return super(MaskedTrace, self).law_in_words.replace(
            "autoregressive sampling", "plain masked decoding"
        )


@dataclass
class Row:
    """One sample of a batch.

    Attributes:
        run: of this sample alone.
        states: the state to score next, then those that were drafted after it. Empty once the sample is complete.
    """

    run: Run
    states: list[MaskedRunState]


@dataclass
class FreeDaveState(MaskedRunState):
    """A batch between two calls. `tokens` and `entry_call` hold what is committed; `round` counts calls."""

    rows: list[Row] = field(default_factory=list)
    scored_states: Tensor = field(default_factory=lambda: torch.zeros(0))


class FreeDaveSampler(MaskedSampler):
    """The tokens of a `MaskedSampler` with the same settings, by calls that check several of its steps at once.

    Args:
        steps, span, span_score, schedule, choice, by_step: as of `MaskedSampler`.
        num_drafts: steps that are drafted for a call, which scores one state more than that for each sample.
        acceptance: "identical": what a step leads to has to be what was drafted.

    A call takes `known_tokens` as that of `MaskedSampler`, and returns a `FreeDaveTrace`.
    """

    takes = ("known_tokens",)
    keeps = Sampler.keeps
    gives_logprobs = False
    no_logprobs = "whose calls score states that may never be"

    @register_to_config
    def __init__(
        self,
        steps: Annotated[int | Sequence[int], CALLS] = 8,
        num_drafts: Annotated[int, Within(0, most=MOST_CALLS)] = 3,
        *,
        acceptance: Annotated[str, OneOf((IDENTICAL,))] = IDENTICAL,
        span: Annotated[int, COUNT] = 1,
        span_score: Annotated[str, OneOf(tuple(SPAN_SCORES))] = "max",
        schedule: Schedule = Schedule(),
        choice: Choice = Choice(),
        by_step: LawByStep = LawByStep(),
    ) -> None:
        self._loop = Unmasking(schedule, choice, by_step, span, span_score)

    def check(self, model: MaskedModel, law: TokenLaw, batch_size: int, parts: dict[str, Any]) -> None:
        super().check(model, law, batch_size, parts)
        if model.grid.codebooks > 1 or hasattr(model, "set_time"):
            raise ValueError(
                f"{type(model).__name__} has several codebooks, or is told the time, so its states share no call; use "
                "MaskedSampler."
            )

    @property
    def law_settings(self) -> dict[str, Any]:
        # Without a rescorer any share of it is the same.
        return super().law_settings | {"rescorer_share": MaskedSampler().config.rescorer_share}

    def planned_calls(self, model: MaskedModel, parts: dict[str, Any]) -> None:
        return None

    def prepare(self, run: Run) -> FreeDaveState:
        state = FreeDaveState(**vars(super().prepare(run)))
        state.scored_states = torch.zeros_like(state.target_calls)
        # What rows note about bad logits stands where the whole batch looks for it.
        slots = torch.zeros_like(state.tokens[:, :1, 0])
        run.law.remember(torch.zeros_like(slots, dtype=torch.bool), slots)
        for number in range(run.batch_size):
            law, noise, sample = copy(run.law), copy(run.noise), torch.tensor([number], device=run.device)
            law.select(sample)
            noise.select(sample)
            alone = replace(run, batch_size=1, law=law, noise=noise)
            first = self._loop.begin(alone, state.tokens[sample], [len(state.plan)])
            state.rows.append(Row(alone, [first] if _hides(first) else []))
        return state

    def step(self, run: Run, state: FreeDaveState) -> None:
        """Score the states of all rows in one call, and commit the steps that they confirm; waits for the device."""
        counts = [len(row.states) for row in state.rows]
        if not sum(counts):  # on a GPU the end is noticed a call late
            return
        state.round += 1
        cache = copy(state.cache)
        cache.select(torch.arange(run.batch_size).repeat_interleave(torch.tensor(counts)).to(run.device))
        fed = torch.cat([one.tokens for row in state.rows for one in row.states])
        logits = run.model(cache, fed, 0)
        logits = check_returned(logits, len(fed), run.guided, run.model.grid.num_tokens, run.model.vocab_size)
        run.lap("model")
        of_rows = logits.unflatten(0, (-1, len(fed))).split(counts, 1)  # [1 or 2, states, L, V] each
        for number, (row, scores) in enumerate(zip(state.rows, of_rows, strict=True)):
            if row.states:
                state.target_calls[number] += 1
                state.scored_states[number] += len(row.states)
                tokens = self._confirmed(row, scores)
                state.entry_call[number].masked_fill_(tokens != state.tokens[number], state.round)
                state.tokens[number] = tokens
        run.lap("verify")

    def _confirmed(self, row: Row, scores: Tensor) -> Tensor:
        """Take the steps that scores [1 or 2, states, L, V] confirm, and draft the next. Returns tokens [L, K]."""
        newest, logits = row.states[0], scores[:, 0]
        for number, state in enumerate(row.states):
            if not torch.equal(newest.tokens, state.tokens):
                break
            logits = scores[:, number]
            newest = self._next(row, newest, logits)
        states = [newest]
        while _hides(states[-1]) and len(states) <= self.config.num_drafts:
            states.append(self._next(row, states[-1], logits))
        row.states = [one for one in states if _hides(one)]
        return newest.tokens[0]

    def _next(self, row: Row, state: MaskedRunState, logits: Tensor) -> MaskedRunState:
        """The state a step later, from logits [1 or 2, L, V], whatever the model would say."""
        after = copy(state)
        after.tokens, after.entry_call = state.tokens.clone(), state.entry_call.clone()
        after.target_calls, after.stage = state.target_calls.clone(), copy(state.stage)
        after.call = lambda *_: logits
        self._loop.step(row.run, after)
        return after

    def result(self, run: Run, state: MaskedRunState, tokens: Tensor, trace: dict[str, Any]) -> SampleResult:
        assert isinstance(state, FreeDaveState)
        whole = super().result(run, state, tokens, trace)
        fields: dict[str, Any] = vars(whole.trace)
        return SampleResult(whole.tokens, FreeDaveTrace(**fields, scored_states=state.scored_states.cpu()))


def _hides(state: MaskedRunState) -> bool:
    return bool((state.tokens == state.model.mask_id).any())
