"""Draw one batch of a setting by the pipeline itself, as arrays."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from visual_spec.eval.media import MEDIA, show
from visual_spec.eval.settings import Setting
from visual_spec.files.documents import json_text
from visual_spec.models.next_scale.scale_budget import CacheBytes, cache_bytes
from visual_spec.samplers.core.trace import MEASURE, DecodeTrace
from visual_spec.samplers.scales.stages import Stage, drawn_stages, draws_guided
from visual_spec.samplers.scales.trace import ScaleTrace

if TYPE_CHECKING:
    from visual_spec.eval.pair import Pipeline


def seeded(seed: int, count: int) -> list[torch.Generator]:
    """One CPU generator per sample; sample i has `seed + i`."""
    return [torch.Generator().manual_seed(seed + place) for place in range(count)]


def decode(
    pipe: Any, setting: Setting, prompts: Sequence[str], first: int, **asked: Any
) -> tuple[Any, float]:
    """What a pipeline that has the setting gives for the samples from index `first`, its tokens not made visible.

    Args:
        asked: what else its call takes, such as `negative_prompt`.

    Returns:
        its output, and the processor's seconds of what the trace times, as far as its share of the call goes; on a
        processor that others use too, these tell more than the clock.
    """
    start, busy = time.perf_counter(), time.process_time()
    output = pipe(
        list(prompts),
        generator=seeded(setting.seed + first, len(prompts)),
        output_type="latent",
        **asked,
        **{name: value for name, value in setting.pipeline_law.items() if value is not None},
    )
    wall, busy, trace = time.perf_counter() - start, time.process_time() - busy, output.trace
    whole = max(wall, trace.seconds + trace.phase_seconds.get(MEASURE, 0.0))
    return output, busy * trace.seconds / whole


def draw(
    pipe: Pipeline, setting: Setting, prompts: Sequence[str], first: int, **asked: Any
) -> dict[str, np.ndarray]:
    """Draw one batch, the samples from index `first`, as arrays; leaves the pipeline its sampler.

    Args:
        asked: as of `decode`.

    Returns:
        tokens, the ids [N, ...], or canvas [N, D, h, w] where the pipeline is stored as that; length: what a call
        commits one or more of, the tokens of a picture or the columns of a clip; calls [N]; moved_mass [N] and
        divergence, nan for a sampler that measures none; promise, see `DecodeTrace.promise`; own_promise, the same
        beside plain decoding with its own law settings; law_settings, as JSON; promises, whether its tokens equal
        those without a condition; seconds and processor_seconds of the batch. Of continuous tokens head_calls [N]; on
        a GPU peak_memory; logprobs and model_logprobs of a trace that has them; of a next-scale pipeline also
        cache_held, cache_peak and lossless, with its own law settings.
    """
    with setting.on(pipe):
        output, busy = decode(pipe, setting, prompts, first, **asked)
        # Whether ids tell the picture may depend on the sampler.
        medium = MEDIA[pipe.medium]
        kept = getattr(output, medium.finished if pipe.stored_as == "canvas" else medium.ids)
        stored = _stored(pipe, kept)
        more = {**stored, **_scale_facts(pipe, setting, output.trace, len(prompts))}
    trace = output.trace
    if trace.peak_memory is not None:
        more["peak_memory"] = np.array(trace.peak_memory)
    lossy = ("logprobs",) if trace.logprobs_law == "target" else ()  # its tokens do not follow that law
    for name in ("head_calls", "logprobs", "model_logprobs"):
        if name not in lossy and getattr(trace, name, None) is not None:
            more[name] = getattr(trace, name).cpu().numpy()
    own = trace.beside(trace.law_settings)
    nothing = np.full(len(prompts), np.nan)
    return {
        "length": np.array(trace.commit_call.shape[1]),
        "calls": trace.target_calls.cpu().numpy(),
        "moved_mass": nothing if trace.moved_mass is None else trace.moved_mass.double().cpu().numpy(),
        "divergence": np.array(np.nan if trace.divergence is None else trace.divergence),
        "promises": np.array(own.promises_tokens),
        "promise": np.array(trace.promise),
        "own_promise": np.array(own.promise),
        "law_settings": np.array(json_text(own.law_settings)),
        "seconds": np.array(trace.seconds),
        "processor_seconds": np.array(busy),
        **more,
    }


def _scale_facts(
    pipe: Pipeline, setting: Setting, trace: DecodeTrace, batch_size: int
) -> dict[str, np.ndarray]:
    """Return what is kept of the caches of a next-scale decode; nothing for other pipelines."""
    if not isinstance(trace, ScaleTrace):
        return {}
    # One cache is freed before the next is allocated, but for the first one's where distances are measured by it.
    stays = trace.divergence is not None
    dtype = pipe.transformer.dtype
    stages = drawn_stages(setting.sampler, pipe.stages(law=setting.law))
    first, *others = caches_of(stages, batch_size, setting.law.guided, dtype, measured=stays)
    together = [first.held + other.held if stays else other.held for other in others]
    at_work = [first.held + other.peak if stays else other.peak for other in others]
    measuring = [first.peak + other.held for other in others if stays]
    return {
        "cache_held": np.array(max([first.held, *together])),
        "cache_peak": np.array(max([first.peak, *at_work, *measuring])),
        "lossless": np.array(trace.beside(trace.law_settings).lossless),
    }


def caches_of(
    stages: Sequence[Stage], batch_size: int, guided: bool, dtype: torch.dtype, *, measured: bool = False
) -> list[CacheBytes]:
    """Keys and values of each model of a schedule, by arithmetic, in the order in which they draw.

    Args:
        guided: in stages without a law of their own.
        measured: the first model scores all scales.
    """
    runs = [list(run) for _, run in groupby(stages, key=lambda stage: id(stage.model))]
    caches = []
    for run in runs:
        stop = (runs[-1] if measured and run is runs[0] else run)[-1].scales.stop
        model: Any = run[0].model
        known = run[0].scales.start
        budget = getattr(model, "budget", None)
        config = (model if budget is None else model.model).config
        scored = stages if measured and run is runs[0] else run
        doubled = draws_guided(scored, guided)
        caches.append(cache_bytes(config, budget, batch_size, doubled, dtype, known=known, stop=stop))
    return caches


def through_tokenizer(pipe: Pipeline, samples: np.ndarray) -> np.ndarray:
    """Return what the tokenizer, or the codec, makes of true samples, as `media.show` gives them; no call is spent."""
    arrays = _stored(pipe, MEDIA[pipe.medium].encode(pipe, samples))
    return show(pipe, arrays[stored_name(arrays)])


def stored_name(arrays: dict[str, np.ndarray]) -> str:
    """The array of a batch that holds the samples."""
    return "canvas" if "canvas" in arrays else "tokens"


def _stored(pipe: Pipeline, samples: Tensor) -> dict[str, np.ndarray]:
    if pipe.stored_as == "canvas":
        return {"canvas": samples.float().cpu().numpy()}
    return {"tokens": small_tokens(samples)}


def small_tokens(tokens: Tensor) -> np.ndarray:
    """Token ids as int16 where they fit, else int32."""
    values = tokens.cpu().numpy()
    return values.astype(np.int16 if values.max() < 2**15 else np.int32)
