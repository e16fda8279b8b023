"""The loop of masked decoding: draw all hidden tokens, keep the tokens of highest score, hide the others again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from visual_spec.models.core.masked_protocol import Rescorer
from visual_spec.samplers.core.checks import check_returned
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.core.masking import (
    FIXED_ORDERS,
    Spans,
    draw_and_score,
    fixed_order,
    hidden_counts,
    hidden_shares,
    mixed,
)
from visual_spec.samplers.core.state import Run
from visual_spec.samplers.core.trace import MEASURE
from visual_spec.samplers.masked.calls import Reuse
from visual_spec.samplers.masked.policies import LawByStep, Ranking, Schedule
from visual_spec.samplers.masked.recap import scattered
from visual_spec.samplers.masked.state import CodebookStage, Dependence, MaskedRunState


@dataclass(frozen=True)
class Unmasking:
    """The loop, with what it decides by.

    Attributes:
        schedule, ranking, by_step: how many tokens stay hidden, which ones are kept, and the law of each step.
        reuse: which calls of the model reuse earlier ones.
        span: slots that are kept or hidden together.
        span_score: "max" is the score of a span's best token, "sum" the sum of its scores.
        rescorer_share: weight of the masked model in the probability of a draw, if another model rescores it.
    """

    schedule: Schedule
    ranking: Ranking
    by_step: LawByStep
    reuse: Reuse = Reuse()
    span: int = 1
    span_score: str = "max"
    rescorer_share: float = 0.5

    def __post_init__(self) -> None:
        rule = self.schedule.rule
        if rule in ("threshold", "factor") and not self.ranking.of_draws:
            raise ValueError(
                f"{rule} with score={self.ranking.score!r}, which is no probability of a draw; pass "
                "score='log_probability' or 'probability'."
            )
        if self.reuse.reuse and self.by_step.credit:
            raise ValueError(
                f"reuse={self.reuse.reuse} with credit={self.by_step.credit}, which is of all slots; pass "
                "one of the two."
            )
        if self.reuse.reuse and rule is not None:
            raise ValueError(
                f"reuse={self.reuse.reuse} with {rule}={getattr(self.schedule, rule)}: which tokens later calls keep "
                "must be known before they are drawn; pass one of the two."
            )

    def begin(
        self,
        run: Run,
        tokens: Tensor,
        steps: list[int],
        *,
        first: int,
        calls: Any,
        meter: Dependence | None,
        conditional: Callable[[], Any] | None = None,
    ) -> MaskedRunState:
        """Return the state before the first call.

        Args:
            tokens: long [B, L, K], the mask id where a token is to be decoded.
            steps: calls of each codebook.
            first: the counter of the first slot.
            calls: the model, or what records its calls.
            conditional: see `MaskedRunState`.
        """
        return MaskedRunState(
            cache=run.cache,
            calls=calls,
            tokens=tokens,
            entry_call=torch.full_like(tokens, -1),
            target_calls=torch.zeros_like(tokens[:, 0, 0]),
            plan=[(codebook, step, count) for codebook, count in enumerate(steps) for step in range(count)],
            meter=meter,
            first=first,
            conditional=conditional,
        )

    def step(self, run: Run, state: MaskedRunState) -> None:
        """Draw all hidden tokens of a codebook, keep the tokens of highest score, and hide the others again."""
        stage, spans = self._next_stage(run, state), Spans(run.model.grid.num_tokens, self.span)
        step, tokens = stage.step, state.tokens[..., stage.codebook]  # a view
        last = step + 1 == len(stage.full)
        reads = None if last else self.schedule.reads
        run.law.law = self.by_step.law(run.law_given, stage.shares[step], step, stage.full)
        logits = self._logits(run, state, stage)  # [R, L, V], or [R, n, V] of the slots `places`
        places = self.reuse.places(stage)

        drawing = stage.unknown & spans.spread(stage.hidden)  # [B, L]
        if self.by_step.credit:
            stage.earned = self.by_step.earned(run.law.law, logits, drawing, stage.earned)
            bonus = self.by_step.credit * stage.earned.log1p()
            logits = logits + bonus.repeat(len(logits) // len(bonus), 1, 1)
        # The last step keeps all draws, whatever their score, and a local one keeps its group in a known order.
        scored = stage.order is None and not last and places is None
        drawn, score, read, drawing = self._draw(run, stage, logits, drawing, places, scored, reads)
        tokens.copy_(torch.where(drawing, drawn, tokens))

        ranks = self._ranks(run, state, stage, spans, score, drawing, places)  # [B, U]
        self.reuse.choose_group(stage, spans, ranks)
        state.target_calls += stage.hidden.any(1) if self.schedule.rule is not None else 1
        if read is not None:
            gap = torch.where(stage.unknown, read, 0).sum(1) / stage.unknown.sum(1)
            read = gap if reads == "gap" else spans.score(read, drawing, "sum")
        if self.schedule.rule in ("threshold", "factor"):
            ranks = self.ranking.probability(ranks)
        done = (step + 1) / len(stage.full)
        stays = self.schedule.stays(ranks, stage.hidden, stage.counts[step + 1], done, read)
        kept = drawing & spans.spread(stage.hidden & ~stays)
        state.entry_call[..., stage.codebook].masked_fill_(kept, state.round)
        tokens.masked_fill_(drawing & ~kept, run.model.mask_id)
        stage.hidden, stage.newest = stays, kept
        run.lap("verify")
        if state.meter is not None:
            if places is not None:  # logits of other slots are not read
                nothing = logits.new_zeros(len(logits), kept.shape[1], logits.shape[2])
                logits = scattered(logits, places.repeat(len(logits) // len(places), 1), nothing)
            state.meter.measure(run, state, logits, kept)
            run.lap(MEASURE)

    def _next_stage(self, run: Run, state: MaskedRunState) -> CodebookStage:
        """The codebook of the next call, at the step of this call."""
        state.round += 1
        # Where draws decide, the end is noticed one call late on a GPU; such a call finds nothing hidden.
        codebook, step, steps = state.plan[min(state.round, len(state.plan) - 1)]
        if step == 0:
            state.stage = self._begin_stage(run, state, codebook, steps)
        assert state.stage is not None
        state.stage.step = step
        return state.stage

    def _begin_stage(self, run: Run, state: MaskedRunState, codebook: int, steps: int) -> CodebookStage:
        grid, spans = run.model.grid, Spans(run.model.grid.num_tokens, self.span)

        def counters(count: int) -> Tensor:
            """The counter slots of the codebook's tokens or units, as `ColumnView.slots`: long [B, count]."""
            slots = torch.arange(count, device=run.device) * grid.codebooks + codebook
            return state.first + slots.expand(run.batch_size, -1)

        unknown = state.tokens[..., codebook] == run.model.mask_id
        hidden, units = spans.any(unknown), counters(spans.count)
        clock, score = self.schedule.clock, self.ranking.score
        shares = hidden_shares(self.schedule.schedule, clock, steps)
        in_order = score in FIXED_ORDERS
        return CodebookStage(
            codebook=codebook,
            unknown=unknown,
            hidden=hidden,
            shares=shares,
            counts=[*hidden_counts(shares, clock, hidden.sum(1)), torch.zeros_like(hidden.sum(1))],
            entries=counters(grid.num_tokens),
            units=units,
            order=fixed_order(score, grid, spans, run.noise, units) if in_order else None,
            full=self.reuse.full(steps),
            room=self.reuse.room(shares, spans),
        )

    def _logits(self, run: Run, state: MaskedRunState, stage: CodebookStage) -> Tensor:
        """Make the call of a step, and leave out unconditional rows that its law does not read."""
        if stage.cache is None or stage.full[stage.step]:
            stage.cache = self._cache(run, state)
        if hasattr(run.model, "set_time"):
            run.model.set_time(stage.cache, stage.step / len(stage.full))
        logits = self.reuse.logits(run, state, stage)
        run.lap("model")
        return logits if run.law.law.guided else logits[: run.batch_size]

    def _cache(self, run: Run, state: MaskedRunState) -> Any:
        """The model's state for a full call: one without unconditional rows after the last guided call."""
        if run.law.law.guided or self.by_step.guided_steps is None or state.conditional is None:
            return state.cache
        return state.conditional()

    def _draw(
        self,
        run: Run,
        stage: CodebookStage,
        logits: Tensor,
        drawing: Tensor,
        places: Tensor | None,
        scored: bool,
        reads: str | None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor]:
        """Draw the slots `drawing [B, L]`, of a local call the slots of its group only.

        Returns:
            Tokens, scores and what is read, [B, L] each, the latter two where they are asked for; and the slots drawn.
        """
        entries, checked = stage.entries, drawing
        if places is not None:
            at = places.clamp(max=drawing.shape[1] - 1)
            entries = entries.gather(1, at)
            checked = drawing.gather(1, at) & (places < drawing.shape[1])
        ranking = self.ranking
        drawn, score, read = draw_and_score(
            run.law,
            run.noise,
            logits,
            entries,
            torch.where(checked, entries, run.num_tokens),
            stage.step,
            score=ranking.score if scored else None,
            filtered=ranking.filtered_score,
            score_temperature=ranking.score_temperature,
            reads=reads,
            greedy=ranking.greedy,
            second=ranking.second_draw,
        )
        if places is not None:
            drawn, drawing = (
                scattered(one, places, torch.zeros_like(drawing, dtype=one.dtype)) for one in (drawn, checked)
            )
        return drawn, score, read, drawing

    def _ranks(
        self,
        run: Run,
        state: MaskedRunState,
        stage: CodebookStage,
        spans: Spans,
        score: Tensor | None,
        drawing: Tensor,
        places: Tensor | None,
    ) -> Tensor:
        """Scores [B, U] of the units, from scores [B, L] of the draws that stand in `state.tokens`."""
        if score is None:
            if stage.order is not None:
                return stage.order
            return stage.hidden.float() if places is None or stage.score is None else stage.score
        rescorer = run.parts.get("rescorer")
        if rescorer is not None:
            run.lap("verify")
            score = self._rescored(run, rescorer, score, state.tokens, stage.codebook)
            run.lap("rescore")
        score = spans.score(score, drawing, self.span_score)
        left = self.by_step.left(stage.step, stage.full)
        return self.ranking.with_noise(score, run.noise, stage.units, stage.step, left)

    def _rescored(self, run: Run, rescorer: Rescorer, score: Tensor, tokens: Tensor, codebook: int) -> Tensor:
        """Mix the scores [B, L] of the draws in `tokens` [B, L, K] with the rescorer's probabilities."""
        own = run.parts.get("rescorer_condition")
        condition = run.condition if own is None else own
        codes = tokens.masked_fill(tokens == run.model.mask_id, rescorer.special_id).transpose(1, 2)
        logits = rescorer.teacher_forced(codes, condition)  # [B, K, L, V]
        check_returned(logits, len(codes), False, *codes.shape[1:], rescorer.vocab_size, who="the rescorer")
        logits = logits[:, codebook]
        other = TokenLaw()(logits, False).gather(-1, codes[:, codebook, :, None])[..., 0].to(score)
        share = self.rescorer_share
        if self.ranking.score == "log_probability":
            return mixed(score, other, share)
        return share * score + (1 - share) * other.exp()
