"""`python -m benchmarks.sizes.official` for VAR: `var-d16`, or `var-d30+var-d16` with a refiner, with random weights.

No draft is ever refused, so the times hold for the true weights too; only the pictures do not.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from benchmarks.sizes import room
from benchmarks.sizes.models import LAW_ARRAYS, fill_at_random
from visual_spec.eval.defaults import ModelSettings, scale_settings
from visual_spec.eval.draws import caches_of
from visual_spec.eval.settings import Setting
from visual_spec.eval.speed import scale_bench, scale_cost
from visual_spec.eval.speed.groups import read_groups
from visual_spec.eval.timing import Report
from visual_spec.models.next_scale.var import PRESETS, SCALES
from visual_spec.pipelines.placing import choose_device
from visual_spec.pipelines.scale_image import ScaleImagePipeline


def run(args: argparse.Namespace, known: ModelSettings | None, report: Report) -> tuple[dict[str, Any], str]:
    """Document and table of VAR of official size.

    Args:
        known: None; the settings follow from the size.

    Raises:
        ValueError: sizes that are unknown or do not fit the device; before any work.
    """
    sizes = var_sizes(args.model, args.image_size)
    device, dtype = choose_device(args.device), getattr(torch, args.dtype)
    counted = scale_cost.pipeline_on_meta(**sizes, dtype=dtype)
    index = {**counted.config, "refiner": None if counted.refiner is None else ["", ""]}
    groups = read_groups(
        args, scale_settings(counted.facts, index, lambda part: counted.components[part].config)
    )
    groups = [[_uncalibrated(setting) for setting in group] for group in groups]

    def make() -> ScaleImagePipeline:
        guided = any(settings[0].law.guided for settings in groups)
        room.refuse_what_does_not_fit(needed_bytes(counted, max(args.batch_sizes), guided), device)
        return random_pipeline(sizes, dtype=dtype, device=device, seed=args.seed)

    return scale_bench.measured(args, counted, groups, make, report, "scale-random-weights")


def var_sizes(name: str, image_size: int | None = None) -> dict[str, Any]:
    """Arguments of `pipeline_on_meta` for VAR of official size: "var-d16", or "var-d30+var-d16" with a refiner.

    Args:
        image_size: 256 or 512; None: what the size was released for.

    Raises:
        ValueError: another name or picture size; lists those there are.
    """
    names = name.split("+")
    known = {f"var-{preset}": config for preset, config in PRESETS.items()}
    if len(names) > 2 or any(part not in known for part in names):
        raise ValueError(
            f"--model {name}; pass one of {', '.join(known)}, or two of them with a + between, "
            "the larger one first, for CoDe."
        )
    if image_size is not None and image_size not in SCALES:
        raise ValueError(f"--image-size {image_size}; VAR draws {' or '.join(map(str, SCALES))} pixels.")
    scales = known[names[0]]["scales"] if image_size is None else SCALES[image_size]
    configs = [{**known[part], "scales": scales} for part in names]
    refiner = configs[1] if len(names) > 1 else None
    return {"transformer": configs[0], "vq_model": {"scales": scales}, "refiner": refiner}


def random_pipeline(
    sizes: dict[str, Any], *, dtype: torch.dtype, device: torch.device, seed: int = 0
) -> ScaleImagePipeline:
    """A pipeline of official size with random weights, made on the device it runs on."""
    pipe = scale_cost.pipeline_on_meta(**sizes, dtype=dtype)
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


def _uncalibrated(setting: Setting) -> Setting:
    """The setting with caches that the layers share alike: random weights have nothing to calibrate on."""
    if setting.sampler.config.get("cache_share") in (None, "off"):
        return setting
    sampler = type(setting.sampler).from_config(setting.sampler.config, num_drafters=0)
    return replace(setting, sampler=sampler)
