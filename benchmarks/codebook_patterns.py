"""Models of `tunes` in other codebook patterns: attributes, distances, likelihood, calls and time at one clip length.

python benchmarks/codebook_patterns.py --trained FOLDER [FOLDER ...] --work FOLDER --out FILE

Each of `--trained` is what `scripts/train music --pattern ... --start_from weights/visual_spec_models/tunes` wrote. Its
transformer replaces the one of `tunes`; codec, caption encoder and law stay. All play the same held-out prompts with
the same seeds. `--work` keeps the clips, so that an interrupted run goes on. Single clips are timed in turn, in one
process. The likelihood is of the codes of true held-out clips, in nats a code: patterns factor the same law.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import MusicgenForCausalLM

from scripts.train.music import MusicTraining, autoregressive_losses, column_model
from visual_spec.eval.defaults import settings_of_model
from visual_spec.eval.intervals import mean_figure, ratio_figure, rounded
from visual_spec.eval.machine import environment
from visual_spec.eval.quality.evaluate import evaluate
from visual_spec.eval.quality.tasks import task_of
from visual_spec.eval.settings import parse_setting
from visual_spec.files.documents import json_text, write_json
from visual_spec.files.whole import write_atomically
from visual_spec.models.next_token.llamagen import TextCondition
from visual_spec.pipelines.audio import AudioPipeline
from visual_spec.training.tokens import tokenize_tunes

START = "tunes"


def pipeline_of(trained: Path | None) -> tuple[Any, MusicTraining, dict[str, Any]]:
    """The pipeline of a trained model, or `tunes` itself; its settings of training, and what the row says of it."""
    pipe = AudioPipeline.from_pretrained(START, drafter=None)
    if trained is None:
        return pipe, MusicTraining(), {}
    record = json.loads((trained / "training.json").read_text())
    settings = MusicTraining(**record["settings"])
    model = MusicgenForCausalLM.from_pretrained(trained / "transformer", dtype=torch.float32)
    own: dict[str, Any] = {"pattern": settings.pattern, "pattern_settings": None}
    if settings.frame_order:
        own["pattern_settings"] = {"frame_order": settings.frame_order}
    kept = {name: value for name, value in pipe.config.items() if name.startswith(("default_", "max_audio"))}
    pipe = AudioPipeline(model, pipe.codec, pipe.text_encoder, pipe.sampler, **kept, **own)
    about = {name: record["settings"][name] for name in ("steps", "batch_size", "clips", "learning_rate")}
    return pipe, settings, {**own, **about, "training_seconds": record["seconds"]}


@torch.no_grad()
def nats(model: Any, settings: MusicTraining, captions: TextCondition, codes: Tensor) -> list[float]:
    """Nats a code of each clip."""
    columns, each = column_model(model, settings), []
    parts = captions.features.split(10), captions.mask.split(10), codes.split(10)
    for features, mask, part in zip(*parts, strict=True):
        nobody = torch.zeros(len(part), dtype=torch.bool)
        nothing = nobody[:, None].expand(-1, columns.num_steps - 1)
        losses = autoregressive_losses(columns, TextCondition(features, mask), part, nobody, nothing)
        each += losses.mean((1, 2)).tolist()
    return each


def both_nats(pipe: Any, start: Any, settings: MusicTraining, count: int, kept: Path) -> list[list[float]]:
    """Nats a code of each held-out clip, by the model and, of 40 clips, by `tunes` read in the model's pattern."""
    if not kept.exists():
        encoder = pipe.text_encoder
        words, codes = tokenize_tunes(pipe.codec, encoder, count, 777, held_out=True, cache=kept.parent)
        own = nats(pipe.transformer, settings, encoder(words[:, 0]), codes.long())
        before = nats(start.transformer, settings, encoder(words[:40, 0]), codes[:40].long())
        write_atomically(kept, json_text([own, before]))
    return json.loads(kept.read_text())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trained", type=Path, nargs="+", required=True)
    parser.add_argument("--work", type=Path, required=True, help="folder of clips")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--samples", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=9, help="clips of each model timed at batch 1")
    args = parser.parse_args()
    torch.set_num_threads(1)
    known = settings_of_model(START)
    setting = parse_setting(known.plain, known.law_with(), 0)
    law = {name: value for name, value in setting.pipeline_law.items() if value is not None}
    rows: dict[str, dict[str, Any]] = {}
    pipes: dict[str, Any] = {}
    likelihood: dict[str, list[float]] = {}
    for folder in [None, *args.trained]:
        name = START if folder is None else folder.name
        pipes[name], settings, about = pipeline_of(folder)
        likelihood[name], start = both_nats(
            pipes[name], pipes[START], settings, args.samples, args.work / f"nats-{name}.json"
        )
        task = task_of(pipes[name], -(-args.samples // 20) * 20)
        document = evaluate(
            pipes[name], [setting], task, args.work / name, samples=args.samples, batch_size=20, model=name
        )
        assert document is not None
        row = document["rows"][0]
        rows[name] = {
            **about,
            "nats_a_code": rounded(mean_figure(likelihood[name])),
            "nats_a_code_of_tunes_so_read": rounded(mean_figure(start)),
            "accuracy": row["accuracy"],
            "mel": {key: row["features"]["mel"][key] for key in ("frechet_to_real", "kernel_to_real")},
        }
        print(name, json_text(rows[name]), flush=True)
    first = args.trained[0].name
    for name, own in likelihood.items():
        gaps = [one - other for one, other in zip(own, likelihood[first], strict=True)]
        rows[name][f"nats_above_{first}"] = rounded(mean_figure(gaps))
    seconds: dict[str, list[float]] = {name: [] for name in pipes}
    for number in range(-1, args.rounds):  # round -1 warms up; the order changes from round to round
        for name in list(pipes)[:: -1 if number % 2 else 1]:
            began = time.process_time()
            drawn = pipes[name](
                task.prompts[max(number, 0)],
                generator=torch.Generator().manual_seed(number + 1),
                output_type="latent",
                **law,
            )
            if number >= 0:
                seconds[name].append(time.process_time() - began)
                rows[name]["calls"] = int(drawn.trace.target_calls[0])
    for name, row in rows.items():
        row["milliseconds_of_music_a_call"] = round(4000 / row["calls"], 2)
        row["processor_seconds_a_clip"] = rounded(mean_figure(seconds[name]))
        row[f"time_of_{first}"] = rounded(ratio_figure(seconds[name], seconds[first]))
    result = {
        "kind": "codebook-patterns",
        "settings": {"samples": args.samples, "law": law, "rounds": args.rounds, "batch_size": 20},
        "environment": environment(torch.device("cpu"), torch.float32),
        "rows": rows,
    }
    write_json(args.out, result)


if __name__ == "__main__":
    main()
