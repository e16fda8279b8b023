"""`python -m benchmarks.sizes.official` for next-token models: speed at true sizes, without the checkpoints.

What a call costs depends on sizes, not on what the weights are, so it is measured on random weights, with the real
sampler. How many drafts are accepted does depend on the weights, so it is not measured: it is stated, as the
probability that a draft is accepted, and every figure that follows from it is labelled so. Plain decoding takes a call
a token, whatever the weights: its figures are measured.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.sizes import models, room
from benchmarks.sizes.baselines import Baseline, baselines_of, time_baseline
from benchmarks.sizes.models import OfficialModel
from visual_spec.eval import measure
from visual_spec.eval.defaults import ModelSettings, settings_for
from visual_spec.eval.draws import seeded
from visual_spec.eval.intervals import quantiles
from visual_spec.eval.machine import environment
from visual_spec.eval.settings import Setting, sampler_settings
from visual_spec.eval.speed.groups import read_groups
from visual_spec.eval.speed.rounds import with_graphs
from visual_spec.eval.speed.tables import FLOOR, PEAK, PHASES, SETTING, WINDOW
from visual_spec.eval.tables import column, table
from visual_spec.eval.timing import Report, add_floors
from visual_spec.models.core.protocol import TokenGrid
from visual_spec.pipelines.placing import choose_device
from visual_spec.records import PipelineFacts
from visual_spec.samplers.core.graph import can_record, forget
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.raster.autoregressive import AutoregressiveSampler
from visual_spec.samplers.registry import RASTER, by_class

# Of official sizes with a stated acceptance. A star marks what follows from it.
STATED = [
    *SETTING,
    WINDOW,
    column("ms/call p50", "{:.2f}", "ms_per_call.p50"),
    column("p20 - p80", "{:.2f} - {:.2f}", "ms_per_call.p20", "ms_per_call.p80"),
    FLOOR,
    *PHASES,
    column("prefill ms", "{:.1f}", "prefill_ms"),
    PEAK,
    column("calls*", "{:.0f}", "calls_per_image"),
    column("tokens/call*", "{:.2f}", "tokens_per_call"),
    column("ms/image*", "{:.0f}", "ms_per_image.p50"),
    column("image p20 - p80*", "{:.0f} - {:.0f}", "ms_per_image.p20", "ms_per_image.p80"),
    column("speed-up*", "{:.2f}x", "speed_up"),
]


def run(args: argparse.Namespace, known: ModelSettings | None, report: Report) -> tuple[dict[str, Any], str]:
    """Document and table of a model of official size with random weights.

    Rows of `benchmarks.sizes.baselines` are left out where the device has no room for them, and where nothing
    guides.

    Args:
        known: None; the settings follow from the size.

    Raises:
        ValueError: settings that cannot be read or timed, a size that is unknown, or does not fit the device; before
            anything is allocated.
    """
    official = models.official_model(args.model, args.image_size)
    args.image_size = official.image_size
    groups = read_groups(args, settings_of_size(official))
    for settings in groups:
        check_settings(settings)
    device, dtype = choose_device(args.device), getattr(torch, args.dtype)
    free = room.available_memory(device)
    needed = _needed_bytes(official, groups, device, dtype)
    batch_size = max(args.batch_sizes)
    window = max(window_of(setting) for settings in groups for setting in settings)
    whole = needed(batch_size, window)
    room.refuse_what_does_not_fit(whole, device, at=needed, batch_size=batch_size, window=window)
    models.fill(official, dtype=dtype, device=device, seed=args.seed)
    if args.fuse_projections:
        from visual_spec.models.core.projections import fuse_projections

        fuse_projections(official.module)
    rows, left_out = [], []
    asked = dict(runs=args.runs, warmup=args.warmup, slots=args.slots, probability=args.accept_probability)
    for batch_size in args.batch_sizes:
        fits = sum(needed(batch_size, 1, baseline=True).values()) <= free
        for settings in groups:
            chosen, others = _chosen_baselines(official, settings[0].law, batch_size, fits=fits)
            left_out += others
            options = dict(batch_size=batch_size, baselines=chosen, left_out=left_out)
            rows += measure_calls(official, settings, **asked, **options, report=report)
    facts = environment(device, dtype)
    facts["transformer_parameters"] = official.parameters
    official.module.to_empty(device="meta")  # the buffers of what follows need room
    facts["copy_bandwidth"] = measure.copy_bandwidth(device)
    facts["matmul_flops"] = measure.matmul_peak(device, dtype)
    add_floors(rows, facts["copy_bandwidth"])
    law = groups[0][0].law
    document = {
        "kind": "random-weights",
        "settings": {"guidance_scales": [one[0].law.guidance_scale for one in groups], "top_k": law.top_k},
        "environment": facts,
        "architecture": args.model,
        "needed_bytes": whole,
        "acceptance": {
            "measured": False,
            "profile": "constant",
            "probability": args.accept_probability,
            "meaning": "every draft is accepted with this probability, whatever its place, sampler and sample",
        },
        "rows": rows,
        "left_out": left_out,
    }
    note = (
        f"* not measured: random weights; follows from the stated acceptance of {args.accept_probability:g} for every "
        "draft, and the measured calls. Rows that draw a token a call accept no drafts: theirs is measured. Speed-ups "
        "are over the fastest of these at the same batch and guidance"
    )
    return document, f"{table(rows, STATED)}\n\n{note}"


def settings_of_size(official: OfficialModel) -> ModelSettings:
    """What is measured of a model of official size: samplers that score windows, under the official program's law."""
    law = {"guidance_scale": official.guidance_scale, "top_k": official.top_k, "top_p": 1.0}
    return settings_for(
        PipelineFacts(
            medium="image",
            unit="tokens",
            calls=(RASTER,),
            plain_sampler="autoregressive",
            fast_sampler="speculative-jacobi",
            default_settings=law,
        )
    )


