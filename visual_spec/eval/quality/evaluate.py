"""visual-spec eval: what samplers gain, and what it costs in quality, beside plain decoding.

For every sampler setting pictures are drawn for held-out prompts, scored against their prompts by the parser of the
data, and compared as a set with true scenes and with the pictures of plain decoding. Plain decoding is always there,
and so is plain decoding at a lower temperature: what a lossy sampler may gain in score, it must gain against that.
Music is measured alike, clips for pictures and true tunes for scenes; a masked model of the same codec stands beside
the model of columns with `--masked`.

Settings are drawn block by block in turn, so a drift of the machine hits all of them alike, and every block that is
done is kept. Under `torchrun`, or with `--rank` and `--shards`, processes share the blocks; whichever finds that
nothing is missing writes `results.json`. The last line of the output is that document.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

    from visual_spec.eval.quality.samples import Judge, Setting
    from visual_spec.eval.rows import Rows
    from visual_spec.samplers.core.law import TokenLaw

Report = Callable[[str], Any]


@dataclass
class Task:
    """What is asked for: prompts, and for each the true picture, uint8 [N, H, W, 3], or clip, float32 [N, samples]."""

    prompts: list[str]
    pictures: np.ndarray


def shapes_task(count: int, image_size: int) -> Task:
    """The captions of `shapes` that no trainer sees, and the scenes they describe."""
    from visual_spec.data.shapes import caption, sample_dataset

    scenes, pictures = sample_dataset(count, 0, held_out=True, size=image_size)
    return Task([caption(scene) for scene in scenes], pictures)


def classes_task(count: int, image_size: int) -> Task:
    """The classes of `shapes` in turn, and for each a scene of the law that class models are trained on."""
    import numpy as np

    from visual_spec.data.shapes import render
    from visual_spec.data.shapes_classes import CLASS_NAMES, class_of, sample_scenes_by_class

    scenes = sample_scenes_by_class(count, 1_000_003)
    pictures = np.stack([render(scene, image_size) for scene in scenes])
    return Task([CLASS_NAMES[class_of(scene)] for scene in scenes], pictures)


def tunes_task(count: int) -> Task:
    """The captions of `tunes` that no trainer sees, those of `held_out_prompts`, and the clips they describe."""
    from visual_spec.data.tunes import caption
    from visual_spec.data.tunes_synth import sample_dataset

    tunes, waves = sample_dataset(count, 0, held_out=True)
    return Task([caption(tune) for tune in tunes], waves)


def task_of(pipe: Any, count: int) -> tuple[Task, Callable[..., dict[str, bool]]]:
    """What a pipeline is asked for, and what scores it: captions, or classes where it draws those of `shapes`.

    Raises:
        ValueError: a pipeline that draws or plays something else.
    """
    from visual_spec.data import shapes_classes, shapes_parser, tunes, tunes_parser
    from visual_spec.eval.quality.music import plays

    if plays(pipe):
        if (pipe.sampling_rate, pipe.max_frames * pipe.samples_per_frame) != (
            tunes.SAMPLE_RATE,
            tunes.NUM_SAMPLES,
        ):
            raise ValueError(
                f"this model plays {pipe.max_frames * pipe.samples_per_frame} samples at {pipe.sampling_rate} Hz, and "
                f"the tunes that the parser reads have {tunes.NUM_SAMPLES} at {tunes.SAMPLE_RATE} Hz; pass a model "
                "such as tunes."
            )
        return tunes_task(count), tunes_parser.score
    if getattr(pipe, "num_classes", None) is None:
        return shapes_task(count, pipe.image_size[0]), shapes_parser.score
    if tuple(pipe.config.get("id2label") or ()) != shapes_classes.CLASS_NAMES:
        raise ValueError(
            "this model draws other classes than those of `shapes`, which no parser reads; pass a model such as "
            "shapes_var. (Models of official size are timed by visual-spec bench.)"
        )
    return classes_task(count, pipe.image_size[0]), shapes_classes.score_class


def evaluate(
    pipe: Any,
    settings: Sequence[Setting],
    task: Task,
    judge: Judge,
    folder: str | Path,
    *,
    samples: int,
    batch_size: int,
    rank: int = 0,
    shards: int = 1,
    alone: int = 0,
    model: str = "",
    report: Report = lambda text: None,
) -> dict[str, Any] | None:
    """Draw, judge and compare, or go on where a run stopped.

    Args:
        pipe: draws; its sampler is left as it was.
        settings: the rows. The first one is plain decoding, which the others are compared with.
        task: at least `samples` prompts, rounded up to whole batches.
        folder: a folder for each setting, `alone.json`, and once complete `results.json` and `pictures.png`.
        samples: of each setting; may be raised later.
        rank, shards: this process takes every `shards`-th block of `batch_size` samples, from block `rank`.
        alone: time that many pictures of each setting at batch 1 too, in turn.
        model: its name, for the record.

    Returns:
        The document (see `figures.rows_of`), or None as long as other processes have samples to draw.

    Raises:
        ValueError: sizes out of range, too few prompts, or a folder with samples of other settings or prompts.
    """
    from visual_spec.eval.files import write_atomically
    from visual_spec.eval.quality import samples as store
    from visual_spec.eval.quality.figures import picture_sheet, rows_of
    from visual_spec.eval.quality.music import mel_thumbnails, plays
    from visual_spec.eval.speed.measure import environment
    from visual_spec.models.core.fingerprint import fingerprint

    least = 3 if plays(pipe) else 2  # so few have an interval
    if samples < least or batch_size < 1 or alone < 0 or not 0 <= rank < shards:
        raise ValueError(
            f"samples={samples}, batch_size={batch_size}, alone={alone}, rank={rank} of {shards}; pass at least "
            f"{least} samples, a batch of at least 1, and a rank from 0 to shards - 1"
        )
    blocks = [(first, min(first + batch_size, samples)) for first in range(0, samples, batch_size)]
    if len(task.prompts) < len(blocks) * batch_size:
        raise ValueError(
            f"{len(task.prompts)} prompts for {samples} samples in batches of {batch_size}; pass "
            f"{len(blocks) * batch_size}"
        )
    folder = Path(folder)
    shared = {
        "model": model,
        "weights": fingerprint(part for part in pipe.components.values() if hasattr(part, "state_dict")),
        "batch_size": batch_size,
        "dtype": str(pipe.transformer.dtype).removeprefix("torch."),
        "device": pipe.device.type,
    }
    if plays(pipe):
        shared["sampling_rate"] = pipe.sampling_rate
    check_samplers(pipe, settings)
    folders = [
        store.SampleFolder(folder / folder_name(setting.text), {**shared, **setting.describe()})
        for setting in settings
    ]
    # What the tokenizer alone makes of true scenes: the best that any sampler of its tokens can reach.
    tokenizer = store.SampleFolder(folder / "tokenizer", {**shared, "sampler": None})

    started = time.monotonic()
    mine = blocks[rank::shards]
    for number, block in enumerate(mine):
        # Every second block runs backwards, so that no setting always follows the same one.
        for setting, place in list(zip(settings, folders, strict=True))[:: -1 if number % 2 else 1]:
            if missing := place.missing(*block):
                prompts = task.prompts[missing[0] : missing[1]]
                place.write("draws", *missing, store.draw(pipe, setting, prompts, missing[0]))
            store.judge_draws(pipe, place, task.prompts, judge, _whole(block, batch_size))
        if missing := tokenizer.missing(*block):
            part = slice(*missing)
            tokenizer.write("draws", *missing, store.encode(pipe, task.prompts[part], task.pictures[part]))
        store.judge_draws(pipe, tokenizer, task.prompts, judge, _whole(block, batch_size))
        spent = time.monotonic() - started
        left = spent / (number + 1) * (len(mine) - number - 1)
        report(f"block {number + 1} of {len(mine)}: {spent:.0f} s, about {left:.0f} s left")

    timings = folder / "alone.json"
    texts = [setting.text for setting in settings]
    if alone and rank == 0 and _read_timings(timings, texts, alone) is None:
        report(f"timing {alone} pictures of each setting at batch 1")
        seconds = time_alone(pipe, settings, task.prompts, alone)
        content = {"settings": texts, "pictures": alone, **seconds}
        write_atomically(timings, json.dumps(content, indent=1) + "\n", overwrite=True)
    if not all(place.complete(samples, judge.fingerprint) for place in [*folders, tokenizer]):
        return None
    if alone and _read_timings(timings, texts, alone) is None:
        return None  # process 0 is at it, and writes the document afterwards

    report("comparing")
    drawn = [place.samples(samples) for place in folders]
    encoded = tokenizer.samples(samples)
    document = {
        "kind": "quality",
        "settings": {
            **shared,
            "samples": samples,
            "seed": settings[0].seed,
            "law": settings[0].pipeline_law,
            "judge": judge.fingerprint,
        },
        "environment": environment(pipe.device, pipe.transformer.dtype),
        **rows_of(
            settings,
            drawn,
            encoded,
            task.pictures[:samples],
            judge,
            _read_timings(timings, texts, alone) if alone else None,
            on_processor=pipe.device.type == "cpu",
        ),
    }
    shown = min(samples, 8)
    sheet = {"true clips" if plays(pipe) else "true scenes": task.pictures[:shown]}
    for title, found in zip(["tokenizer alone", *texts], [encoded, *drawn], strict=True):
        sheet[title] = store.shown_by(pipe, found.tokens[:shown])
    if plays(pipe):
        sheet = {title: mel_thumbnails(clips, pipe.sampling_rate) for title, clips in sheet.items()}
    write_atomically(folder / "pictures.png", png_bytes(picture_sheet(sheet)), overwrite=True)
    write_atomically(folder / "results.json", json.dumps(document, indent=1) + "\n", overwrite=True)
    return document


def png_bytes(picture: Any) -> bytes:
    """A picture as a PNG file."""
    buffer = io.BytesIO()
    picture.save(buffer, format="PNG", optimize=True)
    return buffer.getvalue()


def _whole(block: tuple[int, int], batch_size: int) -> tuple[int, int]:
    """The block without the cut at the number of samples, as an earlier run with more samples saw it."""
    return block[0], block[0] + batch_size


def check_samplers(pipe: Any, settings: Sequence[Setting]) -> None:
    """Refuse a sampler that the pipeline cannot run, before any of them is run.

    Raises:
        ValueError: as `VisualPipeline.check_sampler`, `load_drafter` and `ScalePlan.on`.
    """
    for setting in settings:
        try:
            with setting.on(pipe):
                pass
        except TypeError as error:
            raise ValueError(f"{setting.text}: {error}") from error


def folder_name(text: str) -> str:
    """A setting as the name of a folder."""
    return re.sub(r"[^A-Za-z0-9.=-]+", "_", text)


def time_alone(
    pipe: Any, settings: Sequence[Setting], prompts: Sequence[str], rounds: int
) -> dict[str, list[list[float]]]:
    """Decode one picture at batch 1 with every setting in every round, after a warm-up.

    Returns:
        seconds and processor_seconds, both `[setting][round]`.
    """
    from visual_spec.eval.quality.samples import draw

    found: dict[str, list[list[float]]] = {
        kind: [[] for _ in settings] for kind in ("seconds", "processor_seconds")
    }
    for number in range(-1, rounds):
        index = max(number, 0)
        for place in list(range(len(settings)))[:: -1 if number % 2 else 1]:
            arrays = draw(pipe, settings[place], prompts[index : index + 1], index)
            for kind, values in found.items():
                if number >= 0:
                    values[place].append(float(arrays[kind]))
    return found


def _read_timings(path: Path, texts: list[str], rounds: int) -> dict[str, Any] | None:
    """What `alone.json` holds, if it is of these settings and as many rounds; else None."""
    if not path.exists():
        return None
    there = json.loads(path.read_text())
    return there if (there["settings"], there["pictures"]) == (texts, rounds) else None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `visual-spec eval`."""
    parser.add_argument(
        "--model", default="shapes", help="embedded name, folder, or Hub id (default: shapes)"
    )
    parser.add_argument(
        "--samplers",
        nargs="+",
        metavar="S",
        help="name or name:setting=value,..., such as speculative-jacobi:window=32,coupling=maximal,acceptance=exact, "
        "or scale-wise:num_draft_scales=6,cache_share=0.1,refiner=FOLDER, or column-jacobi:unit=codebook,"
        "acceptance=exact; temperature, top_k, top_p, guidance_scale, seed and drafter may be set too (default: "
        "speculative-jacobi, for next-scale models all that it has, for music the couplings and relaxed tests)",
    )
    parser.add_argument(
        "--masked",
        metavar="MODEL",
        help="of music: a masked model of the same codec, for rows beside --model's own",
    )
    parser.add_argument(
        "--controls",
        nargs="*",
        metavar="S",
        help="further rows beside plain decoding (default: plain decoding at temperature 0.9, and with other seeds)",
    )
    parser.add_argument(
        "--out", type=Path, required=True, metavar="DIR", help="samples and results; goes on if there"
    )
    parser.add_argument("--samples", type=int, default=2000, metavar="N", help="prompts (default: 2000)")
    parser.add_argument(
        "--batch-size", type=int, default=50, metavar="B", help="pictures decoded together (default: 50)"
    )
    parser.add_argument(
        "--alone",
        type=int,
        default=8,
        metavar="N",
        help="pictures timed at batch 1 too (default: 8; 0: none)",
    )
    parser.add_argument("--seed", type=int, default=0, help="of sample 0; sample i has seed + i")
    parser.add_argument(
        "--guidance-scale",
        type=float,
        metavar="S",
        help="(default: 3; as the next three, for next-scale models and music that of the model)",
    )
    parser.add_argument("--top-k", type=int, metavar="K", help="0: off (default)")
    parser.add_argument("--top-p", type=float, metavar="P", help="1: off (default)")
    parser.add_argument("--temperature", type=float, metavar="T", help="(default: 1)")
    parser.add_argument(
        "--inception",
        type=Path,
        metavar="FILE",
        help="Inception weights (default: torch-fidelity's, if in the cache)",
    )
    parser.add_argument(
        "--rank", type=int, metavar="R", help="share of this process (default: as torchrun says, or 0)"
    )
    parser.add_argument(
        "--shards", type=int, metavar="N", help="number of processes (default: as torchrun says, or 1)"
    )
    parser.add_argument("--device", help="default: cuda where there is one, else cpu")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16", "float64"])
    parser.add_argument(
        "--threads", type=int, metavar="N", help="processor threads (default: PyTorch's choice)"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Parse arguments and run; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="visual-spec eval", description="What samplers gain, and what it costs in quality; resumable."
    )
    add_arguments(parser)
    return run(parser.parse_args(argv))


