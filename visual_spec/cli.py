"""The command line: visual-spec generate | convert | models | bench | eval | sample | score | report | app | serve.

Only the standard library is imported before the arguments are known to be good, so that `--help`, a misspelt flag, or
a file in the way are answered at once.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import re
import shutil
import sys
import textwrap
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import visual_spec
from visual_spec import families
from visual_spec.eval.arguments import Parser, add, at_least, show_warning
from visual_spec.eval.tables import plain_table
from visual_spec.files.documents import json_text
from visual_spec.files.program import run_program
from visual_spec.models.core.settings import LAW_SETTINGS
from visual_spec.samplers.registry import names

_OWN_ARGUMENTS = {
    "bench": ("visual_spec.eval.speed.bench", "measure calls and seconds"),
    "eval": ("visual_spec.eval.quality.command", "what samplers gain, and what it costs in quality"),
    "sample": (
        "visual_spec.eval.quality.sample_command",
        "draw a set of samples as files, on any number of processes",
    ),
    "score": (
        "visual_spec.eval.quality.score_command",
        "FID, KID, IS, precision, recall, CLIP, FVD of such a set",
    ),
    "report": (
        "visual_spec.eval.quality.report_command",
        "a page of the results of eval, or of sampled sets",
    ),
    "app": ("visual_spec.app", "a page on this machine: plain and accelerated decoding side by side"),
    "serve": ("visual_spec.serving.command", "pictures over HTTP, by vLLM or Ray Serve"),
}
# The commands that decode batches, and what to pass when there is no memory for one.
_BATCHES: dict[str, str] = dict.fromkeys(("generate", "eval", "sample", "score"), "a smaller --batch-size")
_BATCHES["bench"] = "smaller --batch-sizes"
_DTYPES = ("float32", "bfloat16", "float16")
# fmt: off
# Short flags of `generate`: medium and model, or the setting of the sampler that they stand for; name of a value; help.
_ALIASES: tuple[tuple[str, Any, str | None, str], ...] = (
    ("--music", ("audio", "tunes"), None, "short for --model tunes, unless a model is named"),
    ("--video", ("video", "motion"), None, "short for --model motion, unless a model is named"),
    ("--window", "window", "W", "slots that one target call scores; short for --sampler :window=W, as the next ones"),
    ("--coupling", "coupling", "NAME", "gumbel | independent | maximal"),
    ("--acceptance", "acceptance", "NAME", "identical (same tokens as plain) | exact (same law)"),
    ("--initial-draft", "initial_draft", "NAME", "first draft of a slot, before any call scores it"),
)
# fmt: on


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(prog="visual-spec", description="Fast and exact token-by-token generation.")
    parser.add_argument("--version", action="version", version=f"visual-spec {visual_spec.__version__}")
    commands = parser.add_subparsers(
        dest="command",
        required=True,
        metavar="generate | convert | models | bench | eval | sample | score | report | app | serve",
    )
    _add_generate(commands)
    _add_convert(commands)
    models = commands.add_parser("models", help="list models, samplers, what was verified, and memory")
    models.add_argument(
        "name",
        nargs="?",
        metavar="NAME",
        help="of a model: the samplers that fit it; of a sampler: its settings",
    )
    models.add_argument("--json", action="store_true", help="print JSON")
    models.set_defaults(run=_models)
    for name, (_, what) in _OWN_ARGUMENTS.items():  # they read their own arguments: see `main`
        commands.add_parser(name, help=f"{what}; see visual-spec {name} --help", add_help=False)
    return parser


def _add_generate(commands: Any) -> None:
    generate = commands.add_parser("generate", help="draw pictures or clips, or play music, from prompts")
    generate.add_argument(
        "prompts", nargs="+", metavar="PROMPT", help="(for class models: class names or numbers)"
    )
    generate.add_argument(
        "--model",
        help="embedded name, folder, or Hub id; it says whether pictures, clips or music are made (default: shapes)",
    )
    generate.add_argument("--out", type=Path, default=Path("visual-spec-out"), metavar="DIR")
    generate.add_argument(
        "--num-images", type=at_least(1), default=1, metavar="N", help="pictures per prompt"
    )
    generate.add_argument(
        "--batch-size", type=at_least(1), default=8, metavar="N", help="pictures decoded together"
    )
    generate.add_argument(
        "--seed",
        type=at_least(0),
        default=0,
        help="of the first picture; the next ones have seed + 1, seed + 2 ...",
    )
    generate.add_argument("--dtype", choices=_DTYPES, help="of the weights (default: as they were saved)")
    generate.add_argument(
        "--compare", action="store_true", help="decode plainly too, check equality, draw a sheet and a page"
    )
    add(generate, "device", "threads", "negative_prompt", "overwrite", "json")

    _add_media(generate)
    _add_sampler_and_law(generate)
    short = generate.add_argument_group("short flags")
    for flag, means, metavar, what in _ALIASES:
        if metavar is None:
            short.add_argument(flag, dest="usual", action="append_const", const=(flag, *means), help=what)
        else:
            write = f":{means}={{}}".format
            short.add_argument(flag, dest="sampler", action="append", type=write, metavar=metavar, help=what)
    generate.set_defaults(run=_generate, sampler=[], usual=[])


def _add_media(generate: argparse.ArgumentParser) -> None:
    """Return what only some models take: pictures, and what music and clips have."""
    paint = generate.add_argument_group("painting into a picture (masked and any-order models)")
    paint.add_argument("--image", type=Path, metavar="FILE", help="of the size that the model draws")
    paint.add_argument("--mask", type=Path, metavar="FILE", help="white where --image is drawn anew")
    paint.add_argument(
        "--strength", type=float, metavar="S", help="share of these tokens that is drawn anew (default: all)"
    )
    generate.add_argument(
        "--masked",
        metavar="MODEL",
        help="with --compare: a masked model of the same tokens, which is compared with plain decoding of --model",
    )
    music = generate.add_argument_group("music")
    music.add_argument("--seconds", type=float, metavar="S", help="length (default: as in training)")
    music.add_argument(
        "--extend-stride", type=float, metavar="S", help="go beyond that by a window that moves S seconds"
    )

    control = generate.add_argument_group("control (ControlAR)")
    control.add_argument(
        "--control", type=Path, metavar="FILE", help="picture to draw along: edges, depth, ..."
    )
    control.add_argument(
        "--control-strength",
        type=float,
        metavar="S",
        help="how strongly (default: 1, as trained; 0: not at all)",
    )

    video = generate.add_argument_group("video")
    video.add_argument("--frames", type=at_least(1), metavar="N", help="frames of a clip (default: all)")
    video.add_argument(
        "--policy",
        metavar="P",
        help="cache of a model of chunks, such as sliding:window=8 (default: as it was saved)",
    )
    generate.add_argument(
        "--format",
        choices=("wav", "flac", "ogg", "mp4", "gif", "png"),
        help="of music (default: wav) or clips (default: mp4; gif and png need no PyAV)",
    )


def _add_sampler_and_law(generate: argparse.ArgumentParser) -> None:
    sampler = generate.add_argument_group("sampler")
    sampler.add_argument(
        "--sampler",
        metavar="NAME",
        action="append",
        help=f"{' | '.join(names())} (default: the fast one of the model); settings may follow, such as "
        "tree:depth=4,width=6; `visual-spec models NAME` lists them. Settings alone, as :window=16, change the default",
    )
    sampler.add_argument(
        "--drafter", metavar="NAME", help="embedded drafter or folder (default: the model's own)"
    )

    add(generate.add_argument_group("law of a token"), *LAW_SETTINGS)


def _add_convert(commands: Any) -> None:
    convert = commands.add_parser(
        "convert",
        help="make a folder of official files",
        description="Make a folder of the official files of one of: "
        f"{', '.join(family.name for family in families.all_families() if family.layout)}; MusicGen of audiocraft.",
    )
    convert.add_argument(
        "files",
        nargs="+",
        type=Path,
        metavar="FILE",
        help="a transformer (of Infinity 8B its folder), its tokenizer, or both in any order; of VAR also a smaller "
        "transformer, for CoDe, and of MAR one that drafts; or Self-Forcing's transformer; or the folder of a MusicGen "
        "of audiocraft; a student of LlamaGen also takes the LlamaGen that taught it",
    )
    convert.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder for from_pretrained")
    convert.add_argument(
        "--text-encoder",
        metavar="DIR",
        help="folder or Hub id of flan-t5-xl, to be copied too; of MusicGen its T5 (t5-base)",
    )
    convert.add_argument(
        "--image-size",
        type=at_least(1),
        metavar="N",
        help="pixels (default: what the file or its name says)",
    )
    convert.add_argument("--dtype", choices=_DTYPES, help="of the weights written (default: as in the files)")
    add(convert, "overwrite", "json")
    convert.set_defaults(run=_convert)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status.

    As of `run_program`; 1: a claim of equality failed.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    command = next((text for text in arguments if not text.startswith("-")), "")
    remedy = _BATCHES.get(command, "a smaller model, or take a machine with more memory")
    # At import diffusers says that it does not know a newer torchao's tensors; nothing here reads them through it.
    logging.getLogger("diffusers.quantizers.torchao.torchao_quantizer").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.showwarning = show_warning
        return run_program(lambda: _run(arguments), "visual-spec", remedy)


def _run(arguments: list[str]) -> int:
    early = next((at for at, text in enumerate(arguments) if text not in ("--quiet", "--verbose")), 0)
    arguments = arguments[early : early + 1] + arguments[:early] + arguments[early + 1 :]
    if arguments and arguments[0] in _OWN_ARGUMENTS:
        module = importlib.import_module(_OWN_ARGUMENTS[arguments[0]][0])
        return module.main(arguments[1:]) or 0
    args = build_parser().parse_args(arguments)
    return args.run(args)


def _models(args: argparse.Namespace) -> int:
    from visual_spec.pipelines.embedded import describe, embedded_folder, embedded_models, missing_models
    from visual_spec.samplers.registry import all_samplers, fit

    if args.name is not None:
        print(_sampler_settings(args.name) if args.name in names() else _model_samplers(args.name))
        return 0
    facts = [describe(embedded_folder(name)) for name in embedded_models()]
    if args.json:
        known = [
            {
                **vars(model),
                "memory_bytes": {"float32": model.memory(4), "bfloat16": model.memory(2)},
                "samplers": {sampler.class_name: fit(model.calls, sampler) for sampler in all_samplers()},
            }
            for model in families.models()
        ]
        samplers = [vars(sampler) for sampler in all_samplers()]
        print(
            json_text({"embedded": facts, "models": known, "samplers": samplers, "extras": families.EXTRAS})
        )
        return 0
    print("Embedded: need no download")
    print(missing_models() or _embedded_table(facts))
    print("\nOfficial weights (GB: weights and cache of one picture or clip with guidance)")
    print(_official_table())
    extras = ", ".join(f"{name} {count / 1e6:.0f}M" for name, count in families.EXTRAS.items())
    print(f"On top, in parameters: {extras}.")
    print("\nSamplers and models (visual-spec models NAME: of one of them)")
    print(_fit_lists(facts))
    print("\nVerified")
    for name, how in families.VERIFIED.items():
        print(f"  {name}: {how}")
    print(
        "A folder written by save_pretrained or a Hub id 'owner/name' can be given in place of an embedded name."
    )
    return 0


def _embedded_table(facts: list[dict[str, Any]]) -> str:
    lines = [
        [
            fact["name"],
            fact["pipeline"],
            f"{fact['sampling_rate'] / 1000:g} kHz"
            if fact["sampling_rate"]
            else str(fact["image_size"] or "-"),
            ", ".join(f"{name} {count / 1e6:.1f}M" for name, count in fact["parameters"].items()),
            f"{fact['bytes'] / 1e6:.1f}",
        ]
        for fact in facts
    ]
    return plain_table(["model", "pipeline", "pixels or rate", "parameters", "MB"], lines, _width())


def _official_table() -> str:
    lines = [
        [
            model.name,
            model.weights or "none released",
            model.load,
            str(model.pixels or "-"),
            str(model.tokens),
            f"{model.parameters / 1e6:.0f}M",
            f"{model.memory(4) / 1e9:.1f}",
            f"{model.memory(2) / 1e9:.1f}",
            model.verified,
        ]
        for model in families.models()
    ]
    unsized = [one for one in families.all_families() if not one.sizes and not one.pipelines]
    lines += [[one.name, "", one.load, "-", "-", "-", "-", "-", one.verified] for one in unsized]
    header = ["model", "weights", "load with", "pixels", "tokens", "parameters", "GB float32", "GB bfloat16"]
    return plain_table([*header, "verified by"], lines, _width())


def _fit_lists(facts: list[dict[str, Any]]) -> str:
    """Each sampler, what it promises and takes, and the models that answer its calls."""
    from visual_spec.samplers.registry import all_samplers, fit

    models = {fact["name"]: fact["calls"] for fact in facts}
    models |= {one.name: one.calls for one in families.all_families()}
    lines = []
    for entry in all_samplers():
        fits = fit((entry.calls,), entry)
        takes = "" if fits == "yes" else f" {fits}"
        lines.append(_filled(f"{entry.class_name} ({entry.name}): {entry.promise}{takes}", ""))
        listed = ", ".join(name for name, calls in models.items() if entry.calls in calls)
        lines.append(_filled(listed or "no model here", "    "))
    return "\n".join(lines)


def _model_samplers(name: str) -> str:
    """The samplers of a model, and why the others do not fit it: as `accelerate` says."""
    from visual_spec.eval.machine import load
    from visual_spec.pipelines.accelerate import refusals
    from visual_spec.pipelines.embedded import embedded_models
    from visual_spec.samplers.registry import meant

    try:
        said = refusals(load(name, "cpu", "float32"))
    except TypeError as error:
        return str(error)
    except ValueError as error:  # which names the nearest model
        raise ValueError(
            f"{error}{'' if meant(name, embedded_models()) else meant(name, names())}"
        ) from error
    fitting = ", ".join(sampler for sampler, reason in said.items() if not reason)
    alike: dict[str, list[str]] = {}
    for sampler, reason in said.items():
        alike.setdefault(re.sub(r"^sampler is \w+, which ", "", reason), []).append(sampler)
    others = [_filled(f"{', '.join(same)}: {reason}", "    ") for reason, same in alike.items() if reason]
    return "\n".join([_filled(f"{name} takes {fitting}.", ""), "It does not take", *others])


def _sampler_settings(name: str) -> str:
    """The settings of a sampler: what each may be, and its default."""
    from visual_spec.pipelines.sampler_text import declared_limits
    from visual_spec.samplers.registry import by_name, sampler_class

    limits = declared_limits(sampler_class(by_name(name)))
    return (
        "\n".join(_filled(f"{key}: {what}", "") for key, what in limits.items()) or f"{name} has no settings."
    )


def _filled(text: str, indent: str) -> str:
    return textwrap.fill(
        text, _width() or 120, initial_indent=indent, subsequent_indent=indent + "  ", break_on_hyphens=False
    )


def _width() -> int | None:
    """Letters in a line of the terminal; None where the output goes elsewhere."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def _convert(args: argparse.Namespace) -> int:
    for file in args.files:
        if not file.exists():
            raise FileNotFoundError(f"there is no file {file}")
    import torch
    from diffusers.utils import logging

    from visual_spec.pipelines.convert import convert

    logging.disable_progress_bar()
    facts = convert(
        args.files,
        args.out,
        text_encoder=args.text_encoder,
        image_size=args.image_size,
        dtype=None if args.dtype is None else getattr(torch, args.dtype),
        overwrite=args.overwrite,
    )
    for file, architecture in facts["files"].items():
        print(f"{file}: {architecture}, every key accounted for")
    counts = ", ".join(f"{name} {count / 1e6:.1f}M" for name, count in facts["parameters"].items())
    print(f"wrote {facts['folder']} ({counts}); load it with {facts['class']}.from_pretrained")
    if args.json:
        print(json_text(facts))
    return 0


def _generate(args: argparse.Namespace) -> int:
    from visual_spec.generate import generate

    return generate(args)
