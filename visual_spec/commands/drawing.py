"""`visual-spec generate`: samples of every medium from prompts, alone or beside plain decoding.

A sample is a job with a seed of its own, so that it can be made again alone. Everything that can be refused is refused
before the work: files in the way, settings out of range, a sampler that does not fit.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from visual_spec import records
from visual_spec.commands.options import check_taken, is_quiet, logger
from visual_spec.commands.tables import plain_table
from visual_spec.data.captions import PICTURES, model_that_knows
from visual_spec.files.documents import json_text, write_json
from visual_spec.files.whole import ready_folder, refuse_existing, write_atomically
from visual_spec.models.core.settings import LAW_SETTINGS
from visual_spec.records import MediumWords
from visual_spec.samplers.registry import CHUNKS, MASKED, fitting

if TYPE_CHECKING:
    from PIL import Image

    from visual_spec.pipelines.audio_files import Waves
    from visual_spec.pipelines.video_files import Frames
    from visual_spec.samplers.core.base import Sampler

_PICTURES = ("control", "image", "mask")
_INPUTS = (*_PICTURES, "control_strength", "strength", "negative_prompt", "policy")

# The same codes in fewer calls, and in more time (docs/results/music.md).
SLOWER = "column-jacobi:window=4"

MAX_SEED = 2**64 - 1  # of a `torch.Generator`

Job = tuple[str, int]  # prompt, seed


@dataclass(frozen=True)
class MediumFiles:
    """What differs from medium to medium.

    Attributes:
        words: what samples are called.
        unit: what a call commits, in the singular.
        suffix: of the files, from the options.
        reports: endings of the files that a comparison writes.
        identical: what is said where all samples equal plain decoding's.
        promised: what a sampler promises that calls itself identical.
        field: of a pipeline's output, where its samples are.
        rate: of the output, too: samples or frames per second; "": it has none.
        encode: (sample, rate, format) -> its file.
    """

    words: MediumWords
    unit: str
    suffix: Callable[[argparse.Namespace], str]
    reports: tuple[str, ...]
    identical: str
    promised: str
    field: str
    rate: str
    encode: Callable[[Any, Any, str], bytes]


def generate(args: argparse.Namespace) -> int:
    """Run the command; returns the exit status: 0 done, 1 a promise of equality was broken.

    Raises:
        ValueError, OSError, ImportError: bad input; names it.
        KeyboardInterrupt: what is finished is kept.
    """
    medium = _medium(args)
    prompts = [prompt for prompt in args.prompts for _ in range(args.num_images)]
    jobs = [(prompt, args.seed + index) for index, prompt in enumerate(prompts)]
    if jobs[-1][1] > MAX_SEED:
        raise ValueError(
            f"--seed {args.seed} given; the last seed would be {jobs[-1][1]}, pass less than 2**64."
        )
    suffix = medium.suffix(args)
    files = [
        args.out / f"{index:03d}-{_slug(text, medium.words.nameless)}-seed{seed}.{suffix}"
        for index, (text, seed) in enumerate(jobs)
    ]
    reports = [args.out / f"comparison.{kind}" for kind in medium.reports] if args.compare else []
    for path in (*files, *reports):
        refuse_existing(path, args.overwrite)
    ready_folder(args.out)
    chosen, settings = _sampler(args), _chosen(args, LAW_SETTINGS)
    _check_before_loading(args, settings)
    from visual_spec.pipelines.placing import load

    pipe = load(args.model, args.device, args.dtype, args.threads, args.drafter)
    if args.masked is not None:
        from visual_spec.eval.pair import paired

        pipe = paired(pipe, args.masked)
    pipe.set_progress_bar_config(disable=is_quiet())
    name, sampler, refiner = chosen or _sampler(args, pipe)
    if args.compare and pipe.comparable and chosen is None and pipe.fast_sampler == pipe.plain_sampler:
        other = pipe.facts.shorter_sampler or f"{SLOWER}, or a --masked model"
        alone = all(entry.name == pipe.plain_sampler for entry in fitting(pipe.calls))
        advice = "no other sampler fits it, so leave --compare out" if alone else f"name --sampler {other}"
        same = f"{args.model} decodes plainly by default, and --compare would compare that with itself"
        raise ValueError(f"{same}; {advice}.")
    settings |= _lengths(args)
    if args.compare and MASKED in pipe.calls and "measure" in sampler.config:
        sampler = type(sampler).from_config(sampler.config, measure=True)  # how far it is from plain decoding
    inputs = _inputs(args, pipe)
    document: dict[str, Any] = {
        "model": args.model,
        **({"masked": args.masked} if args.masked else {}),
        "device": str(pipe.device),
        "dtype": str(pipe.transformer.dtype).removeprefix("torch."),
        **({"sampling_rate": pipe.sampling_rate} if pipe.medium == "audio" else {}),
        **({"frame_rate": pipe.frame_rate} if pipe.medium == "video" else {}),
        "sampler": {"name": name}
        | {key: value for key, value in sampler.config.items() if not key.startswith("_")}
        | ({} if refiner is None else {"refiner": refiner}),
        **settings,
        **{name: str(one) if name in _PICTURES else one for name, one in _chosen(args, _INPUTS).items()},
    }
    run = _Generation(args, medium, pipe, jobs, files, settings | inputs, document)
    from visual_spec.pipelines.loading import refined

    with refined(pipe, refiner):
        _check(args, pipe, sampler, inputs)
        status = run.compare(sampler, reports) if args.compare else run.decode(sampler)
    if args.json:
        print(json_text(document))
    return status


@dataclass
class _Generation:
    """What is made, with which settings of a call, and the document that tells of it."""

    args: argparse.Namespace
    medium: MediumFiles
    pipe: Any
    jobs: list[Job]
    files: list[Path]
    inputs: dict[str, Any]
    document: dict[str, Any]

    def decode(self, sampler: Sampler) -> int:
        """Decode in batches, write every sample as soon as it is there, and print a table."""
        import torch

        from visual_spec.samplers.core.trace import with_near_ties

        self.pipe.sampler = sampler
        medium, size, rows = self.medium, self.args.batch_size, []
        unit = medium.unit
        for start in range(0, len(self.jobs), size):
            batch = self.jobs[start : start + size]
            generators = [torch.Generator().manual_seed(seed) for _, seed in batch]
            output = self.pipe([prompt for prompt, _ in batch], generator=generators, **self.inputs)
            logger.debug("%s", output.trace.summary())
            for index, (prompt, seed) in enumerate(batch):
                path = self.files[start + index]
                rate = getattr(output, medium.rate) if medium.rate else None
                content = medium.encode(getattr(output, medium.field)[index], rate, self.args.format)
                write_atomically(path, content, overwrite=self.args.overwrite)
                row = {
                    "prompt": prompt,
                    "seed": seed,
                    "file": str(path),
                    "calls": int(output.trace.target_calls[index]),
                    f"{unit}s_per_call": float(output.trace.tokens_per_call[index]),
                    "batch_seconds": output.trace.seconds,
                    "output_law": output.trace.output_law,
                }
                if output.trace.near_ties is not None:
                    row["near_ties"] = int(output.trace.near_ties[index])
                rows.append(row)
        self.document[medium.words.key] = rows
        lines = [
            [
                row["file"],
                str(row["seed"]),
                str(row["calls"]),
                f"{row[f'{unit}s_per_call']:.2f}",
                f"{row['batch_seconds']:.2f}",
                with_near_ties(row["output_law"], row.get("near_ties")),
            ]
            for row in rows
        ]
        print(plain_table(["file", "seed", "calls", f"{unit}s/call", "seconds (batch)", "output"], lines))
        return 0

    def compare(self, sampler: Sampler, reports: list[Path]) -> int:
        """Decode everything plainly too, write every sample as soon as it is there, then the reports; print a table."""
        from visual_spec.eval.report.comparison import compare
        from visual_spec.eval.report.pages import contact_sheet, write_html
        from visual_spec.files.pictures import png_bytes

        self.pipe.set_progress_bar_config(disable=True)  # drawing a bar would count as decoding time
        overwrite, medium = self.args.overwrite, self.medium

        def write(index: int, row: Any) -> None:
            content = medium.encode(row.fast, row.rate, self.args.format)
            write_atomically(self.files[index], content, overwrite=overwrite)

        rows = compare(self.pipe, sampler, self.jobs, self.inputs, done=write)
        *sheets, page, _ = reports
        for sheet in sheets:
            write_atomically(sheet, png_bytes(contact_sheet(rows)), overwrite=overwrite)
        facts = {key: told for key, told in self.document.items() if not isinstance(told, (dict, list))}
        facts["sampler"] = ", ".join(f"{key}={told}" for key, told in self.document["sampler"].items())
        write_html(rows, page, facts=facts, overwrite=overwrite)
        self.document["comparison"] = [
            {
                "prompt": row.prompt,
                "seed": seed,
                "file": str(path),
                "plain_calls": row.plain_calls,
                "calls": row.fast_calls,
                f"{medium.unit}s_per_call": row.per_call,
                "plain_seconds": row.plain_seconds,
                "seconds": row.fast_seconds,
                "identical": row.identical,
                "output_law": row.output_law,
                **({} if row.near_ties is None else {"near_ties": row.near_ties}),
                **dict(zip(("plain_head_calls", "head_calls"), row.head_calls or (), strict=False)),
            }
            for row, (_, seed), path in zip(rows, self.jobs, self.files, strict=True)
        ]
        write_json(reports[-1], self.document, indent=2, overwrite=overwrite)
        print(_comparison_table(rows, medium.unit))
        samples = medium.words.samples if len(self.files) != 1 else medium.words.samples.removesuffix("s")
        print(f"wrote {', '.join(map(str, reports))} and {len(self.files)} {samples}")
        return _verdict(rows, medium)


def _joined(laws: Sequence[str]) -> list[str]:
    """Each law once. Laws that differ in a measured number only, such as "0.0130 a slot", are one with its range."""
    merged: dict[str, list[str]] = {}
    for law in laws:
        number = re.search(r"\b0\.\d{4}\b", law)
        merged.setdefault(law.replace(number[0], "{}", 1) if number else law, []).append(
            number[0] if number else ""
        )
    ranges = {key: sorted(set(numbers)) for key, numbers in merged.items()}
    return [
        key.replace("{}", numbers[0] if len(numbers) == 1 else f"{numbers[0]} to {numbers[-1]}")
        for key, numbers in ranges.items()
    ]


def _verdict(rows: Sequence[Any], medium: MediumFiles) -> int:
    """Say whether samples equal plain decoding's; 1 where that was promised and is not so."""
    from visual_spec.samplers.core.trace import with_near_ties

    if all(row.identical for row in rows):
        print(medium.identical)
    elif any(row.promised and not row.identical for row in rows):
        message = f"this sampler promises the plain {medium.promised}, and did not give them"
        print(f"visual-spec: error: {message}", file=sys.stderr)
        return 1
    else:
        counts = [row.near_ties for row in rows if row.near_ties is not None]
        laws = "; ".join(_joined([row.output_law for row in rows]))
        laws = with_near_ties(laws, sum(counts) if counts else None)
        same = sum(row.identical for row in rows)
        some = f"{same} of {len(rows)} {medium.words.samples} equal plain decoding's" if same else ""
        print(f"{some or 'Not what plain decoding draws with these seeds'}. The output is: {laws}.")
        if all(row.reference for row in rows):
            print(
                "The reference draws one token a call, which shows the law of the model alone and is no one's choice "
                "for speed. For a speed-up, compare with a model that decodes in order by --masked (--help)."
            )
    return 0