def read_settings(args: argparse.Namespace, rows: Rows, beside: Rows | None = None) -> list[Setting]:
    """Plain decoding, the controls and the samplers that the options name, each once.

    Args:
        rows: those of the model.
        beside: those of the masked model beside it; `masked` rows have its law.

    Raises:
        ValueError: a setting that cannot be read, or a law out of range.
    """
    from visual_spec.eval.quality.samples import parse_setting

    law = law_of(args, rows)
    masked_law = law if beside is None else law_of(args, beside)
    controls = rows.controls if args.controls is None else args.controls
    samplers = rows.others if args.samplers is None else args.samplers
    more = () if beside is None else (beside.plain, *(beside.others if args.samplers is None else ()))
    found: dict[str, Setting] = {}
    for text in (rows.plain, *controls, *samplers, *more):
        setting = parse_setting(text, masked_law if text.strip().startswith("masked") else law, args.seed)
        found.setdefault(json.dumps(setting.describe(), sort_keys=True), setting)
    return list(found.values())


def law_of(args: argparse.Namespace, rows: Rows) -> TokenLaw:
    """The law of a model's rows: its own, but for what the options say.

    Raises:
        ValueError: a law out of range.
    """
    from visual_spec.samplers.core.law import TokenLaw

    known = {"temperature": 1.0, **rows.law}
    asked = {name: value for name in known if (value := getattr(args, name, None)) is not None}
    return TokenLaw(**{**known, **asked})


