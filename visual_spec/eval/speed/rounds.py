"""`visual-spec bench` of models of tokens and of columns: every setting beside plain decoding, round by round.

Plain decoding and all other settings decode the same prompts with the same seeds. Tokens are decoded by the samplers
themselves, so texts are not in the processor's seconds; clips of sound by their pipelines, a masked model of the same
codec among them (`--masked`). A clip of T frames has T + K - 1 columns in the delay pattern of K codebooks; a masked
model decodes its T frames, codebook by codebook, so calls of both compare, and columns a call nearly do.

On CUDA samplers of tokens that can be recorded are measured twice, without and with a recorded graph. With `--curve`
only calls are counted.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from visual_spec.data import motion, shapes, tunes
from visual_spec.eval import draws
from visual_spec.eval.defaults import ModelSettings, settings_beside, with_setting
from visual_spec.eval.intervals import quantiles
from visual_spec.eval.machine import environment, load
from visual_spec.eval.media import clips_of
from visual_spec.eval.settings import Setting, check_samplers, sampler_settings
from visual_spec.eval.speed import measure, plain_loops
from visual_spec.eval.speed.curve import curve
from visual_spec.eval.speed.groups import read_groups
from visual_spec.eval.speed.official_sizes import described
from visual_spec.eval.speed.tables import COLUMNS, TOKENS, curve_table
from visual_spec.eval.speed.timing import (
    Decoded,
    Report,
    Rounds,
    add_floors,
    camera_note,
    coverage_note,
    facts_of,
    mean_and_deviation,
    processor_figures,
    promises_plain,
    summarise_row,
    time_rounds,
)
from visual_spec.eval.tables import table
from visual_spec.models.core.protocol import RASTER_ORDER, trained_order
from visual_spec.pipelines.sampler_text import parse_sampler
from visual_spec.samplers.core.graph import can_record
from visual_spec.samplers.registry import OWN_ORDER, RASTER, VECTORS

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
    pipe = load(args.model, args.device, args.dtype, args.threads, args.masked)
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
    facts.update(machine_facts(pipe, groups[0][0], prompts))
    if not sound:
        add_floors(rows, facts["copy_bandwidth"])
    note = coverage_note(len(prompts), args.batch_sizes, args.runs)
    drawn = prompts[: max(args.batch_sizes) * args.runs]
    shown = table(rows, COLUMNS if sound else TOKENS)
    return document, "\n\n".join(filter(None, [shown, note, camera_note(drawn)]))


def prompts_of(pipe: Any, count: int) -> list[str]:
    """What is drawn: captions that no trainer has seen, or of a class-conditional pipeline the classes in turn."""
    classes = getattr(pipe, "num_classes", None)
    if classes is None:
        return _PROMPTS[pipe.medium].held_out_prompts(count)
    return [str(index % classes) for index in range(count)]


def machine_facts(pipe: Any, plain: Setting, prompts: Sequence[str]) -> dict[str, float]:
    """`copy_bandwidth` in bytes per second, and what follows the decoding: of sound `clip_ms`, milliseconds from codes
    to samples of a clip; else `picture_ms`, from tokens to pixels of an image or clip, and `matmul_flops`, operations
    per second."""
    if pipe.unit == "columns":
        codes = draws.draw(pipe, plain, prompts[:1], 0)["tokens"]
        seconds = [measure.timed(lambda: clips_of(pipe, codes), pipe.device)[1] for _ in range(3)]
        return {"copy_bandwidth": measure.copy_bandwidth(pipe.device), "clip_ms": 1000 * min(seconds)}
    shape = (1, pipe.transformer.grid.num_tokens)
    tokens = torch.zeros(shape, dtype=torch.long, device=pipe.device)
    if {*VECTORS} & set(pipe.calls):
        tokens = torch.zeros(*shape, pipe.transformer.token_dim, device=pipe.device)
    # What turns tokens into pixels; of a tokenizer without what makes files of them. A clip is decoded frame by frame.
    decode: Any = getattr(getattr(pipe, "vq_model", None), "decode_tokens", None)
    if pipe.medium == "video" or decode is None:
        decode = partial(pipe.decode_tokens, output_type="pt")
    with torch.no_grad():
        seconds = [measure.timed(lambda: decode(tokens), pipe.device)[1] for _ in range(4)]
    return {
        "copy_bandwidth": measure.copy_bandwidth(pipe.device),
        "matmul_flops": measure.matmul_peak(pipe.device, pipe.transformer.dtype),
        "picture_ms": min(seconds) * 1000,
    }


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
            rows.append(replace(setting, text=text, sampler=kind(**{**config, "graph": graph})))
    return rows


def time_settings(
    pipe: Any, settings: Sequence[Setting], prompts: Sequence[str], *, batch_size: int, **options: Any
) -> list[dict[str, Any]]:
    """Time settings of a model of tokens or of columns, see `time_rows`.

    Args:
        pipe: its parts are used; its sampler is put back.
        prompts: round r takes the next `batch_size` of them, from the start again at the end.
        options: of `time_rows`.
    """
    kind = ClipDecoder if pipe.unit == "columns" else TokenDecoder
    return time_rows(kind(pipe, prompts, batch_size), settings, **options)


def time_rows(
    decoder: BenchDecoder,
    settings: Sequence[Setting],
    *,
    runs: int,
    warmup: int,
    no_cache: bool = False,
    report: Report = lambda text: None,
) -> list[dict[str, Any]]:
    """Time every setting on the same prompts and seeds, round by round; the first one is plain decoding.

    Args:
        no_cache: also time one plain decoding without a cache, of a model of raster order.

    Returns:
        One dict per setting, on CUDA two (see `with_graphs`): `facts_of`; what `summarise_row` gives, with speed-ups
        over the fastest plain one; `processor_figures`; `identical_samples`: how many of `samples` have the tokens of
        plain decoding, None where not promised; `peak_memory_bytes`, see `measure.peak_memory`; and what the decoder's
        `facts` gives. A model that a straight loop decodes has one row more, at the end: plain decoding by that loop,
        without phases.
    """
    first, pipe, batch_size = settings[0], decoder.pipe, decoder.batch_size
    ways = [(setting, decoder.decode) for setting in decoder.recorded(settings)]
    ways += [(first, loop) for loop in decoder.loops()]
    where = f"batch {batch_size}, guidance {first.law.guidance_scale:g}"
    rounds = time_rounds(
        len(ways),
        decoder.condition,
        lambda index, condition, start: ways[index][1](ways[index][0], condition, start),
        device=pipe.device,
        batch_size=batch_size,
        runs=runs,
        warmup=warmup,
        report=lambda text: report(f"{where}: {text}"),
    )

    def plain(setting: Setting) -> bool:
        same = type(setting.sampler) is type(first.sampler) and setting.same_models(first)
        return setting is first or (same and promises_plain(setting, first))

    best = min(
        (
            seconds
            for seconds, (setting, decode) in zip(rounds.seconds, ways, strict=True)
            if decode == decoder.decode and plain(setting)
        ),
        key=lambda seconds: quantiles(seconds)["p50"],
    )
    rows = []
    for index, (setting, decode) in enumerate(ways):
        promised = index and promises_plain(setting, first) and decoder.exact(setting)
        rows.append(
            {
                **facts_of(setting),
                "batch_size": batch_size,
                "samples": runs * batch_size,
                "identical_samples": rounds.identical[index] if promised else None,
                "peak_memory_bytes": rounds.peak[index],
                **processor_figures(rounds.processor_seconds[index], rounds.processor_seconds[0]),
                **decoder.facts(setting, rounds, index, best),
            }
        )
        if decode != decoder.decode:
            rows[-1] |= {**_LOOP, "name": plain_loops.STRAIGHT, "identical_samples": rounds.identical[index]}
    if no_cache and RASTER in pipe.calls:
        rows.insert(1, decoder.without_cache(first))
        report(f"{where}: decoded once without a cache")
    return rows


_LOOP = {"window": None, "sampler": None, "lossless": True, "phase_ms_per_call": {}, "gap_ms_per_call": None}


class BenchDecoder:
    """What decodes the batches of a benchmark, and what is said of its rows."""

    def __init__(self, pipe: Any, prompts: Sequence[str], batch_size: int) -> None:
        self.pipe, self.prompts, self.batch_size = pipe, prompts, batch_size

    def recorded(self, settings: Sequence[Setting]) -> Sequence[Setting]:
        """The settings that are timed."""
        return settings

    def loops(self) -> list[Any]:
        """Return what else decodes."""
        return []

    def condition(self, first: int) -> Any:
        """Return what the samples from index `first` on are drawn from: their prompts."""
        return [self.prompts[(first + index) % len(self.prompts)] for index in range(self.batch_size)]

    def decode(self, setting: Setting, condition: Any, first: int) -> tuple[Decoded, float]:
        """The samples from index `first` on, and the seconds of their decoding."""
        raise NotImplementedError

    def exact(self, setting: Setting) -> bool:
        """Return whether what was decoded kept what the sampler promises."""
        return True

    def facts(self, setting: Setting, rounds: Rounds, index: int, best: Sequence[float]) -> dict[str, Any]:
        """Return what was measured of a setting; `best`: seconds of the fastest plain decoding."""
        raise NotImplementedError

    def without_cache(self, plain: Setting) -> dict[str, Any]:
        """The row of one plain decoding that keeps nothing from call to call."""
        raise NotImplementedError


class ClipDecoder(BenchDecoder):
    """Decodes clips of sound by the pipeline, or by a `MaskedPair`."""

    def __init__(self, pipe: Any, prompts: Sequence[str], batch_size: int) -> None:
        super().__init__(pipe, prompts, batch_size)
        self.columns: dict[str, int] = {}
        self.divergence: dict[str, list[float]] = {}

    def decode(self, setting: Setting, chosen: list[str], first: int) -> tuple[Decoded, float]:
        """The clips from index `first` on, and the seconds from the prefill to the last column."""
        arrays = draws.draw(self.pipe, setting, chosen, first)
        self.columns[setting.text] = int(arrays["length"])
        if not np.isnan(arrays["divergence"]):
            self.divergence.setdefault(setting.text, []).append(float(arrays["divergence"]))
        codes = torch.from_numpy(arrays["tokens"]).flatten(1)
        busy = float(arrays["processor_seconds"])
        return Decoded(codes, torch.from_numpy(arrays["calls"]), busy), float(arrays["seconds"])

    def facts(self, setting: Setting, rounds: Rounds, index: int, best: Sequence[float]) -> dict[str, Any]:
        """Return what was measured of a setting.

        Returns:
            What `summarise_row` gives, with `ms_per_clip` in place of `ms_per_image`, and `columns_per_call` as the
            mean over clips of a clip's columns over its calls, beside `deviation`, its standard deviation over clips.
            `columns`: of a clip. `speed_up_calls`: calls of the first setting over the setting's. `divergence`: what
            `DivergenceMeter` measures a tested code, mean over rounds; None for a sampler without.
        """
        columns, divergence = self.columns[setting.text], self.divergence.get(setting.text)
        row = summarise_row(rounds.seconds[index], rounds.calls[index], best, columns)
        del row["tokens_per_call"]
        row["ms_per_clip"] = row.pop("ms_per_image")
        plain, calls = ([count for batch in rounds.calls[one] for count in batch] for one in (0, index))
        mean, deviation = mean_and_deviation([columns / count for count in calls])
        return {
            **row,
            "columns": columns,
            "columns_per_call": mean,
            "deviation": deviation,
            "speed_up_calls": sum(plain) / sum(calls),
            "divergence": statistics.fmean(divergence) if divergence else None,
        }


class TokenDecoder(BenchDecoder):
    """Decodes by calling samplers themselves: texts and pixels are not timed.

    Attributes:
        traces: {text of a setting: the traces of its decodes}.
    """

    def __init__(self, pipe: Any, prompts: Sequence[str], batch_size: int) -> None:
        super().__init__(pipe, prompts, batch_size)
        self.length = pipe.transformer.grid.num_tokens
        self.traces: dict[str, list[Any]] = {}

    def recorded(self, settings: Sequence[Setting]) -> Sequence[Setting]:
        """The settings, see `with_graphs`."""
        if RASTER not in self.pipe.calls and OWN_ORDER not in self.pipe.calls:
            return settings
        with torch.no_grad():
            condition = self.pipe.make_condition([self.prompts[0]])
            state = self.pipe.transformer.prefill(condition, batch_size=1, guided=False, window=1)
        return with_graphs(settings, self.pipe.device, recordable=can_record(state))

    def loops(self) -> list[Any]:
        """Return what else decodes: the straight loop, where it fits the model."""
        straight = RASTER in self.pipe.calls and plain_loops.fits(self.pipe.transformer)
        return [self.decode_straight] if straight else []

    def condition(self, first: int) -> Any:
        """The condition of the samples from index `first` on."""
        with torch.no_grad():
            return self.pipe.make_condition(super().condition(first))

    def decode(self, setting: Setting, condition: Any, first: int) -> tuple[Decoded, float]:
        def work() -> Decoded:
            result = self.call(setting, condition, setting.seed + first)
            self.traces.setdefault(setting.text, []).append(result.trace)
            return Decoded(result.tokens.cpu(), result.trace.target_calls)

        with setting.on(self.pipe):
            return measure.timed(work, self.pipe.device)

    def decode_straight(self, plain: Setting, condition: Any, first: int) -> tuple[Decoded, float]:
        """As `decode`, by the straight loop."""

        def work() -> Decoded:
            tokens = plain_loops.straight_loop(
                self.pipe.transformer,
                condition,
                law=plain.law,
                generator=draws.seeded(plain.seed + first, self.batch_size),
                batch_size=self.batch_size,
            )
            return Decoded(tokens.cpu(), torch.full((self.batch_size,), self.length))

        return measure.timed(work, self.pipe.device)

    def call(self, setting: Setting, condition: Any, seed: int, **options: Any) -> Any:
        """Call the sampler, which the pipeline must have."""
        return setting.sampler(
            self.pipe.transformer,
            condition,
            law=setting.law,
            generator=draws.seeded(seed, self.batch_size),
            batch_size=self.batch_size,
            **self.pipe.sampler_parts(),
            **options,
        )

    def facts(self, setting: Setting, rounds: Rounds, index: int, best: Sequence[float]) -> dict[str, Any]:
        """Return what was measured of a setting.

        Returns:
            What `summarise_row` gives; `tokens` of a sample; `phase_ms_per_call` and `gap_ms_per_call`, see
            `measure.phase_figures`; and what `call_costs` gives.
        """
        seconds = rounds.seconds[index]
        return {
            "tokens": self.length,
            **call_costs(self.pipe.transformer, setting, self.batch_size),
            **summarise_row(seconds, rounds.calls[index], best, self.length),
            **(self.phases(setting, len(seconds)) if setting.text in self.traces else {}),
        }

    def phases(self, setting: Setting, runs: int) -> dict[str, Any]:
        """`measure.phase_figures` of the decodes that were timed."""
        traces = self.traces[setting.text][-runs:]
        laps = [dict(trace.phase_seconds) for trace in traces]
        seconds = [trace.seconds - lap.pop("prefill", 0.0) for trace, lap in zip(traces, laps, strict=True)]
        calls = [max(1, int(trace.target_calls.max()) - 1) for trace in traces]

        def decode(callback: Callable[[int, Tensor], Any]) -> None:
            self.call(setting, condition, 0, callback=callback)

        condition = self.condition(0)
        with setting.on(self.pipe):
            busy = measure.busy_ms_per_call(decode, self.pipe.device)
        return measure.phase_figures(seconds, laps, calls, device=self.pipe.device, busy_ms=busy)

    def without_cache(self, plain: Setting) -> dict[str, Any]:
        condition = self.condition(0)
        drawn, plain_seconds = self.decode(plain, condition, 0)
        (tokens, calls), seconds = measure.timed(
            lambda: plain_loops.decode_without_cache(
                self.pipe.transformer,
                condition,
                law=plain.law,
                generator=draws.seeded(plain.seed, self.batch_size),
                batch_size=self.batch_size,
            ),
            self.pipe.device,
        )
        return {
            **facts_of(plain),
            **_LOOP,
            "name": plain_loops.NO_CACHE,
            **dict(batch_size=self.batch_size, tokens=self.length, samples=self.batch_size),
            **dict(weight_bytes=None, cache_bytes=None, flops_per_call=None),
            **summarise_row([seconds], [calls.tolist()], [plain_seconds], self.length),
            "processor_speed_up": None,
            "identical_samples": int((tokens.cpu() == drawn.tokens).all(1).sum()),
            "peak_memory_bytes": measure.peak_memory(self.pipe.device),
        }


@torch.no_grad()
def call_costs(model: Any, setting: Setting, batch_size: int) -> dict[str, int | None]:
    """`weight_bytes` and `cache_bytes` that a call cannot but read, and `flops_per_call`, what it computes.

    They are known for our own architecture in raster order. None for a model of another order, whose calls differ from
    step to step, and for other people's models.
    """
    official = described(model)
    if official is None or trained_order(model) != RASTER_ORDER:
        return {"weight_bytes": None, "cache_bytes": None, "flops_per_call": None}
    guided, window = setting.law.guided, setting.window
    weights, cache = official.call_bytes(batch_size=batch_size, guided=guided)
    flops = None  # of a window that changes from call to call
    if window is None or isinstance(window, int):
        flops = official.call_flops(weights, batch_size=batch_size, guided=guided, window=window or 1)
    return {"weight_bytes": weights, "cache_bytes": cache, "flops_per_call": flops}