def _comparison_table(rows: Sequence[Any], unit: str) -> str:
    header = ["prompt", "calls", f"{unit}s/call", "seconds", "speed-up", "identical"]
    lines = [
        [
            row.prompt,
            f"{row.plain_calls} -> {row.fast_calls}",
            f"{row.plain_per_call:.2f} -> {row.per_call:.2f}",
            f"{row.plain_seconds:.2f} -> {row.fast_seconds:.2f}",
            f"{row.speed_up:.2f}x" if row.speed_up else "-",
            "yes" if row.identical else "no",
        ]
        for row in rows
    ]
    if all(row.head_calls for row in rows):
        header.insert(2, "head calls")
        for line, row in zip(lines, rows, strict=True):
            line.insert(2, f"{row.head_calls[0]} -> {row.head_calls[1]}")
    meaning = (
        f"plain -> accelerated: calls of the model, {unit}s that a call commits, seconds of decoding; identical: both "
        "ways give the same"
    )
    return f"{plain_table(header, lines)}\n{meaning}"


# -- what is asked for -------------------------------------------------------------------------------------------------


def _medium(args: argparse.Namespace) -> MediumFiles:
    """The medium of the model that is named; ValueError for an unknown one, or options of another medium."""
    if args.model is None:
        args.model = next((model for *_, model in args.usual), None) or model_that_knows(args.prompts)
    name, chunks = "image", False
    if args.model not in PICTURES:  # which are known without reading anything
        from visual_spec.pipelines.loading import read_facts

        facts = read_facts(args.model)
        name, chunks = facts.medium, CHUNKS in facts.calls
    makes = {"image": "pictures", "video": "clips", "audio": "music"}
    for flag, medium, _ in args.usual:
        if medium != name:
            raise ValueError(f"{args.model} makes {makes[name]}; leave {flag} out.")
    if name != "audio" and (args.seconds is not None or args.extend_stride is not None):
        raise ValueError(f"--seconds and --extend-stride are of music, and {args.model} makes {makes[name]}.")
    if name != "video" and args.frames is not None:
        raise ValueError(f"--frames is of clips, and {args.model} makes {makes[name]}.")
    if name == "image" and args.format is not None:
        raise ValueError(
            f"--format {args.format} is of music and clips; {args.model} draws pictures, which are PNG files."
        )
    return replace(MEDIA[name], unit="frame") if chunks else MEDIA[name]


