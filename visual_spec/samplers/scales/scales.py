"""Next-scale sampling: VAR with one model, collaborative decoding with several.

VAR (Tian et al. 2024, section 3.2) draws all tokens of a scale at once, given the scales before it. Infinity (Han et
al. 2024, section 3) draws all bits of its tokens at once and independently. In CoDe (Chen et al. 2025, section 3.2) a
large model draws the small scales, which decide what the picture shows, and a small model draws the large scales, which
cost most. The small model starts from the input maps so far, by one prefill that builds its own cache.

A schedule (`scales/schedule.py`) leaves out scales, guidance or places of the large maps: SkipVAR, StageVAR and
FastVAR, as far as they are schedules.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby, takewhile
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor

from visual_spec.models.core.configuration import register_to_config
from visual_spec.models.core.protocol import ScaleModel, ScaleTokenizer, area_of, shape_of
from visual_spec.models.core.settings import OneOf, Within, whole
from visual_spec.samplers.core.base import Run, Sampler
from visual_spec.samplers.core.checks import (
    CheckedLaw,
    check_allowed,
    check_batch_size,
    check_guided,
    check_returned,
)
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.core.noise import TOKEN
from visual_spec.samplers.core.trace import MEASURE, DecodeTrace, SampleResult, Stopwatch
from visual_spec.samplers.scales.schedule import SCHEDULES, ScaleSchedule

ScaleCallback = Callable[[int, Tensor], Any]

# The numbers of the published figures. The official `cfg=1.5` is what the ramp adds to 1 at the last scale.
VAR_LAW = TokenLaw(guidance_scale=2.5, top_k=900, top_p=0.96)
CODE_LAW = TokenLaw(guidance_scale=2.5, top_k=600, top_p=0.96)
CODE_DRAFT_SCALES = (6, 7, 8, 9)
CODE_WARM_SCALES, CODE_WARM_TEMPERATURE = 7, 1.1  # the first scales, see `Stage.late_temperature`


@dataclass(frozen=True)
class Stage:
    """Consecutive scales that one model draws.

    Args:
        model: the model.
        scales: the scales, `range(first, stop)`.
        law: the law of these scales; None is the law of the call.
        late_temperature: divides the log-probabilities after the law's filters; the law's own temperature applies
            before them. The published CoDe samples this way.

    Raises:
        ValueError: the range is empty or has steps, or the temperature is not above 0.
    """

    model: ScaleModel
    scales: range
    law: TokenLaw | None = None
    late_temperature: float = 1.0

    def __post_init__(self) -> None:
        scales = self.scales
        if not isinstance(scales, range) or scales.step != 1 or not scales or scales.start < 0:
            raise ValueError(f"scales={scales!r}; pass range(first, stop) of at least one scale.")
        if not math.isfinite(self.late_temperature) or self.late_temperature <= 0:
            raise ValueError(f"late_temperature={self.late_temperature}; pass a finite number above 0.")


def code_stages(
    large: ScaleModel,
    small: ScaleModel,
    num_draft_scales: int = 8,
    *,
    law: TokenLaw | None = None,
    small_law: TokenLaw | None = None,
) -> list[Stage]:
    """Collaborative decoding: `large` draws the first scales, `small` the rest.

    Args:
        num_draft_scales: N of CoDe; `CODE_DRAFT_SCALES` lists the published ones for ten scales.
        law, small_law: the law of each model; None is the law of the call.

    Raises:
        ValueError: N leaves one of the two models without scales.
    """
    count = _check_split(large, num_draft_scales)
    return [
        Stage(large, range(num_draft_scales), law),
        Stage(small, range(num_draft_scales, count), small_law),
    ]


def _check_split(large: ScaleModel, num_draft_scales: int) -> int:
    count = len(large.scales)
    note = f": each of the two models draws at least one of the {count} scales"
    whole("num_draft_scales", num_draft_scales, Within(1, count - 1), note)
    return count


@dataclass
class ScaleTrace(DecodeTrace):
    """A `DecodeTrace` of a next-scale decode.

    `target_calls` counts the forwards of all models, one a scale; a prefill yields the first scale of its model.
    `commit_call` is the scale of each slot. If the sampler measures, `divergence` and `moved_mass` are the total
    variation distance between the law that a token was drawn from and the first model's law, under the same settings
    and the first model's guidance. `divergence` is the mean over the slots after the first model's stages. `moved_mass`
    is their sum; its mean over samples bounds the distance between the laws of whole pictures.

    With a schedule that leaves something out, the mean and the sum are over the slots from the first scale on that it
    changes: guided and whole there. Scales that are not drawn have no law, and are in no figure.

    Attributes:
        model_calls: forwards of each model, in the order of the schedule, without those that only measure.
        layer_places: places that went through a layer, summed over layers, forwards and rows, of one picture and of
            each model, without forwards that only measure. A model that does not tell `num_layers` counts as one layer.
        cache_bytes: size of each model's key and value cache. Each is freed before the next is allocated, except the
            first model's if the sampler measures.
    """

    model_calls: tuple[int, ...] = ()
    cache_bytes: tuple[int, ...] = ()
    layer_places: tuple[int, ...] = ()


@dataclass
class ScaleResult(SampleResult):
    """A `SampleResult` with the finished canvas [B, D, h, w], which `ScaleTokenizer.decode_canvas` turns into pictures.
    With `smooth` the tokens alone do not determine the pictures."""

    trace: ScaleTrace
    canvas: Tensor


def draws_guided(stages: Sequence[Stage], guided: bool) -> bool:
    """Return whether a decode of these stages has unconditional rows; `guided` is that of stages without a law."""
    return any(guided if stage.law is None else stage.law.guided for stage in stages)


def law_at_scale(law: TokenLaw, ratio: float) -> TokenLaw:
    """Return the law with guidance at `ratio` of the way from none, 0, to the law's own scale, 1."""
    return replace(law, guidance_scale=1 + (law.guidance_scale - 1) * ratio) if law.guided else law


