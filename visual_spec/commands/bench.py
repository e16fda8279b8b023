"""visual-spec bench: calls and seconds of the samplers beside plain decoding with the same model, cache and dtype.

    visual-spec bench --model things --samplers speculative-jacobi zipar --windows 8 16 32
    visual-spec bench --model shapes_var --out scales.json --plot roofline.svg

Without `--curve` it times: in every round plain decoding and all other settings decode the same prompts with the same
seeds one after the other, so that a drift of the machine hits all of them, and speed-ups are taken within a round.
With `--curve` it counts calls only. Only the decoding of tokens is timed; turning tokens into pixels or waves costs
every sampler the same, and is given once. A checkout times
models of official size, without their weights, by `python -m benchmarks.sizes.official`.

`--out` writes one JSON document with the raw seconds, and `--json` prints it as the last line.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from visual_spec.commands.options import LAW, MACHINE, add, command, progress
from visual_spec.files.documents import json_text, write_json

if TYPE_CHECKING:
    from visual_spec.eval.defaults import ModelSettings

_RUNS = "visual_spec.eval.speed"
# What measures a model, by what a call of it commits.
_HOME = {"tokens": "rounds", "columns": "rounds", "scales": "scale_bench"}
# fmt: off
_OPTIONS = dict(
    curve=dict(action="store_true", help="count calls over settings; no timing"),
    windows=dict(type=int, nargs="+", metavar="W", help="measure each sampler that has a window, and is not told one, "
                 "in all of these (default: its own; where no samplers are named 16 32 64, for music 8 16 32, for a "
                 "curve 4 8 16 32 64)"),
    guidance_scales=dict(type=float, nargs="+", metavar="S",
                         help="guidance scales to measure; 1 turns guidance off (default: the model's own)"),
    batch_sizes=dict(type=int, nargs="+", default=[1, 8], metavar="B", help="(default: 1 8)"),
    prompts=dict(type=int, default=32, metavar="N", help="how many prompts (curve: samples per setting)"),
    runs=dict(type=int, default=5, metavar="N", help="timed rounds, at least 5 (default: 5)"),
    warmup=dict(type=int, default=1, metavar="N", help="rounds before the timed ones (default: 1)"),
    skip_uncached=dict(action="store_true", help="leave out the row that decodes without a cache"),
    count_only=dict(action="store_true", help="next-scale models: count arithmetic and bytes, run nothing"),
    random_weights=dict(action="store_true", help=argparse.SUPPRESS),  # of earlier versions
    fuse_projections=dict(action="store_true", help="of next-token models: projections of one input as one matrix "
                          "product, in all rows"),
    out=dict(type=Path, metavar="FILE", help="write a JSON document here"),
    plot=dict(type=Path, metavar="FILE",
              help="draw the rows against the roofline of the machine: .svg, .pdf or .png"),
)
# fmt: on


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `visual-spec bench`."""
    add(parser, "model", "samplers", "masked", "seed", *LAW, *MACHINE, "overwrite", "json")
    add(parser, **_OPTIONS)


def run(args: argparse.Namespace) -> int:
    """Measure, print a Markdown table and with `--json` a JSON document, which is also written to `--out`."""
    if args.random_weights:
        raise ValueError(
            "--random-weights is gone from the package: in a checkout, models of official size are timed by "
            f"python -m benchmarks.sizes.official --model {args.model}"
        )
    return measured(args, _of_model)


def _of_model(args: argparse.Namespace) -> tuple[str, ModuleType, ModelSettings]:
    """What a call of the model commits, the module that times it, and what is known of the model."""
    from visual_spec.eval.defaults import settings_of_model

    known = settings_of_model(args.model)
    unit = known.facts.unit
    return unit, importlib.import_module(f"{_RUNS}.{_HOME[unit]}"), known


def measured(
    args: argparse.Namespace, find: Callable[[argparse.Namespace], tuple[str, ModuleType, ModelSettings]]
) -> int:
    """Time by what `find` finds, see `_of_model`; print and write what was measured."""
    _check_numbers(args)
    from visual_spec.files.whole import ready_folder, refuse_existing

    for path in (args.out, args.plot):
        if path is not None:
            ready_folder(refuse_existing(path, args.overwrite).parent)
    if args.plot is not None:
        from visual_spec.eval.charts import chart_ending, figure_class

        chart_ending(args.plot, "--plot")
        figure_class()  # refuses where there is no matplotlib

    unit, home, known = find(args)
    _refuse_options(args, unit)
    document, text = home.run(args, known, progress)
    document["settings"] = settings_of(args) | document.get("settings", {})

    from visual_spec.eval.machine import environment_line

    print(environment_line(document["environment"]))
    print()
    print(text)
    print()
    if args.plot is not None:
        from visual_spec.eval.speed.roofline import write_roofline

        write_roofline(document, args.plot, overwrite=args.overwrite)
    if args.out is not None:
        write_json(args.out, document, indent=1, overwrite=args.overwrite)
    if args.json:
        print(json_text(document))
    return 0


def settings_of(args: argparse.Namespace) -> dict[str, Any]:
    """The options, for the document."""
    plain = {
        name: value for name, value in vars(args).items() if isinstance(value, (str, int, float, list, bool))
    }
    return {name: value for name, value in plain.items() if name not in ("command", "overwrite", "json")}


def _check_numbers(args: argparse.Namespace) -> None:
    for name, least in (("prompts", 1), ("runs", 5), ("warmup", 0)):
        if getattr(args, name) < least:
            raise ValueError(f"--{name} {getattr(args, name)} given; pass at least {least}")
    if min(args.batch_sizes) < 1:
        raise ValueError(f"--batch-sizes {min(args.batch_sizes)} given; a batch has at least 1 sample")


def _refuse_options(args: argparse.Namespace, unit: str) -> None:
    """Refuse options that a model of this unit does not have, and a dtype that the device lacks; set the threads."""
    if args.masked is not None and unit != "columns":
        raise ValueError(
            f"--masked {args.masked} given; it takes a masked model of music, beside one of columns, such as --model "
            "tunes --masked tunes_masked."
        )
    if args.plot is not None and (unit != "tokens" or args.curve):
        raise ValueError("--plot draws timed rows of next-token models; leave it out")
    if args.count_only and unit not in ("scales", "vectors"):
        raise ValueError(
            "--count-only is for next-scale models and MAR; pass --model var-d16 or the like, or leave it out"
        )
    if args.fuse_projections and unit != "tokens":
        raise ValueError("--fuse-projections is for next-token models; leave it out")
    import torch

    from visual_spec.eval.measure import refuse_dtype
    from visual_spec.pipelines.placing import choose_device

    refuse_dtype(choose_device(args.device), getattr(torch, args.dtype))
    if args.threads is not None:
        torch.set_num_threads(args.threads)


main = command("bench", __doc__, add_arguments, run)
