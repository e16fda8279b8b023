"""Stages of a next-scale decode: which model draws which scales, by which law, how far from the first, and refusals.

In collaborative decoding (CoDe: Chen et al. 2025, section 3.2) a large model draws the small scales, which decide what
the picture shows, and a small model draws the large scales, which cost most. The small model starts from the input maps
so far, by one prefill that builds its own cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, takewhile
from typing import Annotated, Any

import torch
from torch import Tensor

from visual_spec.kernels.law import LawNumbers
from visual_spec.models.core.protocol import ScaleModel, ScaleTokenizer, area_of
from visual_spec.models.core.settings import Within, read_fields, whole
from visual_spec.samplers.core.checks import CheckedLaw, check_allowed, check_guided, check_returned
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.core.state import Run
from visual_spec.samplers.scales.schedule import ScaleSchedule

# The numbers of the published figures. The official `cfg=1.5` is what the ramp adds to 1 at the last scale.
VAR_LAW = TokenLaw(guidance_scale=2.5, top_k=900, top_p=0.96)
CODE_LAW = TokenLaw(guidance_scale=2.5, top_k=600, top_p=0.96)
FLEXVAR_LAW = TokenLaw(guidance_scale=3.5, top_k=900, top_p=0.95)
CODE_DRAFT_SCALES = (6, 7, 8, 9)
CODE_WARM_SCALES, CODE_WARM_TEMPERATURE = 7, 1.1  # the first scales, see `Stage.late_temperature`
# Settings of a sampler that say which model draws which scales, and with which cache.
DIVISION = ("num_draft_scales", "refiner_guidance_scale", "cache_share", "num_drafters")


@dataclass(frozen=True)
class Stage:
    """Consecutive scales that one model draws.

    Args:
        model: the model.
        scales: the scales, `range(first, stop)`.
        law: the law of these scales; None is the law of the call.
        late_temperature: divides the log-probabilities after the law's filters; the law's own temperature applies
            before them. The published CoDe samples this way.
        refines: whether a refiner draws all scales, which has a law of its own.

    Raises:
        ValueError: the range is empty or has steps, or the temperature is not above 0.
    """

    model: ScaleModel
    scales: range
    law: TokenLaw | None = None
    late_temperature: Annotated[float, Within(above=0)] = 1.0
    refines: bool = False

    def __post_init__(self) -> None:
        read_fields(self)
        scales = self.scales
        if not isinstance(scales, range) or scales.step != 1 or not scales or scales.start < 0:
            raise ValueError(f"scales={scales!r}; pass range(first, stop) of at least one scale.")


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
    count = len(large.scales)
    note = f": each of the two models draws at least one of the {count} scales"
    whole("num_draft_scales", num_draft_scales, Within(1, count - 1), note)
    return [
        Stage(large, range(num_draft_scales), law),
        Stage(small, range(num_draft_scales, count), small_law),
    ]


def check_alone(sampler: Any) -> None:
    """Refuse to divide the scales, or to compress a cache, where one model draws with the cache that it has."""
    divided = ("num_draft_scales", "cache_share")
    asked = [name for name in divided if sampler.config.get(name) not in (None, "all", "off")]
    if asked:
        raise ValueError(
            f"{', '.join(asked)} given, but one model draws here; leave them out, pass stages, or set the sampler of a "
            "ScaleImagePipeline, such as shapes_var."
        )


def at_scales(part: Any, scales: Sequence[int] | None) -> Any:
    """Return a model or tokenizer with other scales; it shares the weights. None, and no part: as it is.

    Raises:
        ValueError: the scales of this one are fixed, or it cannot have these.
    """
    if part is None or scales is None or tuple(part.scales) == tuple(scales):
        return part
    if not hasattr(part, "at"):
        raise ValueError(
            f"scales={list(scales)} given, but the scales of a {type(part).__name__} are fixed, {tuple(part.scales)}; "
            "leave scales out, stop early by stop_after, or draw with a FlexVAR, such as shapes_flexvar."
        )
    return part.at(scales)


def draws_guided(stages: Sequence[Stage], guided: bool) -> bool:
    """Return whether a decode of these stages has unconditional rows; `guided`: stages without a law have them."""
    return any(guided if stage.law is None else stage.law.guided for stage in stages)


def first_slots(tokenizer: ScaleTokenizer) -> list[int]:
    """Return the first slot of every scale, then the number of slots: n * n a scale, times the tokens of a place."""
    places = getattr(tokenizer, "tokens_per_place", 1)
    return [0, *accumulate(area_of(side) * places for side in tokenizer.scales)]


def of_one_model(stages: Sequence[Stage], number: int) -> list[Stage]:
    """Return stage `number` and the following stages of the same model, which share its cache."""
    return list(takewhile(lambda stage: stage.model is stages[number].model, stages[number:]))


def stage_law(
    logits: Tensor, slots: Tensor, checked: CheckedLaw, stage: Stage, numbers: LawNumbers
) -> Tensor:
    """Return the log-probabilities [B, N, V] that a stage draws from, given logits [R, N, V].

    `numbers`: of the law of `checked`.
    """
    used = logits if numbers.guided else logits[: len(slots)]
    law = checked(used, slots, numbers.guided, numbers)
    return law if stage.late_temperature == 1 else (law / stage.late_temperature).log_softmax(-1)


def law_at_scale(law: TokenLaw, ratio: float) -> TokenLaw:
    """Return the law with guidance at `ratio` of the way from none, 0, to the law's own scale, 1."""
    return replace(law, guidance_scale=1 + (law.guidance_scale - 1) * ratio) if law.guided else law