def mixture(log_probs: Tensor, gumbel: Tensor, ratio: float) -> Tensor:
    """The weights [B, N, V] of the codes in each smooth token. `ratio` goes from 0, first scale, to 1, last scale.

    The temperature, falling from 0.27 to 0.0135, and the sharpening by 1 + ratio are those of the official
    `more_smooth`.
    """
    temperature = 0.27 * (1 - 0.95 * ratio)
    return (((1 + ratio) * log_probs + gumbel) / temperature).softmax(-1)


@dataclass
class ScaleDecodeState:
    """A batch between two scales.

    Attributes:
        cache: the state of the drawing model.
        canvas: [B, D, h, w].
        maps: [B, D, n, n] each, the input maps so far: all that another model needs to continue.
        parts: long [B, n * n] each, the tokens of the scales.
        reference: the first model's state if the sampler measures; else None. With a schedule that leaves something
            out it has its own prefill, at the first scale that is changed.
        moved: float [B], total variation summed over the measured slots.
        cache_bytes: of every model so far.
        layer_places: of every model so far, see `ScaleTrace`.
        round: index of the last scale.
    """

    cache: Any
    canvas: Tensor
    maps: list[Tensor]
    parts: list[Tensor]
    reference: Any
    moved: Tensor
    cache_bytes: list[int]
    layer_places: list[int]
    round: int = -1

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


