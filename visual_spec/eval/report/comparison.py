"""Plain and accelerated decoding of the same prompts with the same seeds, side by side."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from visual_spec.eval.report.music_pages import AudioRow
from visual_spec.eval.report.pages import ComparisonRow, ScaleComparisonRow
from visual_spec.eval.report.video_pages import VideoRow
from visual_spec.models.core.protocol import TokenGrid
from visual_spec.pipelines.sampler_text import parse_sampler
from visual_spec.pipelines.scale_plan import ScalePlan, make_row
from visual_spec.pipelines.video_files import pixels_of
from visual_spec.samplers.masked.state import MaskedTrace


def seeded_generators(seeds: Sequence[int]) -> list[torch.Generator]:
    """One CPU generator per seed."""
    return [torch.Generator().manual_seed(seed) for seed in seeds]


def compare(
    pipe: Any,
    sampler: Any,
    jobs: Sequence[tuple[str, int]],
    settings: Mapping[str, Any],
    *,
    plan: ScalePlan | None = None,
    done: Callable[[int, Any], None] = lambda index, row: None,
) -> list[Any]:
    """Decode each (prompt, seed) plainly and with `sampler`, one sample at a time.

    Args:
        pipe: its sampler is put back.
        settings: of a call of the pipeline: the law, of music also the length.
        plan: who draws which scales, for a `ScaleImagePipeline`; None: its own.
        done: called with the index of a job and its row, as soon as it is there.

    Returns:
        A `ComparisonRow`, `ScaleComparisonRow`, `VideoRow` or `AudioRow` a job. `identical`: tokens and pixels,
        or codes and waves, are equal; `promised`: the sampler says so without a condition. Seconds are those of the
        decoding, from prefill to the last token, after one sample of warm-up for each sampler. A sampler with
        `exact_width` is compared with plain decoding with `exact_width`, and timed beside plain decoding without it.

    Raises:
        ValueError, TypeError: a pipeline with one way to decode; bad input, as a call of the pipeline.
    """
    if not pipe.comparable:
        raise ValueError(
            f"a {type(pipe).__name__} of this kind has one way to decode and nothing to compare it with; leave "
            "--compare out."
        )
    plain, plain_plan = plain_decoding(pipe)
    chosen_ones = [(plain, plain_plan), (sampler, plan or ScalePlan())]
    if sampler.config.get("exact_width"):
        chosen_ones.append((plain.from_config(plain.config, exact_width=True), plain_plan))

    def decode(chosen: tuple[Any, ScalePlan], prompt: str, seed: int) -> Any:
        pipe.sampler = chosen[0]
        with chosen[1].on(pipe):
            return pipe(prompt, generator=seeded_generators([seed]), **settings)

    rows, before = [], pipe.sampler
    # disable=None: no bar where the output is no terminal. The warm-up counts: it takes as long as a job.
    bar = tqdm(
        total=len(chosen_ones) * (len(jobs) + 1),
        desc="plain and accelerated",
        unit=" decodes",
        leave=False,
        disable=None,
    )
    try:
        with bar:
            for index in range(-1, len(jobs)):
                outputs = []
                for chosen in chosen_ones:
                    outputs.append(decode(chosen, *jobs[max(index, 0)]))
                    bar.update()
                if len(outputs) == 3:
                    seconds, exact = outputs[0].trace.seconds, outputs.pop()
                    exact.trace = dataclasses.replace(exact.trace, seconds=seconds)
                    outputs[0] = exact
                if index >= 0:
                    rows.append(_row_maker(pipe)(pipe, jobs[index][0], *outputs))
                    done(index, rows[-1])
    finally:
        pipe.sampler = before
    return rows


def plain_decoding(pipe: Any) -> tuple[Any, ScalePlan]:
    """Sampler and plan of a pipeline's plain decoding.

    Where the pipeline has a sampler of that class, it is taken as it is: models differ in how their guidance grows.
    """
    name, settings = parse_sampler(pipe.plain_sampler)
    sampler, plan = make_row(name, **settings)
    return (pipe.sampler if type(pipe.sampler) is type(sampler) else sampler), plan


def _figures(prompt: str, plain: Any, fast: Any) -> dict[str, Any]:
    """What all kinds of rows hold."""
    return dict(
        prompt=prompt,
        commit_call=fast.trace.commit_call[0].cpu(),
        plain_calls=int(plain.trace.target_calls[0]),
        fast_calls=int(fast.trace.target_calls[0]),
        plain_seconds=plain.trace.seconds,
        fast_seconds=fast.trace.seconds,
        promised=fast.trace.promises_tokens,
        output_law=fast.trace.output_law,
        near_ties=None if fast.trace.near_ties is None else int(fast.trace.near_ties.sum()),
    )


def _pictures(plain: Any, fast: Any) -> dict[str, Any]:
    one, two = plain.images[0], fast.images[0]
    same_pixels = np.array_equal(np.asarray(one), np.asarray(two))
    return dict(
        plain_image=one, fast_image=two, identical=bool(plain.tokens.equal(fast.tokens)) and same_pixels
    )


def _token_row(pipe: Any, prompt: str, plain: Any, fast: Any) -> ComparisonRow:
    heads = [getattr(one.trace, "head_calls", None) for one in (plain, fast)]
    return ComparisonRow(
        grid=pipe.transformer.grid,
        head_calls=None if None in heads else tuple(int(calls[0]) for calls in heads),  # pyright: ignore
        **_pictures(plain, fast),
        **_figures(prompt, plain, fast),
    )


def _scale_row(pipe: Any, prompt: str, plain: Any, fast: Any) -> ScaleComparisonRow:
    return ScaleComparisonRow(
        grid=TokenGrid(1, fast.tokens.shape[1]),
        sides=tuple(pipe.vq_model.scales[: sum(fast.trace.model_calls)]),
        plain_tokens=plain.tokens.shape[1],
        drafted=fast.trace.model_calls[0],
        plain_cache=max(plain.trace.cache_bytes),
        fast_cache=max(fast.trace.cache_bytes),
        **_pictures(plain, fast),
        **_figures(prompt, plain, fast),
    )


def _column_row(pipe: Any, prompt: str, plain: Any, fast: Any) -> AudioRow:
    return AudioRow(
        plain_audio=plain.audios[0],
        fast_audio=fast.audios[0],
        sampling_rate=fast.sampling_rate,
        identical=plain.codes.equal(fast.codes) and np.array_equal(plain.audios, fast.audios),
        entry_call=fast.trace.entry_call[0] if isinstance(fast.trace, MaskedTrace) else None,
        **_figures(prompt, plain, fast),
    )


def _video_row(pipe: Any, prompt: str, plain: Any, fast: Any) -> VideoRow:
    one, two = (pixels_of(output.frames[0]) for output in (plain, fast))
    return VideoRow(
        plain_frames=one,
        fast_frames=two,
        frame_rate=fast.frame_rate,
        grid=dataclasses.replace(pipe.transformer.grid, frames=len(two)),
        identical=bool(plain.tokens.equal(fast.tokens)) and np.array_equal(one, two),
        **_figures(prompt, plain, fast),
    )


def _row_maker(pipe: Any) -> Callable[..., Any]:
    return _video_row if pipe.medium == "video" else _ROWS[pipe.unit]


_ROWS = {"tokens": _token_row, "scales": _scale_row, "columns": _column_row}
