"""visual-spec sample: draw a set of pictures or clips for an evaluation, as files that every scorer reads.

    visual-spec sample --model shapes_var --prompts classes --num 50000 --out drawn
    visual-spec sample --model things --prompts captions.txt --out drawn --engine ray
    torchrun --nproc-per-node 8 -m -- visual_spec sample --model ...

A run that was stopped goes on where it was; on a Ray cluster, under `torchrun`, or with `--rank` and `--shards`,
processes share the work. The samples are the same bit for bit either way.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from visual_spec.commands.options import MACHINE, SHARE, add, check_taken, command, is_quiet, progress, share
from visual_spec.files.documents import json_text

if TYPE_CHECKING:
    from visual_spec.eval.quality.sample_set import SampleSet
    from visual_spec.pipelines.base import VisualPipeline


# fmt: off
_PROMPTS = dict(
    prompts=dict(required=True, metavar="FILE", help=".txt (one a line), .jsonl, .csv, .tsv, COCO captions or a list "
                 "(.json), GenEval's .jsonl, DPG-Bench's folder, VBench_full_info.json; or classes, of a class model"),
    num=dict(type=int, metavar="N", help="samples (default: one a prompt; GenEval and DPG four, VBench five)"),
    sampler=dict(metavar="S", help="name or name:setting=value,... (default: plain decoding); temperature, top_k, "
                 "top_p and guidance_scale may be set too"),
)
_OUTPUT = dict(
    logprobs=dict(action="store_true", help="keep every token and its log-probability too, for those who train: "
                  "safetensors files under rollouts/"),
    out=dict(type=Path, required=True, metavar="DIR", help="goes on if samples are there"),
)
_ENGINE = dict(
    engine=dict(default="processes", choices=["processes", "ray"], help="ray: Ray Data, one actor a GPU or processor "
                "core (default: this process, or torchrun's processes)"),
    workers=dict(type=int, metavar="N", help="actors of Ray (default: as many as its cluster has GPUs or cores)"),
)
# fmt: on


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `visual-spec sample`."""
    add(parser, "model", **_PROMPTS)
    add(parser, "negative_prompt", **_OUTPUT)
    add(parser, "batch_size", "seed", *SHARE, **_ENGINE)
    add(parser, *MACHINE, "json")


def run(args: argparse.Namespace) -> int:
    """Draw as the options say."""
    from visual_spec.files.whole import ready_folder

    by_ray = args.engine == "ray"
    if by_ray and not (args.rank is None and args.shards is None):
        raise ValueError(
            "--rank and --shards share work without Ray; leave them out, or leave --engine ray out"
        )
    if args.workers is not None and not by_ray:
        raise ValueError(f"--workers {args.workers} counts actors of Ray; pass --engine ray too")
    ready_folder(args.out)
    summary = _by_ray(args) if by_ray else _here(args)
    if summary is None:
        print("this process is done; other processes have samples to draw", file=sys.stderr)
        return 0
    print(
        f"{summary['samples']} samples in {summary['folder']}: {summary['calls_mean']:.1f} calls and "
        f"{summary['seconds_per_sample']:.3f} s each"
    )
    if args.json:
        print(json_text(summary))
    return 0


def sample_set(args: argparse.Namespace, *, drawn_here: bool = True) -> SampleSet:
    """The set that the options describe, with its pipeline loaded where it is drawn here, else with its facts."""
    from visual_spec.eval.defaults import settings_of_model
    from visual_spec.eval.quality.prompt_files import CLASSES, PromptSet, read_prompts
    from visual_spec.eval.quality.sample_set import SampleSet
    from visual_spec.eval.settings import parse_setting
    from visual_spec.pipelines.placing import load, own_device

    # Before anything is loaded.
    prompts = None if args.prompts in CLASSES else read_prompts(args.prompts)
    known = settings_of_model(args.model)
    setting = parse_setting(args.sampler or known.plain, known.law_with(), args.seed)
    pipe = known.facts
    if drawn_here:
        pipe = load(args.model, own_device(args.device), args.dtype, args.threads)
        if args.negative_prompt is not None:
            check_taken(pipe, args.model, ("negative_prompt",))
        prompts = prompts or read_prompts(args.prompts, class_names(pipe))
    elif prompts is None and args.num is None:
        raise ValueError(f"--prompts {args.prompts} with --engine ray: say how many samples by --num")
    prompts = prompts or PromptSet(("",))
    count = len(prompts) if args.num is None else args.num
    given = (pipe, setting, prompts, args.out, count, args.batch_size, args.model)
    return SampleSet(*given, negative_prompt=args.negative_prompt, logprobs=args.logprobs)


def _here(args: argparse.Namespace) -> dict[str, Any] | None:
    from visual_spec.eval.quality.sample_set import sample

    drawn = sample_set(args)
    # Within a batch, on a terminal; seldom enough not to count in its seconds.
    drawn.pipe.set_progress_bar_config(disable=is_quiet() or None, leave=False, mininterval=1.0)
    return sample(drawn, report=progress, **share(args))


def _by_ray(args: argparse.Namespace) -> dict[str, Any] | None:
    """Draw by actors of Ray, which have folders of their own. This process loads no model: it may have no GPU."""
    from visual_spec.eval.quality.prompt_files import CLASSES
    from visual_spec.eval.quality.ray_engine import sample_with_ray
    from visual_spec.pipelines.embedded import local_folder

    args.out = args.out.absolute()
    if args.prompts not in CLASSES:
        args.prompts = str(Path(args.prompts).absolute())
    if local_folder(args.model) == Path(args.model):
        args.model = str(Path(args.model).absolute())
    outline = sample_set(args, drawn_here=False)
    return sample_with_ray(lambda: sample_set(args), outline, workers=args.workers, report=progress)


def class_names(pipe: VisualPipeline) -> list[str] | None:
    """Return what the classes of a pipeline are called, or their numbers; None where it draws none."""
    count = getattr(pipe, "num_classes", None)
    if count is None:
        return None
    return list(pipe.config.get("id2label") or map(str, range(count)))


main = command("sample", __doc__, add_arguments, run)