def _sampler(args: argparse.Namespace, pipe: Any = None) -> Any:
    """Name, sampler and refiner that the options name. If they name settings at most: the fast sampler of `pipe` with
    these settings, and as it was saved without any; None without `pipe`.

    Raises:
        ValueError: two samplers, a setting twice, text of another form, or what no sampler takes.
    """
    from visual_spec.pipelines.sampler_text import make_sampler, parse_sampler

    named = [text for text in args.sampler if not text.startswith(":")]
    if len(named) > 1:
        raise ValueError(f"--sampler {' and --sampler '.join(named)} given; pass one of them.")
    whole = "".join(named)
    for text in (text for text in args.sampler if text.startswith(":")):
        whole += f",{text[1:]}" if ":" in whole else text
    name, settings = parse_sampler(whole)
    changed = bool(named or settings)
    if not named:
        if pipe is None:
            return None
        name, usual = parse_sampler(pipe.fast_sampler)
        settings = usual | settings
    refiner = settings.pop("refiner", None)
    sampler = make_sampler(name, **settings)
    if pipe is not None and not changed and type(pipe.sampler) is type(sampler):
        sampler = pipe.sampler
    return name, sampler, refiner


def _chosen(args: argparse.Namespace, names: Iterable[str]) -> dict[str, Any]:
    """The options of these names that the command sets."""
    return {name: value for name in names if (value := getattr(args, name)) is not None}


