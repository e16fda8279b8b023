"""Masked parallel decoding: MaskGIT, MAGNeT, and other methods made of the same parts.

All tokens are hidden at first. Every step is one forward of a `MaskedModel`. It draws all hidden tokens, keeps some of
the draws for good, and hides the others again; the last step keeps all. Codebooks are decoded one after the other. The
decoder defines its own output law: there is no autoregressive law to compare it with.

* Chang et al., "MaskGIT: masked generative image transformer", CVPR 2022, section 3.2.
* Ziv et al., "Masked audio generation using a single non-autoregressive transformer" (MAGNeT), ICLR 2024, section 3:
  spans, stages, falling guidance; section 3.4: rescoring with another model, which the released code lacks.
  `masked_hybrid` has the paper's other addition, clips with an autoregressive beginning.
* Besnier et al., "Halton scheduler for masked generative image transformer", ICLR 2025.
* Ben-Hamu et al., "Accelerated sampling from masked diffusion models via entropy bounded unmasking", 2505.24857.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from visual_spec.models.core.protocol import MaskedModel, Rescorer
from visual_spec.samplers.core.base import Run, Sampler
from visual_spec.samplers.core.checks import check_allowed, check_batch_size, check_choice, check_flag
from visual_spec.samplers.core.configuration import register_to_config
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.core.masking import (
    CLOCKS,
    FIXED_ORDERS,
    SCHEDULES,
    SCORES,
    SPAN_SCORES,
    Spans,
    beyond_entropy_bound,
    draw_and_score,
    fixed_order,
    hidden_counts,
    hidden_shares,
    least_sure,
    mixed,
)
from visual_spec.samplers.core.noise import ACCEPT, CHOICE, DRAFT
from visual_spec.samplers.core.trace import MEASURE, DecodeTrace, DivergenceMeter, SampleResult

# Falling temperatures end at this value, not at 0 (MAGNeT's code).
_LEAST_TEMPERATURE = 0.01


@dataclass
class MaskedTrace(DecodeTrace):
    """A `DecodeTrace` of a masked decode. There is no prefill: call 0 is the first forward of the model.

    `commit_call` is the call at which the last codebook of a slot was kept, 0 for given slots. `tokens_per_call` counts
    decoded slots.

    Attributes:
        entry_call: long [B, L, K], the call at which each token was kept, -1 for given tokens.
        rescorer_calls: forwards of the rescoring model.
        first_calls: long [B], the part of `target_calls` made by the model that decoded the beginning (hybrid).
        total_correlation: float [B], what `measure` found of the dependence that groups were drawn without, in nats a
            sample; None if it was not measured.
    """

    entry_call: Tensor = field(default_factory=lambda: torch.zeros(0))
    rescorer_calls: int = 0
    first_calls: Tensor | None = None
    total_correlation: Tensor | None = None

    @property
    def tokens_per_call(self) -> Tensor:
        """Decoded slots per target call: float [B]."""
        return (self.entry_call >= 0).any(-1).sum(1) / self.target_calls.float()

    @property
    def output_law(self) -> str:
        """The output law in words."""
        if self.divergence is None:
            return "the law of masked decoding"
        return f"the law of masked decoding, {self.divergence:.4f} a slot from one token a call"


@dataclass
class MaskedState:
    """A batch between two calls.

    Attributes:
        cache: the model's own state.
        tokens: long [B, L, K], the mask id where a token is hidden.
        entry_call: long [B, L, K], the call at which each token was kept; -1 for tokens not yet kept, and given ones.
        target_calls: long [B].
        plan: (codebook, step) of every call.
        steps: number of calls of each codebook.
        round: index of the last call, -1 before the first.
        stage: state of the codebook that is being decoded.
        meter, correlation: what `measure` has found so far; None without it. correlation: [B], in nats.
    """

    cache: Any
    tokens: Tensor
    entry_call: Tensor
    target_calls: Tensor
    steps: list[int]
    plan: list[tuple[int, int]]
    round: int = -1
    stage: Stage | None = None
    meter: DivergenceMeter | None = None
    correlation: Tensor | None = None

    @property
    def commit_call(self) -> Tensor:
        """The call at which the last codebook of a slot was kept, 0 for given slots: long [B, L]."""
        return self.entry_call.amax(-1).clamp(min=0)


@dataclass
class Stage:
    """The decoding of one codebook.

    Attributes:
        unknown: bool [B, L], the tokens to decode.
        hidden: bool [B, U], the units that are not kept yet.
        shares: hidden share of the tokens before every step.
        counts: long [B] each, the number of hidden units before every step, and 0 after the last.
        entries, units: long [B, L] and [B, U], counter slots.
        order: [B, U], scores that keep units in a fixed order; None if draws are scored.
    """

    unknown: Tensor
    hidden: Tensor
    shares: Sequence[float]
    counts: list[Tensor]
    entries: Tensor
    units: Tensor
    order: Tensor | None


class MaskedSampler(Sampler):
    """Draws all hidden tokens at every step, and keeps those of highest score. `masked_presets` has published settings.

    Args:
        steps: forwards of each codebook: one number for all of them, or one for each.
        schedule: of the hidden share, one of `masking.SCHEDULES`.
        clock: "maskgit" ends the schedule after the last step, "magnet" at it; see `masking.CLOCKS`.
        score: what is kept first, one of `masking.SCORES`.
        choice_temperature: scale of the Gumbel noise on the score, times the share of steps that are left. 0: no noise.
        span: slots that are kept or hidden together. More than 1 for sequences only.
        span_score: "max" is the score of a span's best token, "sum" the sum of its scores (with log-probabilities: the
            probability of the whole span).
        temperature: "constant" uses the law's; "falling" scales it by the share of steps that are left, down to 0.01
            (MAGNeT); "root" lets it fall to the share `last_temperature` of itself, as the root of the steps (ReCAP).
        last_temperature: see `temperature`.
        guidance: "constant" uses the law's scale; "falling" goes from it to `least_guidance` as the hidden share falls
            (MAGNeT); "rising" goes the other way (masked image models); "ramp" rises evenly from step to step.
        least_guidance: at least 1, which means no guidance.
        entropy_bound: None keeps what the schedule says. A number lets each step keep as many of the surest tokens as
            this bound on their entropy allows (`masking.beyond_entropy_bound`), until all are kept or the last of
            `steps`, which keeps the rest. What changes from step to step follows `schedule` as without a bound. For
            models of one codebook.
        filtered_score: score draws by the law they were drawn from. False: by that law before top-k and top-p.
        rescorer_share: weight of the masked model in the probability of a draw, if another model rescores it.
        greedy: take the likeliest tokens, and score them by the law with its temperature, which decides about their
            order where it falls (MAGNeT's code with use_sampling=False). A law of temperature 0 takes the same tokens,
            and scores them at temperature 1.
        measure: estimate, by one more call of the model a step, what drawing a group independently moves; see
            `_measured`. The trace reports it; its time does not count as decoding.

    A call takes
        given: long [B, L, K] (or [B, L] for one codebook), known tokens; the mask id marks tokens to decode. None: no
            token is known.
        rescorer: an autoregressive model of the same codes; draws are then ranked by a mixture of both models'
            probabilities (MAGNeT, section 3.4). It costs one forward a step, except in the last step of each codebook.
            Hidden codes, and codes outside a clip, are its special token.
        rescorer_condition: condition of the rescorer; None: the model's.

    and returns tokens long [B, L], or [B, L, K] for several codebooks, with a `MaskedTrace`. The callback gets the
    number of kept or given tokens of each sample, divided by the number of codebooks and rounded down.

    Raises:
        ValueError: a name is unknown, or a number is out of its range.
    """

    takes = ("given", "rescorer", "rescorer_condition")
    promise = "lossy"
    counts_prefill = False

    @register_to_config
    def __init__(
        self,
        steps: int | Sequence[int] = 8,
        schedule: str = "cosine",
        clock: str = "maskgit",
        score: str = "log_probability",
        choice_temperature: float = 0.0,
        span: int = 1,
        span_score: str = "max",
        temperature: str = "constant",
        guidance: str = "constant",
        least_guidance: float = 1.0,
        filtered_score: bool = False,
        rescorer_share: float = 0.5,
        last_temperature: float = 0.7,
        entropy_bound: float | None = None,
        greedy: bool = False,
        measure: bool = False,
    ) -> None:
        check_flag("measure", measure)
        for name, value, known in [
            ("schedule", schedule, SCHEDULES),
            ("clock", clock, CLOCKS),
            ("score", score, SCORES),
            ("span_score", span_score, SPAN_SCORES),
            ("temperature", temperature, ("constant", "falling", "root")),
            ("guidance", guidance, ("constant", "falling", "rising", "ramp")),
        ]:
            check_choice(name, value, known)
        counts = steps if isinstance(steps, (list, tuple)) else [steps]
        if not counts or not all(_at_least_one(count) for count in counts):
            raise ValueError(f"steps={steps!r}; pass an integer of at least 1, or one for each codebook.")
        if not _at_least_one(span):
            raise ValueError(f"span={span!r}; pass an integer of at least 1.")
        for name, number, least, most in [
            ("choice_temperature", choice_temperature, 0.0, math.inf),
            ("least_guidance", least_guidance, 1.0, math.inf),
            ("rescorer_share", rescorer_share, 0.0, 1.0),
            ("last_temperature", last_temperature, 0.0, 1.0),
            ("entropy_bound", 0.0 if entropy_bound is None else entropy_bound, 0.0, math.inf),
        ]:
            if not math.isfinite(number) or not least <= number <= most:
                up_to = "" if most == math.inf else f" and at most {most:g}"
                raise ValueError(f"{name}={number}; pass a finite number of at least {least:g}{up_to}.")
        if choice_temperature and score in FIXED_ORDERS:
            raise ValueError(
                f"choice_temperature={choice_temperature} with score={score!r}, an order that no noise should change; "
                "pass choice_temperature=0."
            )

    def prefill(
        self, model: MaskedModel, condition: Any, law: TokenLaw, batch_size: int, parts: dict[str, Any]
    ) -> Any:
        return model.prepare(condition, batch_size=batch_size, guided=law.guided)

    def num_slots(self, model: MaskedModel, parts: dict[str, Any]) -> int:
        return model.grid.num_tokens * model.grid.codebooks

    def num_calls(self, run: Run) -> int | None:
        if self.config.entropy_bound is not None:
            return None
        return sum(self._steps(run.model, run.parts.get("given")))

    def prepare(self, run: Run) -> MaskedState:
        """Hide all tokens that are not given."""
        grid, given = run.model.grid, run.parts.get("given")
        shape = (run.batch_size, grid.num_tokens, grid.codebooks)
        tokens = torch.full(shape, run.model.mask_id, device=run.device)
        if given is not None:
            tokens.copy_(given.reshape(shape))
        steps = self._steps(run.model, given)
        return MaskedState(
            cache=run.cache,
            tokens=tokens,
            entry_call=torch.full_like(tokens, -1),
            target_calls=torch.zeros_like(tokens[:, 0, 0]),
            steps=steps,
            plan=[(stage, step) for stage, count in enumerate(steps) for step in range(count)],
            meter=DivergenceMeter(run.batch_size, run.device) if self.config.measure else None,
            correlation=torch.zeros(run.batch_size, device=run.device) if self.config.measure else None,
        )

    def step(self, run: Run, state: MaskedState) -> None:
        """Draw all hidden tokens of a codebook, keep those of highest score, and hide the others again."""
        state.round += 1
        # Under an entropy bound the end is noticed one call late on a GPU; such a call finds nothing hidden.
        codebook, step = state.plan[min(state.round, len(state.plan) - 1)]
        stage = state.stage = self._begin_stage(run, state, codebook) if step == 0 else state.stage
        assert stage is not None
        left = 1 - (step + 1) / state.steps[codebook]  # share of the steps
        run.law.law = self._law(run.law_given, stage.shares[step], step, state.steps[codebook])
        logits = run.model(state.cache, state.tokens, codebook)  # [R, L, V]
        run.lap("model")
        if not run.law.law.guided:
            logits = logits[: run.batch_size]
        spans = Spans(run.model.grid.num_tokens, self.config.span)
        drawing = stage.unknown & spans.spread(stage.hidden)  # [B, L]
        bound = self.config.entropy_bound if left else None
        drawn, score, entropy = draw_and_score(
            run.law,
            run.noise,
            logits,
            stage.entries,
            # The logits of slots without a draw are never used, so they are marked as past the grid and not checked.
            torch.where(drawing, stage.entries, run.num_tokens),
            step,
            # The last step keeps all draws, whatever their score.
            score=self.config.score if stage.order is None and left else None,
            filtered=self.config.filtered_score,
            entropies=bound is not None,
            greedy=self.config.greedy,
        )
        tokens = state.tokens[..., codebook]  # a view
        tokens.copy_(torch.where(drawing, drawn, tokens))
        if score is not None:
            score = self._unit_scores(run, state, codebook, step, score, drawing, left)
        else:
            score = stage.hidden.float() if stage.order is None else stage.order
        state.target_calls += 1 if self.config.entropy_bound is None else stage.hidden.any(1)
        if bound is None:
            stays = least_sure(score, stage.hidden, stage.counts[step + 1])  # [B, U]
        else:
            assert entropy is not None
            entropy = spans.score(entropy, drawing, "sum")  # [B, U]
            stays = beyond_entropy_bound(score, entropy, stage.hidden, bound)
        kept = drawing & spans.spread(stage.hidden & ~stays)
        state.entry_call[..., codebook].masked_fill_(kept, state.round)
        tokens.masked_fill_(drawing & ~kept, run.model.mask_id)
        stage.hidden = stays
        if state.meter is not None:
            run.lap("verify")
            self._measured(run, state, codebook, step, logits, kept)
            run.lap(MEASURE)
        run.lap("verify")

    def _measured(
        self, run: Run, state: MaskedState, codebook: int, step: int, logits: Tensor, kept: Tensor
    ) -> None:
        """Estimate how far the group of a step is from its own chain of one token a call, in a random order.

        Along an order, token k of the group has some law given the tokens before it, and was drawn from another, which
        knows none of them. The sum over k of the total variation between both bounds that of the group; the sum of the
        log ratios is an estimate of its (conditional) total correlation, a divergence in nats. One call estimates both:
        a random number of the n kept tokens is shown, and the mean over the others, times n, has the sum as its mean.

        Where the order looks at the draws, these are the figures of the draws that were kept.

        Args:
            logits: [R, L, V], of the step.
            kept: bool [B, L], the group.
        """
        assert state.stage is not None and state.meter is not None and state.correlation is not None
        slots, tokens = state.stage.entries, state.tokens[..., codebook]
        count = kept.sum(1)  # [B]
        rank = run.noise.uniform(slots, DRAFT, step).masked_fill(~kept, torch.inf).argsort(1).argsort(1)
        shown = (run.noise.uniform(slots[:, :1], ACCEPT, step)[:, 0] * count).long()  # [B], below n
        left = kept & (rank >= shown[:, None])
        tested = state.tokens.clone()
        tested[..., codebook] = tokens.masked_fill(left, run.model.mask_id)
        chained = run.model(state.cache, tested, codebook)
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
        state.meter.count(mean[:, None].expand_as(moved), kept)
        state.correlation += (torch.where(left, ratio, 0).sum(1) / number * count).to(state.correlation)

    def _begin_stage(self, run: Run, state: MaskedState, codebook: int) -> Stage:
        grid, score = run.model.grid, self.config.score
        spans = Spans(grid.num_tokens, self.config.span)
        unknown = state.tokens[..., codebook] == run.model.mask_id
        hidden = spans.any(unknown)
        shares = hidden_shares(self.config.schedule, self.config.clock, state.steps[codebook])
        number = hidden.sum(1)
        counts = [*hidden_counts(shares, self.config.clock, number), torch.zeros_like(number)]
        counters = codebook, grid.codebooks, run.batch_size, run.device
        units = _counters(spans.count, *counters)
        order = fixed_order(score, grid, spans, run.noise, units) if score in FIXED_ORDERS else None
        return Stage(unknown, hidden, shares, counts, _counters(grid.num_tokens, *counters), units, order)

    def _unit_scores(
        self,
        run: Run,
        state: MaskedState,
        codebook: int,
        step: int,
        score: Tensor,
        drawing: Tensor,
        left: float,
    ) -> Tensor:
        """Scores [B, U] of the units of the draws in `state.tokens`, from scores [B, L] of single draws."""
        assert state.stage is not None
        rescorer = run.parts.get("rescorer")
        if rescorer is not None:
            run.lap("verify")
            own = run.parts.get("rescorer_condition")
            condition = run.condition if own is None else own
            score = self._rescored(score, rescorer, condition, state.tokens, run.model.mask_id, codebook)
            run.lap("rescore")
        spans = Spans(run.model.grid.num_tokens, self.config.span)
        score = spans.score(score, drawing, self.config.span_score)
        if self.config.choice_temperature:
            gumbel = run.noise.gumbel(state.stage.units, 1, CHOICE, step, score.dtype)[..., 0]
            score = score + self.config.choice_temperature * left * gumbel
        return score

    def progress(self, run: Run, state: MaskedState) -> Tensor:
        return (state.tokens != run.model.mask_id).sum((1, 2)) // run.model.grid.codebooks

    def committed(self, run: Run, state: MaskedState) -> Tensor:
        return (state.tokens != run.model.mask_id).all(-1)

    def result(self, run: Run, state: MaskedState, tokens: Tensor, trace: dict[str, Any]) -> SampleResult:
        calls = 0
        if run.parts.get("rescorer") is not None:
            calls = sum(max(count - 1, 0) for count in state.steps)
        found = MaskedTrace(
            **trace,
            entry_call=state.entry_call.cpu(),
            rescorer_calls=calls,
            total_correlation=None if state.correlation is None else state.correlation.cpu(),
        )
        if found.stopped:  # what is still hidden has the mask's id, which nothing decodes
            tokens = torch.where(tokens < run.model.vocab_size, tokens, 0)
        return SampleResult(tokens if run.model.grid.codebooks > 1 else tokens[..., 0], found)

    def _law(self, law: TokenLaw, share: float, step: int, steps: int) -> TokenLaw:
        """The law of a step at which `share` is hidden."""
        scale, temperature = law.guidance_scale, law.temperature
        past = step / max(steps - 1, 1)
        if law.guided and self.config["guidance"] != "constant":
            weight = {"falling": share, "rising": 1 - share, "ramp": past}[self.config["guidance"]]
            scale = weight * scale + (1 - weight) * self.config["least_guidance"]
        if self.config["temperature"] == "falling" and temperature:
            temperature = max(temperature * (1 - (step + 1) / steps), _LEAST_TEMPERATURE)
        if self.config["temperature"] == "root":
            temperature *= 1 - (1 - self.config["last_temperature"]) * past**0.5
        return replace(law, guidance_scale=scale, temperature=temperature)

    def _rescored(
        self, sure: Tensor, rescorer: Rescorer, condition: Any, tokens: Tensor, mask_id: int, stage: int
    ) -> Tensor:
        """Mix the scores `sure` [B, L] of the draws in `tokens` [B, L, K] with the rescorer's probabilities."""
        codes = tokens.masked_fill(tokens == mask_id, rescorer.special_id).transpose(1, 2)
        logits = rescorer.teacher_forced(codes, condition)[:, stage]  # [B, L, V]
        other = TokenLaw()(logits, False).gather(-1, codes[:, stage, :, None])[..., 0].to(sure)
        share = self.config["rescorer_share"]
        if self.config["score"] == "log_probability":
            return mixed(sure, other, share)
        return share * sure + (1 - share) * other.exp()

    def check(self, model: Any, law: TokenLaw, batch_size: int, parts: dict[str, Any]) -> None:
        check_masked_model(model, law, batch_size)
        steps, grid, span = self.config.steps, model.grid, self.config.span
        if not isinstance(steps, int) and len(steps) != grid.codebooks:
            raise ValueError(
                f"steps={tuple(steps)} are those of {len(steps)} codebooks, and the model has {grid.codebooks}; pass "
                f"{grid.codebooks} numbers, or one for all codebooks."
            )
        if span > 1 and (span > grid.num_tokens or grid.num_tokens != grid.width):
            size = f"{grid.frames} x {grid.height} x {grid.width} slots"
            raise ValueError(
                f"span={span}, but the model decodes {size}; pass "
                + (f"1 to {grid.width}." if grid.num_tokens == grid.width else "1: spans are for sequences.")
            )
        if self.config.entropy_bound is not None and grid.codebooks > 1:
            raise ValueError(
                f"entropy_bound={self.config.entropy_bound}, but the model has {grid.codebooks} codebooks; pass "
                "entropy_bound=None: the bound is for models of one."
            )
        if parts.get("given") is not None:
            _check_given(model, parts["given"], batch_size)
        if parts.get("rescorer") is not None:
            _check_rescorer(model, parts["rescorer"], self.config.score)

    def _steps(self, model: MaskedModel, given: Tensor | None) -> list[int]:
        """Return the calls of each codebook. A codebook whose tokens are all given costs none."""
        steps, codebooks = self.config.steps, model.grid.codebooks
        counts = [steps] * codebooks if isinstance(steps, int) else list(steps)
        if given is None:
            return counts
        unknown = (given.reshape(-1, codebooks) == model.mask_id).any(0).tolist()
        return [count if some else 0 for count, some in zip(counts, unknown, strict=True)]


def check_masked_model(model: Any, law: TokenLaw, batch_size: int) -> None:
    """Refuse, before any compute, a request that no sampler of masked models can decode.

    Raises:
        ValueError: a model that hides no tokens, a batch size below 1, ids beyond the vocabulary, or guidance up to a
            slot.
    """
    if not (hasattr(model, "mask_id") and hasattr(model, "prepare")):
        raise ValueError(
            f"{type(model).__name__} hides no tokens; this sampler decodes masked models, such as MagnetModel. Use "
            "AutoregressiveSampler or ColumnAutoregressiveSampler."
        )
    check_batch_size(batch_size)
    check_allowed(law, model.vocab_size)
    if law.guidance_until is not None:
        raise ValueError(
            f"guidance_until={law.guidance_until}, but masked decoding knows no order of slots; pass "
            "guidance_until=None, and guidance='falling' or 'rising' to the sampler."
        )


def _check_given(model: MaskedModel, given: Tensor, batch_size: int) -> None:
    grid = model.grid
    shapes = [(batch_size, grid.num_tokens, grid.codebooks)]
    shapes += [shapes[0][:2]] if grid.codebooks == 1 else []
    if tuple(given.shape) not in shapes or given.dtype != torch.long:
        raise ValueError(
            f"given is {given.dtype} of shape {tuple(given.shape)}; pass int64 {shapes[-1]}, with the mask id "
            f"{model.mask_id} where a token is to be decoded."
        )
    known = given[given != model.mask_id]
    if known.numel() and not 0 <= int(known.min()) <= int(known.max()) < model.vocab_size:
        raise ValueError(
            f"given holds ids from {int(known.min())} to {int(known.max())}; tokens are 0 to {model.vocab_size - 1}, "
            f"and the mask is {model.mask_id}."
        )
    if known.numel() == given.numel():
        raise ValueError("all tokens are given; leave some at the mask id to have them decoded.")


def _check_rescorer(model: MaskedModel, rescorer: Rescorer, score: str) -> None:
    if rescorer.vocab_size != model.vocab_size:
        raise ValueError(
            f"the rescorer knows {rescorer.vocab_size} codes, and the model {model.vocab_size}; pass two models of the "
            "same codec."
        )
    if rescorer.num_frames != model.grid.num_tokens:
        raise ValueError(
            f"the rescorer is made for clips of {rescorer.num_frames} frames, and the model for "
            f"{model.grid.num_tokens}; pass one for as many frames."
        )
    if score not in ("log_probability", "probability"):
        raise ValueError(
            f"score={score!r} asks for no probability of a draw, so there is nothing to rescore; pass "
            "score='log_probability' or 'probability', or no rescorer."
        )


def _at_least_one(number: Any) -> bool:
    return isinstance(number, int) and not isinstance(number, bool) and number >= 1


def _counters(count: int, stage: int, codebooks: int, batch_size: int, device: torch.device) -> Tensor:
    """Return the counter slots of a codebook's tokens or units, those of `PatternView.slots`: long [B, count]."""
    return (torch.arange(count, device=device) * codebooks + stage).expand(batch_size, -1)
