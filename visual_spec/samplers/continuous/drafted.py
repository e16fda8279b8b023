"""Speculative decoding of continuous tokens: a smaller model drafts, the target verifies a window in one call."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Annotated, Any

import torch
from torch import Tensor

from visual_spec.models.core.continuous import AnyContinuousModel
from visual_spec.models.core.settings import COUNT, SHARE, OneOf, Within, register_to_config
from visual_spec.samplers.continuous import conditions
from visual_spec.samplers.continuous.as_released import CspdReleaseRule, CspdRule
from visual_spec.samplers.continuous.base import (
    ContinuousState,
    ContinuousTokenSampler,
    Eta,
    FinalNoise,
    Guidance,
    HeadSteps,
    Order,
)
from visual_spec.samplers.continuous.coupling import keep_probability
from visual_spec.samplers.continuous.denoising import ChainLog, Chains
from visual_spec.samplers.continuous.rules import (
    AlignedRule,
    ChainRule,
    ContinuousVerdict,
    OdeRule,
    PathRule,
    Rule,
    Window,
)
from visual_spec.samplers.core.acceptance import accepted_prefix
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.core.state import Run
from visual_spec.samplers.core.trace import LOSSLESS, LOSSY, MEASURE

RULES: dict[str, type[Rule]] = {
    "chain": ChainRule,
    "path": PathRule,
    "ode": OdeRule,
    "aligned": AlignedRule,
    "cspd": CspdRule,
    "cspd-release": CspdReleaseRule,
}


@dataclass
class DraftedContinuousState(ContinuousState):
    """A `ContinuousState` with the drafter's own state, and how its tokens are drawn."""

    drafter_cache: Any
    drafter_law: Any = None


class SpeculativeContinuousSampler(ContinuousTokenSampler[DraftedContinuousState]):
    """Drafts tokens one after the other with a smaller model, and verifies them with one call of the target.

    The target scores every draft given all drafts before it. What is after the first refused draft is discarded.

    Args:
        rule: how a draft is tested (`visual_spec.samplers.continuous.rules`).

            | rule         | law      | needs                                                        |
            | ------------ | -------- | ------------------------------------------------------------ |
            | chain        | lossless | final_noise                                                  |
            | path         | lossless | final_noise, noise in every step (eta, or a diffusion head)  |
            | ode          | lossless | eta=0 or a flow head, no final_noise                         |
            | aligned      | measured | -                                                            |
            | cspd         | measured | as path                                                      |
            | cspd-release | measured | noise in every step, a masked model                          |

        num_drafts: tokens drafted before a call of the target.
        tolerance: of rule "aligned".
        prefill: share of the slots, the first ones, that the target draws alone. The published figures have 0.05.
        measure: of rule "aligned": measure what the shifted contexts do to the law, with one more call a round.

    The other settings are of the law (`ContinuousTokenSampler`). Plain decoding has the same law with the same ones,
    and one token a call.

    A call takes a `drafter`, a smaller model of the same kind and tokens.
    """

    takes = ("drafter", "drafter_condition")
    needs_drafter = True

    @register_to_config
    def __init__(
        self,
        rule: Annotated[str, OneOf(tuple(RULES))] = "chain",
        num_drafts: Annotated[int, COUNT] = 4,
        tolerance: Annotated[float, Within(0)] = 0.1,
        prefill: Annotated[float, SHARE] = 0.0,
        measure: bool = False,
        order: Order = None,
        guidance: Guidance = "linear",
        head_steps: HeadSteps = None,
        eta: Eta = None,
        final_noise: FinalNoise = None,
    ) -> None:
        pass

    @property
    def rule_of_drafts(self) -> Rule:
        """The rule of the configuration."""
        return RULES[self.config.rule](self.config.tolerance)

    @property
    def keeps(self) -> str:
        return LOSSLESS if RULES[self.config.rule].lossless else LOSSY

    @property
    def measures_at_least(self) -> bool:
        return self.config.rule == "cspd-release"  # what the missing context does comes on top

    @property
    def measures_at_most(self) -> bool:  # type: ignore[override]
        return self.config.rule == "cspd"  # it is measured given the noise that both chains share

    def plan(self, run: Run) -> None:
        super().plan(run)
        again = self.config.num_drafts if self.config.rule == "aligned" else 0
        run.window = self.config.num_drafts + 1 + again

    def check(self, model: AnyContinuousModel, law: TokenLaw, batch_size: int, parts: dict[str, Any]) -> None:
        super().check(model, law, batch_size, parts)
        _check_drafter(model, parts.get("drafter"))
        self.rule_of_drafts.check(self.config.rule, self.chain_settings(model.chain), model, law)

    def prepare(self, run: Run) -> DraftedContinuousState:
        cache = conditions.begin(
            run.drafter,
            run.drafter_condition,
            batch_size=run.batch_size,
            guided=run.guided,
            window=self.config.num_drafts + 1,
        )
        settings = self.chain_settings(run.model.chain)
        state = self.open(run, DraftedContinuousState, self.config.num_drafts + 1, drafter_cache=cache)
        state.drafter_law = replace(
            state.law, schedule=run.drafter.schedule(settings.head_steps, settings.eta)
        )
        return state

    def step(self, run: Run, state: DraftedContinuousState) -> None:
        assert isinstance(state.round, int)
        rule, count, length = self.rule_of_drafts, self.config.num_drafts, run.num_tokens
        state.round += 1
        if state.round < math.ceil(self.config.prefill * length):  # all samples are equally long
            z = conditions.window_conditions(
                run.model, state.cache, state.tokens, state.places, state.lengths, 1
            )
            return self.draw_plainly(run, state, z)
        before = state.lengths.clone()
        draft, log = self._draft(run, state, rule)
        run.lap("draft")
        slots = state.next_slots(count + 1)
        z = self._conditions(run, state, rule)
        run.lap("model")
        places = state.places.gather(1, slots)
        target = state.law.chains(run.model, z, slots)
        tested = slots[:, :count] < length
        _check_drafts(log.tokens, tested, places)
        window = Window(target, draft, log, run.noise, places, tested)
        verdict = rule.verify(window)
        state.count("head_calls", target.calls[0], length)
        prefix = accepted_prefix(verdict.kept | ~tested)
        committed = prefix + 1
        if not rule.truncates:
            committed = torch.full_like(prefix, count)
        tested &= torch.arange(count, device=run.device) <= prefix[:, None] if rule.truncates else tested
        state.count("tested", tested.sum(1), length)
        state.count("kept", (tested & verdict.kept).sum(1), length)
        state.put(slots, verdict.tokens, committed)
        run.lap("verify")
        if state.meter is not None and verdict.moved is not None:
            state.meter.count(verdict.moved, tested)
        elif state.meter is not None and self.config.measure:
            self._measure(run, state, verdict, slots, before, committed)
        state.commit(slots, committed, length)

    def _draft(self, run: Run, state: DraftedContinuousState, rule: Rule) -> tuple[Chains, ChainLog]:
        """Draft the next slots, write the drafts into the state, and return their chains."""
        count, drafter = self.config.num_drafts, run.drafter
        slots, logs, drawn_from = state.next_slots(count), [], []
        law = state.drafter_law
        for column in range(count):
            # Its cache lacks the last draft of the round before, and what replaced a draft.
            again = 1 if column == 0 else 0
            lengths = state.lengths + column
            z = conditions.window_conditions(
                drafter, state.drafter_cache, state.tokens, state.places, lengths, 1, again=again
            )
            at = slots[:, column : column + 1]
            one = law.chains(drafter, z, at).log(run.noise, state.places.gather(1, at), rule.stream)
            if not rule.truncates:  # as released
                one.points[:, :, 0] = one.mean[:, :, 0]
            drawn_from.append(z)
            logs.append(one)
            state.put(at, one.tokens, torch.ones_like(lengths))
        state.count("draft_calls", count, run.num_tokens)
        return law.chains(drafter, torch.cat(drawn_from, 1), slots), ChainLog.joined(logs)

    def _conditions(self, run: Run, state: DraftedContinuousState, rule: Rule) -> Tensor:
        """The target's conditions [R, N + 1, dim] of the drafts and the slot after them."""
        count, model = self.config.num_drafts, run.model
        known = (state.cache, state.tokens, state.places)
        if not rule.truncates:  # the published code: what was known before the block
            return conditions.step_conditions(model, *known, state.lengths, count + 1, None)
        # Committed tokens that the cache holds only as the drafts they stand for.
        again = count if self.config.rule == "aligned" else 0
        return conditions.window_conditions(model, *known, state.lengths, count + 1, again=again)

    def _measure(
        self,
        run: Run,
        state: DraftedContinuousState,
        verdict: ContinuousVerdict,
        slots: Tensor,
        lengths: Tensor,
        committed: Tensor,
    ) -> None:
        """Compare the chains that drew the new tokens with those given the new tokens as context.

        The mean of (1 - true / used)+ over chains of `used` is their total variation distance.
        """
        log = verdict.log
        assert state.meter is not None and log is not None
        if state.law.schedule.deterministic:
            return  # two points: no distance but 0 and 1
        count = self.config.num_drafts
        z = conditions.window_conditions(
            run.model, state.cache, state.tokens, state.places, lengths, count + 1, again=count
        )
        true = state.law.chains(run.model, z, slots).log_likelihood(log)
        moved = keep_probability(true - log.log_likelihood())
        inside = torch.arange(count + 1, device=run.device) < committed[:, None]
        state.meter.count(moved, inside & (slots < run.num_tokens))
        run.lap(MEASURE)


