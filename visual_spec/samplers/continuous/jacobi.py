"""Jacobi decoding of continuous tokens: a call redraws the drafts that it does not commit.

The drafts of a call are chains under the conditions of the call before, with the noise of their own slots, and are
carried with their records. So speculative Jacobi decoding (Teng et al. 2025, section 3.2) carries over: a draft follows
the law of its record, and is tested once, when all tokens before it are known.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import Tensor

from visual_spec.models.core.continuous import AnyContinuousModel
from visual_spec.models.core.settings import OneOf, Within, register_to_config
from visual_spec.samplers.continuous import conditions
from visual_spec.samplers.continuous.base import (
    ContinuousState,
    ContinuousTokenSampler,
    Eta,
    FinalNoise,
    Guidance,
    HeadSteps,
    Order,
)
from visual_spec.samplers.continuous.denoising import ChainLog
from visual_spec.samplers.continuous.rules import AlignedRule, ChainRule, Rule, Window
from visual_spec.samplers.core.acceptance import accepted_prefix
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.core.state import Run
from visual_spec.samplers.core.trace import LOSSLESS, LOSSY


@dataclass
class ContinuousJacobiState(ContinuousState):
    """A `ContinuousState` with the drafts of the next N slots.

    Attributes:
        log: the records of the drafts.
        drafted: bool [B, N]; the last slots of a window may have no draft yet.
    """

    log: ChainLog
    drafted: Tensor


class ContinuousJacobiSampler(ContinuousTokenSampler[ContinuousJacobiState]):
    """Scores a window of drafts in one call, commits those that stand, and redraws the others from what it scored.

    Args:
        window: slots that one call scores, at least 2.
        rule: "chain", lossless, which needs final_noise, or "aligned", measured by no one: the target draws every token
            itself, and a draft within the tolerance stays as the context of those after it
            (`visual_spec.samplers.continuous.rules`).
        tolerance: of rule "aligned".

    The other settings are of the law (`ContinuousTokenSampler`). Plain decoding has the same law with the same ones,
    and one token a call.
    """

    @register_to_config
    def __init__(
        self,
        window: Annotated[int, Within(2)] = 4,
        rule: Annotated[str, OneOf(("chain", "aligned"))] = "chain",
        tolerance: Annotated[float, Within(0)] = 0.1,
        order: Order = None,
        guidance: Guidance = "linear",
        head_steps: HeadSteps = None,
        eta: Eta = None,
        final_noise: FinalNoise = None,
    ) -> None:
        pass

    @property
    def _rule(self) -> Rule:
        kind = ChainRule if self.config.rule == "chain" else AlignedRule
        return kind(self.config.tolerance)

    @property
    def keeps(self) -> str:
        return LOSSLESS if self._rule.lossless else LOSSY

    def plan(self, run: Run) -> None:
        super().plan(run)
        run.window = self.config.window if self.keeps != LOSSY else 2 * self.config.window

    def check(self, model: AnyContinuousModel, law: TokenLaw, batch_size: int, parts: dict[str, Any]) -> None:
        super().check(model, law, batch_size, parts)
        self._rule.check(self.config.rule, self.chain_settings(model.chain), model, law)

    def prepare(self, run: Run) -> ContinuousJacobiState:
        count, levels = self.config.window - 1, self.chain_settings(run.model.chain).head_steps
        dtype = torch.promote_types(run.model.dtype, torch.float32)
        shape = run.batch_size, count, levels + 1, run.model.token_dim
        points = torch.zeros(shape, dtype=dtype, device=run.device)
        log = ChainLog(points, torch.zeros_like(points[:, :, 1:]), torch.ones_like(points[:, :, 1:]))
        drafted = torch.zeros(shape[:2], dtype=torch.bool, device=run.device)
        return self.open(run, ContinuousJacobiState, self.config.window, log=log, drafted=drafted)

    def step(self, run: Run, state: ContinuousJacobiState) -> None:
        assert isinstance(state.round, int)
        width, length, rule = self.config.window, run.num_tokens, self._rule
        state.round += 1
        slots = state.next_slots(width)
        state.put(slots[:, :-1], state.log.tokens, torch.full_like(state.lengths, width - 1))
        again = 0 if rule.lossless else width - 1  # committed tokens that the cache holds as their drafts
        z = conditions.window_conditions(
            run.model, state.cache, state.tokens, state.places, state.lengths, width, again=again
        )
        run.lap("model")
        places = state.places.gather(1, slots)
        if rule.lossless:  # the redrafts walk beside
            z, slots_of, places_of = (torch.cat([part, part], 1) for part in (z, slots, places))
        else:
            slots_of, places_of = slots, places
        target = state.law.chains(run.model, z, slots_of)
        tested = (slots[:, :-1] < length) & state.drafted
        verdict = rule.verify(Window(target, None, state.log, run.noise, places_of, tested))
        state.count("head_calls", target.calls[0], length)
        assert verdict.log is not None
        prefix = accepted_prefix(verdict.kept & state.drafted)
        tested &= torch.arange(width - 1, device=run.device) <= prefix[:, None]
        state.count("tested", tested.sum(1), length)
        state.count("kept", (tested & verdict.kept).sum(1), length)
        state.put(slots, verdict.tokens, prefix + 1)
        # What was scored and not committed is the next draft; the last slots have none yet.
        columns = prefix[:, None] + 1 + torch.arange(width - 1, device=run.device)
        state.drafted = columns < width
        state.log = verdict.log.at(columns.clamp_max(width - 1))
        # A slot without a draft reads as nothing, not as the draft of another one.
        state.log.points = torch.where(state.drafted[..., None, None], state.log.points, 0.0)
        state.commit(slots, prefix + 1, length)
        run.lap("verify")
