"""Next-scale sampling: VAR with one model, collaborative decoding with several.

VAR (Tian et al. 2024, section 3.2) draws all tokens of a scale at once, given the scales before it. Infinity (Han et
al. 2024, section 3) draws all bits of its tokens at once and independently. `stages` says which model draws which
scales (CoDe) and measures what that changes, `schedule` what is left out (SkipVAR, StageVAR, FastVAR).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor

from visual_spec.models.core.protocol import ScaleModel, area_of, modules_of, shape_of
from visual_spec.models.core.saved import quantised_as
from visual_spec.models.core.settings import LARGEST, OneOf, Within, register_to_config
from visual_spec.samplers.core.base import Sampler
from visual_spec.samplers.core.checks import check_returned
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.core.noise import TOKEN, CounterNoise
from visual_spec.samplers.core.state import Run
from visual_spec.samplers.core.trace import IDENTICAL, LOSSY, MEASURE, SampleResult
from visual_spec.samplers.scales.schedule import SCHEDULES, ScaleSchedule
from visual_spec.samplers.scales.stages import (
    Reference,
    ScalePlan,
    Stage,
    at_scales,
    check_alone,
    check_stages,
    drawn_stages,
    draws_guided,
    first_slots,
    of_one_model,
    planned,
    prefill,
    stage_law,
)
from visual_spec.samplers.scales.trace import ScaleResult, ScaleTrace, layer_places

ScaleCallback = Callable[[int, Tensor], object]


def mixture(log_probs: Tensor, gumbel: Tensor, ratio: float) -> Tensor:
    """The weights [B, N, V] of the codes in each smooth token. `ratio` goes from 0, first scale, to 1, last scale.

    The temperature, falling from 0.27 to 0.0135, and the sharpening by 1 + ratio are the official
    `more_smooth`'s.
    """
    temperature = 0.27 * (1 - 0.95 * ratio)
    return (((1 + ratio) * log_probs + gumbel) / temperature).softmax(-1)


@dataclass
class ScaleDecodeState:
    """A batch between two scales.

    Attributes:
        cache: the state of the drawing model.
        canvas: [B, D, h, w].
        plan: what is decided about each scale that is drawn.
        schedule: what is left out, with all its values for this tokenizer.
        reference: the first model if the sampler measures; else None.
        maps: [B, D, n, n] each, the input maps so far: all that another model needs to continue.
        parts: long [B, n * n] each, the tokens of the scales.
        forwards: so far, see `layer_places`.
        cache_bytes: of every model so far.
        round: index of the last scale.
        logprobs, model_logprobs: float32 [B, slots so far], see `core.logprobs`; None where nobody asked.
    """

    cache: Any
    canvas: Tensor
    plan: dict[int, ScalePlan]
    schedule: ScaleSchedule
    reference: Reference | None
    maps: list[Tensor] = field(default_factory=list)
    parts: list[Tensor] = field(default_factory=list)
    forwards: list[tuple[int, range, bool]] = field(default_factory=list)
    cache_bytes: list[int] = field(default_factory=list)
    round: int = -1
    logprobs: Tensor | None = None
    model_logprobs: Tensor | None = None

    @property
    def tokens(self) -> Tensor:
        """The tokens so far: long [B, slots so far]."""
        return torch.cat(self.parts, 1)

    @property
    def commit_call(self) -> Tensor:
        """The scale of each slot: long [B, slots so far]."""
        return torch.cat([torch.full_like(part, scale) for scale, part in enumerate(self.parts)], 1)

    @property
    def target_calls(self) -> Tensor:
        """The target calls so far, one a scale: long [B]."""
        return torch.full((len(self.canvas),), len(self.parts))


class ScaleWiseSampler(Sampler[Sequence[Stage], ScaleDecodeState]):
    """Draws the tokens of one scale after the other, each with its slot's own noise.

    Args:
        ramp: let guidance grow from none at the first scale to the law's scale s at the last: 1 + (s - 1) k / (K - 1)
            at scale k of K. False guides every scale alike.
        smooth: put mixtures of codes on the canvas in place of drawn codes, weighted by a Gumbel softmax that sharpens
            from scale to scale. Pictures look smoother and vary less (`more_smooth` of the official VAR, whose
            published figures do not use it). The returned tokens are the heaviest code of each mixture.
        measure: let the first model also score the scales that other models draw, and report the distance between their
            laws. Costs that model's forwards, and the memory of its cache until the end. With a schedule, the scales
            that it changes are scored too, guided and whole, and a second cache takes memory.
        schedule: what is left out at each scale: the name of a preset ("just-stop", "skipvar", "stagevar", "fastvar"),
            or values of `ScaleSchedule` by name, such as {"stop_after": 6, "guided_until": 5, "keep_share": [0.5]};
            None: nothing. A schedule that leaves something out is not lossless; one that does not changes nothing.
        scales: tokens per side of each map, coarse to fine, in place of the model's own; for models that draw any
            (FlexVAR). None: the model's own.
        num_draft_scales: scales that the transformer draws before the refiner of the pipeline takes over (CoDe); "all":
            the transformer alone; 0: the refiner alone; None: all but two, or what the refiner did not learn to draw.
        refiner_guidance_scale: guidance of the scales that the refiner draws; None: what the pipeline says.
        cache_share: part of the full cache that each model may keep (ScaleKV). The pipeline calibrates the budgets on
            ten classes, with its default law; "off": uncompressed; None: the budgets of the pipeline.
        num_drafters: of these budgets, see `visual_spec.models.next_scale.scale_cache.calibrate`. With 0 the layers
            share alike, and nothing is calibrated.
    """

    takes = ("tokenizer",)
    gives_logprobs = True
    law_names = ("ramp", "scales", "num_draft_scales")
    flat_settings: ClassVar[dict[str, Sequence[str]]] = {"schedule": ("preset", *ScaleSchedule.names())}

    @register_to_config
    def __init__(
        self,
        ramp: bool = True,
        smooth: bool = False,
        measure: bool = False,
        schedule: Annotated[str | Mapping[str, Any] | None, OneOf(tuple(SCHEDULES))] = None,
        scales: Annotated[Sequence[int] | None, Within(1, none="the model's own")] = None,
        num_draft_scales: Annotated[int | str | None, Within(0), OneOf(("all",))] = None,
        refiner_guidance_scale: Annotated[float | None, Within(0, LARGEST)] = None,
        cache_share: Annotated[float | str | None, Within(above=0, most=1), OneOf(("off",))] = None,
        num_drafters: Annotated[int | None, Within(0)] = None,
    ) -> None:
        self.schedule = ScaleSchedule.of(schedule)  # what is left out at each scale
        if num_drafters is not None and cache_share is None:
            raise ValueError(
                f"num_drafters={num_drafters} without a cache_share; pass the part of the cache that is kept, too."
            )

    @property
    def keeps(self) -> str:
        """What samples of one model follow: the model's sampling, token for token. Several models have no common law.

        With a schedule only if it leaves nothing out, whatever the number of scales.
        """
        return IDENTICAL if self.schedule.empty and not self.config["smooth"] else LOSSY

    @property
    def logprobs_law(self) -> str:
        """The heaviest code of a mixture is no draw."""
        return "target" if self.config["smooth"] else "drawn"

    @property
    def law_settings(self) -> dict[str, Any]:
        """As of `Sampler`; of `num_draft_scales`, 0: two models that share the scales have no law in common."""
        alone = self.config["num_draft_scales"] == 0
        return super().law_settings | {"num_draft_scales": 0 if alone else None}

    def law_settings_in(self, run: Run) -> dict[str, Any]:
        refined = run.model[0].refines  # a call may say so too
        ramp = self.config["ramp"] if draws_guided(run.model, run.law_given.guided) else None
        return self.law_settings | {"ramp": ramp, "num_draft_scales": 0 if refined else None}

    def __call__(
        self,
        model: ScaleModel | Sequence[Stage],
        condition: object,
        *,
        law: TokenLaw,
        generator: torch.Generator | Sequence[torch.Generator] | CounterNoise | None = None,
        batch_size: int = 1,
        callback: ScaleCallback | None = None,
        output_logprobs: bool = False,
        **parts: Any,
    ) -> ScaleResult:
        """Decode a batch.

        Args:
            model: a model for all scales, or stages, whose models share the tokenizer. Successive stages of one model
                share its cache. Pipelines make the stages from the settings of the sampler; models of stages have its
                `scales` already (`at_scales`).
            condition: what the `prefill` of every model takes, `batch_size` rows of it.
            law: how logits become the distribution a token is drawn from, unless a stage has its own. Slots count
                through all scales.
            generator: one `torch.Generator` for the batch, a list of one a sample, or None (PyTorch's default).
            callback: called after every scale with its index and the canvas [B, D, h, w] so far, which
                `tokenizer.decode_canvas` turns into progressive pictures. If it returns a canvas, the decode goes on
                from that one; if it returns `STOP`, it ends there, with the tokens of the scales so far.
            output_logprobs: as of `Sampler`.
            parts: `tokenizer`, a `ScaleTokenizer`, which turns the tokens so far into the input map of the next scale.

        Raises:
            ValueError, TypeError: the request cannot be served.
            FloatingPointError: logits that define no law.
        """
        if "tokenizer" not in parts:
            raise TypeError("ScaleWiseSampler needs tokenizer=..., which makes the input maps of the scales.")
        scales = self.config["scales"]
        parts["tokenizer"] = at_scales(parts["tokenizer"], scales)
        if not isinstance(model, Sequence):
            check_alone(self)
            model = [Stage(at_scales(model, scales), range(len(parts["tokenizer"].scales)))]
        request: dict[str, Any] = dict(law=law, generator=generator, batch_size=batch_size, callback=callback)
        result = super().__call__(list(model), condition, output_logprobs=output_logprobs, **request, **parts)
        assert isinstance(result, ScaleResult)
        return result

    # -- the loop

    def prepare(self, run: Run) -> ScaleDecodeState:
        """Decide about all scales, and draw the first one, which the prefill predicts."""
        tokenizer = run.parts["tokenizer"]
        canvas = tokenizer.begin(run.batch_size, run.device, run.cache.logits.dtype)
        schedule = self.schedule.at(len(tokenizer.scales))
        plan = planned(run, tokenizer, schedule, self.config.ramp)
        reference = None
        if self.config.measure:  # the first model, if there is anything to measure
            first = of_one_model(run.model, 0)[-1]
            start = min(first.scales.stop, schedule.first_change)
            shared = not self.schedule.leaves_out(len(tokenizer.scales))
            reference = Reference(
                first, start, canvas.new_zeros(run.batch_size), run.cache if shared else None
            )
        state = ScaleDecodeState(run.cache, canvas, plan, schedule, reference)
        state.cache_bytes.append(run.cache.cache_bytes)
        state.forwards.append((plan[0].num_layers, range(1), run.cache.guided))
        self._draw(run, state, run.cache.logits)
        return state

    def step(self, run: Run, state: ScaleDecodeState) -> None:
        """Call the model of the next scale on its input map, and draw all tokens of the scale."""
        scale = state.round + 1
        here = state.plan[scale]
        scales = range(scale, scale + 1)
        if here.entering:  # another model takes over (CoDe); its prefill reads the maps so far
            state.cache = run.cache = None  # free the previous model's cache first
            asked = run.condition, run.law_given.guided, run.batch_size, state.maps, state.schedule
            state.cache = run.cache = prefill(here.entering, *asked)
            state.cache_bytes.append(state.cache.cache_bytes)
            logits, scales = state.cache.logits, range(scale + 1)
            run.lap("prefill")
        else:
            if state.cache.guided and not here.guided:
                state.cache.drop_unconditional()
            logits = here.stage.model(state.cache, state.maps[-1], scale)  # [R, n * n, V]
            run.lap("model")
        state.forwards.append((here.num_layers, scales, state.cache.guided))
        self._draw(run, state, logits)

    def _draw(self, run: Run, state: ScaleDecodeState, logits: Tensor) -> None:
        """Draw the next scale from logits [R, n * n, V], add it to the canvas, and make the input map after it."""
        state.round += 1
        scale, tokenizer = state.round, run.parts["tokenizer"]
        here = state.plan[scale]
        slots = here.slots.expand(run.batch_size, -1)
        check_returned(logits, len(slots), state.cache.guided, slots.shape[1], here.vocab_size)
        run.law.law = here.law
        target = stage_law(logits, slots, run.law, here.stage, here.numbers)  # [B, n * n, V]
        if self.config.smooth:
            self._draw_smoothly(run, state, target, slots)
        else:
            state.parts.append(run.noise.categorical(target, slots, TOKEN))
            state.canvas = tokenizer.accumulate(state.canvas, scale, state.parts[-1])
        if run.keeps_scores:
            from visual_spec.samplers.core.logprobs import own_law  # where they are asked for

            laws = {"logprobs": target, "model_logprobs": own_law(logits[: len(slots)], slots, False)}
            for name, law in laws.items():
                drawn = law.gather(-1, state.parts[-1][..., None])[..., 0].float()
                before = [] if getattr(state, name) is None else [getattr(state, name)]
                setattr(state, name, torch.cat([*before, drawn], 1))
        run.lap("verify")
        if state.reference is not None and scale >= state.reference.first:
            state.reference.measure(run, state.maps, here, scale, target)
            run.lap(MEASURE)
        if scale + 1 < len(state.plan):
            state.maps.append(tokenizer.next_map(state.canvas, scale + 1))

    def _draw_smoothly(self, run: Run, state: ScaleDecodeState, target: Tensor, slots: Tensor) -> None:
        """Put mixtures of codes on the canvas."""
        tokenizer, scale = run.parts["tokenizer"], state.round
        gumbel = run.noise.gumbel(slots, target.shape[-1], TOKEN, dtype=target.dtype)
        shares, side = mixture(target, gumbel, state.plan[scale].ratio), tokenizer.scales[scale]
        state.parts.append(shares.argmax(-1))
        codes = shares.to(tokenizer.codebook.dtype) @ tokenizer.codebook
        codes = codes.reshape(run.batch_size, area_of(side), -1).mT  # [B, D, n * n]
        state.canvas = tokenizer.accumulate_codes(state.canvas, scale, codes.unflatten(2, shape_of(side)))

    # -- before and after

    def check(self, model: Sequence[Stage], law: TokenLaw, batch_size: int, parts: dict[str, Any]) -> None:
        check_stages(model, parts["tokenizer"], law)
        drawn_stages(self, model)

    def plan(self, run: Run) -> None:
        run.model = drawn_stages(self, run.model)  # of the scales that the schedule draws
        run.num_tokens = first_slots(run.parts["tokenizer"])[run.model[-1].scales.stop]
        run.quantised = quantised_as(*(part for stage in run.model for part in modules_of(stage.model)))

    def planned_calls(self, model: Sequence[Stage], parts: dict[str, Any]) -> int:
        return model[-1].scales.stop

    def prefill(self, run: Run) -> Any:
        count = len(run.parts["tokenizer"].scales)
        shared = self.config.measure and not self.schedule.leaves_out(count)
        # A measuring model keeps its cache to the end, unless it measures with another one.
        served = run.model if shared else of_one_model(run.model, 0)
        return prefill(served, run.condition, run.guided, run.batch_size, [], self.schedule.at(count))

    def progress(self, run: Run, state: ScaleDecodeState) -> Tensor:
        return state.canvas

    def committed(self, run: Run, state: ScaleDecodeState) -> Tensor:
        return torch.ones_like(state.tokens, dtype=torch.bool)  # all that there are

    def answered(self, run: Run, state: ScaleDecodeState, answer: object) -> None:
        if isinstance(answer, Tensor):
            state.canvas = answer
            if state.round + 1 < len(state.plan):
                state.maps[-1] = run.parts["tokenizer"].next_map(answer, state.round + 1)

    def measure(
        self, run: Run, state: ScaleDecodeState, tokens: Tensor
    ) -> tuple[float | None, Tensor | None]:
        reference = state.reference
        if reference is None or reference.cache is None or reference.first > state.round:
            return None, None
        slots = sum(len(state.plan[scale].slots) for scale in range(reference.first, state.round + 1))
        return float(reference.moved.mean()) / slots, reference.moved.cpu()

    def result(
        self, run: Run, state: ScaleDecodeState, tokens: Tensor, trace: dict[str, Any]
    ) -> SampleResult:
        runs = [list(stages) for _, stages in groupby(run.model, key=lambda stage: id(stage.model))]
        # A model with a compressed cache draws from a different law.
        exact = len(runs) == 1 and getattr(run.model[0].model, "lossless", True)
        whole = not self.schedule.leaves_out(len(run.parts["tokenizer"].scales))
        trace["keeps"] = IDENTICAL if exact and whole and not self.config["smooth"] else LOSSY
        drawn = range(state.round + 1)
        calls = tuple(sum(scale in drawn for stage in stages for scale in stage.scales) for stages in runs)
        whole_trace = ScaleTrace(
            **trace,
            model_calls=calls,
            cache_bytes=tuple(state.cache_bytes),
            layer_places=layer_places(state.forwards, run.parts["tokenizer"].scales, state.schedule.pruning),
        )
        return ScaleResult(tokens, whole_trace, state.canvas)