class ScaleWiseSampler(Sampler):
    """Draws the tokens of one scale after the other, each with its slot's own noise.

    Args:
        ramp: let guidance grow from none at the first scale to the law's scale s at the last: 1 + (s - 1) k / (K - 1)
            at scale k of K. False guides every scale alike.
        smooth: put mixtures of codes on the canvas in place of drawn codes, weighted by a Gumbel softmax that sharpens
            from scale to scale. Pictures look smoother and vary less (`more_smooth` of the official VAR, whose
            published figures do not use it). The returned tokens are the heaviest code of each mixture.
        measure: let the first model also score the scales that other models draw, and report the distance between their
            laws. Costs that model's forwards, and the memory of its cache until the end. With a schedule, the scales
            that it changes are scored too, guided and whole, and the memory is that of a second cache.
        schedule: what is left out at each scale: the name of a preset ("just-stop", "skipvar", "stagevar", "fastvar"),
            or values of `ScaleSchedule` by name, such as {"stop_after": 6, "guided_until": 5, "keep_share": [0.5]};
            None: nothing. A schedule that leaves something out is not lossless; one that does not changes nothing.

    Raises:
        ValueError: a flag is neither True nor False, or `ScaleSchedule` refuses a value.
    """

    takes = ("tokenizer",)
    flat_settings: ClassVar[dict[str, Sequence[str]]] = {"schedule": ("preset", *ScaleSchedule.names())}

    @register_to_config
    def __init__(
        self,
        ramp: bool = True,
        smooth: bool = False,
        measure: bool = False,
        schedule: Annotated[str | Mapping[str, Any] | None, OneOf(tuple(SCHEDULES))] = None,
    ) -> None:
        ScaleSchedule.of(schedule)

    @property
    def schedule(self) -> ScaleSchedule:
        """What is left out at each scale."""
        return ScaleSchedule.of(self.config["schedule"])

    @property
    def lossless(self) -> bool:
        """Whether samples of one model follow its law. Several models have no common law; see the trace.

        A schedule counts as leaving something out here unless it does not for any number of scales.
        """
        return not self.config["smooth"] and self.schedule.empty

    @property
    def identical(self) -> bool:
        """As `lossless`: for one model, this sampler is the model's autoregressive sampling."""
        return self.lossless

    def __call__(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        model: ScaleModel | Sequence[Stage],
        tokenizer: ScaleTokenizer,
        condition: Any,
        *,
        law: TokenLaw,
        generator: torch.Generator | Sequence[torch.Generator] | None = None,
        batch_size: int = 1,
        callback: ScaleCallback | None = None,
    ) -> ScaleResult:
        """Decode a batch.

        Args:
            model: a model for all scales, or a schedule of stages, whose models share the tokenizer. Successive stages
                of one model share its cache.
            tokenizer: turns the tokens so far into the input map of the next scale.
            condition: what the `prefill` of every model takes, `batch_size` rows of it.
            law: how logits become the distribution a token is drawn from, unless a stage has its own. Slots count
                through all scales.
            generator: one `torch.Generator` for the batch, a list of one a sample, or None (PyTorch's default).
            callback: called after every scale with its index and the canvas [B, D, h, w] so far, which
                `tokenizer.decode_canvas` turns into progressive pictures. If it returns a canvas, the decode goes on
                from that one; if it returns `STOP`, it ends there, with the tokens of the scales so far.

        Raises:
            ValueError, TypeError: the request cannot be served.
            FloatingPointError: logits that define no law.
        """
        stages = list(model) if isinstance(model, Sequence) else [Stage(model, range(len(tokenizer.scales)))]
        request: dict[str, Any] = dict(law=law, generator=generator, batch_size=batch_size, callback=callback)
        result = super().__call__(stages, condition, tokenizer=tokenizer, **request)
        assert isinstance(result, ScaleResult)
        return result

    def begin(
        self,
        model: Sequence[Stage],
        condition: Any,
        law: TokenLaw,
        keys: Tensor,
        watch: Stopwatch | None = None,
        **parts: Any,
    ) -> Run:
        """As `Sampler.begin`, for the stages of the scales that the schedule draws."""
        return super().begin(drawn_stages(self, model), condition, law, keys, watch, **parts)

    def num_slots(self, model: Sequence[Stage], parts: dict[str, Any]) -> int:
        return first_slots(parts["tokenizer"])[model[-1].scales.stop]

    def num_calls(self, run: Run) -> int:
        return run.model[-1].scales.stop - 1  # `prepare` draws the first

    def prefill(
        self, model: Sequence[Stage], condition: Any, law: TokenLaw, batch_size: int, parts: dict[str, Any]
    ) -> Any:
        count = len(parts["tokenizer"].scales)
        shared = self.config.measure and not self.schedule.leaves_out(count)
        # A measuring model keeps its cache to the end, unless it measures with another one.
        served = model if shared else _of_one_model(model, 0)
        return prefill(served, condition, law.guided, batch_size, [], self.schedule.at(count))

    def prepare(self, run: Run) -> ScaleDecodeState:
        """Draw the first scale, which the prefill predicts."""
        tokenizer = run.parts["tokenizer"]
        canvas = tokenizer.begin(run.batch_size, run.device, run.cache.logits.dtype)
        shared = self.config.measure and not self.schedule.leaves_out(len(tokenizer.scales))
        state = ScaleDecodeState(
            cache=run.cache,
            canvas=canvas,
            maps=[],
            parts=[],
            reference=run.cache if shared else None,
            moved=canvas.new_zeros(run.batch_size),
            cache_bytes=[run.cache.cache_bytes],
            layer_places=[],
        )
        self._count(run, state, run.model[0], range(1))
        self._draw(run, state, run.model[0], run.cache.logits)
        return state

    def step(self, run: Run, state: ScaleDecodeState) -> None:
        """Draw the next scale."""
        scale = state.round + 1
        number = next(number for number, stage in enumerate(run.model) if scale in stage.scales)
        stage, plan = run.model[number], self._plan(run)
        if scale == stage.scales.start and stage.model is not run.model[number - 1].model:
            state.cache = run.cache = None  # free the previous model's cache first
            served = _of_one_model(run.model, number)
            run.cache = prefill(served, run.condition, run.law_given.guided, run.batch_size, state.maps, plan)
            run.lap("prefill")
            state.cache = run.cache
            state.cache_bytes.append(run.cache.cache_bytes)
            logits = run.cache.logits
            self._count(run, state, stage, range(scale + 1))
        else:
            if state.cache.guided and not plan.guides(scale):
                state.cache.drop_unconditional()
            logits = stage.model(state.cache, state.maps[-1], scale)  # [R, n * n, V]
            run.lap("model")
            self._count(run, state, stage, range(scale, scale + 1))
        self._draw(run, state, stage, logits)

    def _plan(self, run: Run) -> ScaleSchedule:
        """The schedule with all its values for this tokenizer."""
        return self.schedule.at(len(run.parts["tokenizer"].scales))

    def _count(self, run: Run, state: ScaleDecodeState, stage: Stage, scales: range) -> None:
        """Count the places of a forward of these scales; the first one of a model has all of them, from 0 on."""
        sides, num_layers = run.parts["tokenizer"].scales, getattr(stage.model, "num_layers", 1)
        pruning = None if scales.start == 0 else self._plan(run).pruning
        pruned = 0 if pruning is None else len(pruning.layers(num_layers))
        areas = [area_of(side) for side in sides]
        kept = areas if pruning is None else pruning.kept(sides)
        if scales.start == 0:
            state.layer_places.append(0)
        places = sum((num_layers - pruned) * areas[scale] + pruned * kept[scale] for scale in scales)
        state.layer_places[-1] += places * (2 if state.cache.guided else 1)

    def _draw(self, run: Run, state: ScaleDecodeState, stage: Stage, logits: Tensor) -> None:
        """Draw a scale from logits [R, n * n, V], add it to the canvas, and make the next scale's input map."""
        tokenizer, given = run.parts["tokenizer"], run.law_given
        count, starts = len(tokenizer.scales), first_slots(tokenizer)
        scale = state.round = state.round + 1
        ratio = scale / max(count - 1, 1)
        grown = ratio if self.config.ramp else 1.0
        law = stage.law or given
        if not self._plan(run).guides(scale):
            law = replace(law, guidance_scale=1.0)
        run.law.law = law_at_scale(law, grown)
        slots = torch.arange(starts[scale], starts[scale + 1], device=run.device).expand(run.batch_size, -1)
        sizes = slots.shape[1], stage.model.vocab_size
        check_returned(logits, len(slots), state.cache.guided, *sizes)
        target = _stage_law(logits, slots, run.law, stage)  # [B, n * n, V]
        if self.config.smooth:
            gumbel = run.noise.gumbel(slots, target.shape[-1], TOKEN, dtype=target.dtype)
            shares, side = mixture(target, gumbel, ratio), tokenizer.scales[scale]
            state.parts.append(shares.argmax(-1))
            codes = shares.to(tokenizer.codebook.dtype) @ tokenizer.codebook
            codes = codes.reshape(run.batch_size, area_of(side), -1).mT  # [B, D, n * n]
            state.canvas = tokenizer.accumulate_codes(state.canvas, scale, codes.unflatten(2, shape_of(side)))
        else:
            state.parts.append(run.noise.categorical(target, slots, TOKEN))
            state.canvas = tokenizer.accumulate(state.canvas, scale, state.parts[-1])
        run.lap("verify")
        if self.config.measure and scale >= self._measured_from(run):
            other = self._reference(run, state, stage, grown)
            check_returned(other, len(slots), state.reference.guided, *sizes)
            other = _stage_law(other, slots, run.law, stage)
            state.moved = state.moved + (target.exp() - other.exp()).abs().sum((1, 2)) / 2
            run.lap(MEASURE)
        if scale + 1 < run.model[-1].scales.stop:
            state.maps.append(tokenizer.next_map(state.canvas, scale + 1))

    def _measured_from(self, run: Run) -> int:
        """The first scale whose law is not that of the first model, guided and whole."""
        return min(_of_one_model(run.model, 0)[-1].scales.stop, self._plan(run).first_change)

    def _reference(self, run: Run, state: ScaleDecodeState, stage: Stage, grown: float) -> Tensor:
        """The logits [R, n * n, V] of the first model, guided and whole, for the last scale; sets the law to its."""
        first, given, scale = _of_one_model(run.model, 0)[-1], run.law_given, state.round
        own = stage.law or given
        if scale >= first.scales.stop:
            # A refiner that learned guided laws draws without guidance, but the first model's law is guided.
            own = replace(own, guidance_scale=(first.law or given).guidance_scale)
        run.law.law = law_at_scale(own, grown)
        if state.reference is None:
            state.reference = prefill(run.model, run.condition, given.guided, run.batch_size, state.maps)
            return state.reference.logits
        return first.model(state.reference, state.maps[-1], scale)

    def progress(self, run: Run, state: ScaleDecodeState) -> Tensor:
        return state.canvas

    def committed(self, run: Run, state: ScaleDecodeState) -> Tensor:
        return torch.ones_like(state.tokens, dtype=torch.bool)  # all that there are

    def answered(self, run: Run, state: ScaleDecodeState, answer: Any) -> None:
        if isinstance(answer, Tensor):
            state.canvas = answer
            if state.round + 1 < run.model[-1].scales.stop:
                state.maps[-1] = run.parts["tokenizer"].next_map(answer, state.round + 1)

    def measure(
        self, run: Run, state: ScaleDecodeState, tokens: Tensor
    ) -> tuple[float | None, Tensor | None]:
        first = self._measured_from(run)
        if state.reference is None or first > state.round:
            return None, None
        starts = first_slots(run.parts["tokenizer"])
        return float(state.moved.mean()) / (starts[state.round + 1] - starts[first]), state.moved.cpu()

    def result(
        self, run: Run, state: ScaleDecodeState, tokens: Tensor, trace: dict[str, Any]
    ) -> SampleResult:
        runs = [list(stages) for _, stages in groupby(run.model, key=lambda stage: id(stage.model))]
        # A model with a compressed cache draws from a different law.
        exact = len(runs) == 1 and getattr(run.model[0].model, "lossless", True)
        whole = not self.schedule.leaves_out(len(run.parts["tokenizer"].scales))
        promised = exact and whole and not self.config["smooth"]
        trace |= dict(lossless=promised, identical=promised)
        drawn = range(state.round + 1)
        calls = tuple(sum(scale in drawn for stage in stages for scale in stage.scales) for stages in runs)
        found = ScaleTrace(
            **trace,
            model_calls=calls,
            cache_bytes=tuple(state.cache_bytes),
            layer_places=tuple(state.layer_places),
        )
        return ScaleResult(tokens, found, state.canvas)

    def check(self, model: Sequence[Stage], law: TokenLaw, batch_size: int, parts: dict[str, Any]) -> None:
        stages, tokenizer = model, parts["tokenizer"]
        check_batch_size(batch_size)
        bounds = [(stage.scales.start, stage.scales.stop) for stage in stages]
        ends = [0, *(stop for _, stop in bounds)]
        count = len(tokenizer.scales)
        if [first for first, _ in bounds] != ends[:-1] or ends[-1] != count:
            drawn = ", ".join(f"{first} to {stop - 1}" for first, stop in bounds) or "none"
            raise ValueError(
                f"the stages draw scales {drawn}; pass stages that follow each other without gap or overlap, from "
                f"scale 0 to scale {count - 1}, the last of the tokenizer."
            )
        wanted = (tuple(tokenizer.scales), tokenizer.codebook_size, tokenizer.code_dim)
        for index, stage in enumerate(stages):
            given = (tuple(stage.model.scales), stage.model.vocab_size, stage.model.code_dim)
            if given != wanted:
                raise ValueError(
                    f"the model of stage {index} predicts scales {given[0]} of {given[1]} codes with {given[2]} "
                    f"channels, but the tokenizer has scales {wanted[0]} of {wanted[1]} codes with {wanted[2]} "
                    "channels; pass models and a tokenizer that were trained together."
                )
            check_allowed(stage.law or law, stage.model.vocab_size)
        drawn_stages(self, stages)


