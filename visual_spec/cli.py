"""The command line: visual-spec generate | convert | models | bench | eval | report.

Only the standard library is imported before the arguments are known to be good, so that `--help`, a misspelt flag, or
a file in the way are answered at once.
"""

from __future__ import annotations

import argparse
import importlib
import io
import json
import re
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from visual_spec.eval.report.pages import ComparisonRow

_SAMPLER_SETTINGS = ("window", "coupling", "acceptance", "initial_draft")
_OWN_ARGUMENTS = {
    "bench": ("visual_spec.eval.speed.bench", "measure calls and seconds"),
    "eval": ("visual_spec.eval.quality.evaluate", "what samplers gain, and what it costs in quality"),
    "report": ("visual_spec.eval.report.frontier", "draw speed against quality from the results of eval"),
}
_LAW_SETTINGS = ("guidance_scale", "guidance_until", "temperature", "top_k", "top_p")
_DTYPES = ("float32", "bfloat16", "float16")


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="visual-spec", description="Fast and exact token-by-token generation."
    )
    commands = parser.add_subparsers(
        dest="command", required=True, metavar="generate | convert | models | bench | eval | report"
    )

    generate = commands.add_parser("generate", help="draw pictures, or play music, from prompts")
    generate.add_argument(
        "prompts", nargs="+", metavar="PROMPT", help="(for class models: class names or numbers)"
    )
    generate.add_argument(
        "--model", help="embedded name, folder, or Hub id (default: shapes, of music: tunes)"
    )
    generate.add_argument("--out", type=Path, default=Path("visual-spec-out"), metavar="DIR")
    generate.add_argument("--overwrite", action="store_true", help="replace files that are already there")
    generate.add_argument(
        "--num-images", type=_at_least(1), default=1, metavar="N", help="pictures per prompt"
    )
    generate.add_argument(
        "--batch-size", type=_at_least(1), default=8, metavar="N", help="pictures decoded together"
    )
    generate.add_argument(
        "--seed",
        type=_at_least(0),
        default=0,
        help="of the first picture; the next ones have seed + 1, seed + 2 ...",
    )
    generate.add_argument("--device", help="default: cuda where there is one, else cpu")
    generate.add_argument(
        "--compare", action="store_true", help="decode plainly too, check equality, draw a sheet and a page"
    )
    generate.add_argument("--json", action="store_true", help="print a JSON document as the last line")

    music = generate.add_argument_group("music")
    music.add_argument("--music", action="store_true", help="play the prompts: write sound files")
    music.add_argument("--seconds", type=float, metavar="S", help="length (default: that of the training)")
    music.add_argument(
        "--extend-stride", type=float, metavar="S", help="go beyond that by a window that moves S seconds"
    )
    music.add_argument("--format", choices=("wav", "flac", "ogg"), default="wav", help="(default: wav)")

    sampler = generate.add_argument_group("sampler")
    sampler.add_argument(
        "--sampler",
        metavar="NAME",
        help="speculative-jacobi | autoregressive | proactive-jacobi | tree | zipar | scale-wise | ... (default: the "
        "fast one of the model); settings may follow, such as tree:depth=4,width=6, or "
        "scale-wise:num_draft_scales=6,cache_share=0.1",
    )
    sampler.add_argument(
        "--drafter", metavar="NAME", help="embedded drafter or folder (default: the model's own)"
    )
    sampler.add_argument("--window", type=int, metavar="W", help="slots that one target call scores")
    sampler.add_argument("--coupling", metavar="NAME", help="gumbel | independent | maximal")
    sampler.add_argument(
        "--acceptance", metavar="NAME", help="identical (same tokens as plain) | exact (same law)"
    )
    sampler.add_argument("--initial-draft", metavar="NAME", help="guess for a slot that was never scored")

    law = generate.add_argument_group("law of a token")
    law.add_argument("--guidance-scale", type=float, metavar="S", help="above 1: classifier-free guidance")
    law.add_argument(
        "--guidance-until", type=int, metavar="N", help="tokens from the N-th on are drawn without guidance"
    )
    law.add_argument("--temperature", type=float, metavar="T", help="0: greedy")
    law.add_argument("--top-k", type=int, metavar="K", help="0: off")
    law.add_argument("--top-p", type=float, metavar="P", help="1: off")
    generate.set_defaults(run=_generate)

    convert = commands.add_parser(
        "convert", help="make a folder of official LlamaGen, VAR or Infinity checkpoint files"
    )
    convert.add_argument(
        "files",
        nargs="+",
        type=Path,
        metavar="FILE",
        help="a transformer (of Infinity 8B its folder), its tokenizer, or both in any order; of VAR also a smaller "
        "transformer, for CoDe",
    )
    convert.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder for from_pretrained")
    convert.add_argument(
        "--text-encoder", metavar="DIR", help="folder or Hub id of flan-t5-xl, to be copied too"
    )
    convert.add_argument(
        "--image-size",
        type=_at_least(1),
        metavar="N",
        help="pixels (default: what the file or its name says)",
    )
    convert.add_argument(
        "--dtype", choices=_DTYPES, help="of the weights written (default: that of the files)"
    )
    convert.add_argument("--overwrite", action="store_true", help="replace an earlier conversion")
    convert.add_argument("--json", action="store_true", help="print a JSON document as the last line")
    convert.set_defaults(run=_convert)

    models = commands.add_parser("models", help="list models, samplers, what was verified, and memory")
    models.add_argument("--json", action="store_true", help="print JSON")
    models.set_defaults(run=_models)

    for name, (_, what) in _OWN_ARGUMENTS.items():  # they read their own arguments: see `main`
        commands.add_parser(name, help=f"{what}; see visual-spec {name} --help", add_help=False)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status: 0 done, 1 a claim of equality failed, 2 bad input."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    with warnings.catch_warnings():
        warnings.showwarning = _show_warning
        try:
            if arguments and arguments[0] in _OWN_ARGUMENTS:
                module = importlib.import_module(_OWN_ARGUMENTS[arguments[0]][0])
                return module.main(arguments[1:]) or 0
            args = build_parser().parse_args(arguments)
            return args.run(args)
        except (ValueError, OSError, ImportError, FloatingPointError) as error:
            print(f"visual-spec: error: {error}", file=sys.stderr)
            return 2


