"""`visual-spec bench --random-weights` for next-token models: the run, its document, and its table."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any

import torch

from visual_spec.eval.speed import measure, official_sizes, timing, true_size
from visual_spec.eval.speed.tables import PHASES, markdown, share_and_phases


def run(
    args: argparse.Namespace, samplers: list[timing.Entry], report: Callable[[str], Any]
) -> tuple[dict[str, Any], str]:
    """Document and table of a model of official size with random weights.

    Rows of `visual_spec.eval.speed.baselines` are left out where the device has no room for them, and where nothing
    guides.

    Raises:
        ValueError: a size that is unknown, or does not fit the device; before anything is allocated.
    """
    from visual_spec.eval.speed.bench import choose_device, settings_of

    official = official_sizes.official_model(args.model, args.image_size)
    args.image_size = official.image_size
    args.top_k = official.top_k if args.top_k is None else args.top_k
    args.guidance_scales = args.guidance_scales or [official.guidance_scale]
    laws = [
        timing.make_law(scale, temperature=args.temperature, top_k=args.top_k, top_p=args.top_p)
        for scale in args.guidance_scales
    ]
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    device, dtype = choose_device(args.device), getattr(torch, args.dtype)
    guided = any(law.guided for law in laws)

    def needed(batch_size: int, window: int, baseline: bool = False) -> dict[str, int]:
        parts = official.needed_bytes(
            dtype=dtype, batch_size=batch_size, window=window, guided=guided, baseline=baseline
        )
        if device.type == "cuda":  # a recorded decode keeps its cache, and the next one's is copied over it
            parts["recording"] = parts["cache"]
        return parts

    largest = max(args.batch_sizes), max(args.windows)
    room = measure.available_memory(device)
    whole = needed(*largest)
    true_size.refuse_what_does_not_fit(whole, device, at=needed, batch_size=largest[0], window=largest[1])
    official_sizes.fill(official, dtype=dtype, device=device, seed=args.seed)
    if args.fuse_projections:
        from visual_spec.models.core.projections import fuse_projections

        fuse_projections(official.module)
    known = _baselines(official)
    rows, left_out = [], []
    for batch_size in args.batch_sizes:
        fits = sum(needed(batch_size, 1, baseline=True).values()) <= room
        for law in laws:
            chosen = [
                baseline
                for baseline in known
                if fits and law.guided and batch_size <= (baseline.largest_batch or batch_size)
            ]
            left_out += [
                {"name": baseline.name, "batch_size": batch_size, "guidance_scale": law.guidance_scale}
                for baseline in known
                if baseline not in chosen
            ]
            rows += true_size.measure_calls(
                official,
                samplers,
                law,
                batch_size=batch_size,
                runs=args.runs,
                warmup=args.warmup,
                slots=args.slots,
                probability=args.accept_probability,
                baselines=chosen,
                report=report,
            )
    environment = measure.environment(device, dtype)
    environment["transformer_parameters"] = official.parameters
    official.module.to_empty(device="meta")  # the buffers of what follows need room
    environment["copy_bandwidth"] = measure.copy_bandwidth(device)
    environment["matmul_flops"] = measure.matmul_peak(device, dtype)
    timing.add_floors(rows, environment["copy_bandwidth"])
    document = {
        "kind": "random-weights",
        "settings": settings_of(args),
        "environment": environment,
        "architecture": args.model,
        "needed_bytes": whole,
        "acceptance": true_size.acceptance_statement(args.accept_probability),
        "rows": rows,
        "left_out": left_out,
    }
    return document, size_table(rows, args.accept_probability)


def _baselines(official: official_sizes.OfficialModel) -> list[Any]:
    if not hasattr(official.model, "family"):
        return []
    from visual_spec.eval.speed.baselines import baselines_of

    return baselines_of(official)


def size_table(rows: Sequence[dict[str, Any]], probability: float) -> str:
    """The Markdown table, columns that follow from a stated acceptance marked by a star, and a line that says so."""
    header = [
        "batch",
        "guidance",
        "sampler",
        "window",
        "ms/call p50",
        "p20 - p80",
        "floor",
        "of floor",
        *PHASES,
    ]
    header += [
        "prefill ms",
        "peak MiB",
        "calls*",
        "tokens/call*",
        "ms/image*",
        "image p20 - p80*",
        "speed-up*",
    ]
    lines = []
    for row in rows:
        call, image = row["ms_per_call"], row["ms_per_image"]
        lines.append(
            [
                str(row["batch_size"]),
                f"{row['guidance_scale']:g}",
                row["name"],
                str(row["window"]),
                f"{call['p50']:.2f}",
                f"{call['p20']:.2f} - {call['p80']:.2f}",
                f"{row['floor_ms_per_call']:.2f}",
                *share_and_phases(row),
                f"{row['prefill_ms']:.1f}",
                f"{row['peak_memory_bytes'] / 2**20:.0f}",
                f"{row['calls_per_image']:.0f}",
                f"{row['tokens_per_call']:.2f}",
                f"{image['p50']:.0f}",
                f"{image['p20']:.0f} - {image['p80']:.0f}",
                f"{row['speed_up']:.2f}x",
            ]
        )
    note = (
        f"* not measured: random weights; follows from the stated acceptance of {probability:g} for every draft, "
        "and the measured calls. Rows that draw a token a call accept no drafts: theirs is measured. Speed-ups are "
        "over the fastest of these at the same batch and guidance"
    )
    return f"{markdown(header, lines)}\n\n{note}"
