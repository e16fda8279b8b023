"""`shapes` beside what `scripts/train consistency` made of it: tokens a call, time, and whether pictures are right.

python benchmarks/consistency.py --trained "consistency=FOLDER" --out benchmarks/results/shapes-consistency.json

FOLDER holds a `transformer`, which takes the place of the one of `shapes`. Calls and processor time are of held-out
prompts at batch 1, every row's turn after the other's; plain decoding has a turn for the first prompts only. All rows
of a model must draw the same pictures. Those for the parser are drawn in batches, of other prompts, the same for all.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch

from scripts.train.consistency import cross_entropy, laws_of
from visual_spec.data.shapes import held_out_prompts
from visual_spec.data.shapes_parser import score
from visual_spec.eval.draws import seeded
from visual_spec.eval.intervals import mean_figure, ratio_figure
from visual_spec.eval.machine import environment
from visual_spec.eval.quality.accuracy import summarise
from visual_spec.files.documents import json_text, write_json
from visual_spec.models.next_token.llamagen import LlamaGenTransformer
from visual_spec.pipelines.loading import load_pipeline
from visual_spec.samplers.raster.autoregressive import AutoregressiveSampler
from visual_spec.samplers.raster.jacobi import SpeculativeJacobiSampler

PLAIN = "plain"
SAMPLERS = {
    "carried": SpeculativeJacobiSampler(32, drafts="carried"),
    "repaired": SpeculativeJacobiSampler(32, drafts="repaired"),
    PLAIN: AutoregressiveSampler(),
}


def speed(models: dict[str, Any], pipe: Any, prompts: list[str], plain: int) -> dict[str, dict[str, Any]]:
    """Tokens a call and processor seconds a picture of every model and sampler, and how far laws are from each other.

    `entropy` is of a model's law along its own pictures; `divergence` (Kullback and Leibler's) is from the law of
    `shapes` along pictures of `shapes`. Both are in nats a token.
    """
    law, rows = pipe.make_law(), {(name, kind): [] for name in models for kind in SAMPLERS}
    nats: dict[str, dict[str, list[float]]] = {name: {"entropy": [], "divergence": []} for name in models}
    for index, prompt in enumerate(prompts):
        condition, pictures = pipe.make_condition([prompt]), {}
        turns = list(rows) if index % 2 else list(rows)[::-1]
        for name, kind in [turn for turn in turns if turn[1] != PLAIN or index < plain]:
            generator, start = torch.Generator().manual_seed(index), time.process_time()
            drawn = SAMPLERS[kind](models[name], condition, law=law, generator=generator, batch_size=1)
            rows[name, kind].append((int(drawn.trace.target_calls), time.process_time() - start))
            assert torch.equal(pictures.setdefault(name, drawn.tokens), drawn.tokens), (prompt, name, kind)
        usual = fixed_laws(models["shapes"], condition, law, pictures["shapes"])
        for name, model in models.items():
            own = fixed_laws(model, condition, law, pictures[name])
            there = fixed_laws(model, condition, law, pictures["shapes"])
            nats[name]["entropy"].append(float(cross_entropy(own, own).mean()))
            nats[name]["divergence"].append(float(cross_entropy(usual, there - usual).mean()))
    figures: dict[str, dict[str, Any]] = {
        name: {key: mean_figure(values) for key, values in nats[name].items()} for name in models
    }
    for (name, kind), turns in rows.items():
        calls, seconds = zip(*turns, strict=True)
        reference = [took for _, took in rows["shapes", "repaired"][: len(turns)]]
        figures[name][kind] = {
            "pictures": len(turns),
            "tokens_a_call": ratio_figure([256] * len(calls), calls),
            "most_calls": max(calls),
            "processor_seconds": sum(seconds) / len(seconds),
            "speed_beside_default_of_shapes": ratio_figure(reference, seconds),
        }
    return figures


@torch.no_grad()
def fixed_laws(model: Any, condition: Any, law: Any, tokens: torch.Tensor) -> torch.Tensor:
    """The laws of all slots of whole pictures [B, L]."""
    slots = torch.arange(tokens.shape[1] - 1)[None]
    return laws_of(model, condition, law, tokens[:, :-1], slots, slots[..., None] >= slots)


def quality(models: dict[str, Any], pipe: Any, prompts: list[str], first: int) -> dict[str, dict[str, Any]]:
    """Scores of one picture a prompt, and differences from `shapes` over the same prompts."""
    hits: dict[str, list[dict[str, bool]]] = {name: [] for name in models}
    for start in range(0, len(prompts), 25):
        some = prompts[start : start + 25]
        for name, model in models.items():
            pipe.transformer = model
            seeds = seeded(first + start, len(some))
            pictures = pipe(some, generator=seeds, output_type="pil").images
            hits[name] += [score(text, picture) for text, picture in zip(some, pictures, strict=True)]
    shares = {name: [sum(one.values()) / len(one) for one in answers] for name, answers in hits.items()}
    return {
        name: summarise(hits[name])
        | {
            "change": mean_figure(
                [mine - other for mine, other in zip(shares[name], shares["shapes"], strict=True)]
            )
        }
        for name in models
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trained", nargs="+", required=True, metavar="NAME=FOLDER")
    parser.add_argument("--prompts", type=int, default=48, help="for calls and time")
    parser.add_argument("--plain", type=int, default=12, help="of these, for plain decoding")
    parser.add_argument("--pictures", type=int, default=200, help="for the parser")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    pipe: Any = load_pipeline("shapes")
    pipe.set_progress_bar_config(disable=True)
    models, trained = {"shapes": pipe.transformer}, dict(text.split("=", 1) for text in options.trained)
    for name, folder in trained.items():
        models[name] = LlamaGenTransformer.from_pretrained(Path(folder) / "transformer").eval()
    document = {
        "environment": environment(torch.device("cpu"), torch.float32),
        "training": {
            name: json.loads((Path(folder) / "training.json").read_text()) for name, folder in trained.items()
        },
        "speed": speed(models, pipe, held_out_prompts(options.prompts), options.plain),
        "quality": quality(models, pipe, held_out_prompts(200 + options.pictures)[200:], 200),
    }
    write_json(options.out, document)
    print(json_text({"speed": document["speed"], "quality": document["quality"]}, indent=1))


if __name__ == "__main__":
    main()
