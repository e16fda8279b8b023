"""`visual-spec bench` for music: columns a call and seconds a clip of column decoding and of masked models.

Plain decoding, column by column, stands against every other setting on the same captions and seeds in the same rounds.
A masked model of the same codec can stand beside it (`--masked`); a masked model alone is compared with itself, as it
was saved. With `--curve` only calls are counted.

A clip of T frames has T + K - 1 columns in the delay pattern of K codebooks; a masked model decodes its T frames, and
fills each of them codebook by codebook. So the calls of both compare, and columns a call nearly do.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import torch

from visual_spec.eval import draws
from visual_spec.eval.defaults import ModelSettings, settings_beside
from visual_spec.eval.machine import environment, load
from visual_spec.eval.media import clips_of
from visual_spec.eval.settings import Setting, check_samplers
from visual_spec.eval.speed import measure
from visual_spec.eval.speed.curve import curve
from visual_spec.eval.speed.groups import read_groups
from visual_spec.eval.speed.tables import SPEED_UP, curve_table, speed_up_cells
from visual_spec.eval.speed.timing import (
    Decoded,
    Report,
    coverage_note,
    facts_of,
    mean_and_deviation,
    processor_figures,
    promises_plain,
    summarise_row,
    time_rounds,
)
from visual_spec.eval.tables import markdown


def run(args: argparse.Namespace, known: ModelSettings, report: Report) -> tuple[dict[str, Any], str]:
    """Document and table of `visual-spec bench` for music.

    Raises:
        ValueError: options that do not apply, or settings that cannot be read; before anything is loaded.
    """
    from visual_spec.data.tunes import held_out_prompts

    beside = settings_beside(args.masked, known)
    if args.curve and (known.masked or beside is not None):
        raise ValueError(
            "--curve counts the calls of column decoding; a masked model takes as many as its steps. Leave one out."
        )
    groups = read_groups(args, known, beside)
    pipe = load(args.model, args.device, args.dtype, args.threads, args.masked)
    for settings in groups:
        check_samplers(pipe, settings)
    prompts = held_out_prompts(args.prompts)
    facts = environment(pipe.device, pipe.transformer.dtype)
    facts["transformer_parameters"] = parameters_of(pipe)
    if beside is not None:
        facts["masked_parameters"] = parameters_of(pipe.masked)
    document: dict[str, Any] = {
        "kind": "music-curve" if args.curve else "music-bench",
        "settings": {"law": asdict(groups[0][0].law)},
        "environment": facts,
    }
    if args.curve:
        size = max(args.batch_sizes)
        document["rows"] = [
            row
            for settings in groups
            for row in curve(pipe, settings, prompts, batch_size=size, report=report)
        ]
        return document, curve_table(document["rows"], "columns")
    document["rows"] = [
        row
        for batch_size in args.batch_sizes
        for settings in groups
        for row in time_settings(
            pipe,
            settings,
            prompts,
            batch_size=batch_size,
            runs=args.runs,
            warmup=args.warmup,
            report=report,
        )
    ]
    # Last, because the buffers of these measurements would count as memory of the rows.
    facts["copy_bandwidth"] = measure.copy_bandwidth(pipe.device)
    facts["clip_ms"] = clip_ms(pipe, groups[0][0], prompts[:1])
    note = coverage_note(len(prompts), args.batch_sizes, args.runs)
    return document, "\n\n".join(filter(None, [music_table(document["rows"]), note]))


def time_settings(
    pipe: Any,
    settings: Sequence[Setting],
    prompts: Sequence[str],
    *,
    batch_size: int,
    runs: int,
    warmup: int,
    report: Report = lambda text: None,
) -> list[dict[str, Any]]:
    """Time every setting on the same captions and seeds, round by round; the first one is what speed-ups are over.

    Seconds are those of the decoding, from the prefill to the last column; text and codec cost every setting the same.

    Args:
        pipe: an `AudioPipeline`, or a `MaskedPair`.
        prompts: round r takes the next `batch_size` of them, from the start again at the end.

    Returns:
        One dict per setting: `facts_of`; what `summarise_row` gives, with `ms_per_clip` in place of `ms_per_image`, and
        `columns_per_call` as the mean over clips of a clip's columns over its calls, beside `deviation`, its standard
        deviation over clips. `columns`: of a clip. `speed_up_calls`: calls of the first setting over the setting's.
        `identical_samples`: how many of `samples` have the codes of the first setting; None where not promised.
        `divergence`: what `DivergenceMeter` measures a tested code, mean over rounds; None for a sampler without.
        `peak_memory_bytes`: see `measure.peak_memory`.
    """
    columns = [0] * len(settings)
    divergence: list[list[float]] = [[] for _ in settings]

    def decode(index: int, chosen: list[str], first: int) -> tuple[Decoded, float]:
        arrays = draws.draw(pipe, settings[index], chosen, first)
        columns[index] = int(arrays["length"])
        if not np.isnan(arrays["divergence"]):
            divergence[index].append(float(arrays["divergence"]))
        codes = torch.from_numpy(arrays["tokens"]).flatten(1)
        busy = float(arrays["processor_seconds"])
        return Decoded(codes, torch.from_numpy(arrays["calls"]), busy), float(arrays["seconds"])

    rounds = time_rounds(
        len(settings),
        lambda first: [prompts[(first + place) % len(prompts)] for place in range(batch_size)],
        decode,
        device=pipe.device,
        batch_size=batch_size,
        runs=runs,
        warmup=warmup,
        report=lambda text: report(
            f"batch {batch_size}, guidance {settings[0].law.guidance_scale:g}: {text}"
        ),
    )
    plain_calls = [count for batch in rounds.calls[0] for count in batch]
    rows = []
    for index, setting in enumerate(settings):
        row = summarise_row(rounds.seconds[index], rounds.calls[index], rounds.seconds[0], columns[index])
        del row["tokens_per_call"]
        calls = [count for batch in rounds.calls[index] for count in batch]
        mean, deviation = mean_and_deviation([columns[index] / count for count in calls])
        row["ms_per_clip"] = row.pop("ms_per_image")
        row.update(
            columns=columns[index],
            columns_per_call=mean,
            deviation=deviation,
            speed_up_calls=sum(plain_calls) / sum(calls),
            identical_samples=rounds.identical[index]
            if index and promises_plain(setting, settings[0])
            else None,
            samples=runs * batch_size,
            divergence=statistics.fmean(divergence[index]) if divergence[index] else None,
            peak_memory_bytes=rounds.peak[index],
        )
        row |= processor_figures(rounds.processor_seconds[index], rounds.processor_seconds[0])
        rows.append({**facts_of(setting), "batch_size": batch_size, **row})
    return rows


def parameters_of(pipe: Any) -> int:
    """Numbers in the transformer."""
    return sum(parameter.numel() for parameter in pipe.transformer.parameters())


def clip_ms(pipe: Any, setting: Setting, prompts: Sequence[str]) -> float:
    """Milliseconds from the codes to the samples of one clip."""
    codes = draws.draw(pipe, setting, prompts, 0)["tokens"]
    return 1000 * min(measure.timed(lambda: clips_of(pipe, codes), pipe.device)[1] for _ in range(3))


def music_table(rows: Sequence[dict[str, Any]]) -> str:
    """The Markdown table of timed rows."""
    header = ["batch", "guidance", "sampler", "window", "calls", "columns/call", "ms/call", "ms/clip p50"]
    header += ["p20 - p80", *SPEED_UP, "in calls", "same as plain"]
    header += ["divergence", "peak MiB"]
    lines = []
    for row in rows:
        clip, same, divergence = row["ms_per_clip"], row["identical_samples"], row["divergence"]
        lines.append(
            [
                str(row["batch_size"]),
                f"{row['guidance_scale']:g}",
                row["name"],
                str(row["window"] or "-"),
                f"{row['calls']:.1f}",
                f"{row['columns_per_call']:.2f} +- {row['deviation']:.2f}",
                f"{row['ms_per_call']:.2f}",
                f"{clip['p50']:.0f}",
                f"{clip['p20']:.0f} - {clip['p80']:.0f}",
                *speed_up_cells(row),
                f"{row['speed_up_calls']:.2f}x",
                "-" if same is None else f"{same} of {row['samples']}",
                "-" if divergence is None else f"{divergence:.4f}",
                f"{row['peak_memory_bytes'] / 2**20:.0f}",
            ]
        )
    return markdown(header, lines)
