"""Plain and accelerated decoding of the same prompts with the same seeds, side by side."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from tqdm import tqdm

from visual_spec.eval.draws import seeded
from visual_spec.eval.report.rows import ComparisonRow, Scales
from visual_spec.models.core.protocol import TokenGrid
from visual_spec.pipelines.sampler_text import plain_beside
from visual_spec.pipelines.video_files import pixels_of
from visual_spec.samplers import registry
from visual_spec.samplers.registry import MASKED

if TYPE_CHECKING:
    from visual_spec.eval.pair import Pipeline
    from visual_spec.pipelines.output import AudioPipelineOutput, VideoPipelineOutput
    from visual_spec.samplers.core.base import Sampler

# The samples of both, the grid of their tokens, their rate, and the scales; see `ComparisonRow`.
_Shown = tuple[Sequence[object], TokenGrid | None, float, Scales | None]


def compare(
    pipe: Any,
    sampler: Any,
    jobs: Sequence[tuple[str, int]],
    settings: Mapping[str, object],
    *,
    done: Callable[[int, ComparisonRow], None] = lambda index, row: None,
) -> list[ComparisonRow]:
    """Decode each (prompt, seed) plainly and with `sampler`, one sample at a time.

    Args:
        pipe: its sampler is put back.
        settings: of a call of the pipeline: the law, of music also the length.
        done: called with the index of a job and its row, as soon as it is there.

    Returns:
        A row a job. Seconds count the decoding, from prefill to the last token, after one sample of warm-up
        for each sampler. A sampler with `exact_width` is compared with plain decoding with `exact_width`, and timed
        beside plain decoding without it.

    Raises:
        ValueError, TypeError: a pipeline with one way to decode; bad input, as a call of the pipeline.
    """
    if not pipe.comparable:
        raise ValueError(
            f"a {type(pipe).__name__} of this kind has one way to decode and nothing to compare it with; leave "
            "--compare out."
        )
    plain = plain_decoding(pipe)
    samplers = [plain, sampler]
    if sampler.config.get("exact_width"):
        samplers.append(plain.from_config(plain.config, exact_width=True))

    rows, before = [], pipe.sampler
    # disable=None: no bar where the output is no terminal. The warm-up counts: it takes as long as a job.
    bar = tqdm(
        total=len(samplers) * (len(jobs) + 1),
        desc="plain and accelerated",
        unit=" decodes",
        leave=False,
        disable=None,
    )
    try:
        with bar:
            for index in range(-1, len(jobs)):
                outputs = []
                prompt, seed = jobs[max(index, 0)]
                for pipe.sampler in samplers:
                    outputs.append(pipe(prompt, generator=seeded(seed, 1), **settings))
                    bar.update()
                if len(outputs) == 3:
                    seconds, exact = outputs[0].trace.seconds, outputs.pop()
                    exact.trace = dataclasses.replace(exact.trace, seconds=seconds)
                    outputs[0] = exact
                if index >= 0:
                    rows.append(_row(pipe, jobs[index][0], *outputs))
                    done(index, rows[-1])
    finally:
        pipe.sampler = before
    return rows


def plain_decoding(pipe: Pipeline) -> Sampler:
    """The sampler of a pipeline's plain decoding, with settings of the sampler that it has now; see `plain_beside`."""
    return plain_beside(pipe.plain_sampler, pipe.sampler)


def _row(pipe: Pipeline, prompt: str, plain: Any, fast: Any) -> ComparisonRow:
    shown, grid, rate, scales = _SHOWN[pipe.medium](pipe, plain, fast)
    one, two = shown
    trace = fast.trace.beside(plain.trace.law_settings)
    heads = [getattr(output.trace, "head_calls", None) for output in (plain, fast)]
    entered = getattr(trace, "entry_call", None)
    ids = "codes" if pipe.medium == "audio" else "tokens"
    return ComparisonRow(
        prompt=prompt,
        plain=one,
        fast=two,
        commit_call=trace.commit_call[0].cpu(),
        plain_calls=int(plain.trace.target_calls[0]),
        fast_calls=int(trace.target_calls[0]),
        plain_seconds=plain.trace.seconds,
        fast_seconds=trace.seconds,
        identical=getattr(plain, ids).equal(getattr(fast, ids))
        and np.array_equal(np.asarray(one), np.asarray(two)),
        grid=grid,
        rate=rate,
        promised=trace.promises_tokens,
        lossless=trace.lossless,
        output_law=trace.output_law,
        near_ties=None if trace.near_ties is None else int(trace.near_ties.sum()),
        # A plain sampler draws all that it commits.
        drafts=all(entry.class_name != trace.sampler or not entry.plain for entry in registry.all_samplers()),
        reference=MASKED in pipe.calls,
        head_calls=None if None in heads else tuple(int(calls[0]) for calls in heads),  # pyright: ignore
        entry_call=entered[0] if entered is not None and pipe.medium == "audio" else None,
        scales=scales,
    )


def _pictures(pipe: Pipeline, plain: Any, fast: Any) -> _Shown:
    images = plain.images[0], fast.images[0]
    if pipe.unit != "scales":
        return images, pipe.transformer.grid, 0, None
    scales = Scales(
        sides=tuple(pipe.vq_model.scales[: sum(fast.trace.model_calls)]),
        drafted=fast.trace.model_calls[0],
        plain_tokens=plain.tokens.shape[1],
        plain_cache=max(plain.trace.cache_bytes),
        fast_cache=max(fast.trace.cache_bytes),
    )
    return images, TokenGrid(1, fast.tokens.shape[1]), 0, scales


def _clips(pipe: Pipeline, plain: VideoPipelineOutput, fast: VideoPipelineOutput) -> _Shown:
    clips = tuple(pixels_of(output.frames[0]) for output in (plain, fast))
    return clips, dataclasses.replace(pipe.transformer.grid, frames=len(clips[1])), fast.frame_rate, None


def _sounds(pipe: Pipeline, plain: AudioPipelineOutput, fast: AudioPipelineOutput) -> _Shown:
    return (plain.audios[0], fast.audios[0]), None, fast.sampling_rate, None


# By medium.
_SHOWN = {"image": _pictures, "video": _clips, "audio": _sounds}
