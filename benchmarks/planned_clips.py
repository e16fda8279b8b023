"""Key frames first, in MMPL's order, beside frame after frame: calls that wait, time, attributes, drift.

python benchmarks/planned_clips.py --planned FOLDER --out benchmarks/results/motion-planned.json

FOLDER holds `motion_planned`, as `scripts/train planned` and `scripts/assemble.py motion_planned` make it.

Whole clips are of held-out prompts, each model's turn after the other's at batch 1 (processor time), attributes by the
parser of `motion`. Long clips are of shapes that bounce (`benchmarks.long_clips`): 11 segments of 16 frames, each
starting from the last frame of the one before, read frame by frame (`benchmarks.motion_long`). "frame after frame" is
`motion_masked` with the same chain of segments; "planned" is `motion_planned`, whose segments are planned one after the
other and filled in one batch; "untrained" are the weights of `motion_masked` in the order of `motion_planned`.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.long_clips import OBJECT, bouncing_clips
from benchmarks.motion_long import NAMES, consistency
from visual_spec.data.motion import caption, held_out_prompts
from visual_spec.data.motion_parser import score
from visual_spec.eval.draws import seeded
from visual_spec.eval.intervals import mean_figure, ratio_figure, rounded
from visual_spec.files.documents import write_json
from visual_spec.pipelines.loading import load_pipeline
from visual_spec.pipelines.video_files import pixels_of
from visual_spec.prototype.segments import draw_segments
from visual_spec.samplers.core.law import TokenLaw

NAMES_OF_ROWS = ("frame after frame", "planned", "untrained")
LAW = TokenLaw(temperature=0.7)


def whole_clips(pipes: dict[str, Any], count: int) -> dict[str, Any]:
    """Attributes and processor time of single clips, in turn."""
    prompts, seconds, hits, calls = held_out_prompts(count, 0), {}, {}, {}
    for index, prompt in enumerate(prompts):  # the order changes from prompt to prompt
        for name in list(pipes)[:: 1 if index % 2 else -1]:
            began = time.process_time()
            drawn = pipes[name](prompt, generator=seeded(index, 1))
            seconds.setdefault(name, []).append(time.process_time() - began)
            hits.setdefault(name, []).append(score(prompt, pixels_of(drawn.frames[0])))
            calls[name] = int(drawn.trace.target_calls[0])
    rows: dict[str, Any] = {}
    for name, answers in hits.items():
        parts = dict.fromkeys(part for answer in answers for part in answer)
        means = [float(np.mean(list(answer.values()))) for answer in answers]
        rows[name] = {
            "waiting_calls": calls[name],
            "tokens_per_call": round(1024 / calls[name], 1),
            "mean": rounded(mean_figure(means)),
            "everything": rounded(mean_figure([float(all(answer.values())) for answer in answers])),
            "parts": {p: round(float(np.mean([a[p] for a in answers if p in a])), 3) for p in parts},
            "processor_seconds": round(float(np.mean(seconds[name])), 3),
        }
    first, second, _ = NAMES_OF_ROWS
    rows["speed"] = rounded(ratio_figure(seconds[first], seconds[second]))
    return rows


def chained(pipe: Any, prompts: list[str], segments: int) -> tuple[torch.Tensor, int]:
    """Segments frame after frame: tokens [B, frames, N], and their calls."""
    model, drawn, calls = pipe.transformer, [], 0
    shape = (len(prompts), model.grid.frames, model.frame_tokens)
    start, generators = torch.full(shape, model.mask_id), seeded(0, len(prompts))
    for _ in range(segments):
        result = pipe.sampler(
            model, pipe.text_encoder(prompts), known_tokens=start.flatten(1), law=LAW, generator=generators,
            batch_size=len(prompts),
        )  # fmt: skip
        tokens = result.tokens.view(shape)
        drawn.append(tokens[:, 1 if drawn else 0 :])
        start[:, 0], calls = tokens[:, -1], calls + int(result.trace.target_calls.max())
    return torch.cat(drawn, 1), calls


def long_clips(pipes: dict[str, Any], count: int, segments: int, keep: Path | None) -> dict[str, Any]:
    """What holds in each frame of long clips, and the calls that wait."""
    prompts = [caption(clip) for clip in bouncing_clips(count)]
    rows: dict[str, Any] = {}
    for name, pipe in pipes.items():
        began = time.process_time()
        if pipe.transformer.config["key_frames"]:
            tokens, trace = draw_segments(
                pipe.transformer, pipe.sampler,
                lambda copies, pipe=pipe: pipe.text_encoder([p for p in prompts for _ in range(copies)]),
                segments, law=LAW, generator=seeded(0, count),
            )  # fmt: skip
            calls = trace.waiting_calls
        else:
            tokens, calls = chained(pipe, prompts, segments)
        seconds = time.process_time() - began
        clips = [pixels_of(pipe.decode_tokens(clip.flatten()[None])[0]) for clip in tokens]
        rows[name] = {
            "frames": tokens.shape[1],
            "waiting_calls": calls,
            "tokens_per_call": round(tokens[0].numel() / calls, 1),
            "processor_seconds_a_clip": round(seconds / count, 3),
            **read(prompts, clips, keep and keep / f"{name}.npz"),
        }
        print(name, rows[name]["object"], flush=True)
    return rows


def read(prompts: list[str], clips: list[np.ndarray], keep: Path | None) -> dict[str, Any]:
    """Shares of frames that keep what the caption says, over the clip, and by tenth of it."""
    if keep is not None:
        np.savez_compressed(keep, clips=np.stack(clips)[:, ::10])
    answers = [consistency(prompt, clip) for prompt, clip in zip(prompts, clips, strict=True)]
    for one in answers:
        one["object"] = np.all([one[name] for name in OBJECT], 0)
    row: dict[str, Any] = {
        name: rounded(mean_figure([float(one[name].mean()) for one in answers]))
        for name in (*NAMES, "object", "all")
    }
    row["by_tenth"] = {
        name: [
            round(float(np.mean([part.mean() for part in parts])), 3)
            for parts in zip(*(np.array_split(one[name], 10) for one in answers), strict=True)
        ]
        for name in ("object", "shape")
    }
    row["clips"] = [round(float(one["object"].mean()), 4) for one in answers]
    return row


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--clips", type=int, default=48, help="whole clips")
    parser.add_argument("--long", type=int, default=16, help="long clips")
    parser.add_argument("--segments", type=int, default=11)
    parser.add_argument("--keep", type=Path, help="folder for every tenth frame of the long clips")
    parser.add_argument("--planned", type=Path, required=True, help="folder of motion_planned")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    folders = ("motion_masked", options.planned, "motion_masked")
    pipes = {name: load_pipeline(folder) for name, folder in zip(NAMES_OF_ROWS, folders, strict=True)}
    for pipe in pipes.values():
        pipe.set_progress_bar_config(disable=True)
    planned, untrained = pipes["planned"], pipes["untrained"]
    untrained.transformer.register_to_config(key_frames=planned.transformer.config["key_frames"])
    untrained.sampler = planned.sampler
    document = {
        "whole": whole_clips(pipes, options.clips),
        "long": long_clips(pipes, options.long, options.segments, options.keep),
    }
    write_json(options.out, document)


if __name__ == "__main__":
    main()
