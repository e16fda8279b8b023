"""`visual-spec bench` for music: columns a call and seconds a clip of column decoding and of masked models.

Plain decoding, column by column, stands against every window, coupling, unit and acceptance of `ColumnJacobiSampler`,
and against `DraftedColumnSampler` where the model has a drafter, on the same captions and seeds in the same rounds. A
masked model of the same codec can stand beside it (`--masked`); a masked model alone is compared with itself, as it was
saved. With `--curve` only calls are counted.

A clip of T frames has T + K - 1 columns in the delay pattern of K codebooks; a masked model decodes its T frames, and
fills each of them codebook by codebook. So the calls of both compare, and columns a call nearly do.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import torch

from visual_spec.eval.quality.evaluate import check_samplers, law_of
from visual_spec.eval.quality.music import clips_of
from visual_spec.eval.quality.samples import Setting, draw, parse_setting
from visual_spec.eval.rows import Rows, rows_of_masked, rows_of_model
from visual_spec.eval.speed import measure
from visual_spec.eval.speed.timing import Decoded, ratio_with_error, summarise_row, time_rounds
from visual_spec.samplers.columns_jacobi import UNITS, ColumnJacobiSampler
from visual_spec.samplers.core.checks import COUPLINGS

METHODS = (
    "gumbel+identical",
    *(f"{unit}+{coupling}+exact" for unit in UNITS for coupling in ("gumbel", "maximal", "independent")),
)
_WINDOWS = (8, 16, 32)
_CURVE_WINDOWS = (4, 8, 16, 32, 64)
Report = Callable[[str], Any]


def method_row(method: str, window: int, initial_draft: str | None = None) -> str:
    """The row that `coupling+acceptance` or `unit+coupling+acceptance` stands for, such as `column+maximal+exact`.

    Without a unit it is the column, but for acceptances that test each token.

    Raises:
        ValueError: another form.
    """
    *unit, coupling, acceptance = method.split("+") if method.count("+") in (1, 2) else (method, "", "")
    if coupling not in COUPLINGS or (unit and unit[0] not in UNITS):
        raise ValueError(
            f"--methods {method} given; pass coupling+acceptance or unit+coupling+acceptance, such as "
            f"{', '.join(METHODS)}, or a row such as column-jacobi:window=8 or masked:steps=20"
        )
    settings = {"window": window, "coupling": coupling, "acceptance": acceptance}
    if unit and acceptance != "identical":
        settings["unit"] = unit[0]
    if initial_draft is not None:
        settings["initial_draft"] = initial_draft
    return "column-jacobi:" + ",".join(f"{name}={value}" for name, value in settings.items())


def read_groups(args: argparse.Namespace, rows: Rows, beside: Rows | None) -> list[list[Setting]]:
    """For every guidance scale plain decoding, every method under every window, and the masked rows.

    Args:
        rows: of the model; beside: of the masked one beside it.

    Raises:
        ValueError: a method or a setting that cannot be read, or a law out of range.
    """
    windows = args.windows or (_CURVE_WINDOWS if args.curve else _WINDOWS)
    if rows.masked and (args.windows or args.initial_draft):
        raise ValueError(
            "--windows or --initial-draft given, which column decoding has; a masked model fills in whole clips. Leave "
            "it out."
        )
    asked = args.methods
    if asked is None:
        drafted = [text for text in rows.others if text.startswith("drafted-columns")]
        asked = rows.others if rows.masked else (*METHODS, *drafted)
    texts = [rows.plain]
    for method in asked:
        written = rows.masked or ":" in method or "+" not in method
        texts += (
            [method] if written else [method_row(method, window, args.initial_draft) for window in windows]
        )
    if beside is not None:
        texts += [beside.plain, *(beside.others if args.methods is None else ())]
    groups = []
    for scale in args.guidance_scales or [None]:
        laws = {False: law_of(args, rows), True: law_of(args, beside or rows)}
        if scale is not None:
            laws = {masked: replace(law, guidance_scale=scale) for masked, law in laws.items()}
        groups.append(
            [
                parse_setting(text, laws[text.strip().startswith("masked")], args.seed)
                for text in dict.fromkeys(texts)
            ]
        )
    return groups


def short_name(setting: Setting) -> str:
    """A row in a table beside its window: the method of `METHODS`, or the row as it was written."""
    sampler = setting.sampler
    if not isinstance(sampler, ColumnJacobiSampler):
        return setting.text
    config = sampler.config
    known = {"window", "coupling", "acceptance", "unit"}
    usual = ColumnJacobiSampler().config
    others = [
        f"{name}={value}"
        for name, value in config.items()
        if not name.startswith("_") and name not in known and value != usual[name]
    ]
    unit = [] if config["acceptance"] == "identical" else [config["unit"]]
    return ",".join(["+".join([*unit, config["coupling"], config["acceptance"]]), *others])


def facts_of(setting: Setting) -> dict[str, Any]:
    """What a row of the document says of its setting."""
    return {
        "name": short_name(setting),
        "window": setting.sampler.config.get("window"),
        "sampler": measure.sampler_settings(setting.sampler),
        "law": setting.pipeline_law,
        "guidance_scale": setting.law.guidance_scale,
        "lossless": bool(setting.sampler.lossless),
    }


def promises_plain(setting: Setting, plain: Setting) -> bool:
    """Whether a row must have the codes of plain decoding."""
    return bool(setting.sampler.identical) and (setting.law, setting.seed) == (plain.law, plain.seed)


def time_rows(
    pipe: Any,
    settings: Sequence[Setting],
    prompts: Sequence[str],
    *,
    batch_size: int,
    runs: int,
    warmup: int,
    report: Report = lambda text: None,
) -> list[dict[str, Any]]:
    """Time every row on the same captions and seeds, round by round; the first one is what speed-ups are over.

    Seconds are those of the decoding, from the prefill to the last column; text and codec cost every row the same.

    Args:
        pipe: an `AudioPipeline`, or a `MusicPair`.
        prompts: round r takes the next `batch_size` of them, from the start again at the end.

    Returns:
        One dict per row. `seconds`: of every timed round. `calls`: mean over all clips. `columns`: of a clip.
        `columns_per_call`: the mean over clips of a clip's columns over its calls, and `deviation`, its standard
        deviation over clips. `ms_per_call`: median over rounds of seconds over forwards, where a batch takes as many
        forwards as its slowest clip. `ms_per_clip`: quantiles of seconds over batch size. `speed_up`: quantiles of the
        first row's seconds over the row's, both of one round; `speed_up_calls`: its calls over the row's.
        `identical_samples`: how many of `samples` have the codes of the first row; None where not promised.
        `divergence`: what `DivergenceMeter` measures a tested code, mean over rounds; None for a sampler without.
        `peak_memory_bytes`: see `measure.peak_memory`.
    """
    columns = [0] * len(settings)
    divergence: list[list[float]] = [[] for _ in settings]

    def decode(index: int, chosen: list[str], first: int) -> tuple[Decoded, float]:
        arrays = draw(pipe, settings[index], chosen, first)
        columns[index] = int(arrays["columns"])
        if not np.isnan(arrays["divergence"]):
            divergence[index].append(float(arrays["divergence"]))
        codes = torch.from_numpy(arrays["tokens"]).flatten(1)
        return Decoded(codes, torch.from_numpy(arrays["calls"])), float(arrays["seconds"])

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
        rows.append({**facts_of(setting), "batch_size": batch_size, **row})
    return rows


def mean_and_deviation(values: Sequence[float]) -> tuple[float, float]:
    """Mean and standard deviation, the latter 0 for a single value."""
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0


def curve(
    pipe: Any,
    settings: Sequence[Setting],
    prompts: Sequence[str],
    *,
    batch_size: int,
    report: Report = lambda text: None,
) -> list[dict[str, Any]]:
    """Columns per call of every row but the first, one clip per prompt; clip i has seed `seed + i`.

    Returns:
        One dict per row: `calls_per_sample`, `columns_per_call` (all columns over all calls) and `standard_error` of it
        over clips, `deviation` of a clip's own, `identical_samples` (of `samples`, those with the codes of the first
        row; None where not promised).
    """
    starts = range(0, len(prompts), batch_size)

    def decode(setting: Setting) -> list[dict[str, np.ndarray]]:
        return [draw(pipe, setting, prompts[start : start + batch_size], start) for start in starts]

    def joined(parts: list[dict[str, np.ndarray]], name: str) -> np.ndarray:
        return np.concatenate([part[name] for part in parts])

    plain = None
    if any(promises_plain(setting, settings[0]) for setting in settings[1:]):
        plain = joined(decode(settings[0]), "tokens")
    rows = []
    for setting in settings[1:]:
        parts = decode(setting)
        calls, columns = joined(parts, "calls").tolist(), int(parts[0]["columns"])
        value, error = ratio_with_error(calls, columns)
        same = None
        if plain is not None and promises_plain(setting, settings[0]):
            same = int((joined(parts, "tokens") == plain).all((1, 2)).sum())
        row = {
            **facts_of(setting),
            "columns": columns,
            "samples": len(prompts),
            "calls_per_sample": calls,
            "columns_per_call": value,
            "standard_error": error,
            "deviation": mean_and_deviation([columns / count for count in calls])[1],
            "identical_samples": same,
        }
        rows.append(row)
        report(
            f"guidance {row['guidance_scale']:g}, {row['name']}, W={row['window']}: {value:.2f} columns per call"
        )
    return rows


def run(args: argparse.Namespace, report: Report) -> tuple[dict[str, Any], str]:
    """Document and table of `visual-spec bench` for music.

    Raises:
        ValueError: options that do not apply, or rows that cannot be read; before anything is loaded.
    """
    from visual_spec.data.tunes import held_out_prompts
    from visual_spec.eval.speed.bench import curve_table, load, settings_of

    if args.count_only:
        raise ValueError("--count-only is for next-scale models; leave it out")
    rows = rows_of_model(args.model)
    if args.curve and (rows.masked or args.masked is not None):
        raise ValueError(
            "--curve counts the calls of column decoding; a masked model takes as many as its steps. Leave one out."
        )
    groups = read_groups(args, rows, rows_of_masked(args.masked, rows))
    pipe: Any = load(args.model, args.device, args.dtype, args.threads, args.masked)
    for settings in groups:
        check_samplers(pipe, settings)
    prompts = held_out_prompts(args.prompts)
    environment = measure.environment(pipe.device, pipe.transformer.dtype)
    environment["transformer_parameters"] = parameters_of(pipe)
    if args.masked is not None:
        environment["masked_parameters"] = parameters_of(pipe.masked)
    document: dict[str, Any] = {
        "kind": "music-curve" if args.curve else "music-bench",
        "settings": settings_of(args) | {"law": asdict(groups[0][0].law)},
        "environment": environment,
    }
    if args.curve:
        batch_size = max(args.batch_sizes)
        document["rows"] = [
            row
            for settings in groups
            for row in curve(pipe, settings, prompts, batch_size=batch_size, report=report)
        ]
        return document, curve_table(document["rows"], "columns")
    document["rows"] = [
        row
        for batch_size in args.batch_sizes
        for settings in groups
        for row in time_rows(
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
    environment["copy_bandwidth"] = measure.copy_bandwidth(pipe.device)
    environment["clip_ms"] = clip_ms(pipe, groups[0][0], prompts[:1])
    return document, music_table(document["rows"])


def parameters_of(pipe: Any) -> int:
    """Numbers in the transformer."""
    return sum(parameter.numel() for parameter in pipe.transformer.parameters())


def clip_ms(pipe: Any, setting: Setting, prompts: Sequence[str]) -> float:
    """Milliseconds from the codes to the samples of one clip."""
    codes = draw(pipe, setting, prompts, 0)["tokens"]
    return 1000 * min(measure.timed(lambda: clips_of(pipe, codes), pipe.device)[1] for _ in range(3))


def music_table(rows: Sequence[dict[str, Any]]) -> str:
    """The Markdown table of timed rows."""
    from visual_spec.eval.speed.bench import markdown

    header = ["batch", "guidance", "sampler", "window", "calls", "columns/call", "ms/call", "ms/clip p50"]
    header += ["p20 - p80", "speed-up", "in calls", "same as plain", "divergence", "peak MiB"]
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
                f"{row['speed_up']['p50']:.2f}x",
                f"{row['speed_up_calls']:.2f}x",
                "-" if same is None else f"{same} of {row['samples']}",
                "-" if divergence is None else f"{divergence:.4f}",
                f"{row['peak_memory_bytes'] / 2**20:.0f}",
            ]
        )
    return markdown(header, lines)
