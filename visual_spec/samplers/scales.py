"""Next-scale sampling: VAR with one model, collaborative decoding with several.

VAR (Tian et al. 2024, section 3.2) draws all tokens of a scale at once, given the scales before it. Infinity (Han et
al. 2024, section 3) draws the bits of all its tokens at once, each for itself. CoDe (Chen et al. 2025, section 3.2)
has a large model draw the small scales, which decide what the picture shows, and a small model the large ones, which
cost most: it starts from the input maps so far, by one prefill that builds its own cache.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby, pairwise
from typing import Any

import torch
from torch import Tensor

from visual_spec.models.core.protocol import ScaleModel, ScaleTokenizer, area_of, shape_of
from visual_spec.samplers.core.base import Run, Sampler
from visual_spec.samplers.core.checks import CheckedLaw, check_allowed, check_batch_size, check_flag
from visual_spec.samplers.core.configuration import register_to_config
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.core.noise import TOKEN
from visual_spec.samplers.core.trace import MEASURE, DecodeTrace, SampleResult

ScaleCallback = Callable[[int, Tensor], Any]

# Those of the published figures. The official `cfg=1.5` is what the ramp adds to 1 at the last scale.
VAR_LAW = TokenLaw(guidance_scale=2.5, top_k=900, top_p=0.96)
CODE_LAW = TokenLaw(guidance_scale=2.5, top_k=600, top_p=0.96)
CODE_DRAFT_SCALES = (6, 7, 8, 9)


@dataclass(frozen=True)
class Stage:
    """Consecutive scales that one model draws.

    Args:
        model: who draws them.
        scales: which ones, `range(first, stop)`.
        law: how; None is the law of the call.
        late_temperature: divides the log-probabilities that the law's filters left, where the law's own temperature
            comes before the filters. The published CoDe samples this way.

    Raises:
        ValueError: a range that is empty or has steps, a temperature that is not above 0.
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
        law, small_law: of each; None is the law of the call.

    Raises:
        ValueError: N that leaves one of the two without work.
    """
    count = _check_split(large, num_draft_scales)
    return [
        Stage(large, range(num_draft_scales), law),
        Stage(small, range(num_draft_scales, count), small_law),
    ]


def published_code_stages(large: ScaleModel, small: ScaleModel, num_draft_scales: int = 8) -> list[Stage]:
    """`code_stages` with the settings of the published figures: `CODE_LAW`, and the first seven scales a little warmer.

    Raises:
        ValueError: as `code_stages`.
    """
    count = _check_split(large, num_draft_scales)
    bounds = sorted({0, min(7, count), num_draft_scales, count})
    return [
        Stage(
            large if first < num_draft_scales else small,
            range(first, stop),
            CODE_LAW,
            1.1 if first < 7 else 1.0,
        )
        for first, stop in pairwise(bounds)
    ]


def _check_split(large: ScaleModel, num_draft_scales: int) -> int:
    count = len(large.scales)
    whole = isinstance(num_draft_scales, int) and not isinstance(num_draft_scales, bool)
    if not whole or not 1 <= num_draft_scales < count:
        raise ValueError(
            f"num_draft_scales={num_draft_scales!r}; pass an integer from 1 to {count - 1}: each of the two models "
            f"draws at least one of the {count} scales."
        )
    return count


@dataclass
class ScaleTrace(DecodeTrace):
    """A `DecodeTrace` of a next-scale decode.

    `target_calls` counts the forwards of all models, one a scale: a prefill yields the first scale of its model.
    `commit_call` is the scale of each slot. When the sampler measures, `divergence` and `moved_mass` are the total
    variation distance between the law that a token was drawn from and the first model's under the same settings and
    its own guidance: the mean over the slots behind its own stages, and the sum over them, whose mean over samples
    bounds the distance between the laws of whole pictures.

    Attributes:
        model_calls: forwards of each model, in the order of the schedule; those that only measure are not counted.
        cache_bytes: size of the key and value cache of each of them. One is freed before the next is allocated, but
            for the first model's when the sampler measures.
    """

    model_calls: tuple[int, ...] = ()
    cache_bytes: tuple[int, ...] = ()


@dataclass
class ScaleResult(SampleResult):
    """A `SampleResult` with the finished canvas [B, D, h, w], from which `ScaleTokenizer.decode_canvas` makes the
    pictures. With `smooth` the tokens alone do not tell them."""

    trace: ScaleTrace
    canvas: Tensor


def draws_guided(stages: Sequence[Stage], guided: bool) -> bool:
    """Whether a decode of these stages has unconditional rows; those without a law of their own do as `guided` says."""
    return any(guided if stage.law is None else stage.law.guided for stage in stages)


def law_at_scale(law: TokenLaw, ratio: float) -> TokenLaw:
    """The law where guidance has come `ratio` of its way from none, 0, to the law's own scale, 1."""
    return replace(law, guidance_scale=1 + (law.guidance_scale - 1) * ratio) if law.guided else law


