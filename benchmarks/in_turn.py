"""Settings of embedded models of pictures in turn: what the parser reads on given prompts, and processor time.

python benchmarks/in_turn.py "shapes autoregressive" "shapes speculative-jacobi" "shapes_masked masked:steps=6" \\
    --first 200 --prompts 200 --alone 24 --out FILE

A setting is a model and, after a space, what `visual-spec eval --samplers` takes. Captions are held-out ones from
number `--first` on, so that some choose a setting and others measure it; models of classes draw the classes in turn.
Accuracy is of batches. Time is at batch 1, every setting's turn after the other's, the order turned round from picture
to picture. Speed is beside the first setting, those that are only `--timed` included, and `more_right` beside the first
one of the same model, on the same prompts.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import torch

from visual_spec.data import shapes_classes, shapes_parser
from visual_spec.data.shapes import held_out_prompts
from visual_spec.eval.draws import draw, stored_name
from visual_spec.eval.intervals import mean_figure, ratio_figure, rounded
from visual_spec.eval.machine import environment
from visual_spec.eval.media import show
from visual_spec.eval.quality.accuracy import summarise
from visual_spec.eval.settings import Setting, parse_setting
from visual_spec.files.documents import json_text, write_json
from visual_spec.pipelines.placing import load


def prompts_of(pipe: Any, first: int, count: int) -> list[str]:
    """Captions or classes, from number `first` on."""
    if getattr(pipe, "num_classes", None) is None:
        return held_out_prompts(first + count)[first:]
    names = shapes_classes.CLASS_NAMES
    return [names[index % len(names)] for index in range(first, first + count)]


def hits_of(
    pipe: Any, setting: Setting, prompts: list[str], first: int
) -> tuple[list[dict[str, bool]], list[int]]:
    """What the parser reads in a batch of pictures, and the calls of each."""
    drawn = draw(pipe, setting, prompts, first)
    pictures = show(pipe, drawn[stored_name(drawn)])
    score = shapes_parser.score if getattr(pipe, "num_classes", None) is None else shapes_classes.score_class
    return [score(*one) for one in zip(prompts, pictures, strict=True)], drawn["calls"].tolist()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("settings", nargs="+", metavar="MODEL SETTING")
    parser.add_argument(
        "--timed", nargs="+", default=[], metavar="MODEL SETTING", help="whose accuracy is known"
    )
    parser.add_argument("--first", type=int, default=0, help="prompts of the list to leave out")
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--batch", type=int, default=10)
    parser.add_argument("--alone", type=int, default=24, help="pictures timed at batch 1")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    texts = [text.split(maxsplit=1) for text in args.timed + args.settings]
    pipes = {model: load(model, "cpu", "float32") for model, _ in texts}
    turns = [(model, parse_setting(text, pipes[model].make_law(), 0)) for model, text in texts]
    rows: list[dict[str, Any]] = [
        {"model": model, "setting": setting.text, "law": setting.pipeline_law} for model, setting in turns
    ]
    shares: dict[str, list[float]] = {}
    for row, (model, setting) in list(zip(rows, turns, strict=True))[len(args.timed) :]:
        prompts, hits, calls = prompts_of(pipes[model], args.first, args.prompts), [], []
        for start in range(0, args.prompts, args.batch):
            some = prompts[start : start + args.batch]
            more = hits_of(pipes[model], setting, some, args.first + start)
            hits, calls = hits + more[0], calls + more[1]
        right = [sum(one.values()) / len(one) for one in hits]
        known = summarise(hits)
        row["calls"] = rounded(mean_figure(calls))
        row["attributes_right"] = rounded(known["mean_attribute"])
        row["all_right"] = rounded(known["all_correct"])
        row["more_right"] = rounded(mean_figure(np.subtract(right, shares.setdefault(model, right)).tolist()))
        print(json_text(row), flush=True)
    seconds: list[list[float]] = [[] for _ in turns]
    for index in range(-1 if args.alone else 0, args.alone):  # the first picture of each warms up
        for place in range(len(turns))[:: 1 if index % 2 else -1]:
            model, setting = turns[place]
            number = args.first + max(index, 0)
            drawn = draw(pipes[model], setting, prompts_of(pipes[model], number, 1), number)
            seconds[place] += [float(drawn["processor_seconds"])] * (index >= 0)
        print("picture", index, [round(took[-1], 3) for took in seconds if took], flush=True)
    for row, took in zip(rows if args.alone else (), seconds, strict=False):
        row["processor_seconds"] = rounded(mean_figure(took))
        row["speed"] = rounded(ratio_figure(seconds[0], took))
        print(row["setting"], row["processor_seconds"], row["speed"], flush=True)
    if args.out:
        facts = {"first prompt": args.first, "prompts": args.prompts, "alone": args.alone}
        document = {**facts, "environment": environment(torch.device("cpu"), torch.float32), "rows": rows}
        write_json(args.out, document, indent=1)


if __name__ == "__main__":
    main()
