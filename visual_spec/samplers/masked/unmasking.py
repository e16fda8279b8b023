"""The loop of masked decoding: draw all hidden tokens, keep the tokens of highest score, hide the others again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from visual_spec.kernels.launch import fits
from visual_spec.kernels.law import law_reference, unfiltered_reference
from visual_spec.kernels.masked_sample import masked_sample
from visual_spec.models.core.masked_protocol import HidingModel, MaskedModel, Rescorer
from visual_spec.samplers.core.checks import check_allowed, check_returned
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.core.masking import (
    FIXED_ORDERS,
    Spans,
    fixed_order,
    hidden_counts,
    hidden_shares,
    least_sure,
    mixed,
)
from visual_spec.samplers.core.noise import ACCEPT, CHOICE, DRAFT, RESIDUAL, TOKEN
from visual_spec.samplers.core.state import Run
from visual_spec.samplers.core.trace import MEASURE, DecodeTrace, DivergenceMeter
from visual_spec.samplers.masked.policies import Choice, LawByStep, Schedule


@dataclass
class MaskedRunState:
    """A batch between two calls.

    Attributes:
        cache: the model's own state.
        model: the model, or what records its calls.
        call: what a step calls as the model: the model, unless a sampler puts something else in its place.
        tokens: long [B, L, K], the mask id where a token is hidden.
        entry_call: long [B, L, K], the call at which each token was kept; -1 for tokens not yet kept, and given ones.
        target_calls: long [B].
        plan: (codebook, step, steps of this codebook) of every call.
        spans: the units that are kept or hidden together.
        first: the counter of the first slot: above 0 for a part of a longer decode.
        meter: what `measure` has found so far; None without it.
        conditional: makes a state of the model without unconditional rows, for calls that need none; None: all do.
        round: index of the last call, -1 before the first.
        stage: state of the codebook that is being decoded.
        logprobs, model_logprobs: float32 [B, L, K], see `core.logprobs`; None where nobody asked.
    """

    cache: Any
    model: Any
    call: Callable[..., Tensor]
    tokens: Tensor
    entry_call: Tensor
    target_calls: Tensor
    plan: list[tuple[int, int, int]]
    spans: Spans
    first: int
    meter: Dependence | None
    conditional: Callable[[], Any] | None
    round: int = -1
    stage: CodebookStage | None = None
    logprobs: Tensor | None = None
    model_logprobs: Tensor | None = None

    @property
    def commit_call(self) -> Tensor:
        """The call at which the last codebook of a slot was kept, 0 for given slots: long [B, L]."""
        return self.entry_call.amax(-1).clamp(min=0)


@dataclass
class CodebookStage:
    """The decoding of one codebook. What does not depend on draws is decided before its first step.

    Attributes:
        codebook: its index.
        unknown: bool [B, L], the tokens to decode.
        hidden: bool [B, U], the units that are not kept yet.
        shares: hidden share of the tokens before every step.
        counts: long [B] each, the number of hidden units before every step, and 0 after the last.
        entries, units: long [B, L] and [B, U], counter slots.
        laws, guided: of every step, and whether its logits hold unconditional rows.
        noise: scale of the noise on the score at every step.
        order: [B, U], scores that keep units in an order that is known before the draw; None: draws are scored.
        step: index of the current step.
        scores: [B, U], what the last step chose by.
        earned: [B, L, V], what tokens earned so far, see `LawByStep.credit`.
    """

    codebook: int
    unknown: Tensor
    hidden: Tensor
    shares: Sequence[float]
    counts: list[Tensor]
    entries: Tensor
    units: Tensor
    laws: list[TokenLaw]
    guided: list[bool]
    noise: list[float]
    order: Tensor | None
    step: int = 0
    scores: Tensor | None = None
    earned: Tensor | None = None


@dataclass(frozen=True)
class Unmasking:
    """The loop, with what it decides by.

    Attributes:
        schedule, choice, by_step: how many tokens stay hidden, which ones are kept, and the law of each step.
        span: slots that are kept or hidden together.
        span_score: "max" is the score of a span's best token, "sum" the sum of its scores.
        rescorer_share: weight of the masked model in the probability of a draw, if another model rescores it.
    """

    schedule: Schedule
    choice: Choice
    by_step: LawByStep
    span: int = 1
    span_score: str = "max"
    rescorer_share: float = 0.5

    def __post_init__(self) -> None:
        rule = self.schedule.rule
        if rule in ("threshold", "factor") and not self.choice.of_draws:
            raise ValueError(
                f"{rule} with score={self.choice.score!r}, which is no probability of a draw; pass "
                "score='log_probability' or 'probability'."
            )

    def begin(
        self,
        run: Run,
        tokens: Tensor,
        steps: list[int],
        *,
        first: int = 0,
        model: Any = None,
        meter: Dependence | None = None,
        conditional: Callable[[], Any] | None = None,
    ) -> MaskedRunState:
        """Return the state before the first call.

        Args:
            tokens: long [B, L, K], the mask id where a token is to be decoded.
            steps: calls of each codebook.
            first, meter, conditional: see `MaskedRunState`.
            model: what records the calls of the model; None: the model itself.
        """
        return MaskedRunState(
            cache=run.cache,
            model=model or run.model,
            call=model or run.model,
            tokens=tokens,
            entry_call=torch.full_like(tokens, -1),
            target_calls=torch.zeros_like(tokens[:, 0, 0]),
            plan=[(codebook, step, count) for codebook, count in enumerate(steps) for step in range(count)],
            spans=Spans(tokens.shape[1], self.span),
            first=first,
            meter=meter,
            conditional=conditional,
        )

    def left(self, steps: int) -> list[float]:
        """The share of the steps of a codebook that is left at each, by which noise and temperature fall."""
        return self.by_step.left(steps)

    def step(self, run: Run, state: MaskedRunState) -> None:
        """Draw all hidden tokens of a codebook, keep the tokens of highest score, and hide the others again."""
        state.round += 1
        # Where draws decide, the end is noticed one call late on a GPU; such a call finds nothing hidden.
        codebook, step, steps = state.plan[min(state.round, len(state.plan) - 1)]
        if step == 0:
            state.stage = self._begin_codebook(run, state, codebook, steps)
        stage, spans, tokens = state.stage, state.spans, state.tokens[..., codebook]  # the tokens are a view
        assert stage is not None
        stage.step, last = step, step + 1 == steps
        run.law.law, guided = stage.laws[step], stage.guided[step]

        # The model scores all slots. After the last guided call its state needs no unconditional rows.
        cache = state.cache if guided or state.conditional is None else state.conditional()
        if hasattr(run.model, "set_time"):
            run.model.set_time(cache, step / steps)
        logits = state.call(cache, state.tokens, codebook)
        logits = logits if guided else logits[: run.batch_size]  # [R, L, V]
        run.lap("model")

        # Draw the hidden tokens, and score the units [B, U].
        drawing = stage.unknown & spans.spread(stage.hidden)  # [B, L]
        own = logits
        if self.by_step.credit:
            logits = self._credited(stage.laws[step], stage, logits, drawing)
        drawn, score, read = self._draw(run, stage, logits, drawing)
        tokens.copy_(torch.where(drawing, drawn, tokens))
        if score is None:  # all are kept, or an order decides
            scores = stage.hidden.float() if stage.order is None else stage.order
        else:
            if run.parts.get("rescorer") is not None:
                score = self._rescored(run, score, state.tokens, codebook)
            scores = spans.score(score, drawing, self.span_score)
            if self.choice.choice_temperature:
                gumbel = run.noise.gumbel(stage.units, 1, CHOICE, step, scores.dtype)[..., 0]
                scores = scores + stage.noise[step] * gumbel

        # Keep the units of highest score: as many as the schedule says, or as a rule allows.
        if self.schedule.rule is None:
            state.target_calls += 1
            stays = least_sure(scores, stage.hidden, stage.counts[step + 1])
        else:
            state.target_calls += stage.hidden.any(1)
            stays = self._refused(stage, scores, drawing, spans, read, last)
        kept = drawing & spans.spread(stage.hidden & ~stays)
        state.entry_call[..., codebook].masked_fill_(kept, state.round)
        if state.logprobs is not None:
            self._keep_logprobs(run, state, stage, logits, own, kept)
        tokens.masked_fill_(drawing & ~kept, run.model.mask_id)
        stage.hidden, stage.scores = stays, scores
        run.lap("verify")
        if state.meter is not None:
            state.meter.measure(run, state, cache, logits, kept)
            run.lap(MEASURE)

    def _keep_logprobs(
        self, run: Run, state: MaskedRunState, stage: CodebookStage, logits: Tensor, own: Tensor, kept: Tensor
    ) -> None:
        """Write the log-probabilities of the kept tokens, bool [B, L], from logits of the call, [R, L, V].

        `own`: the model's, without what tokens earned.
        """
        from visual_spec.samplers.core.logprobs import keep_entries, own_law  # where they are asked for

        assert state.logprobs is not None and state.model_logprobs is not None
        tokens = state.tokens[..., stage.codebook]
        slots = torch.where(kept, stage.entries, run.law.num_tokens)
        laws = run.law(logits, slots, stage.guided[stage.step])
        keep_entries(state.logprobs[..., stage.codebook], laws, tokens, kept)
        laws = own_law(own[: len(tokens)], slots, False)
        keep_entries(state.model_logprobs[..., stage.codebook], laws, tokens, kept)

    def _draw(
        self, run: Run, stage: CodebookStage, logits: Tensor, drawing: Tensor
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Draw a token at every position and score each draw.

        On a GPU one kernel does both, except where something is read of the laws and where `greedy`,
        `score_temperature` or `second_draw` is set.

        Args:
            logits: [R, L, V], R = 2B if the step is guided, else B.
            drawing: bool [B, L], the positions whose logits are checked.

        Returns:
            Tokens, long [B, L]; scores [B, L], or None: the last step keeps all, whatever their score, and an order is
            no score; and what the schedule reads of the laws, in nats [B, L], or None.
        """
        choice, law, noise, slots, step = self.choice, run.law, run.noise, stage.entries, stage.step
        last, guided = step + 1 == len(stage.laws), stage.guided[step]
        score = None if last or stage.order is not None else choice.score
        reads = None if last else self.schedule.reads
        checked = torch.where(drawing, slots, law.num_tokens)
        numbers = law.numbers(logits, checked, guided)
        own_score = score is not None and choice.score_temperature is not None
        if (
            fits(logits)
            and score != "entropy"
            and not (choice.greedy or reads or own_score or choice.second_draw)
        ):
            drawn, log_probs, log_kept, finite = masked_sample(
                logits, noise.keys, slots, numbers, stream=TOKEN, round=step
            )
            law.remember(~finite, checked)
            sure = log_probs if choice.filtered_score else log_probs + log_kept
            return drawn, None if score is None else sure if score == "log_probability" else sure.exp(), None
        target = law(logits, checked, guided, numbers)  # [B, L, V]
        if choice.greedy:
            # By the logits themselves: a low temperature rounds the likeliest tokens to the same probability.
            drawn = law_reference(logits, checked, numbers._replace(temperature=0.0)).argmax(-1)
        else:
            drawn = noise.categorical(target, slots, TOKEN, step)
        read = torch.special.entr(target.exp()).sum(-1) if reads == "entropy" else None
        if score is None and reads != "gap":
            return drawn, None, read
        scored = target
        if choice.score_temperature is not None:
            numbers = numbers._replace(temperature=choice.score_temperature)
            scored = law_reference(logits, checked, numbers)
        if not choice.filtered_score:
            scored = unfiltered_reference(logits, checked, numbers, scored)
        if reads == "gap":
            first, second = scored.topk(2, -1).values.unbind(-1)
            read = first - second
        if score is None:
            return drawn, None, read
        if score == "entropy":
            return drawn, -torch.special.entr(scored.exp()).sum(-1), read
        shown = noise.categorical(scored, slots, RESIDUAL, step) if choice.second_draw else drawn
        log_probability = scored.gather(-1, shown[..., None])[..., 0]
        return drawn, log_probability if score == "log_probability" else log_probability.exp(), read

    def _begin_codebook(self, run: Run, state: MaskedRunState, codebook: int, steps: int) -> CodebookStage:
        grid, spans, schedule, by_step = run.model.grid, state.spans, self.schedule, self.by_step

        def counters(count: int) -> Tensor:
            """The counter slots of the codebook's tokens or units, as `ColumnView.slots`: long [B, count]."""
            slots = torch.arange(count, device=run.device) * grid.codebooks + codebook
            return state.first + slots.expand(run.batch_size, -1)

        unknown = state.tokens[..., codebook] == run.model.mask_id
        hidden, units, score = spans.any(unknown), counters(spans.count), self.choice.score
        shares, left = hidden_shares(schedule.schedule, schedule.clock, steps), self.left(steps)
        scale, in_order = self.choice.choice_temperature, score in FIXED_ORDERS
        laws = [by_step.law(run.law_given, share, step, left) for step, share in enumerate(shares)]
        return CodebookStage(
            codebook=codebook,
            unknown=unknown,
            hidden=hidden,
            shares=shares,
            counts=[
                *hidden_counts(shares, schedule.clock, hidden.sum(1)),
                torch.zeros_like(hidden.sum(1)),
            ],
            entries=counters(grid.num_tokens),
            units=units,
            laws=laws,
            guided=[law.guided for law in laws],
            noise=[scale * share for share in left] if scale else [],
            order=fixed_order(score, grid, spans, run.noise, units) if in_order else None,
        )

    def _credited(self, law: TokenLaw, stage: CodebookStage, logits: Tensor, drawing: Tensor) -> Tensor:
        """Logits [R, L, V] with what their tokens earned up to this call."""
        stage.earned = self.by_step.earned(law, logits, drawing, stage.earned)
        bonus = self.by_step.credit * stage.earned.log1p()
        return logits + bonus.repeat(len(logits) // len(bonus), 1, 1)

    def _refused(
        self,
        stage: CodebookStage,
        scores: Tensor,
        drawing: Tensor,
        spans: Spans,
        read: Tensor | None,
        last: bool,
    ) -> Tensor:
        """The units, bool [B, U], that the schedule's rule leaves hidden; the last step leaves none."""
        count = stage.counts[stage.step + 1]
        if last:
            return least_sure(scores, stage.hidden, count)
        if read is not None:
            gap = torch.where(stage.unknown, read, 0).sum(1) / stage.unknown.sum(1)
            read = gap if self.schedule.reads == "gap" else spans.score(read, drawing, "sum")
        if self.schedule.rule in ("threshold", "factor") and self.choice.score == "log_probability":
            scores = scores.exp()
        done = (stage.step + 1) / len(stage.laws)
        return self.schedule.refused(scores, stage.hidden, count, done, read)

    def _rescored(self, run: Run, score: Tensor, tokens: Tensor, codebook: int) -> Tensor:
        """Mix the scores [B, L] of the draws in `tokens` [B, L, K] with the rescorer's probabilities."""
        run.lap("verify")
        rescorer: Rescorer = run.parts["rescorer"]
        own = run.parts.get("rescorer_condition")
        condition = run.condition if own is None else own
        codes = tokens.masked_fill(tokens == run.model.mask_id, rescorer.special_id).transpose(1, 2)
        logits = rescorer.teacher_forced(codes, condition)  # [B, K, L, V]
        check_returned(logits, len(codes), False, *codes.shape[1:], rescorer.vocab_size, who="the rescorer")
        logits = logits[:, codebook]
        other = TokenLaw()(logits, False).gather(-1, codes[:, codebook, :, None])[..., 0].to(score)
        run.lap("rescore")
        share = self.rescorer_share
        if self.choice.score == "log_probability":
            return mixed(score, other, share)
        return share * score + (1 - share) * other.exp()


@dataclass
class MaskedTrace(DecodeTrace):
    """A `DecodeTrace` of a masked decode. There is no prefill: call 0 is the first forward of the model.

    `commit_call` is the call at which the last codebook of a slot was kept, 0 for given slots. `tokens_per_call` counts
    decoded slots. `logprobs` are of a token given what was visible at the call that kept it. Which tokens a call keeps,
    a choice by confidence, has a probability of its own that is in none of them: the sum is the log-probability of a
    sample only in a fixed order.

    Attributes:
        entry_call: long [B, L, K], the call at which each token was kept, -1 for given tokens.
        rescorer_calls: forwards of the rescoring model.
        total_correlation: float [B], what `measure` found of the dependence that groups were drawn without, in nats a
            sample; None if it was not measured.
    """

    entry_call: Tensor = field(default_factory=lambda: torch.zeros(0))
    rescorer_calls: int = 0
    total_correlation: Tensor | None = None

    @property
    def tokens_per_call(self) -> Tensor:
        """Decoded slots per target call: float [B]."""
        return (self.entry_call >= 0).any(-1).sum(1) / self.target_calls.float()

    @property
    def law_in_words(self) -> str:
        """The output law in words."""
        if self.divergence is None:
            return "the law of masked decoding"
        return f"the law of masked decoding, {self.divergence:.4f} a slot from one token a call"


class Dependence(DivergenceMeter):
    """A `DivergenceMeter` of groups, which also estimates the dependence that they were drawn without.

    Attributes:
        correlation: [B], the total correlation of all groups, in nats.
    """

    def __init__(self, batch_size: int, device: torch.device) -> None:
        super().__init__(batch_size, device)
        self.correlation = torch.zeros(batch_size, device=device)

    def measure(self, run: Run, state: MaskedRunState, cache: Any, logits: Tensor, kept: Tensor) -> None:
        """Estimate how far the group of a step is from its own chain of one token a call, in a random order.

        Along an order, token k of the group has some law given the tokens before it, and was drawn from another, which
        knows none of them. The sum over k of the total variation between both bounds the total variation of the group;
        the sum of the log ratios is an estimate of its (conditional) total correlation, a divergence in nats. One call
        estimates both: a random number of the n kept tokens is shown, and the mean over the others, times n, has the
        sum as its mean.

        Where the order looks at the draws, these are the figures of the draws that were kept.

        Args:
            cache: the model's state in the call of the step.
            logits: [R, L, V], of the step.
            kept: bool [B, L], the group.
        """
        stage = state.stage
        assert stage is not None
        slots, tokens = stage.entries, state.tokens[..., stage.codebook]
        count = kept.sum(1)  # [B]
        rank = run.noise.uniform(slots, DRAFT, stage.step).masked_fill(~kept, torch.inf).argsort(1).argsort(1)
        shown = (run.noise.uniform(slots[:, :1], ACCEPT, stage.step)[:, 0] * count).long()  # [B], below n
        left = kept & (rank >= shown[:, None])
        tested = state.tokens.clone()
        tested[..., stage.codebook] = tokens.masked_fill(left, run.model.mask_id)
        chained = state.model(cache, tested, stage.codebook)
        ignored = torch.where(left, slots, run.num_tokens)
        guided = run.law.law.guided
        used, wanted = (
            run.law(part if guided else part[: len(slots)], ignored, guided) for part in (logits, chained)
        )
        moved = (used.exp() - wanted.exp()).clamp(min=0).sum(-1)  # [B, L]
        at = tokens[..., None].clamp(max=run.model.vocab_size - 1)
        ratio = (used.gather(-1, at) - wanted.gather(-1, at))[..., 0]
        number = left.sum(1).clamp(min=1)
        mean = torch.where(left, moved, 0).sum(1) / number
        self.count(mean[:, None].expand_as(moved), kept)
        self.correlation += (torch.where(left, ratio, 0).sum(1) / number * count).to(self.correlation)


def check_masked_model(model: MaskedModel, law: TokenLaw) -> None:
    """Refuse, before any compute, a request that no sampler of masked models can decode."""
    if hasattr(model, "write"):
        raise ValueError(
            f"{type(model).__name__} fills in one frame after the other; use FrameMaskedSampler for such models."
        )
    if not (hasattr(model, "mask_id") and hasattr(model, "prepare")):
        raise ValueError(
            f"{type(model).__name__} hides no tokens; this sampler decodes masked models, such as MagnetModel. Use "
            "AutoregressiveSampler or ColumnAutoregressiveSampler."
        )
    check_masked_law(model, law)


def check_masked_law(model: HidingModel, law: TokenLaw) -> None:
    """Refuse a law with another vocabulary, or one that reads an order of slots."""
    check_allowed(law, model.vocab_size)
    if law.guidance_until is not None:
        raise ValueError(
            f"guidance_until={law.guidance_until}, but masked decoding knows no order of slots; pass "
            "guidance_until=None, and guidance='falling' or 'rising' to the sampler."
        )
