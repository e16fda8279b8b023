"""Masked decoding some of whose calls reuse an earlier one; `recap` says how."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from torch import Tensor

from visual_spec.models.core.settings import (
    CALLS,
    COUNT,
    SHARE,
    Graph,
    OneOf,
    fields_of,
    register_to_config,
)
from visual_spec.prototype.reuse.recap import Reuse, ReusedCalls, full_calls
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.core.masking import SPAN_SCORES
from visual_spec.samplers.core.state import Run
from visual_spec.samplers.core.trace import SampleResult
from visual_spec.samplers.masked.masked import MaskedSampler, RecordedCalls
from visual_spec.samplers.masked.policies import Choice, LawByStep, Schedule
from visual_spec.samplers.masked.presets import PRESETS, MaskedPreset
from visual_spec.samplers.masked.unmasking import MaskedRunState, MaskedTrace, Unmasking


@dataclass(frozen=True)
class ReusingUnmasking(Unmasking):
    """The loop of masked decoding. `reuse`: which calls reuse earlier ones."""

    reuse: Reuse = Reuse()

    def __post_init__(self) -> None:
        super().__post_init__()
        reuse, rule = self.reuse.reuse, self.schedule.rule
        if reuse and self.by_step.credit:
            raise ValueError(
                f"reuse={reuse} with credit={self.by_step.credit}, which is of all slots; pass one of the two."
            )
        if reuse and rule is not None:
            raise ValueError(
                f"reuse={reuse} with {rule}={getattr(self.schedule, rule)}: which tokens later calls keep must be "
                "known before they are drawn; pass one of the two."
            )

    def left(self, steps: int) -> list[float]:
        if self.by_step.falls != "full":
            return super().left(steps)
        full = full_calls(steps, self.reuse.reuse, self.reuse.reuse_from)
        return [1 - sum(full[: step + 1]) / sum(full) for step in range(steps)]


@dataclass
class ReusingMaskedTrace(MaskedTrace):
    """A `MaskedTrace`.

    Attributes:
        reused_calls: the part of `target_calls` that went on from what an earlier one computed.
        whole_calls: calls of all slots that the slots which the model computed would fill.
    """

    reused_calls: int = 0
    whole_calls: float = 0.0


class ReusingMaskedSampler(MaskedSampler):
    """Draws as `MaskedSampler`, and reuses in some calls what an earlier one computed: ReCAP, a shortcut, or logits.

    Args:
        steps, span, span_score, rescorer_share, measure, schedule, choice, by_step: as of `MaskedSampler`.
        graph: as of `MaskedSampler`; "auto" records nothing with a shortcut or logits.
        reuse: which calls reuse earlier ones.

    A call takes also `shortcut`, the network that stands in for the model where `reuse_by="shortcut"`: a
    `FeatureShortcut`, or a `DimooShortcut` for Lumina-DiMOO. The model is a `ReusingMaskedModel`. It returns a
    `ReusingMaskedTrace`.
    """

    takes = (*MaskedSampler.takes, "shortcut")
    law_names = (*MaskedSampler.law_names, *fields_of(Reuse))

    @register_to_config
    def __init__(
        self,
        steps: Annotated[int | Sequence[int], CALLS] = 8,
        *,
        span: Annotated[int, COUNT] = 1,
        span_score: Annotated[str, OneOf(tuple(SPAN_SCORES))] = "max",
        rescorer_share: Annotated[float, SHARE] = 0.5,
        graph: Graph = False,
        measure: bool = False,
        schedule: Schedule = Schedule(),
        choice: Choice = Choice(),
        by_step: LawByStep = LawByStep(),
        reuse: Reuse = Reuse(),
    ) -> None:
        if graph is True and reuse.reuse and reuse.reuse_by != "recap":
            raise ValueError(
                f"graph=True with reuse_by={reuse.reuse_by!r}, where what is kept moves; pass graph=False."
            )
        self._reuse = reuse
        self._loop = ReusingUnmasking(schedule, choice, by_step, span, span_score, rescorer_share, reuse)

    def check(self, model: Any, law: TokenLaw, batch_size: int, parts: dict[str, Any]) -> None:
        super().check(model, law, batch_size, parts)
        if not self._reuse.reuse:
            return
        if not hasattr(model, "scores"):
            raise ValueError(
                f"reuse={self._reuse.reuse}, but a {type(model).__name__} keeps nothing of a call; pass reuse=0."
            )
        if parts.get("rescorer") is not None:
            raise ValueError(
                f"reuse={self._reuse.reuse} with a rescorer, which scores the draws of every call; pass one of the two."
            )
        if self._reuse.reuse_by == "logits" and "least" not in inspect.signature(model.forward).parameters:
            raise ValueError(
                f"reuse_by='logits', but a {type(model).__name__} keeps no logits; pass a DimooTransformer, or "
                "reuse_by='recap'."
            )
        if self._reuse.by_shortcut:
            shortcut = parts.get("shortcut")
            if shortcut is None:
                raise ValueError(
                    "reuse_by='shortcut' needs shortcut, a FeatureShortcut trained for this model (in a checkout: "
                    "python scripts/train shortcut)."
                )
            shortcut.check_fits(model)

    def prepare(self, run: Run) -> MaskedRunState:
        state = super().prepare(run)
        if self._reuse.reuse:
            if isinstance(state.model, RecordedCalls):
                recap = self._reuse.reuse_by == "recap"
                state.model = RecordedReuse(run.model, run.cache) if recap else run.model
            state.call = ReusedCalls(run, state, self._reuse)
        return state

    def result(self, run: Run, state: MaskedRunState, tokens: Tensor, trace: dict[str, Any]) -> SampleResult:
        found, calls = super().result(run, state, tokens, trace), state.call
        reused, saved = (calls.count, calls.saved) if self._reuse.reuse else (0, 0.0)
        fields: dict[str, Any] = {
            **vars(found.trace),
            "reused_calls": reused,
            "whole_calls": state.round + 1 - saved,
        }
        return SampleResult(found.tokens, ReusingMaskedTrace(**fields))


class RecordedReuse(RecordedCalls):
    """`RecordedCalls` of a `ReusingMaskedModel`.

    Calls that keep something, or go on from it, are recorded only if the state says that what is kept stays where it is
    (`MaskedState.fixed`).
    """

    def __call__(
        self, state: Any, tokens: Tensor, stage: int, keep: int | None = None, places: Tensor | None = None
    ) -> Tensor:
        if keep is None and places is None:
            return super().__call__(state, tokens, stage)
        assert state is self.state, "recordings read the state that they were made with"
        if not state.fixed:
            return self.model(state, tokens, stage, keep=keep, places=places)
        if places is None:
            return self.replayed((stage, keep), lambda ids: self.model(state, ids, stage, keep=keep), tokens)
        return self.replayed(
            (stage, "places"), lambda ids, at: self.model(state, ids, stage, places=at), tokens, places
        )


# ReCAP's script of 16 calls on MaskGIT (2505.19089): 8 full ones, then 4 pairs of a full and a local one.
RECAP = MaskedPreset(
    dict(
        steps=16,
        schedule="power_2.5",
        clock="recap",
        choice_temperature=5.5,
        falls="full",
        temperature="root",
        last_temperature=0.65,
        score_temperature=1.0,
        second_draw=True,
        reuse=1,
        reuse_from=0.5,
    ),
    TokenLaw(),
    ReusingMaskedSampler,
)

# The cache of Lumina-DiMOO's release, with its settings: 20 full calls of 64, then one in five.
ML_CACHE = MaskedPreset(
    PRESETS["dimoo"].settings | dict(reuse=4, reuse_from=19 / 64, reuse_by="logits", reuse_share=0.1),
    PRESETS["dimoo"].law,
    ReusingMaskedSampler,
)