def first_slots(tokenizer: ScaleTokenizer) -> list[int]:
    """Return the first slot of every scale, then the number of slots: n * n a scale, times the tokens of a place."""
    places = getattr(tokenizer, "tokens_per_place", 1)
    return [0, *accumulate(area_of(side) * places for side in tokenizer.scales)]


def _of_one_model(stages: Sequence[Stage], number: int) -> list[Stage]:
    """Return stage `number` and the following stages of the same model, which share its cache."""
    return list(takewhile(lambda stage: stage.model is stages[number].model, stages[number:]))


def drawn_stages(sampler: Any, stages: Sequence[Stage]) -> list[Stage]:
    """Return the stages of the scales that a sampler draws, given those of all scales.

    Raises:
        ValueError: its schedule names scales that there are not, or prunes a model that runs all places.
    """
    schedule = getattr(sampler, "schedule", None)  # a sampler that is not ours draws all
    if not isinstance(schedule, ScaleSchedule):
        return list(stages)
    plan = schedule.at(stages[-1].scales.stop)
    _check_pruning(plan, stages)
    return plan.cut(stages)


def _check_pruning(plan: ScaleSchedule, stages: Sequence[Stage]) -> None:
    """Refuse parts of places for a model that cannot take them, or where they would change nothing."""
    for run in plan.pruned_runs(stages):
        model, first = run[0].model, run[0].scales.start
        if not getattr(model, "prunes", False):
            raise ValueError(
                f"keep_share given, but a {type(model).__name__} runs all places; leave keep_share out, or decode with "
                "a VAR or an Infinity whose cache is whole."
            )
        pruning = plan.pruning
        assert pruning is not None
        if not pruning.layers(model.num_layers):
            raise ValueError(
                f"pruned_layers={plan.pruned_layers} holds none of the {model.num_layers} layers; pass a wider part of "
                "the depth."
            )
        if plan.keep_share[first] < 1:
            raise ValueError(
                f"keep_share={plan.keep_share[first]} for scale {first}, which the first forward of its model runs "
                "whole with all scales before it; pass 1 there, or let one model draw all scales."
            )