def check_settings(settings: Sequence[Setting]) -> None:
    """Refuse what cannot be timed on random weights.

    Raises:
        ValueError: a sampler that needs more than the model, or scores something else than windows in raster order; or
            a window that is not a number.
    """
    for setting in settings:
        entry = by_class(type(setting.sampler).__name__)
        if entry.calls != RASTER or entry.needs or setting.drafter is not None:
            raise ValueError(
                f"{setting.text} given; random weights time samplers that score windows in raster order and need "
                "no drafter, such as speculative-jacobi."
            )
        if isinstance(setting.window, str):
            raise ValueError(
                f"{setting.text} given; random weights state tokens per call for a window that is a number."
            )


def window_of(setting: Setting) -> int:
    """Slots that a call scores: 1 for a sampler without a window."""
    return int(setting.window or 1)


def _needed_bytes(
    official: OfficialModel, groups: Sequence[Sequence[Setting]], device: torch.device, dtype: torch.dtype
) -> Callable[..., dict[str, int]]:
    """(batch size, window, baseline=False) -> what the device needs room for."""
    guided = any(setting.law.guided for settings in groups for setting in settings)

    def needed(batch_size: int, window: int, baseline: bool = False) -> dict[str, int]:
        parts = official.needed_bytes(
            dtype=dtype, batch_size=batch_size, window=window, guided=guided, baseline=baseline
        )
        if device.type == "cuda":  # a recorded decode keeps its cache, and the next one's is copied over it
            parts["recording"] = parts["cache"]
        return parts

    return needed


def _chosen_baselines(
    official: OfficialModel, law: TokenLaw, batch_size: int, *, fits: bool
) -> tuple[list[Baseline], list[dict[str, Any]]]:
    """The baselines that are measured, and what the document says of the others."""
    known = baselines_of(official)
    chosen = [one for one in known if fits and law.guided and batch_size <= (one.largest_batch or batch_size)]
    where = {"batch_size": batch_size, "guidance_scale": law.guidance_scale}
    return chosen, [{"name": one.name, **where} for one in known if one not in chosen]


