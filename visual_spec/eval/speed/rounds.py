"""`visual-spec bench` of models of tokens and of columns: every setting beside plain decoding, round by round.

Plain decoding and all other settings decode the same prompts with the same seeds, by the pipeline itself. Its trace
tells the seconds from the prefill to the last token, so texts and pixels are not among them. A masked model of the same
codec may stand beside a model of columns (`--masked`). A clip of T frames has T + K - 1 columns in the delay pattern of
K codebooks; a masked model decodes its T frames, codebook by codebook, so calls of both compare, and columns a call
nearly do.

On CUDA samplers of tokens that can be recorded are measured twice, without and with a recorded graph. With `--curve`
only calls are counted.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from visual_spec.data import motion, shapes, tunes
from visual_spec.eval import draws, measure
from visual_spec.eval.defaults import ModelSettings, settings_beside, with_setting
from visual_spec.eval.intervals import quantiles
from visual_spec.eval.machine import environment
from visual_spec.eval.media import show
from visual_spec.eval.pair import paired
from visual_spec.eval.settings import Setting, check_samplers, sampler_settings
from visual_spec.eval.speed import plain_loops
from visual_spec.eval.speed.call_cost import cost_of
from visual_spec.eval.speed.curve import curve
from visual_spec.eval.speed.groups import read_groups
from visual_spec.eval.speed.tables import COLUMNS, TOKENS, curve_table
from visual_spec.eval.tables import table
from visual_spec.eval.timing import (
    Decoded,
    Report,
    Rounds,
    add_floors,
    camera_note,
    coverage_note,
    decoded,
    facts_of,
    mean_and_deviation,
    processor_figures,
    promises_plain,
    summarise_row,
    time_rounds,
)
from visual_spec.models.core.protocol import RASTER_ORDER, trained_order
from visual_spec.models.core.settings import of_settings
from visual_spec.pipelines.placing import load
from visual_spec.pipelines.sampler_text import parse_sampler
from visual_spec.samplers.core.graph import can_record
from visual_spec.samplers.registry import OWN_ORDER, RASTER

if TYPE_CHECKING:
    from visual_spec.eval.pair import Pipeline
    from visual_spec.samplers.core.trace import DecodeTrace

_PROMPTS = {"image": shapes, "video": motion, "audio": tunes}


def run(args: argparse.Namespace, known: ModelSettings, report: Report) -> tuple[dict[str, Any], str]:
    """Measure a model of tokens or of columns; returns the document and the table.

    Raises:
        ValueError: options that do not apply, settings that cannot be read, before anything is loaded; or that do not
            fit the model.
    """
    sound = known.facts.unit == "columns"
    beside = settings_beside(args.masked, known)
    if args.curve and sound and (known.masked or beside is not None):
        raise ValueError(
            "--curve counts the calls of column decoding; a masked model takes as many as its steps. Leave one out."
        )
    groups = read_groups(args, known, beside)
    pipe = paired(load(args.model, args.device, args.dtype, args.threads), args.masked)
    for settings in groups:
        check_samplers(pipe, settings)
    if args.fuse_projections:
        from visual_spec.models.core.projections import fuse_projections

        fuse_projections(pipe.transformer)
    prompts = prompts_of(pipe, args.prompts)
    facts = environment(pipe.device, pipe.transformer.dtype)
    facts["transformer_parameters"] = sum(p.numel() for p in pipe.transformer.parameters())
    if beside is not None:
        facts["masked_parameters"] = sum(p.numel() for p in pipe.masked.transformer.parameters())
    kind = ("music-" if sound else "") + ("curve" if args.curve else "bench")
    document: dict[str, Any] = {"kind": kind, "environment": facts}
    if sound:
        document["settings"] = {"law": asdict(groups[0][0].law)}
    if args.curve:
        size = max(args.batch_sizes)
        document["rows"] = [
            row
            for settings in groups
            for row in curve(pipe, settings, prompts, batch_size=size, report=report)
        ]
        return document, curve_table(document["rows"], pipe.unit)
    rows = document["rows"] = [
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
            # One row without a cache is enough to see what the cache is worth, and it takes long.
            no_cache=not args.skip_uncached and batch_size == args.batch_sizes[0],
            report=report,
        )
    ]
    # Last, because the buffers of these measurements would count as memory of the rows.
    facts["copy_bandwidth"] = measure.copy_bandwidth(pipe.device)
    facts["clip_ms" if sound else "picture_ms"] = shown_ms(pipe, groups[0][0], prompts)
    if not sound:
        facts["matmul_flops"] = measure.matmul_peak(pipe.device, pipe.transformer.dtype)
        add_floors(rows, facts["copy_bandwidth"])
    note = coverage_note(len(prompts), args.batch_sizes, args.runs)
    drawn = prompts[: max(args.batch_sizes) * args.runs]
    shown = table(rows, COLUMNS if sound else TOKENS)
    return document, "\n\n".join(filter(None, [shown, note, camera_note(drawn)]))


def prompts_of(pipe: Pipeline, count: int) -> list[str]:
    """What is drawn: captions that no trainer has seen, or of a class-conditional pipeline the classes in turn."""
    classes = getattr(pipe, "num_classes", None)
    if classes is None:
        return _PROMPTS[pipe.medium].held_out_prompts(count)
    return [str(index % classes) for index in range(count)]


def shown_ms(pipe: Pipeline, setting: Setting, prompts: Sequence[str]) -> float:
    """Milliseconds from the tokens of a sample to its pixels, or from codes to waves: the best of some runs."""
    arrays = draws.draw(pipe, setting, prompts[:1], 0)
    stored = arrays[draws.stored_name(arrays)]
    return 1000 * min(measure.timed(lambda: show(pipe, stored), pipe.device)[1] for _ in range(4))


def with_graphs(settings: Sequence[Setting], device: torch.device, *, recordable: bool) -> list[Setting]:
    """On CUDA every setting without a graph and, where the model can be recorded, with one; else as they are.

    So are those whose sampler records nothing, or that say themselves whether it does.
    """
    if device.type != "cuda":
        return list(settings)
    rows = []
    for setting in settings:
        config = sampler_settings(setting.sampler)
        kind = type(setting.sampler)
        config.pop("class")
        if "graph" not in config or "graph" in parse_sampler(setting.text)[1]:
            rows.append(setting)
            continue
        for graph in (False, True) if recordable else (False,):
            text = with_setting(setting.text, f"graph={str(graph).lower()}")
            rows.append(replace(setting, text=text, sampler=of_settings(kind, **{**config, "graph": graph})))
    return rows


def time_settings(
    pipe: Pipeline,
    settings: Sequence[Setting],
    prompts: Sequence[str],
    *,
    batch_size: int,
    runs: int,
    warmup: int,
    no_cache: bool = False,
    report: Report = lambda text: None,
) -> list[dict[str, Any]]:
    """Time every setting on the same prompts and seeds, round by round; the first one is plain decoding.

    Args:
        pipe: decodes; its sampler is put back.
        prompts: round r takes the next `batch_size` of them, from the start again at the end.
        no_cache: also time one plain decoding without a cache, of a model of raster order.

    Returns:
        One dict per setting, on CUDA two (see `with_graphs`): `facts_of`; `unit_figures`, with speed-ups over the
        fastest plain one; `processor_figures`; `identical_samples`: how many of `samples` have the tokens of plain
        decoding, None where not promised; `peak_memory_bytes`, see `measure.peak_memory`. A model that a straight loop
        decodes has one row more, at the end: plain decoding by that loop, without phases.
    """
    first = settings[0]
    if {RASTER, OWN_ORDER} & {*pipe.calls}:
        settings = with_graphs(settings, pipe.device, recordable=_can_record(pipe, prompts[:1]))
    straight = [first] if RASTER in pipe.calls and plain_loops.fits(pipe.transformer) else []
    traces: list[list[DecodeTrace]] = [[] for _ in settings]

    def prepare(start: int) -> tuple[list[str], object]:
        chosen = [prompts[(start + place) % len(prompts)] for place in range(batch_size)]
        return chosen, _condition(pipe, chosen) if straight else None

    def decode(index: int, asked: tuple[list[str], object], start: int) -> tuple[Decoded, float]:
        if index == len(settings):
            return _timed_loop(plain_loops.straight_loop, pipe, first, asked[1], start, batch_size)
        drawn, trace = decoded(pipe, settings[index], asked[0], start)
        traces[index].append(trace)
        return drawn, trace.seconds

    where = f"batch {batch_size}, guidance {first.law.guidance_scale:g}"
    rounds = time_rounds(
        len(settings) + len(straight),
        prepare,
        decode,
        device=pipe.device,
        batch_size=batch_size,
        runs=runs,
        warmup=warmup,
        report=lambda text: report(f"{where}: {text}"),
    )

    best = _fastest_plain(settings, rounds)
    rows = []
    for index, setting in enumerate(settings):
        same = traces[index][-1].beside(traces[0][-1].law_settings).identical
        rows.append(
            {
                **facts_of(setting, first),
                "batch_size": batch_size,
                "samples": runs * batch_size,
                "identical_samples": rounds.identical[index]
                if index and same and promises_plain(setting, first)
                else None,
                **machine_figures(rounds, index),
                **unit_figures(pipe, setting, rounds, index, best, traces[index][-runs:]),
            }
        )
    if straight:
        figures = summarise_row(
            rounds.seconds[-1], rounds.calls[-1], best, traces[0][-1].commit_call.shape[1]
        )
        same = {"name": plain_loops.STRAIGHT, "identical_samples": rounds.identical[-1]}
        rows.append({**rows[0], **_LOOP, **same, **machine_figures(rounds, -1), **figures})
    if no_cache and RASTER in pipe.calls:
        rows.insert(1, _without_cache(pipe, first, prepare(0)[0]))
        report(f"{where}: decoded once without a cache")
    return rows


def _fastest_plain(settings: Sequence[Setting], rounds: Rounds) -> Sequence[float]:
    """Seconds of the fastest plain decoding."""
    first = settings[0]

    def plain(setting: Setting) -> bool:
        same = type(setting.sampler) is type(first.sampler) and setting.same_models(first)
        return setting is first or (same and promises_plain(setting, first))

    seconds = [rounds.seconds[index] for index, setting in enumerate(settings) if plain(setting)]
    return min(seconds, key=lambda one: quantiles(one)["p50"])


def machine_figures(rounds: Rounds, index: int) -> dict[str, object]:
    """Peak memory and processor time of a setting."""
    busy = rounds.processor_seconds
    return {"peak_memory_bytes": rounds.peak[index], **processor_figures(busy[index], busy[0])}


_LOOP = {"window": None, "sampler": None, "lossless": True, "phase_ms_per_call": {}, "gap_ms_per_call": None}


@torch.no_grad()
def _condition(pipe: Pipeline, prompts: Sequence[str]) -> object:
    return pipe.make_condition(list(prompts))


@torch.no_grad()
def _can_record(pipe: Pipeline, prompts: Sequence[str]) -> bool:
    condition = _condition(pipe, prompts)
    return can_record(pipe.transformer.prefill(condition, batch_size=1, guided=False, window=1))


def _timed_loop(
    loop: Callable[..., Tensor],
    pipe: Pipeline,
    plain: Setting,
    condition: object,
    start: int,
    batch_size: int,
) -> tuple[Decoded, float]:
    """Plain decoding by a loop of `plain_loops`, and its seconds."""
    generator = draws.seeded(plain.seed + start, batch_size)
    options = dict(law=plain.law, generator=generator, batch_size=batch_size)
    busy = time.process_time()
    tokens, seconds = measure.timed(lambda: loop(pipe.transformer, condition, **options).cpu(), pipe.device)
    calls = torch.full((batch_size,), tokens.shape[1])
    return Decoded(tokens, calls, time.process_time() - busy), seconds


def unit_figures(
    pipe: Pipeline, setting: Setting, rounds: Rounds, index: int, best: Sequence[float], traces: Sequence[Any]
) -> dict[str, object]:
    """What was measured of a setting, by what a call of the model commits.

    Args:
        best: seconds of the fastest plain decoding.
        traces: of the timed rounds.

    Returns:
        What `summarise_row` gives. Of a model of tokens also `tokens` of a sample; `phase_ms_per_call` and
        `gap_ms_per_call`, see `measure.phase_figures`; and what `call_costs` gives. Of a next-scale model
        `cache_held_measured`: bytes a picture that the trace tells. Of columns `ms_per_clip` in place of
        `ms_per_image`, and `columns_per_call` as the mean over clips of a clip's columns over its calls, beside
        `deviation`, its standard deviation over clips; `columns` of a clip; `speed_up_calls`: calls of the first
        setting over the setting's; `divergence`: what `DivergenceMeter` measures a tested code, mean over rounds, None
        for a sampler without.
    """
    batch_size, length = len(rounds.calls[index][0]), traces[-1].commit_call.shape[1]
    row = summarise_row(rounds.seconds[index], rounds.calls[index], best, length)
    if pipe.unit == "scales":
        return row | {"cache_held_measured": max(traces[-1].cache_bytes) / batch_size}
    if pipe.unit != "columns":
        phases = _phases(pipe, setting, traces, batch_size)
        return {"tokens": length, **call_costs(pipe.transformer, setting, batch_size), **row, **phases}
    del row["tokens_per_call"]
    row["ms_per_clip"] = row.pop("ms_per_image")
    plain, calls = ([count for batch in rounds.calls[one] for count in batch] for one in (0, index))
    mean, deviation = mean_and_deviation([length / count for count in calls])
    divergence = [trace.divergence for trace in traces if trace.divergence is not None]
    return {
        **row,
        "columns": length,
        "columns_per_call": mean,
        "deviation": deviation,
        "speed_up_calls": sum(plain) / sum(calls),
        "divergence": statistics.fmean(divergence) if divergence else None,
    }


def _phases(
    pipe: Pipeline, setting: Setting, traces: Sequence[DecodeTrace], batch_size: int
) -> dict[str, object]:
    """`measure.phase_figures` of the decodes that were timed."""
    calls = [max(1, int(trace.target_calls.max()) - 1) for trace in traces]

    def decode(callback: Callable[[int, Tensor], None]) -> None:
        setting.sampler(
            pipe.transformer,
            condition,
            law=setting.law,
            generator=draws.seeded(0, batch_size),
            batch_size=batch_size,
            callback=callback,
            **pipe.sampler_parts(),
        )

    busy = None
    if pipe.device.type == "cuda":
        condition = _condition(pipe, prompts_of(pipe, batch_size))
        with setting.on(pipe):
            busy = measure.busy_ms_per_call(decode, pipe.device)
    _, seconds, laps = measure.without_prefill(traces)
    return measure.phase_figures(seconds, laps, calls, device=pipe.device, busy_ms=busy)


def _without_cache(pipe: Pipeline, plain: Setting, prompts: list[str]) -> dict[str, object]:
    """The row of one plain decoding that keeps nothing from call to call."""
    count, device = len(prompts), pipe.device
    cached, trace = decoded(pipe, plain, prompts, 0)
    drawn, seconds = _timed_loop(
        plain_loops.decode_without_cache, pipe, plain, _condition(pipe, prompts), 0, count
    )
    length = drawn.tokens.shape[1]
    return {
        **facts_of(plain, plain),
        **_LOOP,
        "name": plain_loops.NO_CACHE,
        **dict(batch_size=count, tokens=length, samples=count),
        **dict(weight_bytes=None, cache_bytes=None, flops_per_call=None),
        **summarise_row([seconds], [drawn.calls.tolist()], [trace.seconds], length),
        "processor_speed_up": None,
        "identical_samples": int((drawn.tokens == cached.tokens).all(1).sum()),
        "peak_memory_bytes": measure.peak_memory(device),
    }


@torch.no_grad()
def call_costs(model: nn.Module, setting: Setting, batch_size: int) -> dict[str, int | None]:
    """`weight_bytes` and `cache_bytes` that a call cannot but read, and `flops_per_call`, what it computes.

    They are known for our own architecture in raster order. None for a model of another order, whose calls differ from
    step to step, and for other people's models.
    """
    cost = cost_of(model)
    if cost is None or trained_order(model) != RASTER_ORDER:
        return {"weight_bytes": None, "cache_bytes": None, "flops_per_call": None}
    guided, window = setting.law.guided, setting.window
    weights, cache = cost.call_bytes(batch_size=batch_size, guided=guided)
    flops = None  # of a window that changes from call to call
    if window is None or isinstance(window, int):
        flops = cost.call_flops(weights, batch_size=batch_size, guided=guided, window=window or 1)
    return {"weight_bytes": weights, "cache_bytes": cache, "flops_per_call": flops}
