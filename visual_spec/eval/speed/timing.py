"""The measurements behind `visual-spec bench`: rows of plain numbers, raw seconds included."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from visual_spec.eval.rows import PLAIN
from visual_spec.eval.speed import measure
from visual_spec.eval.speed.official_sizes import of_llamagen
from visual_spec.pipelines.token_image import TokenImagePipeline
from visual_spec.samplers.autoregressive import AutoregressiveSampler
from visual_spec.samplers.core.graph import can_record
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.core.noise import TOKEN, CounterNoise, draw_keys
from visual_spec.samplers.jacobi import SpeculativeJacobiSampler

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


def with_graphs(entries: Sequence[Entry], device: torch.device, *, recordable: bool) -> list[Entry]:
    """On CUDA every entry as it runs without a graph and, where the model can be recorded, with one; else as it is."""
    if device.type != "cuda":
        return list(entries)
    found = []
    for entry in entries:
        settings = measure.sampler_settings(entry.sampler)
        kind = type(entry.sampler)
        for graph, suffix in ((False, "eager"), (True, "graph")):
            if recordable or not graph:
                chosen = {name: value for name, value in settings.items() if name != "class"} | {
                    "graph": graph
                }
                found.append(Entry(f"{entry.name}, {suffix}", kind(**chosen), entry.window))
    return found


def make_law(guidance_scale: float, **settings: Any) -> TokenLaw:
    """The law of a row; refuses values out of range."""
    return TokenLaw(guidance_scale=guidance_scale, **settings)


def environment_of(pipe: TokenImagePipeline) -> dict[str, Any]:
    """`measure.environment` of the pipeline's device and dtype, and the size of its model."""
    facts = measure.environment(pipe.device, pipe.transformer.dtype)
    facts["transformer_parameters"] = sum(p.numel() for p in pipe.transformer.parameters())
    return facts


def machine_facts(pipe: TokenImagePipeline) -> dict[str, float]:
    """`copy_bandwidth` in bytes per second, `matmul_flops` in operations per second, and `picture_ms`, milliseconds
    from tokens to pixels of one image."""
    tokens = torch.zeros(1, pipe.transformer.grid.num_tokens, dtype=torch.long, device=pipe.device)
    with torch.no_grad():
        seconds = [
            measure.timed(lambda: pipe.vq_model.decode_tokens(tokens), pipe.device)[1] for _ in range(4)
        ]
    return {
        "copy_bandwidth": measure.copy_bandwidth(pipe.device),
        "matmul_flops": measure.matmul_peak(pipe.device, pipe.transformer.dtype),
        "picture_ms": min(seconds) * 1000,
    }


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
        One dict per row; plain decoding comes first. On CUDA every sampler has two rows, see `with_graphs`.
        `seconds`: of every timed round. `calls` and `tokens_per_call`: means over all timed samples, tokens per call
        as all tokens over all calls. `ms_per_call`: median over rounds of seconds over forwards, where a batch takes
        as many forwards as its slowest sample. `phase_ms_per_call`, `gap_ms_per_call`: see `measure.phase_figures`.
        `ms_per_image`: quantiles of seconds over batch size. `speed_up`: quantiles of seconds of the fastest plain
        row over the row's, both of one round. `weight_bytes`, `cache_bytes`: what a call must read. `flops_per_call`:
        see `OfficialModel.call_flops`. `identical_samples`: how many of `samples` have the tokens of plain decoding;
        None where not promised.
    """
    device = pipe.device
    entries = [Entry(PLAIN, AutoregressiveSampler()), *samplers]
    with torch.no_grad():
        state = pipe.transformer.prefill(
            pipe.encode_prompt([prompts[0]]), batch_size=1, guided=False, window=1
        )
    entries = with_graphs(entries, device, recordable=can_record(state))
    samples = runs * batch_size
    traces: dict[str, list[Any]] = {}  # by row

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
            traces.setdefault(f"{entry.name}, {entry.window}", []).append(result.trace)
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
    official = of_llamagen(PLAIN, pipe.transformer)
    plain_rows = [n for n, entry in enumerate(entries) if isinstance(entry.sampler, AutoregressiveSampler)]
    best = min(plain_rows, key=lambda index: measure.quantiles(seconds[index])["p50"])
    rows = []
    for index, entry in enumerate(entries):
        promised = entry.sampler.identical
        row = summarise_row(seconds[index], calls[index], seconds[best], shared["tokens"])
        row.update(_phases(entry, traces[f"{entry.name}, {entry.window}"][-runs:], pipe, condition, law))
        row["flops_per_call"] = official.call_flops(
            read[0], batch_size=batch_size, guided=law.guided, window=entry.window or 1
        )
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
        row.update(phase_ms_per_call={}, gap_ms_per_call=None, flops_per_call=None)
        rows.insert(1, {"name": NO_CACHE, "window": None, "sampler": None, **shared, **row})
        report(f"batch {batch_size}, guidance {law.guidance_scale:g}: decoded once without a cache")
    return rows


def _phases(
    entry: Entry, traces: Sequence[Any], pipe: TokenImagePipeline, condition: Any, law: TokenLaw
) -> dict[str, Any]:
    """`measure.phase_figures` of the decodes that were timed."""
    phases = [dict(trace.phase_seconds) for trace in traces]
    seconds = [trace.seconds - laps.pop("prefill") for trace, laps in zip(traces, phases, strict=True)]
    calls = [max(1, int(trace.target_calls.max()) - 1) for trace in traces]
    batch_size = len(traces[0].target_calls)

    def decode(callback: Callable[[int, Tensor], Any]) -> None:
        generator = [torch.Generator().manual_seed(index) for index in range(batch_size)]
        options = dict(law=law, generator=generator, batch_size=batch_size, callback=callback)
        entry.sampler(pipe.transformer, condition, **options)

    busy = measure.busy_ms_per_call(decode, pipe.device)
    return measure.phase_figures(seconds, phases, calls, device=pipe.device, busy_ms=busy)


def add_floors(rows: Sequence[dict[str, Any]], bandwidth: float) -> None:
    """Add `floor_ms_per_call`, (weight + cache bytes) / bandwidth in bytes per second, and `floor_share`, that over the
    (median) milliseconds measured; None without a cache.

    A call that reads its weights and cache from memory takes no less; one whose weights fit into the caches of the
    processor may.
    """
    for row in rows:
        floor = (row["weight_bytes"] + row["cache_bytes"]) / bandwidth * 1000
        row["floor_ms_per_call"] = None if row["name"] == NO_CACHE else floor
        row["floor_share"] = None if row["name"] == NO_CACHE else floor / median_ms(row)


def median_ms(row: dict[str, Any]) -> float:
    """Milliseconds of a call: some rows have all quantiles."""
    measured = row["ms_per_call"]
    return measured["p50"] if isinstance(measured, dict) else measured


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


def ratio_with_error(calls: Sequence[int], tokens: int) -> tuple[float, float]:
    """Tokens over calls of all samples, and its standard error to first order (0 for a single sample)."""
    count = len(calls)
    mean = sum(calls) / count
    if count < 2:
        return tokens / mean, 0.0
    variance = sum((value - mean) ** 2 for value in calls) / (count - 1)
    return tokens / mean, tokens / mean**2 * math.sqrt(variance / count)