class Middle:
    """The `count` slots in the middle of a model's grid as a model of their own, so that a sampler runs for some calls
    at the mean cost of a whole picture. The cache before them is empty, which costs no less to read.
    """

    def __init__(self, model: Any, count: int) -> None:
        self.model = model
        self.grid = TokenGrid(1, min(count, model.grid.num_tokens))
        self.vocab_size = model.vocab_size
        self.first = (model.grid.num_tokens - self.grid.num_tokens) // 2
        self.device = model.device
        # Recorded graphs belong to what owns the weights; see `visual_spec.samplers.core.graph`.
        self.decoder = getattr(model, "decoder", model)

    def prefill(self, condition: Any, **options: Any) -> Any:
        return self.model.prefill(condition, **options)

    def __call__(self, state: Any, tokens: Tensor, slots: Tensor) -> Tensor:
        return self.model(state, tokens, slots + self.first)


@torch.no_grad()
def measure_calls(
    official: OfficialModel,
    settings: Sequence[Setting],
    *,
    batch_size: int,
    runs: int,
    warmup: int,
    slots: int,
    probability: float,
    baselines: Sequence[Baseline] = (),
    left_out: list[dict[str, Any]],
    report: Report = lambda text: None,
) -> list[dict[str, Any]]:
    """Time the calls of every setting over `slots` slots in the middle of the grid.

    On CUDA a sampler that can be recorded has two rows: its calls one operation after the other, and as a recorded
    graph.

    Args:
        official: filled.
        settings: the first is plain decoding.
        baselines: of `benchmarks.sizes.baselines`; their rows come first.
        left_out: gets those that fail, with the error; the others are measured all the same.

    Returns:
        One dict per row. Measured: `seconds` and `calls` of every round without the prefill, `ms_per_call`
        (quantiles), `phase_ms_per_call` and `gap_ms_per_call` (see `measure.phase_figures`), `prefill_ms`,
        `peak_memory_bytes`. Counted: `weight_bytes`, `cache_bytes`, `flops_per_call`. Stated, but for rows that are
        `autoregressive`: `tokens_per_call`. From these: `calls_per_image`, `ms_per_image` (quantiles), and `speed_up`
        over the fastest autoregressive row.
    """
    model, law, tokens = official.model, settings[0].law, official.model.grid.num_tokens
    middle, condition = Middle(model, slots), official.condition(batch_size)
    recordable = can_record(model.prefill(condition, batch_size=batch_size, guided=law.guided, window=1))
    # By whether the law is guided; now, as it needs room for a cache.
    costs = {
        guided: official.call_bytes(batch_size=batch_size, guided=guided)
        for guided in {setting.law.guided for setting in settings}
    }
    rows: list[dict[str, Any]] = []

    def add(
        name: str, window: int, law: TokenLaw, time_it: Callable[[], dict[str, Any]], **more: Any
    ) -> None:
        measure.reset_peak_memory(model.device)
        row = time_it()
        row["peak_memory_bytes"] = measure.peak_memory(model.device)
        weights, cache = costs[law.guided]
        flops = official.call_flops(weights, batch_size=batch_size, guided=law.guided, window=window)
        rows.append(
            dict(name=name, window=window, batch_size=batch_size, guidance_scale=law.guidance_scale)
            | dict(tokens=tokens, weight_bytes=weights, cache_bytes=cache, flops_per_call=flops)
            | {**row, **more}
        )
        report(f"batch {batch_size}, {name}, window {window}: {row['ms_per_call']['p50']:.2f} ms per call")

    for baseline in baselines:
        try:
            add(
                baseline.name,
                1,
                law,
                lambda one=baseline: _time_baseline(one, official, law, batch_size, runs, warmup, slots),
                sampler=None,
                autoregressive=True,
                tokens_per_call=tokens / official.length,
                calls_per_image=official.length,
            )
        except (AttributeError, RuntimeError, TypeError, ValueError) as error:
            # Another version of its library may call it otherwise.
            failed = dict(name=baseline.name, batch_size=batch_size, guidance_scale=law.guidance_scale)
            left_out.append(failed | {"error": f"{type(error).__name__}: {error}"})
            report(f"{baseline.name} failed, and has no row: {left_out[-1]['error']}")
    for setting in with_graphs(settings, model.device, recordable=recordable):
        plain = isinstance(setting.sampler, AutoregressiveSampler)
        # One token is certain, and the k-th draft counts when it and all before it are accepted.
        per_call = 1.0 if plain else sum(probability**place for place in range(window_of(setting)))
        add(
            setting.name,
            window_of(setting),
            setting.law,
            lambda one=setting: time_sampler(one, middle, condition, batch_size, runs, warmup),
            sampler=sampler_settings(setting.sampler),
            autoregressive=plain,
            tokens_per_call=per_call,
            calls_per_image=1 + (tokens - 1) / per_call,  # the prefill yields the first token
        )
        forget(middle)  # its memory would count for the next row
    add_picture_times(rows)
    return rows


