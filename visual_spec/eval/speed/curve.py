"""Tokens per call over windows, guidance scales and methods: counted, nothing is timed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from visual_spec.eval.speed import measure
from visual_spec.eval.speed.timing import Decoded, Entry, ratio_with_error
from visual_spec.pipelines.token_image import TokenImagePipeline
from visual_spec.samplers.autoregressive import AutoregressiveSampler
from visual_spec.samplers.core.law import TokenLaw


def curve(
    pipe: TokenImagePipeline,
    samplers: Sequence[Entry],
    laws: Sequence[TokenLaw],
    prompts: Sequence[str],
    *,
    seed: int,
    batch_size: int,
    report: Callable[[str], Any] = lambda text: None,
) -> list[dict[str, Any]]:
    """Tokens per call of every sampler under every law, one sample per prompt; sample i has seed `seed + i`.

    Returns:
        One dict per cell: `calls_per_sample`, `tokens_per_call` (all tokens over all calls), `standard_error` of it
        over samples, `identical_samples` (of `samples`, those with the tokens of plain decoding; None where not
        promised).
    """
    length = pipe.transformer.grid.num_tokens
    starts = range(0, len(prompts), batch_size)
    rows = []
    for law in laws:
        with torch.no_grad():
            conditions = [pipe.encode_prompt(list(prompts[start : start + batch_size])) for start in starts]

        def decode(sampler: Any, law: TokenLaw = law, conditions: list = conditions) -> Decoded:
            parts = []
            for start, condition in zip(starts, conditions, strict=True):
                seeds = range(seed + start, seed + min(start + batch_size, len(prompts)))
                generator = [torch.Generator().manual_seed(number) for number in seeds]
                parts.append(
                    sampler(pipe.transformer, condition, law=law, generator=generator, batch_size=len(seeds))
                )
            return Decoded(
                torch.cat([part.tokens.cpu() for part in parts]),
                torch.cat([part.trace.target_calls for part in parts]),
            )

        plain = (
            decode(AutoregressiveSampler()) if any(entry.sampler.identical for entry in samplers) else None
        )
        for entry in samplers:
            found = decode(entry.sampler)
            same = None
            if plain is not None and entry.sampler.identical:
                same = int((found.tokens == plain.tokens).all(1).sum())
            rate, error = ratio_with_error(found.calls.tolist(), length)
            rows.append(
                {
                    "name": entry.name.removeprefix("jacobi "),
                    "window": entry.window,
                    "sampler": measure.sampler_settings(entry.sampler),
                    "guidance_scale": law.guidance_scale,
                    "tokens": length,
                    "samples": len(prompts),
                    "calls_per_sample": found.calls.tolist(),
                    "tokens_per_call": rate,
                    "standard_error": error,
                    "identical_samples": same,
                }
            )
            report(
                f"guidance {law.guidance_scale:g}, {rows[-1]['name']}, W={entry.window}: {rate:.2f} tokens per call"
            )
    return rows