def _lengths(args: argparse.Namespace) -> dict[str, Any]:
    """What the options say about the length of a clip, by the names that pipelines give it."""
    lengths = dict(
        num_frames=args.frames, audio_length_in_s=args.seconds, extend_stride_in_s=args.extend_stride
    )
    return {name: value for name, value in lengths.items() if value is not None}


def _check_before_loading(args: argparse.Namespace, law: dict[str, Any]) -> None:
    """Refuse a law out of range, and a masked model that does not belong to `--model`."""
    from visual_spec.samplers.core.law import TokenLaw

    TokenLaw(**law)
    if args.masked is None:
        return
    if not args.compare:
        raise ValueError(
            f"--masked {args.masked} given without --compare; pass both, or --model {args.masked} to play by it alone."
        )
    from visual_spec.eval.defaults import refuse_unpaired
    from visual_spec.pipelines.loading import read_facts

    refuse_unpaired(args.masked, read_facts(args.model), read_facts(args.masked))


def _inputs(args: argparse.Namespace, pipe: Any) -> dict[str, Any]:
    """Return what a call takes beside prompts and law: texts to avoid, pictures, read from their files, and a policy.

    Raises:
        ValueError: the pipeline takes no such thing or no such law, or a file is no picture.
        OSError: there is no such file.
    """
    if args.guidance_until is not None and pipe.unit == "scales":
        raise ValueError(
            "--guidance-until counts the tokens of a next-token model; this one decodes scale by scale, and its "
            "guidance grows from scale to scale. Leave it out."
        )
    inputs = _chosen(args, _INPUTS)
    law = {} if args.masked else _chosen(args, LAW_SETTINGS)  # a pair hands all on
    check_taken(pipe, args.model, (*inputs, *law))
    for name in (name for name in _PICTURES if name in inputs):
        from visual_spec.files.pictures import read_picture_file

        inputs[name] = read_picture_file(inputs[name])
    return inputs