def _models(args: argparse.Namespace) -> int:
    from visual_spec.models import catalogue
    from visual_spec.models.core.calls import RASTER_TREE_ORDER
    from visual_spec.pipelines.embedded import describe, embedded_folder, embedded_models
    from visual_spec.samplers.registry import SAMPLERS, fit

    facts = [describe(embedded_folder(name)) for name in embedded_models()]
    known = [
        {
            **vars(model),
            "memory_bytes": {"float32": model.memory(4), "bfloat16": model.memory(2)},
            "samplers": {sampler.class_name: fit(model.calls, sampler) for sampler in SAMPLERS},
        }
        for model in catalogue.MODELS
    ]
    if args.json:
        samplers = [vars(sampler) for sampler in SAMPLERS]
        print(
            json.dumps({"embedded": facts, "models": known, "samplers": samplers, "extras": catalogue.EXTRAS})
        )
        return 0
    print("Embedded: need no download")
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
    print(format_table(["model", "pipeline", "pixels or rate", "parameters", "MB"], lines))

    print("\nOfficial weights (GB: weights and cache of one picture or clip with guidance)")
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
        for model in catalogue.MODELS
    ]
    lines += [
        [name, "", load, "-", "-", "-", "-", "-", how] for name, (load, how) in catalogue.OTHER_MODELS.items()
    ]
    header = ["model", "weights", "load with", "pixels", "tokens", "parameters", "GB float32", "GB bfloat16"]
    print(format_table([*header, "verified by"], lines))
    extras = ", ".join(f"{name} {count / 1e6:.0f}M" for name, count in catalogue.EXTRAS.items())
    print(f"On top, in parameters: {extras}.")

    print("\nSamplers x models")
    families = {fact["name"]: catalogue.PIPELINES.get(fact["pipeline"], ()) for fact in facts}
    families |= {
        m.name.split("-")[0]
        if m.name.startswith(("LlamaGen", "VAR", "MusicGen", "MAGNeT", "Infinity"))
        else m.name.split(",")[0]: m.calls
        for m in catalogue.MODELS
    }
    families |= {name.split(",")[0]: RASTER_TREE_ORDER for name in catalogue.OTHER_MODELS}
    lines = [[s.class_name, s.promise, *(fit(calls, s) for calls in families.values())] for s in SAMPLERS]
    print(format_table(["sampler", "result", *families], lines))

    print("\nVerified")
    for name, how in catalogue.VERIFIED.items():
        print(f"  {name}: {how}")
    print(
        "A folder written by save_pretrained or a Hub id 'owner/name' can be given in place of an embedded name."
    )
    return 0


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
        print(json.dumps(facts))
    return 0


