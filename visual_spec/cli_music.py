"""`visual-spec generate --music`: sound files from prompts, and the comparison with plain decoding."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from visual_spec import cli


def play(args: argparse.Namespace) -> int:
    """Run the command; returns the exit status, as `cli.main`."""
    # As of pictures, a job per clip, each with its own seed.
    prompts = [prompt for prompt in args.prompts for _ in range(args.num_images)]
    jobs = [(prompt, args.seed + index) for index, prompt in enumerate(prompts)]
    names = [f"{index:03d}-{cli._slug(text, 'tune')}-seed{seed}" for index, (text, seed) in enumerate(jobs)]
    clips = [args.out / f"{name}.{args.format}" for name in names]
    report = [args.out / f"comparison.{kind}" for kind in ("html", "json")] if args.compare else []
    from visual_spec.eval.files import refuse_existing, write_atomically

    for path in (*clips, *report):
        refuse_existing(path, args.overwrite)

    from visual_spec.pipelines.accelerate import make_sampler, parse_sampler
    from visual_spec.pipelines.audio_files import audio_bytes
    from visual_spec.samplers.core.law import TokenLaw

    audio_bytes([0.0], 8000, args.format)  # refuses a format whose writer is missing
    name, settings = parse_sampler(args.sampler or "column-jacobi")
    for flag in cli._SAMPLER_SETTINGS:
        if (value := getattr(args, flag)) is not None:
            settings[flag] = value
    sampler = make_sampler(name, **settings)
    TokenLaw(**cli._law(args))  # refuses values out of range before the model is loaded
    pipe = cli._load(args)
    if not hasattr(pipe, "sampling_rate"):
        raise ValueError(f"{args.model} draws pictures; leave --music out.")
    if pipe.config["masked"]:
        if args.compare:
            raise ValueError(
                f"{args.model} fills in hidden codes; there is no plain decoding of it to compare with."
            )
        if args.sampler is None:
            if settings:
                raise ValueError(
                    f"{', '.join(settings)} given, which {args.model}'s own sampler does not have."
                )
            name, sampler = pipe.fast_sampler, pipe.sampler
    pipe.sampler = sampler
    lengths = {"audio_length_in_s": args.seconds, "extend_stride_in_s": args.extend_stride}
    try:
        pipe.check_inputs(args.prompts, **lengths)
    except TypeError as error:
        raise ValueError(str(error)) from error
    asked = {**cli._law(args), **lengths}
    document: dict[str, Any] = {
        "model": args.model,
        "device": str(pipe.device),
        "sampling_rate": pipe.sampling_rate,
        "sampler": {"name": name} | {k: v for k, v in sampler.config.items() if not k.startswith("_")},
        **{key: value for key, value in asked.items() if value is not None},
    }
    if args.compare:
        status, waves = _compare(args, pipe, sampler, jobs, asked, clips, report, document)
    else:
        status, waves = 0, _decode(args, pipe, jobs, asked, clips, document)
    for path, wave in zip(clips, waves, strict=True):
        content = audio_bytes(wave, pipe.sampling_rate, args.format)
        write_atomically(path, content, overwrite=args.overwrite)
    if args.json:
        print(json.dumps(document))
    return status


def _decode(args: Any, pipe: Any, jobs: list, asked: dict, clips: list[Path], document: dict) -> list[Any]:
    from visual_spec.eval.quality.comparison import seeded_generators

    waves, rows = [], []
    for start in range(0, len(jobs), args.batch_size):
        batch = jobs[start : start + args.batch_size]
        output = pipe(
            [prompt for prompt, _ in batch],
            generator=seeded_generators([seed for _, seed in batch]),
            **asked,
        )
        waves += list(output.audios)
        for index, (prompt, seed) in enumerate(batch):
            rows.append(
                {
                    "prompt": prompt,
                    "seed": seed,
                    "file": str(clips[start + index]),
                    "calls": int(output.trace.target_calls[index]),
                    "columns_per_call": float(output.trace.tokens_per_call[index]),
                    "batch_seconds": output.trace.seconds,
                    "output_law": output.trace.output_law,
                }
            )
    document["clips"] = rows
    header = ["file", "seed", "calls", "columns/call", "seconds (batch)", "output"]
    lines = [
        [
            row["file"],
            str(row["seed"]),
            str(row["calls"]),
            f"{row['columns_per_call']:.2f}",
            f"{row['batch_seconds']:.2f}",
            row["output_law"],
        ]
        for row in rows
    ]
    print(cli.format_table(header, lines))
    return waves


def _compare(
    args: Any,
    pipe: Any,
    sampler: Any,
    jobs: list,
    asked: dict,
    clips: list[Path],
    report: list[Path],
    document: dict,
) -> tuple[int, Sequence[Any]]:
    from visual_spec.eval.files import write_atomically
    from visual_spec.eval.report.music_pages import compare_audio, write_music_page

    pipe.set_progress_bar_config(disable=True)  # drawing a bar would count as decoding time
    rows = compare_audio(pipe, sampler, jobs, asked)
    document["comparison"] = [
        {
            "prompt": row.prompt,
            "seed": seed,
            "file": str(path),
            "plain_calls": row.plain_calls,
            "calls": row.fast_calls,
            "columns_per_call": row.columns_per_call,
            "plain_seconds": row.plain_seconds,
            "seconds": row.fast_seconds,
            "identical": row.identical,
            "output_law": row.output_law,
        }
        for row, (_, seed), path in zip(rows, jobs, clips, strict=True)
    ]
    page, record = report
    write_music_page(rows, page, facts=cli._facts(document), overwrite=args.overwrite)
    write_atomically(record, json.dumps(document, indent=2) + "\n", overwrite=args.overwrite)
    header = ["prompt", "calls", "columns/call", "seconds", "speed-up", "identical"]
    lines = [
        [
            row.prompt,
            f"{row.plain_calls} -> {row.fast_calls}",
            f"{len(row.commit_call) / row.plain_calls:.2f} -> {row.columns_per_call:.2f}",
            f"{row.plain_seconds:.2f} -> {row.fast_seconds:.2f}",
            f"{row.speed_up:.2f}x",
            "yes" if row.identical else "no",
        ]
        for row in rows
    ]
    print(cli.format_table(header, lines))
    print(f"wrote {page}, {record} and {len(clips)} clips")
    status = 0
    if all(row.identical for row in rows):
        print("Every clip is the same, code for code and sample for sample.")
    elif sampler.identical:
        print(
            "visual-spec: error: this sampler promises the plain codes, and did not give them",
            file=sys.stderr,
        )
        status = 1
    else:
        print(cli.other_tokens(rows))
    return status, [row.fast_audio for row in rows]
