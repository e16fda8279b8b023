"""`visual-spec bench` of next-scale models: the large model, the small one, both (CoDe), compressed caches (ScaleKV).

Embedded models are timed as they are. Official sizes (`benchmarks.sizes.official --model var-d16`, or
`var-d30+var-d16` with a refiner) have random weights: no draft is ever refused here, so the times hold for the true
weights too; only the pictures do not. With `--count-only` nothing is run: arithmetic and bytes are counted on the meta
device.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from visual_spec.eval import measure
from visual_spec.eval.defaults import ModelSettings, scale_settings
from visual_spec.eval.draws import caches_of
from visual_spec.eval.machine import environment
from visual_spec.eval.settings import Setting, check_samplers
from visual_spec.eval.speed import scale_cost
from visual_spec.eval.speed.groups import read_groups
from visual_spec.eval.speed.official_sizes import LAW_ARRAYS, fill_at_random
from visual_spec.eval.speed.rounds import prompts_of, shown_ms, time_settings
from visual_spec.eval.speed.tables import COUNTED_SCALES, TIMED_SCALES
from visual_spec.eval.tables import table
from visual_spec.eval.timing import Report
from visual_spec.models.next_scale.var import VARTransformer
from visual_spec.pipelines.placing import choose_device, load
from visual_spec.pipelines.scale_image import ScaleImagePipeline
from visual_spec.samplers.scales.stages import drawn_stages


def random_pipeline(
    sizes: dict[str, Any], *, dtype: torch.dtype, device: torch.device, seed: int = 0
) -> ScaleImagePipeline:
    """A pipeline of official size with random weights, made on the device it runs on."""
    pipe = scale_cost.pipeline_on_meta(**sizes, dtype=dtype, kind=VARTransformer)
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
    device, dtype = choose_device(args.device), getattr(torch, args.dtype)
    pipe, sizes = None, None
    if known is not None:
        groups = read_groups(args, known)
        pipe = load(args.model, args.device, args.dtype)
        counted = scale_cost.like_on_meta(pipe)
    else:
        sizes = scale_cost.var_sizes(args.model, args.image_size)
        counted = scale_cost.pipeline_on_meta(**sizes, dtype=dtype)
        index = {**counted.config, "refiner": None if counted.refiner is None else ["", ""]}
        groups = read_groups(
            args, scale_settings(counted.facts, index, lambda part: counted.components[part].config)
        )
        groups = [[_uncalibrated(setting) for setting in group] for group in groups]
    check_samplers(counted, groups[0])
    facts = environment(device, dtype)
    for name in ("transformer", "refiner", "vq_model"):
        weights = getattr(getattr(counted, name), "parameters", None)
        facts[f"{name}_parameters"] = weights and sum(weight.numel() for weight in weights())
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
    plain: dict[Any, dict[str, Any]] = {}
    for row in rows:
        first = plain.setdefault((row["batch_size"], row["guidance_scale"]), row)
        row["cache_share"] = row["cache_held_per_image"] / (first["cache_held_per_image"] or 1)
    shown = table(rows, COUNTED_SCALES if args.count_only else TIMED_SCALES)
    return {"kind": kind, "environment": facts, "rows": rows}, shown


def _uncalibrated(setting: Setting) -> Setting:
    """The setting with caches that the layers share alike: random weights have nothing to calibrate on."""
    if setting.sampler.config.get("cache_share") in (None, "off"):
        return setting
    sampler = type(setting.sampler).from_config(setting.sampler.config, num_drafters=0)
    return replace(setting, sampler=sampler)
