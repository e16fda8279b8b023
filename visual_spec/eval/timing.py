"""The measurements behind `visual-spec bench`: rows of plain numbers, raw seconds included."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from visual_spec.eval import measure
from visual_spec.eval.rows import PLAIN
from visual_spec.pipelines.token_image import TokenImagePipeline
from visual_spec.samplers.autoregressive import AutoregressiveSampler
from visual_spec.samplers.jacobi import SpeculativeJacobiSampler
from visual_spec.samplers.law import TokenLaw
from visual_spec.samplers.randomness import TOKEN, CounterNoise, draw_keys

NO_CACHE = "autoregressive, no cache"


@dataclass
class Decoded:
    """One decoding of a batch: tokens `[B, L]` and target calls `[B]`, both on the CPU."""

    tokens: Tensor
    calls: Tensor


@dataclass
class Entry:
    """One row of a benchmark: a sampler, or None for plain decoding without a cache."""

    name: str
    sampler: Any
    window: int | None = None


def make_samplers(
    methods: Sequence[str], windows: Sequence[int], initial_draft: str | None = None
) -> list[Entry]:
    """Entries for every method (`coupling+acceptance`) and window, methods outermost.

    Raises:
        ValueError: a coupling, acceptance, window or initial draft that the sampler refuses.
    """
    entries = []
    more: dict[str, Any] = {} if initial_draft is None else {"initial_draft": initial_draft}
    for method in methods:
        coupling, _, acceptance = method.partition("+")
        for window in windows:
            sampler = SpeculativeJacobiSampler(
                window=window, coupling=coupling, acceptance=acceptance, **more
            )
            entries.append(Entry(f"jacobi {method}", sampler, window))
    return entries


def make_law(guidance_scale: float, **settings: Any) -> TokenLaw:
    """The law of a row; refuses values out of range."""
    return TokenLaw(guidance_scale=guidance_scale, **settings)


def environment_of(pipe: TokenImagePipeline) -> dict[str, Any]:
    """`measure.environment` of the pipeline's device and dtype, and the size of its model."""
    facts = measure.environment(pipe.device, pipe.transformer.dtype)
    facts["transformer_parameters"] = sum(p.numel() for p in pipe.transformer.parameters())
    return facts


def machine_facts(pipe: TokenImagePipeline) -> dict[str, float]:
    """`copy_bandwidth` in bytes per second, and `picture_ms`, milliseconds from tokens to pixels of one image."""
    tokens = torch.zeros(1, pipe.transformer.grid.num_tokens, dtype=torch.long, device=pipe.device)
    with torch.no_grad():
        seconds = [
            measure.timed(lambda: pipe.vq_model.decode_tokens(tokens), pipe.device)[1] for _ in range(4)
        ]
    return {"copy_bandwidth": measure.copy_bandwidth(pipe.device), "picture_ms": min(seconds) * 1000}


@torch.no_grad()
def decode_without_cache(
    model: Any, condition: Any, *, law: TokenLaw, generator: Any, batch_size: int
) -> tuple[Tensor, Tensor]:
    """Plain decoding that runs the whole prefix anew for every token: what a cache saves.

    The noise is that of `AutoregressiveSampler`, and so are the tokens.

    Returns:
        tokens `[B, L]` and calls `[B]`.
    """
    length = model.grid.num_tokens
    keys = draw_keys(generator, batch_size)
    noise, tokens = None, None
    for slot in range(length):
        state = model.prefill(condition, batch_size=batch_size, guided=law.guided, window=max(slot, 1))
        if noise is None or tokens is None:
            noise = CounterNoise(keys, state.logits.device)
            tokens = torch.zeros(batch_size, length, dtype=torch.long, device=state.logits.device)
        logits = state.logits[:, None]  # [R, 1, V]
        if slot:
            slots = torch.arange(slot, device=tokens.device).expand(batch_size, -1)
            logits = model(state, tokens[:, :slot], slots)[:, -1:]
        here = torch.full((batch_size, 1), slot, device=tokens.device)
        tokens[:, slot] = noise.categorical(law(logits, law.guided, here), here, TOKEN)[:, 0]
    assert tokens is not None  # a grid has at least one slot
    return tokens, torch.full((batch_size,), length)