def mixture(log_probs: Tensor, gumbel: Tensor, ratio: float) -> Tensor:
    """Weights [B, N, V] of the codes in each smooth token, `ratio` of the way from the first scale, 0, to the last, 1.

    The temperature, 0.27 falling to 0.0135, and the sharpening by 1 + ratio are those of the official `more_smooth`.
    """
    temperature = 0.27 * (1 - 0.95 * ratio)
    return (((1 + ratio) * log_probs + gumbel) / temperature).softmax(-1)


@dataclass
class ScaleDecodeState:
    """A batch between two scales.

    Attributes:
        cache: the state of the model that draws.
        canvas: [B, D, h, w].
        maps: [B, D, n, n] each, what models were fed so far: all that one needs to go on from another.
        parts: long [B, n * n] each, the tokens of the scales.
        round: index of the last scale.
        reference: the first model's state, where the sampler measures.
        moved: float [B], total variation of the measured slots.
        cache_bytes: of every model so far.
    """

    cache: Any
    canvas: Tensor
    maps: list[Tensor]
    parts: list[Tensor]
    reference: Any
    moved: Tensor
    cache_bytes: list[int]
    round: int = -1

    @property
    def tokens(self) -> Tensor:
        """long [B, all slots so far]."""
        return torch.cat(self.parts, 1)

    @property
    def commit_call(self) -> Tensor:
        """The scale of each slot: long [B, slots]."""
        sizes = torch.tensor([part.shape[1] for part in self.parts])
        return torch.arange(len(self.parts)).repeat_interleave(sizes).repeat(len(self.canvas), 1)

    @property
    def target_calls(self) -> Tensor:
        """One a scale: long [B]."""
        return torch.full((len(self.canvas),), len(self.parts))


@dataclass(frozen=True)
class Schedule:
    """Who draws which scale.

    Attributes:
        stages: of every scale.
        firsts: of every scale, whether its model takes over there.
        starts: first slot of every scale, and the number of slots.
        own: scales that the first model draws.
    """

    stages: list[Stage]
    firsts: list[bool]
    starts: list[int]
    own: int

    @classmethod
    def of(cls, stages: Sequence[Stage], tokenizer: ScaleTokenizer) -> Schedule:
        """The schedule of stages that follow each other. A model that follows itself goes on with its cache."""
        # n * n tokens a scale, or n * n * T where a place has T tokens, each with its slot.
        places = getattr(tokenizer, "tokens_per_place", 1)
        sizes = [area_of(side) * places for side in tokenizer.scales]
        by_scale, firsts = [], []
        runs = [list(run) for _, run in groupby(stages, key=lambda stage: id(stage.model))]
        for run in runs:
            mine = [stage for stage in run for _ in stage.scales]
            by_scale += mine
            firsts += [True] + [False] * (len(mine) - 1)
        return cls(by_scale, firsts, [0, *accumulate(sizes)], sum(len(stage.scales) for stage in runs[0]))

    @property
    def count(self) -> int:
        """Number of scales."""
        return len(self.stages)

    def run_of(self, scale: int) -> list[Stage]:
        """The stages of the model that takes over at a scale, one a scale."""
        rest = [False, *self.firsts[scale + 1 :]]
        length = rest.index(True, 1) if True in rest[1:] else len(rest)
        return self.stages[scale : scale + length]


