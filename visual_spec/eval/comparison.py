"""Plain and accelerated decoding of the same prompts with the same seeds, side by side."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from visual_spec.eval.report import ComparisonRow
from visual_spec.pipelines.accelerate import make_sampler
from visual_spec.pipelines.image import ImagePipeline


def seeded_generators(seeds: Sequence[int]) -> list[torch.Generator]:
    """One CPU generator per seed."""
    return [torch.Generator().manual_seed(seed) for seed in seeds]


def compare(
    pipe: ImagePipeline, sampler: Any, jobs: Sequence[tuple[str, int]], law: Mapping[str, Any]
) -> list[ComparisonRow]:
    """Decode each (prompt, seed) plainly and with `sampler`, one picture at a time.

    Args:
        law: guidance_scale, temperature, top_k, top_p as for `ImagePipeline.__call__`; what is left out is its default.

    Returns:
        One row per job; `identical` says that tokens and pixels are equal. Seconds are those of the decoding, from
        prefill to the last token, after one picture of warm-up for each sampler.

    Raises:
        ValueError, TypeError: bad input, as `ImagePipeline.__call__`.
    """

    def decode(chosen: Any, prompt: str, seed: int) -> Any:
        pipe.sampler = chosen
        return pipe(prompt, generator=seeded_generators([seed]), **law)

    rows, before = [], pipe.sampler
    both = (make_sampler("autoregressive"), sampler)
    try:
        for chosen in both:
            decode(chosen, *jobs[0])
        # disable=None: no bar where the output is no terminal.
        for prompt, seed in tqdm(
            jobs, desc="plain and accelerated", unit=" pictures", leave=False, disable=None
        ):
            plain, fast = (decode(chosen, prompt, seed) for chosen in both)
            same_pixels = np.array_equal(np.asarray(plain.images[0]), np.asarray(fast.images[0]))
            rows.append(
                ComparisonRow(
                    prompt=prompt,
                    plain_image=plain.images[0],
                    fast_image=fast.images[0],
                    commit_call=fast.trace.commit_call[0].cpu(),
                    grid=pipe.transformer.grid,
                    plain_calls=int(plain.trace.target_calls[0]),
                    fast_calls=int(fast.trace.target_calls[0]),
                    plain_seconds=plain.trace.seconds,
                    fast_seconds=fast.trace.seconds,
                    identical=bool(plain.tokens.equal(fast.tokens)) and same_pixels,
                )
            )
    finally:
        pipe.sampler = before
    return rows
