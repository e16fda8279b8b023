"""`visual-spec bench` for next-token models: every sampler beside plain decoding with the same model, cache and dtype.

On CUDA samplers that can be recorded are measured twice, without and with a recorded graph.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from visual_spec.data import motion
from visual_spec.data.shapes import held_out_prompts
from visual_spec.eval.defaults import ModelSettings, with_setting
from visual_spec.eval.intervals import quantiles
from visual_spec.eval.machine import environment, load
from visual_spec.eval.settings import Setting, check_samplers, sampler_settings
from visual_spec.eval.speed import measure
from visual_spec.eval.speed.curve import curve
from visual_spec.eval.speed.groups import read_groups
from visual_spec.eval.speed.official_sizes import described
from visual_spec.eval.speed.straight_loop import NAME, fits, straight_loop
from visual_spec.eval.speed.tables import bench_table, curve_table
from visual_spec.eval.speed.timing import (
    Decoded,
    Report,
    Rounds,
    add_floors,
    coverage_note,
    facts_of,
    processor_figures,
    promises_plain,
    summarise_row,
    time_rounds,
)
from visual_spec.models.core.calls import CONTINUOUS, OWN_ORDER, RASTER
from visual_spec.models.core.trained_order import RASTER_ORDER, trained_order
from visual_spec.pipelines.sampler_text import parse_sampler
from visual_spec.samplers.core.graph import can_record
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.core.noise import TOKEN, CounterNoise, draw_keys

NO_CACHE = "autoregressive, no cache"


def run(args: argparse.Namespace, known: ModelSettings, report: Report) -> tuple[dict[str, Any], str]:
    """Document and table of a next-token model.

    Raises:
        ValueError: settings that cannot be read, before anything is loaded; or that do not fit the model.
    """
    groups = read_groups(args, known)
    pipe = load(args.model, args.device, args.dtype, args.threads)
    for settings in groups:
        check_samplers(pipe, settings)
    if args.fuse_projections:
        from visual_spec.models.core.projections import fuse_projections

        fuse_projections(pipe.transformer)
    prompts = prompts_of(pipe, args.prompts)
    facts = environment(pipe.device, pipe.transformer.dtype)
    facts["transformer_parameters"] = sum(p.numel() for p in pipe.transformer.parameters())
    document: dict[str, Any] = {"kind": "curve" if args.curve else "bench", "environment": facts}
    if args.curve:
        size = max(args.batch_sizes)
        document["rows"] = [
            row
            for settings in groups
            for row in curve(pipe, settings, prompts, batch_size=size, report=report)
        ]
        return document, curve_table(document["rows"])
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
            no_cache=not args.without_no_cache and batch_size == args.batch_sizes[0],
            report=report,
        )
    ]
    # Last, because the buffers of this measurement would count as memory of the rows.
    facts.update(machine_facts(pipe))
    add_floors(rows, facts["copy_bandwidth"])
    note = coverage_note(len(prompts), args.batch_sizes, args.runs)
    return document, "\n\n".join(filter(None, [bench_table(rows), note]))


def prompts_of(pipe: Any, count: int) -> list[str]:
    """What is drawn: captions that no trainer has seen, or of a class-conditional pipeline the classes in turn."""
    if pipe.medium == "video":
        return motion.held_out_prompts(count)
    classes = getattr(pipe, "num_classes", None)
    return held_out_prompts(count) if classes is None else [str(i % classes) for i in range(count)]


def machine_facts(pipe: Any) -> dict[str, float]:
    """`copy_bandwidth` in bytes per second, `matmul_flops` in operations per second, and `picture_ms`, milliseconds
    from tokens to pixels of one image or clip."""
    shape = (1, pipe.transformer.grid.num_tokens)
    tokens = torch.zeros(shape, dtype=torch.long, device=pipe.device)
    if CONTINUOUS in pipe.calls:
        tokens = torch.zeros(*shape, pipe.transformer.token_dim, device=pipe.device)
    # What turns tokens into pixels; of a tokenizer without what makes files of them. A clip is decoded frame by frame.
    decode = getattr(getattr(pipe, "vq_model", None), "decode_tokens", None)
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
    found = []
    for setting in settings:
        config = sampler_settings(setting.sampler)
        kind = type(setting.sampler)
        config.pop("class")
        if "graph" not in config or "graph" in parse_sampler(setting.text)[1]:
            found.append(setting)
            continue
        for graph in (False, True) if recordable else (False,):
            text = with_setting(setting.text, f"graph={str(graph).lower()}")
            found.append(replace(setting, text=text, sampler=kind(**{**config, "graph": graph})))
    return found


def time_settings(
    pipe: Any,
    settings: Sequence[Setting],
    prompts: Sequence[str],
    *,
    batch_size: int,
    runs: int,
    warmup: int,
    no_cache: bool,
    report: Report = lambda text: None,
) -> list[dict[str, Any]]:
    """Time every setting on the same prompts and seeds, round by round; the first one is plain decoding.

    Args:
        pipe: its transformer, text encoder and drafter are used; its sampler is put back.
        prompts: round r takes the next `batch_size` of them, from the start again at the end.
        no_cache: also time one plain decoding without a cache, of a model of raster order.

    Returns:
        One dict per setting, on CUDA two (see `with_graphs`): `facts_of`; what `summarise_row` gives, with speed-ups
        over the fastest plain one; `processor_figures`; `phase_ms_per_call` and `gap_ms_per_call`, see
        `measure.phase_figures`; what `call_costs` gives; `identical_samples`: how many of `samples` have the tokens of
        plain decoding, None where not promised; `peak_memory_bytes`. A model that a straight loop decodes has one row
        more, at the end: plain decoding by that loop, without phases.
    """
    plain_class = type(settings[0].sampler)
    in_raster = RASTER in pipe.calls
    if in_raster or OWN_ORDER in pipe.calls:
        with torch.no_grad():
            condition = pipe.encode_prompt([prompts[0]])
            state = pipe.transformer.prefill(condition, batch_size=1, guided=False, window=1)
        settings = with_graphs(settings, pipe.device, recordable=can_record(state))
    decoder = _Decoder(pipe, prompts, batch_size)
    where = f"batch {batch_size}, guidance {settings[0].law.guidance_scale:g}"
    straight = in_raster and fits(pipe.transformer)

    def decode(index: int, condition: Any, first: int) -> tuple[Decoded, float]:
        if index == len(settings):
            return decoder.decode_straight(settings[0], condition, first)
        return decoder.decode(settings[index], condition, first)

    rounds = time_rounds(
        len(settings) + straight,
        decoder.condition,
        decode,
        device=pipe.device,
        batch_size=batch_size,
        runs=runs,
        warmup=warmup,
        report=lambda text: report(f"{where}: {text}"),
    )
    plain = [
        seconds
        for seconds, one in zip(rounds.seconds, settings, strict=False)  # behind them the straight loop
        if one is settings[0] or (type(one.sampler) is plain_class and promises_plain(one, settings[0]))
    ]
    best = min(plain, key=lambda seconds: quantiles(seconds)["p50"])
    rows = [
        _row(decoder, setting, settings[0], rounds, index, best) for index, setting in enumerate(settings)
    ]
    if straight:
        rows.append(_straight_row(decoder, settings[0], rounds, best))
    if no_cache and in_raster:
        rows.insert(1, decoder.without_cache(settings[0]))
        report(f"{where}: decoded once without a cache")
    return rows


class _Decoder:
    """Decodes the batches of a benchmark by calling samplers themselves: texts and pixels are not timed.

    Attributes:
        traces: {text of a setting: the traces of its decodes}.
    """

    def __init__(self, pipe: Any, prompts: Sequence[str], batch_size: int) -> None:
        self.pipe, self.prompts, self.batch_size = pipe, prompts, batch_size
        self.length = pipe.transformer.grid.num_tokens
        self.traces: dict[str, list[Any]] = {}

    def condition(self, first: int) -> Any:
        """What the samples from index `first` on are drawn from."""
        chosen = [self.prompts[(first + index) % len(self.prompts)] for index in range(self.batch_size)]
        with torch.no_grad():
            return self.pipe.encode_prompt(chosen)

    def decode(self, setting: Setting, condition: Any, first: int) -> tuple[Decoded, float]:
        """The samples from index `first` on, and their seconds."""

        def work() -> Decoded:
            result = self.call(setting, condition, setting.seed + first)
            self.traces.setdefault(setting.text, []).append(result.trace)
            return Decoded(result.tokens.cpu(), result.trace.target_calls)

        with setting.on(self.pipe):
            return measure.timed(work, self.pipe.device)

    def decode_straight(self, plain: Setting, condition: Any, first: int) -> tuple[Decoded, float]:
        """As `decode`, by the straight loop."""

        def work() -> Decoded:
            tokens = straight_loop(
                self.pipe.transformer,
                condition,
                law=plain.law,
                generator=self.generators(plain.seed + first),
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
            generator=self.generators(seed),
            batch_size=self.batch_size,
            **self.pipe.sampler_parts(),
            **options,
        )

    def generators(self, seed: int) -> list[torch.Generator]:
        """Those of a batch whose first sample has this seed."""
        return [torch.Generator().manual_seed(seed + index) for index in range(self.batch_size)]

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
        """The row of one plain decoding that keeps nothing from call to call."""
        condition = self.condition(0)
        drawn, plain_seconds = self.decode(plain, condition, 0)
        (tokens, calls), seconds = measure.timed(
            lambda: decode_without_cache(
                self.pipe.transformer,
                condition,
                law=plain.law,
                generator=self.generators(plain.seed),
                batch_size=self.batch_size,
            ),
            self.pipe.device,
        )
        return {
            **facts_of(plain),
            **dict(name=NO_CACHE, window=None, sampler=None, lossless=True),
            **dict(batch_size=self.batch_size, tokens=self.length, samples=self.batch_size),
            **dict(weight_bytes=None, cache_bytes=None, flops_per_call=None),
            **summarise_row([seconds], [calls.tolist()], [plain_seconds], self.length),
            "processor_speed_up": None,
            "identical_samples": int((tokens.cpu() == drawn.tokens).all(1).sum()),
            "peak_memory_bytes": measure.peak_memory(self.pipe.device),
            "phase_ms_per_call": {},
            "gap_ms_per_call": None,
        }


def _row(
    decoder: _Decoder, setting: Setting, plain: Setting, rounds: Rounds, index: int, best: list[float]
) -> dict[str, Any]:
    """What was measured of a setting; see `time_settings`."""
    seconds, size = rounds.seconds[index], decoder.batch_size
    promised = index and promises_plain(setting, plain)
    return {
        **facts_of(setting),
        "batch_size": size,
        "tokens": decoder.length,
        **call_costs(decoder.pipe.transformer, setting, size),
        **summarise_row(seconds, rounds.calls[index], best, decoder.length),
        **processor_figures(rounds.processor_seconds[index], rounds.processor_seconds[0]),
        **decoder.phases(setting, len(seconds)),
        "identical_samples": rounds.identical[index] if promised else None,
        "samples": len(seconds) * size,
        "peak_memory_bytes": rounds.peak[index],
    }


def _straight_row(decoder: _Decoder, plain: Setting, rounds: Rounds, best: list[float]) -> dict[str, Any]:
    """The row of the straight loop, the last setting of the rounds."""
    seconds, size = rounds.seconds[-1], decoder.batch_size
    return {
        **facts_of(plain),
        **dict(name=NAME, window=None, sampler=None, lossless=True),
        **dict(batch_size=size, tokens=decoder.length, samples=len(seconds) * size),
        **call_costs(decoder.pipe.transformer, plain, size),
        **summarise_row(seconds, rounds.calls[-1], best, decoder.length),
        **processor_figures(rounds.processor_seconds[-1], rounds.processor_seconds[0]),
        "identical_samples": rounds.identical[-1],
        "peak_memory_bytes": rounds.peak[-1],
        "phase_ms_per_call": {},
        "gap_ms_per_call": None,
    }


@torch.no_grad()
def call_costs(model: Any, setting: Setting, batch_size: int) -> dict[str, int | None]:
    """`weight_bytes` and `cache_bytes` that a call cannot but read, and `flops_per_call`, what it computes.

    They are known of our own architecture in raster order; None for a model of another order, whose calls differ from
    step to step, and for that of someone else.
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
