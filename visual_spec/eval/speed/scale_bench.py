"""`visual-spec bench` for next-scale models: the large model, the small one, both (CoDe), compressed caches (ScaleKV).

Embedded models are timed as they are. Official sizes (`--random-weights --model var-d16`, or `var-d30+var-d16` with a
refiner) have random weights: no draft is ever refused here, so their times are those of the true weights, and only the
pictures are not. With `--count-only` nothing is run: arithmetic and bytes are counted on the meta device.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from visual_spec.eval.defaults import ModelSettings, scale_settings
from visual_spec.eval.draws import caches_of, seeded
from visual_spec.eval.machine import choose_device, environment, load
from visual_spec.eval.settings import Setting, check_samplers, sampler_settings
from visual_spec.eval.speed import measure, scale_cost
from visual_spec.eval.speed.groups import read_groups
from visual_spec.eval.speed.official_sizes import LAW_ARRAYS, fill_at_random
from visual_spec.eval.speed.tables import SPEED_UP, speed_up_cells
from visual_spec.eval.speed.timing import Decoded, Report, processor_figures, summarise_row, time_rounds
from visual_spec.eval.tables import markdown
from visual_spec.models.next_scale.var import VARTransformer
from visual_spec.pipelines.scale_image import ScaleImagePipeline
from visual_spec.samplers.scales.stages import drawn_stages


def random_pipeline(
    sizes: scale_cost.VarSizes, *, dtype: torch.dtype, device: torch.device, seed: int = 0
) -> ScaleImagePipeline:
    """A pipeline of official size with random weights, made on the device it runs on."""
    pipe = scale_cost.pipeline_on_meta(
        sizes.transformer, sizes.vq_model, sizes.refiner, dtype=dtype, kind=VARTransformer
    )
    for part in (pipe.transformer, pipe.vq_model, pipe.refiner):
        if part is not None:
            fill_at_random(part, dtype=dtype, device=device, seed=seed)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def needed_bytes(pipe: ScaleImagePipeline, batch_size: int, guided: bool) -> dict[str, int]:
    """Bytes of weights, of the cache at its peak, and of logits with what is made of them; also on the meta device."""
    model, dtype = pipe.transformer, pipe.transformer.dtype
    parts: list[nn.Module] = [part for part in (model, pipe.vq_model, pipe.refiner) if part is not None]
    stages = pipe.stages(len(model.scales))
    (cache,) = caches_of(stages, batch_size, guided, dtype)
    rows = batch_size * (2 if guided else 1)
    return {
        "weights": sum(p.numel() * p.element_size() for part in parts for p in part.parameters()),
        "cache": cache.peak,
        "logits": rows * model.scales[-1] ** 2 * model.vocab_size * 4 * LAW_ARRAYS,
    }


def count_settings(
    pipe: ScaleImagePipeline, settings: Sequence[Setting], *, batch_sizes: Sequence[int], dtype: torch.dtype
) -> list[dict[str, Any]]:
    """What every setting costs at every batch size, by counting: see `ScaleCost.in_batch`, and the cache of a picture.

    Args:
        pipe: on the meta device. Compressed caches are counted with layers that share alike.

    Returns:
        The rows of the first batch size, then those of the next.
    """
    rows: list[list[dict[str, Any]]] = [[] for _ in batch_sizes]
    for setting in settings:
        with setting.on(pipe, calibrated=False):
            stages, guided = pipe.stages(law=setting.law), setting.law.guided
            cost = scale_cost.count_decode(stages, guided=guided, schedule=setting.sampler.schedule)
            caches = caches_of(drawn_stages(setting.sampler, stages), 1, guided, dtype)
        for batch_size, found in zip(batch_sizes, rows, strict=True):
            found.append(
                {
                    "name": setting.text,
                    "plan": setting.plan.describe(),
                    "batch_size": batch_size,
                    "guidance_scale": setting.law.guidance_scale,
                    **cost.in_batch(batch_size),
                    "cache_held_per_image": max(cache.held for cache in caches),
                    "cache_peak_per_image": max(cache.peak for cache in caches),
                }
            )
    return [row for found in rows for row in found]


def time_settings(
    pipe: ScaleImagePipeline,
    settings: Sequence[Setting],
    *,
    batch_size: int,
    runs: int,
    warmup: int,
    calibrated: bool,
    report: Report = lambda text: None,
) -> list[dict[str, Any]]:
    """Time every setting on the same classes and seeds, round by round; the first one is what speed-ups are over.

    Args:
        calibrated: see `ScalePlan.on`.

    Returns:
        One dict per setting: `seconds` of every timed round, `ms_per_image` and `speed_up` (quantiles), `calls`,
        `identical_samples`: how many of `samples` have the tokens of the first one, None where not promised;
        `cache_held_measured`: bytes a picture that the trace tells, `peak_memory_bytes`.
    """
    device = pipe.device
    held, promised = [0] * len(settings), [False] * len(settings)

    def decode(index: int, condition: Any, first: int) -> tuple[Decoded, float]:
        setting = settings[index]
        generator = seeded(setting.seed + first, batch_size)
        with setting.on(pipe, calibrated=calibrated):
            stages = pipe.stages(law=setting.law)

            def work() -> Any:
                result = setting.sampler(
                    stages,
                    pipe.vq_model,
                    condition,
                    law=setting.law,
                    generator=generator,
                    batch_size=batch_size,
                )
                return result.tokens.cpu(), result.trace

            (tokens, trace), seconds = measure.timed(work, device)
        held[index] = max(trace.cache_bytes)
        promised[index] = trace.identical and setting.plan.same_model
        return Decoded(tokens, trace.target_calls), seconds

    def conditions(first: int) -> torch.Tensor:
        labels = torch.arange(first, first + batch_size) % pipe.num_classes
        return labels.to(device)

    rounds = time_rounds(
        len(settings),
        conditions,
        decode,
        device=device,
        batch_size=batch_size,
        runs=runs,
        warmup=warmup,
        report=lambda text: report(f"batch {batch_size}: {text}"),
    )
    rows = []
    sides = pipe.vq_model.scales
    for index, setting in enumerate(settings):
        stop = setting.sampler.schedule.at(len(sides)).stop_after
        tokens = sum(side * side for side in sides[: stop + 1])
        row = summarise_row(rounds.seconds[index], rounds.calls[index], rounds.seconds[0], tokens)
        row.update(
            sampler=sampler_settings(setting.sampler),
            identical_samples=rounds.identical[index] if promised[index] and index else None,
            **processor_figures(rounds.processor_seconds[index], rounds.processor_seconds[0]),
            samples=runs * batch_size,
            cache_held_measured=held[index] / batch_size,
            peak_memory_bytes=rounds.peak[index],
        )
        rows.append(row)
    return rows


def run(args: argparse.Namespace, known: ModelSettings | None, report: Report) -> tuple[dict[str, Any], str]:
    """Document and table of `visual-spec bench` for a next-scale model.

    Args:
        known: the settings of a model that is there; None for official sizes.

    Raises:
        ValueError: options that do not apply, sizes that are unknown or do not fit the device; before any work.
    """
    if args.curve:
        raise ValueError(
            "--curve counts calls, and a next-scale model takes one a scale, whatever the setting; leave it out."
        )
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    device, dtype = choose_device(args.device), getattr(torch, args.dtype)
    pipe, sizes = None, None
    if known is not None:
        groups = read_groups(args, known)
        pipe = load(args.model, args.device, args.dtype)
        counted = scale_cost.like_on_meta(pipe)
    else:
        sizes = scale_cost.var_sizes(args.model, args.image_size)
        counted = scale_cost.pipeline_on_meta(sizes.transformer, sizes.vq_model, sizes.refiner, dtype=dtype)
        index = {**counted.config, "refiner": None if counted.refiner is None else ["", ""]}
        groups = read_groups(
            args, scale_settings(counted.facts, index, lambda part: counted.components[part].config)
        )
    check_samplers(counted, groups[0], calibrated=False)
    facts = environment(device, dtype)
    for name in ("transformer", "refiner", "vq_model"):
        part = getattr(counted, name)
        count = None if part is None else sum(parameter.numel() for parameter in part.parameters())
        facts[f"{name}_parameters"] = count
    rows = [
        row
        for settings in groups
        for row in count_settings(counted, settings, batch_sizes=args.batch_sizes, dtype=dtype)
    ]
    kind = "scale-count"
    if not args.count_only:
        kind = "scale-bench" if sizes is None else "scale-random-weights"
        if sizes is not None:
            guided = any(settings[0].law.guided for settings in groups)
            measure.refuse_what_does_not_fit(needed_bytes(counted, max(args.batch_sizes), guided), device)
            pipe = random_pipeline(sizes, dtype=dtype, device=device, seed=args.seed)
        assert pipe is not None  # of one kind or the other
        _add_times(rows, pipe, groups, args, calibrated=sizes is None, report=report)
        # Last, because the buffers of this measurement would count as memory of the rows.
        facts["copy_bandwidth"] = measure.copy_bandwidth(device)
        facts["picture_ms"] = picture_ms(pipe)
        for row in rows:
            row["floor_ms_per_image"] = row["bytes_per_image"] / facts["copy_bandwidth"] * 1000
    return {"kind": kind, "environment": facts, "rows": rows}, scale_table(rows)


def _add_times(
    rows: list[dict[str, Any]],
    pipe: ScaleImagePipeline,
    groups: Sequence[Sequence[Setting]],
    args: argparse.Namespace,
    *,
    calibrated: bool,
    report: Report,
) -> None:
    """Time every setting, and add what was measured to what was counted of it."""
    times = [
        row
        for settings in groups
        for batch_size in args.batch_sizes
        for row in time_settings(
            pipe,
            settings,
            batch_size=batch_size,
            runs=args.runs,
            warmup=args.warmup,
            calibrated=calibrated,
            report=report,
        )
    ]
    for row, timed in zip(rows, times, strict=True):
        row.update(timed)


@torch.no_grad()
def picture_ms(pipe: ScaleImagePipeline) -> float:
    """Milliseconds from the finished canvas to the pixels of one picture."""
    canvas = pipe.vq_model.begin(1)
    times = [measure.timed(lambda: pipe.vq_model.decode_canvas(canvas), pipe.device)[1] for _ in range(4)]
    return min(times) * 1000


def scale_table(rows: Sequence[dict[str, Any]]) -> str:
    """The Markdown table: what was timed, if anything was, and what was counted."""
    timed = "seconds" in rows[0]
    header = ["batch", "guidance", "sampler"]
    if timed:
        header += ["ms/image p50", "p20 - p80", *SPEED_UP, "floor ms", "same as plain"]
    header += ["GFLOP/image", "MB read/image", "cache KiB/image", "of plain", "peak KiB/image"]
    lines = []
    plain: dict[tuple[int, float], dict[str, Any]] = {}
    for row in rows:
        first = plain.setdefault((row["batch_size"], row["guidance_scale"]), row)
        line = [str(row["batch_size"]), f"{row['guidance_scale']:g}", row["name"]]
        if timed:
            image, same = row["ms_per_image"], row["identical_samples"]
            line += [
                f"{image['p50']:.1f}",
                f"{image['p20']:.1f} - {image['p80']:.1f}",
                *speed_up_cells(row),
                f"{row['floor_ms_per_image']:.2f}",
                "-" if same is None else f"{same} of {row['samples']}",
            ]
        held = row["cache_held_per_image"]
        lines.append(
            [
                *line,
                _short(row["flops_per_image"] / 1e9),
                _short(row["bytes_per_image"] / 1e6),
                f"{held / 2**10:.0f}",
                f"{100 * held / (first['cache_held_per_image'] or 1):.0f} %",
                f"{row['cache_peak_per_image'] / 2**10:.0f}",
            ]
        )
    return markdown(header, lines)


def _short(value: float) -> str:
    return f"{value:.0f}" if value >= 1000 else f"{value:.3g}"
