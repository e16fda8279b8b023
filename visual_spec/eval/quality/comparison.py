"""Plain and accelerated decoding of the same prompts with the same seeds, side by side."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from visual_spec.eval.report.pages import ComparisonRow, ScaleComparisonRow
from visual_spec.models.core.protocol import TokenGrid
from visual_spec.pipelines.accelerate import make_sampler
from visual_spec.pipelines.scale_image import ScaleImagePipeline
from visual_spec.pipelines.scale_plan import ScalePlan


def seeded_generators(seeds: Sequence[int]) -> list[torch.Generator]:
    """One CPU generator per seed."""
    return [torch.Generator().manual_seed(seed) for seed in seeds]


def compare(
    pipe: Any,
    sampler: Any,
    jobs: Sequence[tuple[str, int]],
    law: Mapping[str, Any],
    *,
    plan: ScalePlan | None = None,
) -> list[ComparisonRow]:
    """Decode each (prompt, seed) plainly and with `sampler`, one picture at a time.

    Plainly is one token after the other, and for a `ScaleImagePipeline` one scale after the other by one model.

    Args:
        law: guidance_scale, temperature, top_k, top_p as for `ImagePipeline.__call__`; what is left out is its default.
        plan: who draws which scales, for a `ScaleImagePipeline`; None: its own.

    Returns:
        One row per job; `identical` says that tokens and pixels are equal, `promised` that the sampler says so. Seconds
        are those of the decoding, from prefill to the last token, after one picture of warm-up for each sampler.

    Raises:
        ValueError, TypeError: bad input, as `ImagePipeline.__call__`.
    """
    plan = plan or ScalePlan()
    if isinstance(pipe, ScaleImagePipeline):
        both = ((pipe.sampler, ScalePlan.plain(pipe.config)), (sampler, plan))
    elif pipe.fast_sampler == "scale-wise":
        raise ValueError(
            f"a {type(pipe).__name__} has one way to draw and nothing to compare it with; draw without --compare."
        )
    else:
        both = ((make_sampler("autoregressive"), ScalePlan()), (sampler, plan))

    def decode(chosen: tuple[Any, ScalePlan], prompt: str, seed: int) -> Any:
        pipe.sampler = chosen[0]
        with chosen[1].on(pipe):
            return pipe(prompt, generator=seeded_generators([seed]), **law)

    rows, before = [], pipe.sampler
    try:
        for chosen in both:
            decode(chosen, *jobs[0])
        # disable=None: no bar where the output is no terminal.
        for prompt, seed in tqdm(
            jobs, desc="plain and accelerated", unit=" pictures", leave=False, disable=None
        ):
            plain, fast = (decode(chosen, prompt, seed) for chosen in both)
            rows.append(_row(pipe, prompt, plain, fast))
    finally:
        pipe.sampler = before
    return rows


def _row(pipe: Any, prompt: str, plain: Any, fast: Any) -> ComparisonRow:
    same_pixels = np.array_equal(np.asarray(plain.images[0]), np.asarray(fast.images[0]))
    figures: dict[str, Any] = dict(
        prompt=prompt,
        plain_image=plain.images[0],
        fast_image=fast.images[0],
        commit_call=fast.trace.commit_call[0].cpu(),
        plain_calls=int(plain.trace.target_calls[0]),
        fast_calls=int(fast.trace.target_calls[0]),
        plain_seconds=plain.trace.seconds,
        fast_seconds=fast.trace.seconds,
        identical=bool(plain.tokens.equal(fast.tokens)) and same_pixels,
        promised=fast.trace.identical,
        output_law=fast.trace.output_law,
    )
    if not isinstance(pipe, ScaleImagePipeline):
        return ComparisonRow(grid=pipe.transformer.grid, **figures)
    return ScaleComparisonRow(
        grid=TokenGrid(1, fast.tokens.shape[1]),
        sides=tuple(pipe.vq_model.scales),
        drafted=fast.trace.model_calls[0],
        plain_cache=max(plain.trace.cache_bytes),
        fast_cache=max(fast.trace.cache_bytes),
        **figures,
    )