def add_picture_times(rows: Sequence[dict[str, Any]]) -> None:
    """Add `ms_per_image`, quantiles of the prefill and so many calls over the batch, and `speed_up`: how much faster a
    picture is than by the fastest autoregressive row, medians of both. All rows are of one batch size and law.
    """
    for row in rows:
        row["ms_per_image"] = {
            name: (row["prefill_ms"] + (row["calls_per_image"] - 1) * value) / row["batch_size"]
            for name, value in row["ms_per_call"].items()
        }
    best = min(row["ms_per_image"]["p50"] for row in rows if row["autoregressive"])
    for row in rows:
        row["speed_up"] = best / row["ms_per_image"]["p50"]


def time_sampler(
    setting: Setting, middle: Any, condition: Any, batch_size: int, runs: int, warmup: int
) -> dict[str, Any]:
    """Return what was measured of a sampler: see `measure_calls`.

    Args:
        middle: the model, or a part of its grid.
    """
    counted, traces = [], []

    def decode(number: int, callback: Callable[[int, Tensor], Any]) -> Any:
        generator = seeded(number * batch_size, batch_size)
        options: dict[str, Any] = dict(
            law=setting.law, generator=generator, batch_size=batch_size, callback=callback
        )
        return setting.sampler(middle, condition, **options).trace

    for number in range(warmup + runs):
        # A recorded step runs no Python; the callback is called once a call, and once after the prefill.
        called: list[int] = []
        traces.append(decode(number, lambda index, lengths, called=called: called.append(index)))
        counted.append(len(called) - 1)
    counted, (prefills, seconds, phases) = counted[warmup:], measure.without_prefill(traces[warmup:])
    busy = measure.busy_ms_per_call(lambda callback: decode(0, callback), middle.device)
    return {
        "seconds": seconds,
        "calls": counted,
        "ms_per_call": quantiles([1000 * s / c for s, c in zip(seconds, counted, strict=True)]),
        "prefill_ms": quantiles([1000 * s for s in prefills])["p50"],
        **measure.phase_figures(seconds, phases, counted, device=middle.device, busy_ms=busy),
    }


def _time_baseline(
    baseline: Baseline,
    official: OfficialModel,
    law: TokenLaw,
    batch_size: int,
    runs: int,
    warmup: int,
    slots: int,
) -> dict[str, Any]:
    """The same of a baseline, whose phases are not known."""
    times = [
        time_baseline(baseline, official, law, batch_size=batch_size, slots=max(slots, 3))
        for _ in range(warmup + runs)
    ][warmup:]
    return {
        "seconds": [seconds for seconds, _, _ in times],
        "calls": [calls for _, calls, _ in times],
        "ms_per_call": quantiles([1000 * seconds / calls for seconds, calls, _ in times]),
        "prefill_ms": quantiles([1000 * prefill for _, _, prefill in times])["p50"],
        "phase_ms_per_call": {},
        "gap_ms_per_call": None,
    }