def _generate(args: argparse.Namespace) -> int:
    args.model = args.model or ("tunes" if args.music else "shapes")
    if args.music:
        from visual_spec.cli_music import play

        return play(args)
    if args.seconds is not None or args.extend_stride is not None:
        raise ValueError("--seconds and --extend-stride are of music; pass --music too, or leave them out.")
    # One job per picture: a picture's seed is its own, so that the same picture can be drawn again alone.
    prompts = [prompt for prompt in args.prompts for _ in range(args.num_images)]
    jobs = [(prompt, args.seed + index) for index, prompt in enumerate(prompts)]
    pictures = [
        args.out / f"{index:03d}-{_slug(text)}-seed{seed}.png" for index, (text, seed) in enumerate(jobs)
    ]
    report = [args.out / f"comparison.{kind}" for kind in ("png", "html", "json")] if args.compare else []
    from visual_spec.eval.files import refuse_existing

    for path in (*pictures, *report):
        refuse_existing(path, args.overwrite)

    from visual_spec.pipelines.accelerate import make_row, parse_sampler
    from visual_spec.samplers.core.law import TokenLaw

    def read(text: str) -> tuple[str, Any, Any]:
        name, settings = parse_sampler(text)
        for flag in _SAMPLER_SETTINGS:
            if (value := getattr(args, flag)) is not None:
                settings[flag] = value
        return (name, *make_row(name, **settings))

    asked = None if args.sampler is None else read(args.sampler)
    TokenLaw(**_law(args))  # refuses values out of range before the model is loaded
    pipe = _load(args)
    if hasattr(pipe, "sampling_rate"):
        raise ValueError(f"{args.model} plays music; pass --music too.")
    name, sampler, plan = asked or read(pipe.fast_sampler)
    if asked is None and name == "scale-wise":
        sampler = pipe.sampler  # as it was saved: models differ in how their guidance grows
    _check_row(args, pipe, sampler, plan)
    pipe.check_inputs(args.prompts)
    document: dict[str, Any] = {
        "model": args.model,
        "device": str(pipe.device),
        "sampler": {"name": name}
        | {key: value for key, value in sampler.config.items() if not key.startswith("_")}
        | plan.describe(),
        **{name: getattr(args, name) for name in _LAW_SETTINGS if getattr(args, name) is not None},
    }
    if args.compare:
        status = _compare(args, pipe, (sampler, plan), jobs, pictures, report, document)
    else:
        with plan.on(pipe):
            status = _draw(args, pipe, sampler, jobs, pictures, document)
    if args.json:
        print(json.dumps(document))
    return status


def _check_row(args: Any, pipe: Any, sampler: Any, plan: Any) -> None:
    """Refuse, before anything is drawn, a sampler, a plan or a law that the pipeline has no use of."""
    before = pipe.sampler
    pipe.sampler = sampler
    try:
        pipe.check_sampler()
        with plan.on(pipe):
            pass
    except TypeError as error:
        raise ValueError(str(error)) from error
    finally:
        pipe.sampler = before
    if args.guidance_until is not None and pipe.fast_sampler == "scale-wise":
        raise ValueError(
            "--guidance-until counts the tokens of a next-token model; this one decodes scale by scale, and its "
            "guidance grows from scale to scale. Leave it out."
        )


def _draw(args: Any, pipe: Any, sampler: Any, jobs: list, pictures: list[Path], document: dict) -> int:
    from visual_spec.eval.files import write_atomically
    from visual_spec.eval.quality.comparison import seeded_generators

    pipe.sampler = sampler
    rows = []
    for start in range(0, len(jobs), args.batch_size):
        batch = jobs[start : start + args.batch_size]
        output = pipe(
            [prompt for prompt, _ in batch],
            generator=seeded_generators([seed for _, seed in batch]),
            **_law(args),
        )
        for index, (prompt, seed) in enumerate(batch):
            path = pictures[start + index]
            write_atomically(path, _png(output.images[index]), overwrite=args.overwrite)
            rows.append(
                {
                    "prompt": prompt,
                    "seed": seed,
                    "file": str(path),
                    "calls": int(output.trace.target_calls[index]),
                    "tokens_per_call": float(output.trace.tokens_per_call[index]),
                    "batch_seconds": output.trace.seconds,
                    "output_law": output.trace.output_law,
                }
            )
    document["images"] = rows
    header = ["file", "seed", "calls", "tokens/call", "seconds (batch)", "output"]
    print(
        format_table(
            header,
            [
                [
                    r["file"],
                    str(r["seed"]),
                    str(r["calls"]),
                    f"{r['tokens_per_call']:.2f}",
                    f"{r['batch_seconds']:.2f}",
                    r["output_law"],
                ]
                for r in rows
            ],
        )
    )
    return 0