def _check_drafter(model: AnyContinuousModel, drafter: Any) -> None:
    """Refuse a drafter whose drafts the model could not score."""
    grid, dim = model.grid, model.token_dim
    fits = f"{grid.height} x {grid.width} tokens of {dim} numbers"
    if drafter is None:
        raise ValueError(
            f"SpeculativeContinuousSampler needs a drafter, and got none; pass drafter=..., a smaller model of {fits}."
        )
    offered = getattr(drafter, "grid", None), getattr(drafter, "token_dim", None)
    if offered != (grid, dim):
        other = offered[0]
        draws = (
            "no such tokens"
            if other is None
            else f"{other.height} x {other.width} tokens of {offered[1]} numbers"
        )
        raise ValueError(
            f"the drafter draws {draws}, but the model {fits}; pass a drafter for the model's tokens."
        )
    if conditions.is_causal(model) != conditions.is_causal(drafter):
        own, other = ("causal" if conditions.is_causal(one) else "masked" for one in (model, drafter))
        raise ValueError(
            f"the drafter is a {other} model, and the model a {own} one; pass one of the same kind."
        )
    if conditions.is_causal(model) and model.places.tolist() != drafter.places.tolist():
        raise ValueError(
            "the drafter decodes the grid in another order than the model; pass one of the same order."
        )


def _check_drafts(tokens: Tensor, tested: Tensor, places: Tensor) -> None:
    """Refuse drafts [B, N, d] that are not finite, where bool [B, N] `tested`. `places`: long [B, >= N]."""
    bad = (tested & ~tokens.isfinite().all(-1)).nonzero()
    if len(bad):
        row, column = bad[0].tolist()
        raise FloatingPointError(
            f"in the drafter: its token of place {int(places[row, column])} is not finite. Check its weights, or run "
            "it in float32 or bfloat16 if it overflows in float16."
        )