def _check(args: argparse.Namespace, pipe: Any, sampler: Sampler, inputs: dict[str, Any]) -> None:
    """Refuse, before any work, what the pipeline has no use of."""
    if args.compare and not pipe.comparable:
        raise ValueError(
            f"{args.model} has one way to decode; there is no plain decoding to compare it with. Leave --compare out."
        )
    if args.drafter is not None and not sampler.needs_drafter:
        readers = [entry.name for entry in fitting(pipe.calls) if entry.needs] or ["of another model"]
        raise ValueError(
            f"--drafter {args.drafter} given, but {type(sampler).__name__} drafts without one; pass --sampler "
            f"{' or '.join(readers)} too, or leave it out."
        )
    before, pipe.sampler = pipe.sampler, sampler
    try:
        pipe.check_sampler()
        pipe.check_call(args.prompts, **_lengths(args), **_chosen(args, LAW_SETTINGS), **inputs)
    except TypeError as error:
        raise ValueError(str(error)) from error
    finally:
        pipe.sampler = before


def _slug(prompt: str, otherwise: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", prompt.lower()).strip("-")[:40].strip("-") or otherwise


# -- files of each medium ----------------------------------------------------------------------------------------------


def _picture(picture: Image.Image, rate: object, kind: str) -> bytes:
    from visual_spec.files.pictures import png_bytes

    return png_bytes(picture)


def _sound(waves: Waves, rate: float, kind: str) -> bytes:
    from visual_spec.pipelines.audio_files import audio_bytes

    return audio_bytes(waves, int(rate), kind)


def _clip(frames: Frames, rate: float, kind: str) -> bytes:
    from visual_spec.pipelines.video_files import pixels_of, video_bytes

    return video_bytes(pixels_of(frames), rate, kind)


def _sound_suffix(args: argparse.Namespace) -> str:
    """The format that was asked for; refuses one whose writer is missing."""
    from visual_spec.pipelines.audio_files import FORMATS, audio_bytes

    args.format = args.format or "wav"
    if args.format not in FORMATS:
        raise ValueError(f"--format {args.format} given; music is written as {', '.join(FORMATS)}.")
    audio_bytes([0.0], 8000, args.format)
    return args.format


def _clip_suffix(args: argparse.Namespace) -> str:
    """The format that was asked for, or mp4; refuses one whose writer is missing."""
    from visual_spec.pipelines.video_files import check_format

    args.format = args.format or "mp4"
    check_format(args.format)
    return args.format


MEDIA = {
    "video": MediumFiles(
        words=records.MEDIA["video"],
        unit="token",
        suffix=_clip_suffix,
        reports=("html", "json"),
        identical="Every clip is the same, pixel for pixel in all frames.",
        promised="tokens",
        field="frames",
        rate="frame_rate",
        encode=_clip,
    ),
    "image": MediumFiles(
        words=records.MEDIA["image"],
        unit="token",
        suffix=lambda args: "png",
        reports=("png", "html", "json"),
        identical="Every picture is the same, pixel for pixel.",
        promised="tokens",
        field="images",
        rate="",
        encode=_picture,
    ),
    "audio": MediumFiles(
        words=records.MEDIA["audio"],
        unit="column",
        suffix=_sound_suffix,
        reports=("html", "json"),
        identical="Every clip is the same, code for code and sample for sample.",
        promised="codes",
        field="audios",
        rate="sampling_rate",
        encode=_sound,
    ),
}
