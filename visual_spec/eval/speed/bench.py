"""visual-spec bench: calls and seconds of the samplers beside plain decoding with the same model, cache and dtype.

Without `--curve` it times: in every round the plain sampler and all others decode the same prompts with the same
seeds one after the other, so that a drift of the machine hits all of them, and speed-ups are taken within a round.
With `--curve` it counts calls only, over windows, guidance scales and couplings. Only token decoding is timed; turning
tokens into pixels costs every sampler the same, and is given once. With `--random-weights` it times the calls of a
model of official size, and states the acceptance instead of measuring it (`visual_spec.eval.speed.true_size`).
Next-scale models, embedded or of official size, have rows of their own (`visual_spec.eval.speed.scale_bench`), and
so has music (`visual_spec.eval.speed.music_bench`). On CUDA every sampler has two rows, without and with a recorded
graph.

The last line of the output is one JSON document with the raw seconds.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from visual_spec.eval.speed.tables import bench_table
from visual_spec.eval.speed.tables import curve_table as curve_table
from visual_spec.eval.speed.tables import markdown as markdown

if TYPE_CHECKING:
    from visual_spec.pipelines.token_image import TokenImagePipeline

METHODS = ("gumbel+identical", "gumbel+exact", "maximal+exact", "independent+exact")
_BENCH = {"windows": [16, 32, 64], "guidance_scales": [1.0], "methods": ["gumbel+identical", "maximal+exact"]}
_TRUE_SIZE = {**_BENCH, "guidance_scales": None, "methods": list(METHODS)}  # None: that of the model
_CURVE = {"windows": [4, 8, 16, 32, 64], "guidance_scales": [1.0, 3.0, 5.0], "methods": list(METHODS)}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `visual-spec bench`."""
    parser.add_argument(
        "--model", default="shapes", help="embedded name, folder, or Hub id (default: shapes)"
    )
    parser.add_argument(
        "--curve", action="store_true", help="count calls over windows x guidance x methods; no timing"
    )
    parser.add_argument(
        "--windows",
        type=int,
        nargs="+",
        metavar="W",
        help="(default: 16 32 64; curve: 4 8 16 32 64; music: 8 16 32)",
    )
    parser.add_argument(
        "--guidance-scales",
        type=float,
        nargs="+",
        metavar="S",
        help="1: without (default: 1; curve: 1 3 5; music: the model's)",
    )
    parser.add_argument(
        "--methods",
        nargs="+",
        metavar="M",
        help=f"coupling+acceptance, of {', '.join(METHODS)} (default: gumbel+identical maximal+exact; curve and random "
        "weights: all); for next-scale models rows such as scale-wise:num_draft_scales=6,cache_share=0.1 (default: all "
        "it has); for music also unit+coupling+acceptance, such as column+maximal+exact, and rows such as "
        "masked:steps=20 (default: all)",
    )
    parser.add_argument(
        "--masked",
        metavar="MODEL",
        help="of music: a masked model of the same codec, for rows beside --model's own",
    )
    parser.add_argument("--initial-draft", metavar="NAME", help="guess for a slot that was never scored")
    parser.add_argument(
        "--batch-sizes", type=int, nargs="+", default=[1, 8], metavar="B", help="(default: 1 8)"
    )
    parser.add_argument(
        "--prompts", type=int, default=32, metavar="N", help="how many prompts (curve: samples per cell)"
    )
    parser.add_argument(
        "--runs", type=int, default=5, metavar="N", help="timed rounds, at least 5 (default: 5)"
    )
    parser.add_argument(
        "--warmup", type=int, default=1, metavar="N", help="rounds before the timed ones (default: 1)"
    )
    parser.add_argument(
        "--without-no-cache", action="store_true", help="leave out the row that decodes with no cache"
    )
    parser.add_argument(
        "--temperature", type=float, metavar="T", help="(default: 1, of music the model's own)"
    )
    parser.add_argument(
        "--top-k", type=int, metavar="K", help="0: off (default: 0; with --random-weights the model's own)"
    )
    parser.add_argument("--top-p", type=float, metavar="P", help="1: off (default: 1, or the model's own)")
    parser.add_argument("--seed", type=int, default=0, help="of the first sample; sample i has seed + i")
    sizes = parser.add_argument_group("official sizes without their weights")
    sizes.add_argument(
        "--random-weights",
        action="store_true",
        help="--model names a size, such as llamagen-xxl, llamagen-xl-t2i, janus-pro-7b, lumina-mgpt-7b or emu3-8b, "
        "whose acceptance is stated, not measured; or var-d16, or var-d30+var-d16 for CoDe",
    )
    sizes.add_argument(
        "--count-only", action="store_true", help="next-scale models: count arithmetic and bytes, run nothing"
    )
    sizes.add_argument(
        "--accept-probability",
        type=float,
        default=0.75,
        metavar="P",
        help="stated: every draft is accepted with this probability (default: 0.75)",
    )
    sizes.add_argument(
        "--image-size", type=int, metavar="N", help="pixels (default: what the model was released for)"
    )
    sizes.add_argument(
        "--slots", type=int, default=32, metavar="N", help="slots decoded in a timed round (default: 32)"
    )
    parser.add_argument("--device", help="default: cuda where there is one, else cpu")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16", "float64"])
    parser.add_argument(
        "--fuse-projections",
        action="store_true",
        help="of next-token models: projections of one input as one matrix product, in all rows",
    )
    parser.add_argument(
        "--threads", type=int, metavar="N", help="processor threads (default: PyTorch's choice)"
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the JSON document here too")
    parser.add_argument(
        "--plot",
        type=Path,
        metavar="FILE",
        help="draw the rows against the roofline of the machine: .svg or .png",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace FILE if it is there")


def main(argv: Sequence[str] | None = None) -> int:
    """Parse arguments and run; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="visual-spec bench", description="Calls and seconds of the samplers beside plain decoding."
    )
    add_arguments(parser)
    return run(parser.parse_args(argv))


def run(args: argparse.Namespace) -> int:
    """Measure, print a Markdown table and the JSON document, and write the latter to `--out`.

    Raises:
        ValueError: an option out of range; before anything is loaded.
        FileExistsError: `--out` exists and `--overwrite` is not given; before anything is loaded.
    """
    _check(args)
    from visual_spec.eval.files import refuse_existing, write_atomically

    for path in (args.out, args.plot):
        if path is not None:
            refuse_existing(path, args.overwrite)
    if args.plot is not None:
        from visual_spec.eval.speed.roofline import refuse_plot

        refuse_plot(args.plot)  # where there is no matplotlib

    rows = None
    if not args.random_weights:
        from visual_spec.eval.rows import rows_of_masked, rows_of_model

        rows = rows_of_model(args.model)
        rows_of_masked(args.masked, rows)  # refuses one that does not fit
    elif args.masked is not None:
        raise ValueError("--masked is for music models that are there; leave it out, or --random-weights")
    plays = rows is not None and rows.plays
    by_scales = rows.by_scales if rows is not None else args.model.startswith("var-")
    if args.plot is not None and (plays or by_scales or args.curve):
        raise ValueError("--plot draws timed rows of next-token models; leave it out")
    _refuse_dtype(args)
    if plays:
        from visual_spec.eval.speed import music_bench

        document, text = music_bench.run(args, _progress)
    elif by_scales:
        from visual_spec.eval.speed import scale_bench

        args.temperature = 1.0 if args.temperature is None else args.temperature
        document, text = scale_bench.run(args, _progress)
    else:
        args.temperature = 1.0 if args.temperature is None else args.temperature
        document, text = _next_token(args)
    print(environment_line(document["environment"]))
    print()
    print(text)
    print()
    line = json.dumps(document)
    if args.plot is not None:
        from visual_spec.eval.speed.roofline import write_roofline

        write_roofline(document, args.plot, overwrite=args.overwrite)
    if args.out is not None:
        write_atomically(args.out, json.dumps(document, indent=1) + "\n", overwrite=args.overwrite)
    print(line)
    return 0


def _next_token(args: argparse.Namespace) -> tuple[dict[str, Any], str]:
    """Document and table of a next-token model."""
    for name, value in (_CURVE if args.curve else _TRUE_SIZE if args.random_weights else _BENCH).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    args.top_p = 1.0 if args.top_p is None else args.top_p
    for method in args.methods:
        if method not in METHODS:
            raise ValueError(f"--methods {method} given; allowed are {', '.join(METHODS)}")
    if args.count_only:
        raise ValueError(
            "--count-only is for next-scale models; pass --model var-d16 or the like, or leave it out"
        )
    from visual_spec.eval.speed import timing

    samplers = timing.make_samplers(args.methods, args.windows, args.initial_draft)
    if args.random_weights:
        from visual_spec.eval.speed import size_bench

        return size_bench.run(args, samplers, _progress)
    return _measure(args, samplers)


def _measure(args: argparse.Namespace, samplers: list) -> tuple[dict[str, Any], str]:
    """Document and table of a model that is there."""
    from visual_spec.eval.speed import timing

    args.top_k = args.top_k or 0
    laws = [
        timing.make_law(scale, temperature=args.temperature, top_k=args.top_k, top_p=args.top_p)
        for scale in args.guidance_scales
    ]
    pipe = load(args.model, args.device, args.dtype, args.threads)
    if args.fuse_projections:
        from visual_spec.models.core.projections import fuse_projections

        fuse_projections(pipe.transformer)
    prompts = bench_prompts(pipe, args.prompts)
    document: dict[str, Any] = {
        "kind": "curve" if args.curve else "bench",
        "settings": settings_of(args),
        "environment": timing.environment_of(pipe),
    }
    if args.curve:
        from visual_spec.eval.speed.curve import curve

        document["rows"] = curve(
            pipe, samplers, laws, prompts, seed=args.seed, batch_size=max(args.batch_sizes), report=_progress
        )
        text = curve_table(document["rows"])
    else:
        rows = []
        for batch_size in args.batch_sizes:
            for law in laws:
                rows += timing.bench(
                    pipe,
                    samplers,
                    law,
                    prompts,
                    batch_size=batch_size,
                    runs=args.runs,
                    warmup=args.warmup,
                    seed=args.seed,
                    # One row without a cache is enough to see what the cache is worth, and it takes long.
                    no_cache=not args.without_no_cache and batch_size == args.batch_sizes[0],
                    report=_progress,
                )
        # Last, because the buffers of this measurement would count as memory of the rows.
        facts = timing.machine_facts(pipe)
        document["environment"].update(facts)
        timing.add_floors(rows, facts["copy_bandwidth"])
        document["rows"] = rows
        text = bench_table(rows)
    return document, text


def settings_of(args: argparse.Namespace) -> dict[str, Any]:
    """The options, for the document."""
    plain = {
        name: value for name, value in vars(args).items() if isinstance(value, (str, int, float, list, bool))
    }
    return {name: value for name, value in plain.items() if name not in ("command", "overwrite")}


def _check(args: argparse.Namespace) -> None:
    for name, least in (("prompts", 1), ("runs", 5), ("warmup", 0)):
        if getattr(args, name) < least:
            raise ValueError(f"--{name} {getattr(args, name)} given; pass at least {least}")
    if args.threads is not None and args.threads < 1:
        raise ValueError(f"--threads {args.threads} given; pass at least 1")
    if args.slots < 2:
        raise ValueError(f"--slots {args.slots} given; pass at least 2")
    if not 0 <= args.accept_probability <= 1:
        raise ValueError(f"--accept-probability {args.accept_probability} given; pass a number from 0 to 1")
    if args.random_weights and args.curve:
        raise ValueError(
            "--curve counts accepted drafts, and --random-weights accepts none; pass one of them"
        )
    if min(args.batch_sizes) < 1:
        raise ValueError(f"--batch-sizes {min(args.batch_sizes)} given; a batch has at least 1 sample")


def load(
    model: str, device: str | None, dtype: str, threads: int | None, masked: str | None = None
) -> TokenImagePipeline:
    """A silent pipeline for measuring, on `device` (default: a GPU if there is one), with weights of `dtype`.

    Args:
        masked: a masked model of music beside it: the two come as a `MusicPair`.
    """
    import torch
    from diffusers.utils import logging

    from visual_spec.pipelines.loading import load_pipeline

    if threads is not None:
        torch.set_num_threads(threads)
    logging.disable_progress_bar()
    pipe = load_pipeline(model).to(choose_device(device), getattr(torch, dtype))
    pipe.set_progress_bar_config(disable=True)
    if masked is None:
        return pipe
    from visual_spec.eval.quality.music import MusicPair

    pair: Any = MusicPair(pipe, load(masked, device, dtype, threads))
    return pair


def choose_device(name: str | None) -> Any:
    """The device of a name; without one a GPU if there is one, else the CPU.

    Raises:
        ValueError: a name that PyTorch does not know, or a GPU that is not there.
    """
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    try:
        device = torch.device(name or ("cuda" if count else "cpu"))
    except RuntimeError as error:
        raise ValueError(f"--device {name} is no device; pass cpu, cuda, or cuda:1 and the like.") from error
    if device.type == "cuda" and (device.index or 0) >= count:
        raise ValueError(
            f"--device {name}, but PyTorch sees {count} GPUs here; pass --device cpu, or leave it out."
        )
    return device


def _refuse_dtype(args: argparse.Namespace) -> None:
    import torch

    from visual_spec.eval.speed.measure import refuse_dtype

    refuse_dtype(choose_device(args.device), getattr(torch, args.dtype))


def bench_prompts(pipe: Any, count: int) -> list[str]:
    """What a benchmark draws: held-out captions, or for a class-conditional pipeline the classes in turn."""
    classes = getattr(pipe, "num_classes", None)
    return held_out_prompts(count) if classes is None else [str(i % classes) for i in range(count)]


def held_out_prompts(count: int) -> list[str]:
    """The prompts of the benchmark: captions that no trainer has seen, the same ones every time."""
    from visual_spec.data.shapes import held_out_prompts

    return held_out_prompts(count)


def environment_line(environment: dict[str, Any]) -> str:
    """One line that says where the numbers come from."""
    parts = [environment["device_name"]]
    if environment["device"] == "cpu":
        parts.append(f"{environment['threads']} threads, load {environment['load_average']}")
    parts += [
        environment["dtype"],
        f"torch {environment['torch']}",
        f"commit {environment['commit'] or 'unknown'}",
    ]
    if "copy_bandwidth" in environment:
        parts.append(f"copies {environment['copy_bandwidth'] / 1e9:.1f} GB/s")
        if environment["device"] == "cpu":
            parts.append("peak memory is that of the process so far")
        if "picture_ms" in environment:
            parts.append(f"tokens to pixels {environment['picture_ms']:.1f} ms per image")
        if "clip_ms" in environment:
            parts.append(f"codes to waves {environment['clip_ms']:.0f} ms per clip")
    return ", ".join(parts)


def _progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