@dataclass
class Rounds:
    """What was timed, by row.

    Attributes:
        seconds: `[row][round]`.
        calls: target calls, `[row][round][sample]`.
        identical: `[row]`, samples with the tokens of row 0.
        peak: `[row]`, bytes, see `measure.peak_memory`.
    """

    seconds: list[list[float]]
    calls: list[list[list[int]]]
    identical: list[int]
    peak: list[int]


def time_rounds(
    rows: int,
    prepare: Callable[[int], Any],
    decode: Callable[[int, Any, int], tuple[Decoded, float]],
    *,
    device: torch.device,
    batch_size: int,
    runs: int,
    warmup: int,
    report: Callable[[str], Any] = lambda text: None,
) -> Rounds:
    """Decode the same samples with every row, round by round.

    Args:
        prepare: makes a condition of the index of a round's first sample; not timed.
        decode: (row, condition, first sample) -> what was decoded, and its seconds.
    """
    found = Rounds([[] for _ in range(rows)], [[] for _ in range(rows)], [0] * rows, [0] * rows)
    for _ in range(warmup):
        condition = prepare(0)
        for index in range(rows):
            decode(index, condition, 0)
    for number in range(runs):
        first = number * batch_size
        condition = prepare(first)
        # Every second round runs backwards, so that no row always follows the same one.
        order = list(range(rows))[:: 1 if number % 2 == 0 else -1]
        drawn: dict[int, Decoded] = {}
        for index in order:
            measure.reset_peak_memory(device)
            drawn[index], elapsed = decode(index, condition, first)
            found.seconds[index].append(elapsed)
            found.calls[index].append(drawn[index].calls.tolist())
            found.peak[index] = max(found.peak[index], measure.peak_memory(device))
        for index in order:
            found.identical[index] += int((drawn[index].tokens == drawn[0].tokens).all(1).sum())
        report(f"round {number + 1} of {runs}")
    return found


def bench(
    pipe: TokenImagePipeline,
    samplers: Sequence[Entry],
    law: TokenLaw,
    prompts: Sequence[str],
    *,
    batch_size: int,
    runs: int,
    warmup: int,
    seed: int,
    no_cache: bool,
    report: Callable[[str], Any] = lambda text: None,
) -> list[dict[str, Any]]:
    """Time plain decoding and every sampler on the same prompts and seeds, round by round.

    Args:
        pipe: its transformer and text encoder are used, its sampler is not.
        law: of every row.
        prompts: round r takes the next `batch_size` of them, from the start again at the end.
        no_cache: also time one decoding without a cache.

    Returns:
        One dict per row; plain decoding comes first. `seconds`: of every timed round. `calls` and
        `tokens_per_call`: means over all timed samples, tokens per call as all tokens over all calls.
        `ms_per_call`: median over rounds of seconds over forwards, where a batch takes as many forwards as its
        slowest sample. `ms_per_image`: quantiles of seconds over batch size. `speed_up`: quantiles of plain seconds
        over the row's, both of one round. `weight_bytes`, `cache_bytes`: what a call must read.
        `identical_samples`: how many of `samples` have the tokens of plain decoding; None where not promised.
    """
    device = pipe.device
    entries = [Entry(PLAIN, AutoregressiveSampler()), *samplers]
    samples = runs * batch_size

    def decode(entry: Entry, condition: Any, first: int) -> tuple[Decoded, float]:
        generator = [torch.Generator().manual_seed(seed + first + index) for index in range(batch_size)]

        def work() -> Decoded:
            if entry.sampler is None:
                tokens, count = decode_without_cache(
                    pipe.transformer, condition, law=law, generator=generator, batch_size=batch_size
                )
                return Decoded(tokens.cpu(), count)
            result = entry.sampler(
                pipe.transformer, condition, law=law, generator=generator, batch_size=batch_size
            )
            return Decoded(result.tokens.cpu(), result.trace.target_calls)

        return measure.timed(work, device)

    def conditions(first: int) -> Any:
        chosen = [prompts[(first + index) % len(prompts)] for index in range(batch_size)]
        with torch.no_grad():
            return pipe.encode_prompt(chosen)

    rounds = time_rounds(
        len(entries),
        conditions,
        lambda index, condition, first: decode(entries[index], condition, first),
        device=device,
        batch_size=batch_size,
        runs=runs,
        warmup=warmup,
        report=lambda text: report(f"batch {batch_size}, guidance {law.guidance_scale:g}: {text}"),
    )
    seconds, calls, identical, peak = rounds.seconds, rounds.calls, rounds.identical, rounds.peak

    condition = conditions(0)
    with torch.no_grad():
        read = measure.bytes_per_call(pipe.transformer, condition, batch_size=batch_size, guided=law.guided)
    shared = {
        "batch_size": batch_size,
        "guidance_scale": law.guidance_scale,
        "tokens": pipe.transformer.grid.num_tokens,
        "weight_bytes": read[0],
        "cache_bytes": read[1],
    }
    rows = []
    for index, entry in enumerate(entries):
        promised = entry.sampler.identical
        row = summarise_row(seconds[index], calls[index], seconds[0], shared["tokens"])
        row["identical_samples"] = identical[index] if promised and index else None
        row.update(peak_memory_bytes=peak[index], samples=samples, lossless=bool(entry.sampler.lossless))
        rows.append(
            {
                "name": entry.name,
                "window": entry.window,
                "sampler": measure.sampler_settings(entry.sampler),
                **shared,
                **row,
            }
        )
    if no_cache:
        entry = Entry(NO_CACHE, None)
        plain, plain_elapsed = decode(entries[0], condition, 0)
        drawn_anew, elapsed = decode(entry, condition, 0)
        row = summarise_row([elapsed], [drawn_anew.calls.tolist()], [plain_elapsed], shared["tokens"])
        same = int((drawn_anew.tokens == plain.tokens).all(1).sum())
        row.update(identical_samples=same, samples=batch_size, lossless=True)
        row["peak_memory_bytes"] = measure.peak_memory(device)
        rows.insert(1, {"name": NO_CACHE, "window": None, "sampler": None, **shared, **row})
        report(f"batch {batch_size}, guidance {law.guidance_scale:g}: decoded once without a cache")
    return rows


