"""Masked parallel decoding: MaskGIT, MAGNeT, and other methods made of the same parts.

All tokens are hidden at first. Every step is one forward of a `MaskedModel`. It draws all hidden tokens, keeps some of
the draws for good, and hides the others again; the last step keeps all. Codebooks are decoded one after the other. The
decoder defines its own output law: there is no autoregressive law to compare it with.

* Chang et al., "MaskGIT: masked generative image transformer", CVPR 2022, section 3.2.
* Ziv et al., "Masked audio generation using a single non-autoregressive transformer" (MAGNeT), ICLR 2024, section 3:
  spans, stages, falling guidance; section 3.4: rescoring with another model, which the released code lacks.
  `masked_hybrid` has the paper's other addition, clips with an autoregressive beginning. `frames` decodes videos frame
  by frame.
* Besnier et al., "Halton scheduler for masked generative image transformer", ICLR 2025.
* Ben-Hamu et al., "Accelerated sampling from masked diffusion models via entropy bounded unmasking", 2505.24857.
* `core.recap`: calls that go on from what an earlier one computed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any

import torch
from torch import Tensor

from visual_spec.models.core.configuration import register_to_config
from visual_spec.models.core.masked_protocol import MaskedModel, Rescorer
from visual_spec.models.core.settings import CALLS, COUNT, SHARE, Graph, OneOf, Within
from visual_spec.samplers.core.base import Run, Sampler
from visual_spec.samplers.core.checks import check_guided, check_returned
from visual_spec.samplers.core.graph import wants_graph
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
from visual_spec.samplers.core.recap import (
    KINDS as REUSES,
)
from visual_spec.samplers.core.recap import (
    full_calls,
    group_width,
    last_of_group,
    places_of,
    scattered,
)
from visual_spec.samplers.core.trace import MEASURE, DivergenceMeter, SampleResult
from visual_spec.samplers.masked.checks import (
    check_given,
    check_masked_model,
    check_rescorer,
    check_reuse,
)
from visual_spec.samplers.masked.graph import RecordedCalls
from visual_spec.samplers.masked.state import CodebookStage, MaskedRunState, MaskedTrace

# Falling temperatures end at this value, not at 0 (MAGNeT's code).
_LEAST_TEMPERATURE = 0.01
# That of a codebook which is drawn in one step, where temperatures fall before the steps (MaskGCT's code).
_SINGLE_TEMPERATURE = 0.2


# Settings that decoding frame by frame has as well.
Schedule = Annotated[str, OneOf(tuple(SCHEDULES))]
Clock = Annotated[str, OneOf(tuple(CLOCKS))]
Score = Annotated[str, OneOf(tuple(SCORES))]
NoiseScale = Annotated[float, Within(0)]
Falls = Annotated[str, OneOf(("after", "before", "product", "full"))]
Cooling = Annotated[str, OneOf(("constant", "falling", "root", "sharpening"))]
LastTemperature = Annotated[float, SHARE]
GuidanceCourse = Annotated[str, OneOf(("constant", "falling", "rising", "ramp"))]
LeastGuidance = Annotated[float, Within(1)]
EntropyBound = Annotated[float | None, Within(0)]
ScoreTemperature = Annotated[float | None, Within(above=0)]


class MaskedSampler(Sampler):
    """Draws all hidden tokens at every step, and keeps those of highest score. `masked_presets` has published settings.

    Args:
        steps: forwards of each codebook: one number for all of them, or one for each.
        schedule: of the hidden share, one of `masking.SCHEDULES`.
        clock: "maskgit" ends the schedule after the last step, "magnet" at it; see `masking.CLOCKS`.
        score: what is kept first, one of `masking.SCORES`.
        choice_temperature: scale of the Gumbel noise on the score, times the share of steps that are left. 0: no noise.
        falls: the share of steps by which noise and temperature fall is what is left "after" a step (MaskGIT, MAGNeT)
            or "before" it (MaskGCT), the "product" of what is left after it and all steps before (Lumos-1's code), or
            the share of "full" calls that is left after it (ReCAP's code).
        span: slots that are kept or hidden together. More than 1 for sequences only.
        span_score: "max" is the score of a span's best token, "sum" the sum of its scores (with log-probabilities: the
            probability of the whole span).
        temperature: "constant" uses the law's; "falling" scales it by the share of steps that are left, down to 0.01
            (MAGNeT), or, if it falls "before" the steps, to the likeliest tokens in the last of them, but 0.2 in a
            single one (MaskGCT); "root" lets it fall to the share `last_temperature` of itself, as the root of the
            steps (ReCAP), and "sharpening" so that its inverse rises evenly (the Halton sampler's code: to 1 / 1.2).
        last_temperature: see `temperature`.
        guidance: "constant" uses the law's scale; "falling" goes from it to `least_guidance` as the hidden share falls
            (MAGNeT); "rising" goes the other way (masked image models); "ramp" rises evenly from step to step.
        least_guidance: at least 1, which means no guidance.
        entropy_bound: None keeps what the schedule says. A number lets each step keep as many of the surest tokens as
            this bound on their entropy allows (`masking.beyond_entropy_bound`), until all are kept or the last of
            `steps`, which keeps the rest. What changes from step to step follows `schedule` as without a bound. For
            models of one codebook.
        filtered_score: score draws by the law they were drawn from. False: by that law before top-k and top-p.
        score_temperature: score draws by the law of this temperature, above 0. None: by that of the draw.
        rescorer_share: weight of the masked model in the probability of a draw, if another model rescores it.
        greedy: take the likeliest tokens, and score them by the law with its temperature, which decides about their
            order where it falls (MAGNeT's code with use_sampling=False). A law of temperature 0 takes the same tokens,
            and scores them at temperature 1.
        reuse: calls behind each full one that reuse what it computed (`core.recap`); 0: all calls are full.
        reuse_from: share of the calls of a codebook that are full before any reuse.
        reuse_by: "recap" (keys and values: calls of the tokens that they may keep) or "shortcut" (features: a small
            network in place of the model).
        warmup: steps at the beginning of each codebook with twice the temperature (the Halton sampler's code).
        second_draw: score another, independent draw from the law that scores, and keep the token all the same (ReCAP's
            code).
        graph: replay the model's calls as CUDA graphs (`masked.graph`). "auto": wherever possible. Not with the
            shortcut.
        measure: estimate, by one more call of the model a step, what drawing a group independently moves; see
            `_measured`. The trace reports it; its time does not count as decoding.

    A call takes
        given: long [B, L, K] (or [B, L] for one codebook), known tokens; the mask id marks tokens to decode. None: no
            token is known.
        rescorer: an autoregressive model of the same codes; draws are then ranked by a mixture of both models'
            probabilities (MAGNeT, section 3.4). It costs one forward a step, except in the last step of each codebook.
            Hidden codes, and codes outside a clip, are its special token.
        rescorer_condition: condition of the rescorer; None: the model's.
        shortcut: the network that stands in for the model where `reuse_by="shortcut"`, a `FeatureShortcut`.

    and returns tokens long [B, L], or [B, L, K] for several codebooks, with a `MaskedTrace`. The callback gets the
    number of kept or given tokens of each sample, divided by the number of codebooks and rounded down.

    Raises:
        ValueError: a name is unknown, or a number is out of its range.
    """

    takes = ("given", "rescorer", "rescorer_condition", "shortcut")
    promise = "lossy"
    counts_prefill = False
    records_steps = False

    @register_to_config
    def __init__(
        self,
        steps: Annotated[int | Sequence[int], CALLS] = 8,
        schedule: Schedule = "cosine",
        clock: Clock = "maskgit",
        score: Score = "log_probability",
        choice_temperature: NoiseScale = 0.0,
        span: Annotated[int, COUNT] = 1,
        span_score: Annotated[str, OneOf(tuple(SPAN_SCORES))] = "max",
        temperature: Cooling = "constant",
        guidance: GuidanceCourse = "constant",
        least_guidance: LeastGuidance = 1.0,
        filtered_score: bool = False,
        rescorer_share: Annotated[float, SHARE] = 0.5,
        last_temperature: LastTemperature = 0.7,
        entropy_bound: EntropyBound = None,
        greedy: bool = False,
        measure: bool = False,
        reuse: Annotated[int, Within(0)] = 0,
        reuse_from: Annotated[float, SHARE] = 0.5,
        reuse_by: Annotated[str, OneOf(tuple(REUSES))] = "recap",
        falls: Falls = "after",
        score_temperature: ScoreTemperature = None,
        graph: Graph = False,
        warmup: Annotated[int, Within(0)] = 0,
        second_draw: bool = False,
    ) -> None:
        if graph is True and reuse and reuse_by == "shortcut":
            raise ValueError("graph=True with reuse_by='shortcut', whose features move; pass graph=False.")
        if reuse and entropy_bound is not None:
            raise ValueError(
                f"reuse={reuse} with entropy_bound={entropy_bound}: which tokens later calls keep must be known before "
                "they are drawn; pass one of the two."
            )
        if temperature == "sharpening" and last_temperature == 0:
            raise ValueError("last_temperature=0.0 with temperature='sharpening'; pass a share above 0.")
        if second_draw and score not in ("log_probability", "probability"):
            raise ValueError(
                f"second_draw=True with score={score!r}, which looks at no draw; pass second_draw=False."
            )
        if score_temperature is not None:
            TokenLaw(temperature=score_temperature)  # refuses what no law can have
        if choice_temperature and score in FIXED_ORDERS:
            raise ValueError(
                f"choice_temperature={choice_temperature} with score={score!r}, an order that no noise should change; "
                "pass choice_temperature=0."
            )

    def prefill(
        self, model: MaskedModel, condition: Any, law: TokenLaw, batch_size: int, parts: dict[str, Any]
    ) -> Any:
        return check_guided(model.prepare(condition, batch_size=batch_size, guided=law.guided), law.guided)

    def num_slots(self, model: MaskedModel, parts: dict[str, Any]) -> int:
        return model.grid.num_tokens * model.grid.codebooks

    def num_calls(self, run: Run) -> int | None:
        if self.config.entropy_bound is not None:
            return None
        return sum(self._steps(run.model, run.parts.get("given")))

    def prepare(self, run: Run) -> MaskedRunState:
        """Hide all tokens that are not given."""
        grid, given = run.model.grid, run.parts.get("given")
        shape = (run.batch_size, grid.num_tokens, grid.codebooks)
        tokens = torch.full(shape, run.model.mask_id, device=run.device)
        if given is not None:
            tokens.copy_(given.reshape(shape))
        steps = self._steps(run.model, given)
        by_shortcut = self.config.reuse and self.config.reuse_by == "shortcut"
        recording = wants_graph(self.config.graph, run.model) and not by_shortcut
        return MaskedRunState(
            cache=run.cache,
            calls=RecordedCalls(run.model, run.cache) if recording else run.model,
            tokens=tokens,
            entry_call=torch.full_like(tokens, -1),
            target_calls=torch.zeros_like(tokens[:, 0, 0]),
            steps=steps,
            plan=[(stage, step) for stage, count in enumerate(steps) for step in range(count)],
            meter=DivergenceMeter(run.batch_size, run.device) if self.config.measure else None,
            correlation=torch.zeros(run.batch_size, device=run.device) if self.config.measure else None,
        )

    def step(self, run: Run, state: MaskedRunState) -> None:
        """Draw all hidden tokens of a codebook, keep those of highest score, and hide the others again."""
        state.round += 1
        # Under an entropy bound the end is noticed one call late on a GPU; such a call finds nothing hidden.
        codebook, step = state.plan[min(state.round, len(state.plan) - 1)]
        stage = state.stage = self._begin_stage(run, state, codebook) if step == 0 else state.stage
        assert stage is not None
        last = step + 1 == state.steps[codebook]
        run.law.law = self._law(run.law_given, stage.shares[step], step, state.steps[codebook])
        if hasattr(run.model, "set_time"):
            run.model.set_time(state.cache, step / state.steps[codebook])
        logits = self._logits(run, state, stage, codebook, step)  # [R, L, V], of a local call [R, n, V]
        run.lap("model")
        if not run.law.law.guided:
            logits = logits[: run.batch_size]
        spans = Spans(run.model.grid.num_tokens, self.config.span)
        drawing = stage.unknown & spans.spread(stage.hidden)  # [B, L]
        local = stage.places if self._is_local(stage, step) else None
        tokens = state.tokens[..., codebook]  # a view
        score, entropy, drawing = self._draw(run, stage, step, logits, tokens, drawing, last)
        bound = None if last else self.config.entropy_bound
        if score is not None:
            score = self._unit_scores(run, state, codebook, step, score, drawing)
        elif stage.order is not None:
            score = stage.order
        else:
            score = stage.hidden.float() if local is None or stage.score is None else stage.score
        self._choose_group(run, stage, score, step)
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
        stage.hidden, stage.newest = stays, kept
        if state.meter is not None:
            run.lap("verify")
            if local is not None:  # logits of other slots are not read
                nothing = logits.new_zeros(len(logits), kept.shape[1], logits.shape[2])
                logits = scattered(logits, local.repeat(len(logits) // len(local), 1), nothing)
            self._measured(run, state, codebook, step, logits, kept)
            run.lap(MEASURE)
        run.lap("verify")

    def _draw(
        self,
        run: Run,
        stage: CodebookStage,
        step: int,
        logits: Tensor,
        tokens: Tensor,
        drawing: Tensor,
        last: bool,
    ) -> tuple[Tensor | None, Tensor | None, Tensor]:
        """Draw the tokens of the slots `drawing [B, L]` in place, of a local call those of its group only.

        Returns:
            The scores and the entropies [B, L] of the draws, where they are asked for, and the slots that were drawn.
        """
        entries, checked = stage.entries, drawing
        local = stage.places if self._is_local(stage, step) else None
        if local is not None:
            inside = local < drawing.shape[1]
            at = local.clamp(max=drawing.shape[1] - 1)
            entries, checked = entries.gather(1, at), drawing.gather(1, at) & inside
            drawing = scattered(checked, local, torch.zeros_like(drawing))
        drawn, score, entropy = draw_and_score(
            run.law,
            run.noise,
            logits,
            entries,
            # The logits of slots without a draw are never used, so they are marked as past the grid and not checked.
            torch.where(checked, entries, run.num_tokens),
            step,
            # The last step keeps all draws, whatever their score, and a local one keeps its group in a known order.
            score=self.config.score if stage.order is None and not last and local is None else None,
            filtered=self.config.filtered_score,
            score_temperature=self.config.score_temperature,
            entropies=self.config.entropy_bound is not None and not last,
            greedy=self.config.greedy,
            second=self.config.second_draw,
        )
        if local is not None:
            drawn = scattered(drawn, local, tokens)
        tokens.copy_(torch.where(drawing, drawn, tokens))
        return score, entropy, drawing

    def _is_local(self, stage: CodebookStage, step: int) -> bool:
        """Whether a step computes the slots of its group only."""
        return not stage.full[step] and self.config.reuse_by == "recap"

    def _logits(
        self, run: Run, state: MaskedRunState, stage: CodebookStage, codebook: int, step: int
    ) -> Tensor:
        """Logits `[R, L, V]` of a call, or `[R, n, V]` of the slots `stage.places` of a local one."""
        cache, tokens, length = state.cache, state.tokens, run.model.grid.num_tokens
        if not stage.full[step]:
            state.reused_calls += 1
            if not self._is_local(stage, step):
                return self._by_shortcut(run, state, stage, codebook, step)
            assert stage.places is not None
            state.whole_calls += min(stage.places.shape[1] / length, 1.0)
            return state.calls(cache, tokens, codebook, places=stage.places)
        state.whole_calls += 1
        last = last_of_group(stage.full, step)
        if last == step:
            return state.calls(cache, tokens, codebook)
        return state.calls(cache, tokens, codebook, keep=stage.room if self.config.reuse_by == "recap" else 0)

    def _by_shortcut(
        self, run: Run, state: MaskedRunState, stage: CodebookStage, codebook: int, step: int
    ) -> Tensor:
        """Logits `[R, L, V]` of the features that the shortcut makes of those of the call before."""
        assert stage.newest is not None
        cache, tokens = state.cache, state.tokens[..., codebook]
        repeats = 2 if cache.guided else 1
        shown, newest = tokens.repeat(repeats, 1), stage.newest.repeat(repeats, 1)
        share = (stage.hidden.sum(1) / stage.hidden.shape[1]).repeat(repeats)
        shortcut = run.parts["shortcut"]
        cache.features = shortcut(cache.features, shown, newest, share)
        return run.model.scores(cache, cache.features, codebook)

    def _choose_group(self, run: Run, stage: CodebookStage, score: Tensor, step: int) -> None:
        """After a full call: the tokens that the calls which reuse it will keep, and their order."""
        last = last_of_group(stage.full, step)
        if last == step or not stage.full[step] or self.config.reuse_by != "recap":
            return
        length = run.model.grid.num_tokens
        group = stage.hidden & ~least_sure(score, stage.hidden, stage.counts[last + 1])
        group = stage.unknown & Spans(length, self.config.span).spread(group)
        stage.score, stage.places = (
            score,
            places_of(group, self._group_width(stage.shares, length, step, last)),
        )

    def _measured(
        self, run: Run, state: MaskedRunState, codebook: int, step: int, logits: Tensor, kept: Tensor
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
        chained = state.calls(state.cache, tested, codebook)
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

    def _begin_stage(self, run: Run, state: MaskedRunState, codebook: int) -> CodebookStage:
        grid, score = run.model.grid, self.config.score
        spans = Spans(grid.num_tokens, self.config.span)
        unknown = state.tokens[..., codebook] == run.model.mask_id
        hidden = spans.any(unknown)
        shares = hidden_shares(self.config.schedule, self.config.clock, state.steps[codebook])
        number = hidden.sum(1)
        counts = [*hidden_counts(shares, self.config.clock, number), torch.zeros_like(number)]
        counters = codebook, grid.codebooks, run.batch_size, run.device
        units = state.first + _counters(spans.count, *counters)
        order = fixed_order(score, grid, spans, run.noise, units) if score in FIXED_ORDERS else None
        entries = state.first + _counters(grid.num_tokens, *counters)
        full = full_calls(state.steps[codebook], self.config.reuse, self.config.reuse_from)
        groups = [(step, last_of_group(full, step)) for step in range(len(full)) if full[step]]
        widths = [
            self._group_width(shares, grid.num_tokens, *group) for group in groups if group[0] < group[1]
        ]
        return CodebookStage(
            unknown, hidden, shares, counts, entries, units, order, full, room=max(widths, default=0)
        )

    def _group_width(self, shares: Sequence[float], length: int, first: int, last: int) -> int:
        """Places of the calls of the group that steps `first` to `last` keep."""
        units = Spans(length, self.config.span).count
        return min(group_width(shares, units, self.config.span, first, last), length)

    def _unit_scores(
        self,
        run: Run,
        state: MaskedRunState,
        codebook: int,
        step: int,
        score: Tensor,
        drawing: Tensor,
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
            left = self._left(step, state.steps[codebook])
            score = score + self.config.choice_temperature * left * gumbel
        return score

    def progress(self, run: Run, state: MaskedRunState) -> Tensor:
        return (state.tokens != run.model.mask_id).sum((1, 2)) // run.model.grid.codebooks

    def committed(self, run: Run, state: MaskedRunState) -> Tensor:
        return (state.tokens != run.model.mask_id).all(-1)

    def result(self, run: Run, state: MaskedRunState, tokens: Tensor, trace: dict[str, Any]) -> SampleResult:
        calls = 0
        if run.parts.get("rescorer") is not None:
            calls = sum(max(count - 1, 0) for count in state.steps)
        found = MaskedTrace(
            **trace,
            entry_call=state.entry_call.cpu(),
            rescorer_calls=calls,
            reused_calls=state.reused_calls,
            whole_calls=state.whole_calls,
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
            temperature = max(temperature * self._left(step, steps), _LEAST_TEMPERATURE)
            if self.config["falls"] == "before" and step + 1 == steps:
                temperature = 0.0 if step else _SINGLE_TEMPERATURE
        if self.config["temperature"] == "root":
            temperature *= 1 - (1 - self.config["last_temperature"]) * past**0.5
        if self.config["temperature"] == "sharpening":
            temperature /= 1 + (1 / self.config["last_temperature"] - 1) * past
        if step < self.config["warmup"]:
            temperature *= 2
        return replace(law, guidance_scale=scale, temperature=temperature)

    def _left(self, step: int, steps: int) -> float:
        """The share of the steps that is left, by which noise and temperature fall."""
        falls = self.config["falls"]
        if falls == "product":
            return math.prod(1 - (earlier + 1) / steps for earlier in range(step + 1))
        if falls == "full":
            full = full_calls(steps, self.config["reuse"], self.config["reuse_from"])
            return 1 - sum(full[: step + 1]) / sum(full)
        return 1 - (step + (falls == "after")) / steps

    def _rescored(
        self, sure: Tensor, rescorer: Rescorer, condition: Any, tokens: Tensor, mask_id: int, stage: int
    ) -> Tensor:
        """Mix the scores `sure` [B, L] of the draws in `tokens` [B, L, K] with the rescorer's probabilities."""
        codes = tokens.masked_fill(tokens == mask_id, rescorer.special_id).transpose(1, 2)
        logits = rescorer.teacher_forced(codes, condition)  # [B, K, L, V]
        check_returned(logits, len(codes), False, *codes.shape[1:], rescorer.vocab_size, who="the rescorer")
        logits = logits[:, stage]
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
        check_reuse(model, self.config, parts)
        wants_graph(self.config.graph, model)  # refuses what cannot be recorded
        if parts.get("given") is not None:
            check_given(model, parts["given"], batch_size)
        if parts.get("rescorer") is not None:
            if self.config.second_draw:
                raise ValueError(
                    "second_draw=True with a rescorer, which ranks the draws themselves; leave one out."
                )
            check_rescorer(model, parts["rescorer"], self.config.score)

    def _steps(self, model: MaskedModel, given: Tensor | None) -> list[int]:
        """Return the calls of each codebook. A codebook whose tokens are all given costs none."""
        steps, codebooks = self.config.steps, model.grid.codebooks
        counts = [steps] * codebooks if isinstance(steps, int) else list(steps)
        if given is None:
            return counts
        unknown = (given.reshape(-1, codebooks) == model.mask_id).any(0).tolist()
        return [count if some else 0 for count, some in zip(counts, unknown, strict=True)]


def _counters(count: int, stage: int, codebooks: int, batch_size: int, device: torch.device) -> Tensor:
    """Return the counter slots of a codebook's tokens or units, those of `ColumnView.slots`: long [B, count]."""
    return (torch.arange(count, device=device) * codebooks + stage).expand(batch_size, -1)