def prefill(
    served: Sequence[Stage],
    condition: object,
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


@dataclass(frozen=True)
class ScalePlan:
    """What is decided about a scale before the first one is drawn.

    Attributes:
        stage: who draws it.
        entering: the stages of a model that takes over at this scale; none: the model before goes on.
        guided: whether the schedule guides it.
        law, numbers: of its tokens, with the guidance of this scale.
        ratio: from 0, the first scale, to 1, the last.
        grown: the share of the guidance at this scale.
        slots: long [n * n].
        vocab_size, num_layers: of its model.
    """

    stage: Stage
    entering: Sequence[Stage]
    guided: bool
    law: TokenLaw
    numbers: LawNumbers
    ratio: float
    grown: float
    slots: Tensor
    vocab_size: int
    num_layers: int


def planned(run: Run, tokenizer: ScaleTokenizer, schedule: ScaleSchedule, ramp: bool) -> dict[int, ScalePlan]:
    """Return what is decided about each scale that is drawn. `schedule`: `at` the number of scales."""
    starts, last, plan = first_slots(tokenizer), max(len(tokenizer.scales) - 1, 1), {}
    for number, stage in enumerate(run.model):
        enters = number > 0 and stage.model is not run.model[number - 1].model
        for scale in stage.scales:
            guided, ratio, law = schedule.guides(scale), scale / last, stage.law or run.law_given
            grown, vocab_size = ratio if ramp else 1.0, stage.model.vocab_size
            law = law_at_scale(law if guided else replace(law, guidance_scale=1.0), grown)
            plan[scale] = ScalePlan(
                stage,
                of_one_model(run.model, number) if enters and scale == stage.scales.start else (),
                guided,
                law,
                law.numbers(law.guided, vocab_size),
                ratio,
                grown,
                torch.arange(starts[scale], starts[scale + 1], device=run.device),
                vocab_size,
                getattr(stage.model, "num_layers", 1),
            )
    return plan


@dataclass
class Reference:
    """The first model, which also scores the scales that others draw, or that a schedule changes.

    Attributes:
        stage: its last stage.
        first: the first scale whose law differs from the first model's, guided and whole.
        moved: float [B], total variation summed over the measured slots.
        cache: its state. With a schedule that leaves something out it has its own prefill, at scale `first`; until then
            None.
    """

    stage: Stage
    first: int
    moved: Tensor
    cache: Any

    def measure(self, run: Run, maps: Sequence[Tensor], here: ScalePlan, scale: int, target: Tensor) -> None:
        """Add the distance of the laws `target [B, n * n, V]`, which a scale was drawn from.

        `maps`: [B, D, n, n] each, the input maps so far.
        """
        own, usual = here.stage.law or run.law_given, run.law_given
        slots = here.slots.expand(run.batch_size, -1)
        if scale >= self.stage.scales.stop:
            # A refiner that learned guided laws draws without guidance, but the first model's law is guided.
            own = replace(own, guidance_scale=(self.stage.law or usual).guidance_scale)
        run.law.law = law = law_at_scale(own, here.grown)
        if self.cache is None:
            self.cache = prefill(run.model, run.condition, usual.guided, run.batch_size, maps)
            logits = self.cache.logits
        else:
            logits = self.stage.model(self.cache, maps[-1], scale)
        check_returned(logits, len(slots), self.cache.guided, slots.shape[1], here.vocab_size)
        numbers = law.numbers(law.guided, here.vocab_size)
        other = stage_law(logits, slots, run.law, here.stage, numbers)
        self.moved = self.moved + (target.exp() - other.exp()).abs().sum((1, 2)) / 2


def check_stages(stages: Sequence[Stage], tokenizer: ScaleTokenizer, law: TokenLaw) -> None:
    """Refuse stages that leave scales out or draw them twice, and models that do not fit the tokenizer."""
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
        model = (tuple(stage.model.scales), stage.model.vocab_size, stage.model.code_dim)
        if model != wanted:
            raise ValueError(
                f"the model of stage {index} predicts scales {model[0]} of {model[1]} codes with {model[2]} "
                f"channels, but the tokenizer has scales {wanted[0]} of {wanted[1]} codes with {wanted[2]} "
                "channels; pass models and a tokenizer that were trained together."
            )
        check_allowed(stage.law or law, stage.model.vocab_size)


def drawn_stages(sampler: Any, stages: Sequence[Stage]) -> list[Stage]:
    """Return the stages of the scales that a sampler draws, out of the stages of all scales.

    Raises:
        ValueError: its schedule names scales that there are not, or prunes a model that runs all places.
    """
    schedule = getattr(sampler, "schedule", None)  # a sampler that is not ours draws all
    if not isinstance(schedule, ScaleSchedule):
        return list(stages)
    plan = schedule.at(stages[-1].scales.stop)
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
    return plan.cut(stages)
