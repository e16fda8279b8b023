"""`visual-spec bench` of next-scale models: the large model, the small one, both (CoDe), compressed caches (ScaleKV).

With `--count-only` nothing is run: arithmetic and bytes are counted on the meta device.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any

import torch

from visual_spec.eval import measure
from visual_spec.eval.defaults import ModelSettings
from visual_spec.eval.draws import caches_of
from visual_spec.eval.machine import environment
from visual_spec.eval.settings import Setting, check_samplers
from visual_spec.eval.speed import scale_cost
from visual_spec.eval.speed.groups import read_groups
from visual_spec.eval.speed.rounds import prompts_of, shown_ms, time_settings
from visual_spec.eval.speed.tables import COUNTED_SCALES, TIMED_SCALES
from visual_spec.eval.tables import table
from visual_spec.eval.timing import Report
from visual_spec.pipelines.placing import choose_device, load
from visual_spec.pipelines.scale_image import ScaleImagePipeline
from visual_spec.samplers.scales.stages import drawn_stages


def count_settings(
    pipe: ScaleImagePipeline, settings: Sequence[Setting], *, batch_sizes: Sequence[int], dtype: torch.dtype
) -> list[dict[str, Any]]:
    """What every setting costs at every batch size, by counting: see `ScaleCost.in_batch`, and the cache of a picture.

    Args:
        pipe: on the meta device. Compressed caches are counted with layers that share alike.

    Returns:
        The rows of the first batch size, then of the next.
    """
    rows: list[list[dict[str, Any]]] = [[] for _ in batch_sizes]
    for setting in settings:
        with setting.on(pipe):
            stages, guided = pipe.stages(law=setting.law), setting.law.guided
            cost = scale_cost.count_decode(stages, guided=guided, schedule=setting.sampler.schedule)
            caches = caches_of(drawn_stages(setting.sampler, stages), 1, guided, dtype)
        for batch_size, group in zip(batch_sizes, rows, strict=True):
            group.append(
                {
                    "name": setting.text,
                    "batch_size": batch_size,
                    "guidance_scale": setting.law.guidance_scale,
                    **cost.in_batch(batch_size),
                    "cache_held_per_image": max(cache.held for cache in caches),
                    "cache_peak_per_image": max(cache.peak for cache in caches),
                }
            )
    return [row for group in rows for row in group]


def run(args: argparse.Namespace, known: ModelSettings, report: Report) -> tuple[dict[str, Any], str]:
    """Document and table of `visual-spec bench` for a next-scale model.

    Raises:
        ValueError: options that do not apply, before any work.
    """
    if args.curve:
        raise ValueError(
            "--curve counts calls, and a next-scale model takes one a scale, whatever the setting; leave it out."
        )
    groups = read_groups(args, known)
    pipe = load(args.model, args.device, args.dtype)
    return measured(args, scale_cost.like_on_meta(pipe), groups, lambda: pipe, report, "scale-bench")


def measured(
    args: argparse.Namespace,
    counted: ScaleImagePipeline,
    groups: Sequence[Sequence[Setting]],
    make: Callable[[], ScaleImagePipeline],
    report: Report,
    kind: str,
) -> tuple[dict[str, Any], str]:
    """Count, and unless `--count-only` time, groups of settings.

    Args:
        counted: the pipeline on the meta device.
        make: the pipeline that is timed.
        kind: of the document of timed rows.
    """
    check_samplers(counted, groups[0])
    device = choose_device(args.device)
    dtype = getattr(torch, args.dtype)
    facts = environment(device, dtype)
    for name in ("transformer", "refiner", "vq_model"):
        weights = getattr(getattr(counted, name), "parameters", None)
        facts[f"{name}_parameters"] = weights and sum(weight.numel() for weight in weights())
    rows = [
        row
        for settings in groups
        for row in count_settings(counted, settings, batch_sizes=args.batch_sizes, dtype=dtype)
    ]
    if args.count_only:
        kind = "scale-count"
    else:
        pipe = make()
        labels = prompts_of(pipe, pipe.num_classes)
        options = dict(runs=args.runs, warmup=args.warmup, report=report)
        timed = [
            row
            for settings in groups
            for batch_size in args.batch_sizes
            for row in time_settings(pipe, settings, labels, batch_size=batch_size, **options)
        ]
        for row, more in zip(rows, timed, strict=True):
            row.update(more)
        # Last, because the buffers of this measurement would count as memory of the rows.
        facts["copy_bandwidth"] = measure.copy_bandwidth(device)
        facts["picture_ms"] = shown_ms(pipe, groups[0][0], labels)
        for row in rows:
            row["floor_ms_per_image"] = row["bytes_per_image"] / facts["copy_bandwidth"] * 1000
    plain: dict[tuple[int, float], dict[str, Any]] = {}
    for row in rows:
        first = plain.setdefault((row["batch_size"], row["guidance_scale"]), row)
        row["cache_share"] = row["cache_held_per_image"] / (first["cache_held_per_image"] or 1)
    shown = table(rows, COUNTED_SCALES if args.count_only else TIMED_SCALES)
    return {"kind": kind, "environment": facts, "rows": rows}, shown