def prefill(
    served: Sequence[Stage],
    condition: Any,
    guided: bool,
    batch_size: int,
    maps: Sequence[Tensor],
    plan: ScaleSchedule | None = None,
) -> Any:
    """Prefill the model of these stages for all their scales: guided and whole, or as a schedule says.

    Args:
        guided: in stages without a law of their own.
        plan: a schedule `at` its number of scales; None: nothing is left out.
    """
    rows, stop, more = served, served[-1].scales.stop, {}
    if plan is not None:
        rows = [stage for stage in served if plan.guides(stage.scales.start)]
        more = {"pruning": plan.pruning} if plan.pruned_runs(served) else {}
    asked = draws_guided(rows, guided)
    cache = served[0].model.prefill(
        condition, batch_size=batch_size, guided=asked, maps=maps, stop=stop, **more
    )
    return check_guided(cache, asked)


def _stage_law(logits: Tensor, slots: Tensor, checked: CheckedLaw, stage: Stage) -> Tensor:
    """Return the log-probabilities [B, N, V] that a stage draws from, given logits [R, N, V]."""
    guided = checked.law.guided
    law = checked(logits if guided else logits[: len(slots)], slots, guided)
    return law if stage.late_temperature == 1 else (law / stage.late_temperature).log_softmax(-1)
