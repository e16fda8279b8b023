"""Models of whole maps or blocks of latents: what ACDiTs and FlowARs draw, and how fast, beside `shapes_mar`.

python benchmarks/block_sizes.py --models B4 B16 B64 --keep FOLDER --out benchmarks/results/shapes-blocks.json

Each of `--models` is a folder that `scripts/train acdit` or `flowar` wrote. Quality is `visual-spec eval`'s: the
classes in turn, read by the parser of `shapes`, and the Frechet distance of the same features to true pictures. Time is
processor time at batch 1, one thread, each setting's turn after the other's in one process, the order turned round from
picture to picture.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from visual_spec.data.shapes_classes import CLASS_NAMES
from visual_spec.eval.draws import draw
from visual_spec.eval.intervals import mean_figure, ratio_figure, rounded
from visual_spec.eval.machine import environment
from visual_spec.eval.quality.evaluate import evaluate
from visual_spec.eval.quality.tasks import task_of
from visual_spec.eval.settings import Setting, parse_setting
from visual_spec.files.documents import json_text, write_json
from visual_spec.pipelines.continuous_image import ContinuousImagePipeline
from visual_spec.pipelines.loading import load_pipeline
from visual_spec.pipelines.sampler_text import make_sampler
from visual_spec.prototype.acdit.model import ACDiTTransformer
from visual_spec.prototype.flowar.model import FlowARTransformer
from visual_spec.samplers.core.law import TokenLaw

SETTINGS: dict[str, tuple[str, ...]] = {
    "ACDiTTransformer": tuple(f"block-diffusion:levels={count}" for count in (25, 10, 5)),
    "FlowARTransformer": (
        *(f"flow-scales:levels={count}" for count in (2, 4, 8, 25)),
        *(f"flow-scales:levels=25,last_levels={count}" for count in (15, 4)),
    ),
}
BASELINES = ("continuous", "continuous:steps=16,last_head_steps=5")


def pipelines(folders: list[Path], guidance: float) -> dict[str, tuple[Any, list[Setting]]]:
    """The models with their settings, by the names of their rows."""
    mar: Any = load_pipeline("shapes_mar")
    made = {"shapes_mar": (mar, [parse_setting(text, TokenLaw(guidance_scale=3.0), 0) for text in BASELINES])}
    for folder in folders:
        kind = json.loads((folder / "config.json").read_text())["_class_name"]
        model: Any = (ACDiTTransformer if kind == "ACDiTTransformer" else FlowARTransformer).from_pretrained(
            folder
        )
        law = TokenLaw(guidance_scale=guidance)
        settings = [parse_setting(text, law, 0) for text in SETTINGS[kind]]
        pipe = ContinuousImagePipeline(
            model, mar.vae, make_sampler(SETTINGS[kind][0].split(":")[0]), list(CLASS_NAMES), guidance
        )
        made[f"blocks of {model.block_size}" if hasattr(model, "block_size") else "maps"] = (pipe, settings)
    for pipe, _ in made.values():
        pipe.set_progress_bar_config(disable=True)
    return made


def quality(made: dict[str, tuple[Any, list[Setting]]], keep: Path, samples: int) -> list[dict[str, Any]]:
    """Calls, classes and distances of every setting."""
    rows = []
    for name, (pipe, settings) in made.items():
        folder = keep / name.replace(" ", "-")
        task = task_of(pipe, samples)
        document: Any = evaluate(pipe, settings, task, folder, samples=samples, batch_size=48, model=name)
        for setting, row in zip(settings, document["rows"], strict=True):
            facts = {
                "model": name,
                "setting": setting.text,
                "guidance_scale": setting.law.guidance_scale,
                "calls": round(pipe.transformer.grid.num_tokens / row["tokens_per_call"]["value"]),
                "classes_right": rounded(row["accuracy"]["all_correct"]),
                "attributes_right": rounded(row["accuracy"]["mean_attribute"]),
                "frechet_to_true": rounded(row["features"]["shapes"]["frechet_to_real"]),
            }
            rows.append(facts)
            print(json_text(facts), flush=True)
    return rows


def timings(made: dict[str, tuple[Any, list[Setting]]], count: int) -> dict[tuple[str, str], dict[str, Any]]:
    """Processor seconds of a picture at batch 1, and the speed beside the first setting, by model and setting."""
    turn = [(name, pipe, setting) for name, (pipe, settings) in made.items() for setting in settings]
    seconds: dict[tuple[str, str], list[float]] = {(name, setting.text): [] for name, _, setting in turn}
    for index in range(count + 1):
        for name, pipe, setting in turn[:: 1 if index % 2 else -1]:
            drawn = draw(pipe, setting, [CLASS_NAMES[index % len(CLASS_NAMES)]], index)
            seconds[name, setting.text].append(float(np.asarray(drawn["processor_seconds"])))
    kept = {key: values[1:] for key, values in seconds.items()}  # the first picture of each warms up
    plain = next(iter(kept.values()))
    return {
        key: {
            "processor_seconds": rounded(mean_figure(values)),
            "speed": rounded(ratio_figure(plain, values)),
        }
        for key, values in kept.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", type=Path, nargs="+", required=True)
    parser.add_argument("--keep", type=Path, required=True, help="folder for pictures; goes on if there")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--samples", type=int, default=144)
    parser.add_argument("--alone", type=int, default=8, help="pictures timed at batch 1")
    parser.add_argument("--guidance-scale", type=float, default=2.0, help="of these models")
    args = parser.parse_args()
    torch.set_num_threads(1)
    made = pipelines(args.models, args.guidance_scale)
    rows, seconds = quality(made, args.keep, args.samples), timings(made, args.alone)
    rows = [row | seconds[row["model"], row["setting"]] for row in rows]
    machine = environment(torch.device("cpu"), torch.float32)
    document = {"samples": args.samples, "alone": args.alone, "environment": machine, "rows": rows}
    write_json(args.out, document, indent=1)


if __name__ == "__main__":
    main()