def add_floors(rows: Sequence[dict[str, Any]], bandwidth: float) -> None:
    """Add `floor_ms_per_call`: (weight + cache bytes) / bandwidth in bytes per second; None without a cache.

    A call that reads its weights and cache from memory takes no less; one whose weights fit into the caches of the
    processor may.
    """
    for row in rows:
        floor = (row["weight_bytes"] + row["cache_bytes"]) / bandwidth * 1000
        row["floor_ms_per_call"] = None if row["name"] == NO_CACHE else floor


def summarise_row(
    seconds: Sequence[float], calls: Sequence[Sequence[int]], plain_seconds: Sequence[float], tokens: int
) -> dict[str, Any]:
    """The figures of a row from its rounds: `seconds[r]`, target calls `calls[r][b]`, plain decoding's seconds.

    See `bench` for what each figure means.
    """
    flat = [count for batch in calls for count in batch]
    batch_size = len(calls[0])
    per_call = [elapsed / max(batch) * 1000 for elapsed, batch in zip(seconds, calls, strict=True)]
    return {
        "seconds": list(seconds),
        "calls_per_sample": [list(batch) for batch in calls],
        "calls": sum(flat) / len(flat),
        "tokens_per_call": tokens * len(flat) / sum(flat),
        "ms_per_call": measure.quantiles(per_call)["p50"],
        "ms_per_image": measure.quantiles([elapsed / batch_size * 1000 for elapsed in seconds]),
        "speed_up": measure.quantiles([p / s for p, s in zip(plain_seconds, seconds, strict=True)]),
    }


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


def ratio_with_error(calls: Sequence[int], tokens: int) -> tuple[float, float]:
    """Tokens over calls of all samples, and its standard error to first order (0 for a single sample)."""
    count = len(calls)
    mean = sum(calls) / count
    if count < 2:
        return tokens / mean, 0.0
    variance = sum((value - mean) ** 2 for value in calls) / (count - 1)
    return tokens / mean, tokens / mean**2 * math.sqrt(variance / count)
