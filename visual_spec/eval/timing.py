"""Rounds in which every setting decodes the same samples, and the figures that follow from their seconds and calls."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from visual_spec.eval import draws, measure
from visual_spec.eval.intervals import quantiles
from visual_spec.eval.media import MEDIA
from visual_spec.eval.settings import Setting, sampler_settings
from visual_spec.samplers.core.trace import IDENTICAL, LOSSLESS, DecodeTrace, promised

if TYPE_CHECKING:
    from visual_spec.eval.pair import Pipeline

Report = Callable[[str], object]
T = TypeVar("T")


@dataclass
class Decoded:
    """One decoding of a batch: tokens `[B, L]` and target calls `[B]`, both on the CPU.

    Attributes:
        processor_seconds: of the decoding; None: as the processor's clock says of all that was done.
    """

    tokens: Tensor
    calls: Tensor
    processor_seconds: float | None = None


def decoded(
    pipe: Pipeline, setting: Setting, prompts: Sequence[str], first: int
) -> tuple[Decoded, DecodeTrace]:
    """The samples from index `first` by the pipeline itself, and the trace of their decoding."""
    with setting.on(pipe):
        output, busy = draws.decode(pipe, setting, prompts, first)
    ids = getattr(output, MEDIA[pipe.medium].ids)
    return Decoded(ids.cpu(), output.trace.target_calls, busy), output.trace


@dataclass
class Rounds:
    """What was timed, by setting.

    Attributes:
        seconds: `[setting][round]`.
        processor_seconds: likewise, of all threads of this process; no rounds where the model is on a GPU.
        calls: target calls, `[setting][round][sample]`.
        identical: `[setting]`, samples with the tokens of setting 0.
        peak: `[setting]`, bytes, see `measure.peak_memory`.
    """

    seconds: list[list[float]]
    processor_seconds: list[list[float]]
    calls: list[list[list[int]]]
    identical: list[int]
    peak: list[int]


def time_rounds(
    count: int,
    prepare: Callable[[int], T],
    decode: Callable[[int, T, int], tuple[Decoded, float]],
    *,
    device: torch.device,
    batch_size: int,
    runs: int,
    warmup: int,
    report: Report = lambda text: None,
) -> Rounds:
    """Decode the same samples with every setting, round by round.

    Args:
        count: how many settings there are.
        prepare: makes a condition of the index of a round's first sample; not timed.
        decode: (setting, condition, first sample) -> what was decoded, and its seconds.
    """
    seconds, busy_seconds, calls = ([[] for _ in range(count)] for _ in range(3))
    times = Rounds(seconds, busy_seconds, calls, [0] * count, [0] * count)
    for _ in range(warmup):
        condition = prepare(0)
        for index in range(count):
            decode(index, condition, 0)
    for number in range(runs):
        first = number * batch_size
        condition = prepare(first)
        # Every second round runs backwards, so that no setting always follows the same one.
        order = list(range(count))[:: 1 if number % 2 == 0 else -1]
        drawn: dict[int, Decoded] = {}
        for index in order:
            measure.reset_peak_memory(device)
            busy = time.process_time()
            drawn[index], elapsed = decode(index, condition, first)
            busy, own = time.process_time() - busy, drawn[index].processor_seconds
            times.seconds[index].append(elapsed)
            if device.type == "cpu":
                times.processor_seconds[index].append(busy if own is None else own)
            times.calls[index].append(drawn[index].calls.tolist())
            times.peak[index] = max(times.peak[index], measure.peak_memory(device))
        for index in order:
            one, plain = drawn[index].tokens, drawn[0].tokens
            # Clips of another model may have another length; tokens may be vectors.
            same = (one == plain).flatten(1).all(1) if one.shape == plain.shape else torch.zeros(0)
            times.identical[index] += int(same.sum())
        report(f"round {number + 1} of {runs}")
    return times


def facts_of(setting: Setting, plain: Setting) -> dict[str, object]:
    """Return what a document says of a setting beside its figures and beside plain decoding."""
    return {
        "name": setting.name,
        "window": setting.window,
        "sampler": sampler_settings(setting.sampler),
        "law": setting.pipeline_law,
        "guidance_scale": setting.law.guidance_scale,
        "lossless": promised(setting.sampler, plain.sampler) in (IDENTICAL, LOSSLESS),
    }


def promises_plain(setting: Setting, plain: Setting) -> bool:
    """Return whether a setting must have the tokens of plain decoding."""
    same = (setting.law, setting.seed) == (plain.law, plain.seed)
    return same and promised(setting.sampler, plain.sampler) == IDENTICAL


def add_floors(rows: Sequence[dict[str, Any]], bandwidth: float) -> None:
    """Add `floor_ms_per_call`, (weight + cache bytes) / bandwidth in bytes per second, and `floor_share`, that over the
    (median) milliseconds measured; None where it is not known what a call reads.

    A call that reads its weights and cache from memory takes no less; one whose weights fit into the caches of the
    processor may.
    """
    for row in rows:
        row["floor_ms_per_call"] = row["floor_share"] = None
        if row["weight_bytes"] is not None:
            row["floor_ms_per_call"] = (row["weight_bytes"] + row["cache_bytes"]) / bandwidth * 1000
            row["floor_share"] = row["floor_ms_per_call"] / median_ms(row)


def median_ms(row: dict[str, Any]) -> float:
    """Milliseconds of a call: some rows have all quantiles."""
    measured = row["ms_per_call"]
    return measured["p50"] if isinstance(measured, dict) else measured


def summarise_row(
    seconds: Sequence[float], calls: Sequence[Sequence[int]], plain_seconds: Sequence[float], tokens: int
) -> dict[str, Any]:
    """The figures of a setting from its rounds: `seconds[r]`, target calls `calls[r][b]`, plain decoding's seconds.

    Returns:
        `calls` and `tokens_per_call`: means over all timed samples, tokens per call as all tokens over all calls.
        `ms_per_call`: median over rounds of seconds over forwards, where a batch takes as many forwards as its slowest
        sample. `ms_per_image`: quantiles of seconds over batch size. `speed_up`: quantiles of plain seconds over the
        setting's, both of one round. `seconds` and `calls_per_sample`: what was given.
    """
    flat = [count for batch in calls for count in batch]
    batch_size = len(calls[0])
    per_call = [elapsed / max(batch) * 1000 for elapsed, batch in zip(seconds, calls, strict=True)]
    return {
        "seconds": list(seconds),
        "calls_per_sample": [list(batch) for batch in calls],
        "calls": sum(flat) / len(flat),
        "tokens_per_call": tokens * len(flat) / sum(flat),
        "ms_per_call": quantiles(per_call)["p50"],
        "ms_per_image": quantiles([elapsed / batch_size * 1000 for elapsed in seconds]),
        "speed_up": quantiles([p / s for p, s in zip(plain_seconds, seconds, strict=True)]),
    }


def processor_figures(busy: Sequence[float], plain: Sequence[float]) -> dict[str, Any]:
    """`processor_seconds` of every round, and `processor_speed_up`, plain decoding's over the setting's in all rounds.

    None where the model does not run on the processor. Where it does, others' work takes clock time and hardly
    processor time, so this figure is the steadier one.
    """
    return {"processor_seconds": list(busy), "processor_speed_up": sum(plain) / sum(busy) if busy else None}


def coverage_note(prompts: int, batch_sizes: Sequence[int], runs: int) -> str:
    """Says which prompts rounds left out; "" where they drew all."""
    short = [size for size in batch_sizes if size * runs < prompts]
    return " ".join(
        f"At batch {size}, {runs} rounds drew the first {size * runs} of {prompts} prompts; --runs "
        f"{-(-prompts // size)} draws all."
        for size in short
    )


def camera_note(prompts: Sequence[str]) -> str:
    """Says in how many clips the camera pans, on which tokens a call depend; "" where no prompt names a camera."""
    if not any(", camera " in prompt for prompt in prompts):
        return ""
    pans = sum(", camera pans " in prompt for prompt in prompts)
    return (
        f"The camera pans in {pans} of {len(prompts)} clips ({pans / len(prompts):.0%}); a call commits fewer "
        "tokens of those."
    )


def mean_and_deviation(values: Sequence[float]) -> tuple[float, float]:
    """Mean and standard deviation, the latter 0 for a single value."""
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0