def _compare(
    args: Any,
    pipe: Any,
    row_of: tuple[Any, Any],
    jobs: list,
    pictures: list[Path],
    report: list[Path],
    document: dict,
) -> int:
    from visual_spec.eval.files import write_atomically
    from visual_spec.eval.quality.comparison import compare
    from visual_spec.eval.report.pages import contact_sheet, write_html

    pipe.set_progress_bar_config(disable=True)  # drawing a bar would count as decoding time
    sampler, plan = row_of
    rows = compare(pipe, sampler, jobs, _law(args), plan=plan)
    for path, row in zip(pictures, rows, strict=True):
        write_atomically(path, _png(row.fast_image), overwrite=args.overwrite)
    sheet_path, page_path, json_path = report
    write_atomically(sheet_path, _png(contact_sheet(rows)), overwrite=args.overwrite)
    write_html(rows, page_path, facts=_facts(document), overwrite=args.overwrite)
    num_tokens = rows[0].grid.num_tokens
    document["comparison"] = [
        {
            "prompt": row.prompt,
            "seed": seed,
            "file": str(path),
            "plain_calls": row.plain_calls,
            "calls": row.fast_calls,
            "tokens_per_call": num_tokens / row.fast_calls,
            "plain_seconds": row.plain_seconds,
            "seconds": row.fast_seconds,
            "identical": row.identical,
            "output_law": row.output_law,
        }
        for row, (_, seed), path in zip(rows, jobs, pictures, strict=True)
    ]
    write_atomically(json_path, json.dumps(document, indent=2) + "\n", overwrite=args.overwrite)

    print(_comparison_table(rows, num_tokens))
    print(f"wrote {sheet_path}, {page_path}, {json_path} and {len(pictures)} pictures")
    if all(row.identical for row in rows):
        print("Every picture is the same, pixel for pixel.")
    elif any(row.promised and not row.identical for row in rows):
        print(
            "visual-spec: error: this sampler promises the plain tokens, and did not give them",
            file=sys.stderr,
        )
        return 1
    elif pipe.fast_sampler == "scale-wise":
        print(
            "These are pictures of other laws than plain VAR's: several models, another one, or a compressed cache "
            "promise neither the same tokens nor the same law. How far they are off, visual-spec eval measures."
        )
    else:
        print(other_tokens(rows))
    return 0


def other_tokens(rows: Sequence[Any]) -> str:
    """What to say of samples that are not those of plain decoding."""
    laws = "; ".join(dict.fromkeys(row.output_law for row in rows))
    return f"Not what plain decoding draws with these seeds. The output is: {laws}."


def _comparison_table(rows: Sequence[ComparisonRow], num_tokens: int) -> str:
    header = ["prompt", "calls", "tokens/call", "seconds", "speed-up", "identical"]
    lines = []
    for row in rows:
        lines.append(
            [
                row.prompt,
                f"{row.plain_calls} -> {row.fast_calls}",
                f"{num_tokens / row.plain_calls:.2f} -> {num_tokens / row.fast_calls:.2f}",
                f"{row.plain_seconds:.2f} -> {row.fast_seconds:.2f}",
                f"{row.plain_seconds / row.fast_seconds:.2f}x",
                "yes" if row.identical else "no",
            ]
        )
    return format_table(header, lines)


def format_table(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Aligned columns, the first to the left and the others to the right."""
    table = [header, *lines]
    widths = [max(len(line[column]) for line in table) for column in range(len(header))]
    text = [
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in table
    ]
    text.insert(1, "-" * (sum(widths) + 2 * (len(widths) - 1)))
    return "\n".join(text)


def _load(args: argparse.Namespace) -> Any:
    import torch
    from diffusers.utils import logging
    from transformers.utils import logging as transformers_logging

    from visual_spec.pipelines.loading import load_drafter, load_pipeline

    logging.disable_progress_bar()
    transformers_logging.disable_progress_bar()
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(
            f"--device {device} cannot be used ({reason}); pass cpu, or leave it out."
        ) from error
    pipe = load_pipeline(args.model).to(device)
    if args.drafter is not None:
        pipe.drafter = load_drafter(args.drafter).to(device)
    return pipe


def _facts(document: dict[str, Any]) -> dict[str, Any]:
    """What the page says about the run: the scalars of the document, and the sampler's settings."""
    facts = {name: value for name, value in document.items() if not isinstance(value, (dict, list))}
    settings = document["sampler"]
    return {**facts, "sampler": ", ".join(f"{name}={value}" for name, value in settings.items())}


def _law(args: argparse.Namespace) -> dict[str, Any]:
    return {name: value for name in _LAW_SETTINGS if (value := getattr(args, name)) is not None}


def _png(image: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format="PNG")
    return buffer.getvalue()


def _slug(prompt: str, otherwise: str = "picture") -> str:
    return re.sub(r"[^a-z0-9]+", "-", prompt.lower()).strip("-")[:40].strip("-") or otherwise


def _at_least(minimum: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        value = int(text)
        if value < minimum:
            raise argparse.ArgumentTypeError(f"{value} given; pass an integer of at least {minimum}")
        return value

    return parse


def _show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    print(f"visual-spec: warning: {message}", file=sys.stderr)