class ScaleWiseSampler(Sampler):
    """Draws the tokens of one scale after the other, each with its slot's own noise.

    Args:
        ramp: let guidance grow from none at the first scale to the law's scale s at the last: 1 + (s - 1) k / (K - 1)
            at scale k of K. False guides every scale alike.
        smooth: put mixtures of codes on the canvas, weighted by a Gumbel softmax that sharpens from scale to scale, in
            place of drawn codes. Pictures look smoother and vary less (the `more_smooth` of the official VAR, which its
            published figures do without). The tokens returned are the heaviest code of each mixture.
        measure: have the first model also score the scales that other models draw, and report how far their laws are
            apart. Costs that model's forwards, and the memory of its cache until the end.

    Raises:
        ValueError: a setting that is neither True nor False.
    """

    takes = ("tokenizer",)

    @register_to_config
    def __init__(self, ramp: bool = True, smooth: bool = False, measure: bool = False) -> None:
        for name, value in (("ramp", ramp), ("smooth", smooth), ("measure", measure)):
            check_flag(name, value)

    @property
    def lossless(self) -> bool:
        """Whether samples of one model follow its law. Several models have no law in common; see the trace."""
        return not self.config["smooth"]

    @property
    def identical(self) -> bool:
        """As `lossless`: what this sampler draws from one model is what its autoregressive sampling is."""
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
            model: a model for all scales, or a schedule of stages, whose models share the tokenizer. A model that
                follows itself goes on with its cache.
            tokenizer: turns the tokens so far into the input map of the next scale.
            condition: what the `prefill` of every model takes, `batch_size` rows of it.
            law: how logits become the distribution a token is drawn from, where a stage does not say otherwise. Slots
                count through all scales.
            generator: one `torch.Generator` for the batch, a list of one a sample, or None (PyTorch's default).
            callback: called after every scale with its index and the canvas [B, D, h, w] so far, of which
                `tokenizer.decode_canvas` makes progressive pictures.

        Raises:
            ValueError, TypeError: a request that cannot be served.
            FloatingPointError: logits that define no law.
        """
        whole = (
            [Stage(model, range(len(tokenizer.scales)))] if not isinstance(model, Sequence) else list(model)
        )
        request: dict[str, Any] = dict(law=law, generator=generator, batch_size=batch_size, callback=callback)
        result = super().__call__(whole, condition, tokenizer=tokenizer, **request)
        assert isinstance(result, ScaleResult)
        return result

    def num_slots(self, model: Sequence[Stage], parts: dict[str, Any]) -> int:
        return Schedule.of(model, parts["tokenizer"]).starts[-1]

    def num_calls(self, run: Run) -> int:
        return len(run.parts["tokenizer"].scales) - 1  # `prepare` draws the first

    def prefill(
        self, model: Sequence[Stage], condition: Any, law: TokenLaw, batch_size: int, parts: dict[str, Any]
    ) -> Any:
        schedule = Schedule.of(model, parts["tokenizer"])
        served = schedule.stages if self._measures(schedule) else schedule.run_of(0)
        return _prefill(served, 0, condition, law, batch_size, [])

    def prepare(self, run: Run) -> ScaleDecodeState:
        """Draw the first scale, which the prefill predicts."""
        schedule = Schedule.of(run.model, run.parts["tokenizer"])
        canvas = run.parts["tokenizer"].begin(run.batch_size, run.device, run.cache.logits.dtype)
        state = ScaleDecodeState(
            cache=run.cache,
            canvas=canvas,
            maps=[],
            parts=[],
            reference=run.cache if self._measures(schedule) else None,
            moved=canvas.new_zeros(run.batch_size),
            cache_bytes=[run.cache.cache_bytes],
        )
        run.lap("model")
        self._draw(run, state, schedule, run.cache.logits)
        return state

    def step(self, run: Run, state: ScaleDecodeState) -> None:
        """Draw the next scale."""
        schedule, scale = Schedule.of(run.model, run.parts["tokenizer"]), state.round + 1
        stage = schedule.stages[scale]
        if schedule.firsts[scale]:
            state.cache = run.cache = None  # the cache of the model before: free it first
            mine = schedule.run_of(scale)
            state.cache = run.cache = _prefill(
                mine, scale, run.condition, run.law_given, run.batch_size, state.maps
            )
            run.lap("prefill")
            state.cache_bytes.append(state.cache.cache_bytes)
            logits = state.cache.logits
        else:
            logits = stage.model(state.cache, state.maps[-1], scale)  # [R, n * n, V]
        run.lap("model")
        self._draw(run, state, schedule, logits)

    def _draw(self, run: Run, state: ScaleDecodeState, schedule: Schedule, logits: Tensor) -> None:
        """Draw a scale from logits [R, n * n, V], put it on the canvas, and make the input map of the next."""
        tokenizer = run.parts["tokenizer"]
        scale = state.round = state.round + 1
        stage, given = schedule.stages[scale], run.law_given
        ratio = scale / max(schedule.count - 1, 1)
        grown = ratio if self.config.ramp else 1.0
        run.law.law = law_at_scale(stage.law or given, grown)
        slots = torch.arange(schedule.starts[scale], schedule.starts[scale + 1], device=run.device)
        slots = slots.expand(run.batch_size, -1)
        target = _stage_law(logits, slots, run.law, stage)  # [B, n * n, V]
        if self.config.smooth:
            gumbel = run.noise.gumbel(slots, target.shape[-1], TOKEN, dtype=target.dtype)
            shares, side = mixture(target, gumbel, ratio), tokenizer.scales[scale]
            state.parts.append(shares.argmax(-1))
            codes = shares.to(tokenizer.codebook.dtype) @ tokenizer.codebook
            codes = codes.reshape(run.batch_size, area_of(side), -1).mT.unflatten(
                2, shape_of(side)
            )  # [B, D, n, n]
            state.canvas = tokenizer.accumulate_codes(state.canvas, scale, codes)
        else:
            state.parts.append(run.noise.categorical(target, slots, TOKEN))
            state.canvas = tokenizer.accumulate(state.canvas, scale, state.parts[-1])
        run.lap("verify")
        if state.reference is not None and scale >= schedule.own:
            # A refiner that learned guided laws draws without guidance; what it stands in for is guided.
            first = schedule.stages[schedule.own - 1]
            own = replace(stage.law or given, guidance_scale=(first.law or given).guidance_scale)
            run.law.law = law_at_scale(own, grown)
            other = first.model(state.reference, state.maps[-1], scale)
            other = _stage_law(other, slots, run.law, stage)
            state.moved = state.moved + (target.exp() - other.exp()).abs().sum((1, 2)) / 2
            run.lap(MEASURE)
        if scale + 1 < schedule.count:
            state.maps.append(tokenizer.next_map(state.canvas, scale + 1))

    def _measures(self, schedule: Schedule) -> bool:
        return self.config.measure and sum(schedule.firsts) > 1

    def progress(self, run: Run, state: ScaleDecodeState) -> Tensor:
        return state.canvas

    def measure(
        self, run: Run, state: ScaleDecodeState, tokens: Tensor
    ) -> tuple[float | None, Tensor | None]:
        if state.reference is None:
            return None, None
        schedule = Schedule.of(run.model, run.parts["tokenizer"])
        others = schedule.starts[-1] - schedule.starts[schedule.own]  # slots behind the first model's stages
        return float(state.moved.mean()) / others, state.moved.cpu()

    def result(
        self, run: Run, state: ScaleDecodeState, tokens: Tensor, trace: dict[str, Any]
    ) -> SampleResult:
        schedule = Schedule.of(run.model, run.parts["tokenizer"])
        starts = [scale for scale, first in enumerate(schedule.firsts) if first]
        # A model with a compressed cache draws from a law of its own.
        exact = len(starts) == 1 and getattr(schedule.stages[0].model, "lossless", True)
        trace |= dict(lossless=self.lossless and exact, identical=self.identical and exact)
        calls = tuple(stop - start for start, stop in pairwise([*starts, schedule.count]))
        found = ScaleTrace(**trace, model_calls=calls, cache_bytes=tuple(state.cache_bytes))
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


def _prefill(
    stages: Sequence[Stage],
    scale: int,
    condition: Any,
    law: TokenLaw,
    batch_size: int,
    maps: Sequence[Tensor],
) -> Any:
    """Start the model of the first of these stages, one a scale from `scale` on."""
    guided = draws_guided(stages, law.guided)
    stop = scale + len(stages)
    return stages[0].model.prefill(condition, batch_size=batch_size, guided=guided, maps=maps, stop=stop)


def _stage_law(logits: Tensor, slots: Tensor, checked: CheckedLaw, stage: Stage) -> Tensor:
    """Log-probabilities [B, N, V] that a stage draws from, given logits [R, N, V]."""
    guided = checked.law.guided
    law = checked(logits if guided else logits[: len(slots)], slots, guided)
    return law if stage.late_temperature == 1 else (law / stage.late_temperature).log_softmax(-1)