def run(args: argparse.Namespace) -> int:
    """Evaluate as the options say, print tables and, as the last line, the document.

    Raises:
        ValueError, OSError: bad input; names it.
    """
    from visual_spec.eval.rows import rows_of_masked, rows_of_model

    rows = rows_of_model(args.model)
    beside = rows_of_masked(args.masked, rows)
    settings = read_settings(args, rows, beside)  # refuses what cannot be read before anything is loaded
    if args.samples < 2 or args.batch_size < 1:
        raise ValueError(
            f"--samples {args.samples} --batch-size {args.batch_size} given; pass at least 2 samples and a batch of 1"
        )
    from visual_spec.eval.quality.accuracy import accuracy_table
    from visual_spec.eval.quality.features import extractors_of
    from visual_spec.eval.quality.figures import quality_table
    from visual_spec.eval.quality.samples import Judge
    from visual_spec.eval.speed.bench import environment_line, load

    rank = int(os.environ.get("RANK", 0)) if args.rank is None else args.rank
    shards = int(os.environ.get("WORLD_SIZE", 1)) if args.shards is None else args.shards
    device = args.device
    if device is None and "LOCAL_RANK" in os.environ:
        import torch

        device = f"cuda:{os.environ['LOCAL_RANK']}" if torch.cuda.is_available() else "cpu"
    pipe = load(args.model, device, args.dtype, args.threads, args.masked)
    extractors = extractors_of(pipe, args.inception)
    rounded = -(-args.samples // args.batch_size) * args.batch_size
    task, score = task_of(pipe, rounded)
    document = evaluate(
        pipe,
        settings,
        task,
        Judge(score, extractors),
        args.out,
        samples=args.samples,
        batch_size=args.batch_size,
        rank=rank,
        shards=shards,
        alone=args.alone,
        model=args.model,
        report=lambda text: print(text, file=sys.stderr, flush=True),
    )
    if document is None:
        print("this process is done; other processes have samples to draw", file=sys.stderr)
        return 0
    print(environment_line(document["environment"]))
    print()
    for name in extractors:
        print(f"features: {name}\n")
        print(quality_table(document, name))
        print()
    print(accuracy_table({row["name"]: row["accuracy"] for row in document["rows"]}))
    print()
    print(json.dumps(document))
    return 0
