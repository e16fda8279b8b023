"""visual-spec eval: what samplers gain, and what it costs in quality, beside plain decoding.

    visual-spec eval --model things --samplers speculative-jacobi gsd:window=16 --samples 200 --out results
    visual-spec eval --model tunes --masked tunes_masked --out music
    visual-spec eval --model things --prompts captions.txt --out mine

For every setting pictures are drawn for held-out prompts, scored against their prompts by the parser of the data, and
compared as a set with true scenes and with the pictures of plain decoding. Plain decoding is always there, and so is
plain decoding at a lower temperature: what a lossy sampler may gain in score, it must gain against that. Music is
measured alike, clips for pictures and true tunes for scenes; a masked model of the same tokens stands beside the model
with `--masked`. Of prompts of your own (`--prompts`) nobody knows the true scenes: settings are compared with plain
decoding, and scored by the parser where it knows the captions.

Under `torchrun`, or with `--rank` and `--shards`, processes share the work. `results.json` in the folder `--out` holds
the results, and `--json` prints them as the last line.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from visual_spec.commands.options import LAW, MACHINE, SHARE, add, command, progress, share
from visual_spec.files.documents import json_text

if TYPE_CHECKING:
    from visual_spec.eval.defaults import ModelSettings
    from visual_spec.eval.settings import Setting


# fmt: off
_OPTIONS = dict(
    controls=dict(nargs="*", metavar="S",
                  help="further settings of plain decoding (default: at 0.9 of the temperature, and with other seeds)"),
    out=dict(type=Path, required=True, metavar="DIR", help="samples and results; goes on if there"),
    prompts=dict(metavar="FILE", help="prompts to draw, as of visual-spec sample (default: held-out captions)"),
    samples=dict(type=int, metavar="N", help="prompts (default: 2000; of --prompts all)"),
    alone=dict(type=int, default=8, metavar="N",
               help="pictures timed at batch 1 too, at most --samples (default: 8; 0: none)"),
    guidance_scale=dict(type=float, metavar="S", help="1 turns guidance off (default: the model's own)"),
    inception=dict(type=Path, metavar="FILE",
                   help="Inception weights, which add FID (default: torch-fidelity's, if in the cache)"),
)
# fmt: on


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `visual-spec eval`."""
    add(parser, "model", "samplers", "masked", "batch_size", "seed", *SHARE, *MACHINE, *LAW, "json")
    add(parser, **_OPTIONS)


def read_settings(
    args: argparse.Namespace, known: ModelSettings, beside: ModelSettings | None = None
) -> list[Setting]:
    """Plain decoding, the controls and the samplers that the options name, each once.

    Args:
        known: the settings of the model.
        beside: the settings of the masked model of `--masked`, under its own law.

    Raises:
        ValueError: a setting that cannot be read, or a law out of range.
    """
    from visual_spec.eval.defaults import settings_under
    from visual_spec.models.core.settings import LAW_DEFAULTS

    controls = known.controls if args.controls is None else args.controls
    samplers = known.others if args.samplers is None else args.samplers
    more = () if beside is None else (beside.plain, *(beside.others if args.samplers is None else ()))
    asked = {name: getattr(args, name) for name in LAW_DEFAULTS}
    texts = (known.plain, *controls, *samplers, *more)
    settings: dict[str, Setting] = {}
    for setting in settings_under(texts, known, beside, args.seed, **asked):
        settings.setdefault(json_text(setting.describe(), sort_keys=True), setting)
    return list(settings.values())


def run(args: argparse.Namespace) -> int:
    """Evaluate as the options say, print tables and with `--json`, as the last line, the document."""
    from visual_spec.eval.defaults import settings_beside, settings_of_model
    from visual_spec.eval.quality.prompt_files import read_prompts
    from visual_spec.files.whole import ready_folder

    ready_folder(args.out)
    prompts = None if args.prompts is None else read_prompts(args.prompts)
    if args.samples is None:
        args.samples = 2000 if prompts is None else len(prompts.texts)
    known = settings_of_model(args.model, args.temperature)
    settings = read_settings(args, known, settings_beside(args.masked, known))  # before anything is loaded
    if args.samples < 4 or args.batch_size < 1:
        raise ValueError(
            f"--samples {args.samples} --batch-size {args.batch_size}; pass at least 4 samples (as many prompts, or "
            "--samples), and a batch of at least 1"
        )
    from visual_spec.eval.pair import paired
    from visual_spec.eval.quality.evaluate import evaluate
    from visual_spec.eval.quality.extractors import Setup
    from visual_spec.eval.quality.features import find_inception
    from visual_spec.eval.quality.metric_table import OWN
    from visual_spec.eval.quality.tasks import own_task, task_of
    from visual_spec.pipelines.placing import load, own_device

    pipe = paired(load(args.model, own_device(args.device), args.dtype, args.threads), args.masked)
    weights = args.inception or find_inception()
    inception = ("inception",) if pipe.medium == "image" and weights is not None else ()
    needed = -(-args.samples // args.batch_size) * args.batch_size
    document = evaluate(
        pipe,
        settings,
        task_of(pipe, needed) if prompts is None else own_task(prompts, needed),
        args.out,
        samples=args.samples,
        batch_size=args.batch_size,
        extractors=(OWN[pipe.medium], *inception),
        setup=Setup({} if weights is None else {"feature_weights": weights}, device=str(pipe.device)),
        alone=args.alone,
        model=args.model,
        report=progress,
        **share(args),
    )
    if document is None:
        print("this process is done; other processes have samples to draw", file=sys.stderr)
        return 0
    print_tables(document)
    if args.json:
        print(json_text(document))
    return 0


def print_tables(document: dict) -> None:
    """Print what was measured, as Markdown."""
    from visual_spec.eval.machine import environment_line
    from visual_spec.eval.quality.accuracy import accuracy_table
    from visual_spec.eval.quality.figures import quality_table

    print(environment_line(document["environment"]))
    print()
    for name in document["rows"][0]["features"]:
        print(f"features: {name}\n")
        print(quality_table(document, name))
        print()
    if document["rows"][0]["accuracy"]["mean_attribute"] is None:
        print("The parser knows none of these prompts; visual-spec score --clip judges any.")
    else:
        print(accuracy_table({row["name"]: row["accuracy"] for row in document["rows"]}))
    print()


main = command("eval", __doc__, add_arguments, run)
