"""ACDiTs of clips by block size: what they draw in how many calls, with and without the keys of clean blocks.

python benchmarks/block_sizes_clips.py --models B16 B128 --out benchmarks/results/motion-blocks.json

Each of `--models` is a folder that `scripts/train acdit --frames 8` wrote. The parser of `motion` reads clips of all
classes in turn, beside clips of `motion_causal`, for captions of the same classes, and true ones. Time is processor
time at batch 1, one thread, each setting's turn after the other's in one process, the order turned round from clip to
clip. Without the cache every level reads all clean blocks again.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from scripts.train.clips import (
    CLIP_CLASSES,
    class_of_clip,
    clip_pixels,
    moving_clips,
    score_clip,
    tokens_of,
)
from scripts.train.motion_small import small_frames
from visual_spec.data.motion import Clip, caption
from visual_spec.eval.draws import seeded
from visual_spec.eval.intervals import mean_figure, rate, ratio_figure, rounded, share_figure
from visual_spec.eval.machine import environment
from visual_spec.files.documents import json_text, write_json
from visual_spec.pipelines.loading import load_pipeline
from visual_spec.prototype.acdit.model import ACDiTState, ACDiTTransformer
from visual_spec.prototype.acdit.sampler import BlockDiffusionSampler
from visual_spec.samplers.core.law import TokenLaw

LEVELS = (25, 10, 5)


class Recomputing(ACDiTTransformer):
    """The model without a cache: every call reads all clean blocks again."""

    @torch.no_grad()
    def forward(
        self, state: ACDiTState, noisy: Tensor, time: float, block: int, clean: Tensor | None = None
    ) -> Tensor:
        if block == 0:
            self.seen = noisy[:, :0]
        if clean is not None:
            self.seen = torch.cat([self.seen, clean], 1)
        count, tokens = self.seen.shape[1], torch.cat([self.seen, noisy], 1)
        index = torch.arange(tokens.shape[1], device=tokens.device) // self.block_size
        times = torch.full((1,), time, device=tokens.device)
        condition = (self.t_embedder(times) + state.conditions)[:, None]
        hidden = self.x_embedder(tokens.repeat(2 if state.guided else 1, 1, 1).to(condition.dtype))
        rotary = state.rotary[:, : tokens.shape[1]]
        for layer in self.blocks:
            hidden = layer(hidden, count, condition, rotary, index <= index[:, None])
        return self.final_layer(hidden[:, count:], condition)


def draw(model: ACDiTTransformer, levels: int, guidance: float, labels: Tensor, first: int) -> Any:
    """Clips of these classes; the i-th has seed `first` + i."""
    law, seeds = TokenLaw(guidance_scale=guidance), seeded(first, len(labels))
    return BlockDiffusionSampler(levels)(model, labels, law=law, generator=seeds, batch_size=len(labels))


def clips_by_class(count: int) -> list[Clip]:
    """True clips, the i-th of class i modulo the number of classes, none of them held out."""
    waiting: dict[int, list[Clip]] = {label: [] for label in range(len(CLIP_CLASSES))}
    for clip in moving_clips(20 * count, 5):
        waiting[class_of_clip(clip)].append(clip)
    return [waiting[index % len(CLIP_CLASSES)].pop() for index in range(count)]


def read(
    name: str, setting: str, calls: int | None, clips: Sequence[np.ndarray] | np.ndarray
) -> dict[str, Any]:
    """A row: shares of clips with intervals, by the parser."""
    scores = [score_clip(index % len(CLIP_CLASSES), clip) for index, clip in enumerate(clips)]
    row: dict[str, Any] = {"model": name, "setting": setting, "calls": calls}
    row["attributes"] = rounded(share_figure([float(np.mean([*score.values()])) for score in scores]))
    named = [[score[key] for key in ("one_object", "colour", "direction")] for score in scores]
    row["class_right"] = rounded(rate([all(answers) for answers in named]))
    row["everything_right"] = rounded(rate([all(score.values()) for score in scores]))
    for key in scores[0]:
        row[key] = rounded(rate([score[key] for score in scores]))
    print(json_text(row), flush=True)
    return row


def batches(count: int, drawn: Callable[[slice], Tensor], size: int = 32) -> np.ndarray:
    """All clips, uint8 [N, T, 64, 64, 3], of tokens drawn batch by batch."""
    return np.concatenate([clip_pixels(drawn(slice(first, first + size))) for first in range(0, count, size)])


def quality(models: dict[str, ACDiTTransformer], guidance: float, samples: int) -> list[dict[str, Any]]:
    clips, labels = clips_by_class(samples), torch.arange(samples) % len(CLIP_CLASSES)
    frames = next(iter(models.values())).grid.frames
    small = torch.stack([tokens_of(small_frames(clip, 0, frames)) for clip in clips])
    rows = [read("(true clips)", "", None, clip_pixels(small))]
    causal: Any = load_pipeline("motion_causal")
    causal.set_progress_bar_config(disable=True)
    calls: set[int] = set()

    def of_captions(some: slice) -> Tensor:
        prompts = [caption(clip) for clip in clips[some]]
        output = causal(
            prompts,
            num_frames=frames,
            policy="full",
            generator=seeded(some.start, len(prompts)),
            output_type="latent",
        )
        calls.update(output.trace.target_calls.tolist())
        return torch.stack([tokens_of(clip) for clip in output.latents])

    drawn = batches(samples, of_captions)
    rows.append(read("motion_causal", "its own", calls.pop(), drawn))
    for name, model in models.items():
        for levels in LEVELS:

            def of_classes(some: slice, model: Any = model, levels: int = levels) -> Tensor:
                return draw(model, levels, guidance, labels[some], some.start).tokens

            drawn = batches(samples, of_classes)
            rows.append(read(name, f"levels={levels}", model.num_blocks * levels, drawn))
    return rows


def timings(turns: dict[tuple[str, int, bool], Any], guidance: float, count: int) -> list[dict[str, Any]]:
    """Processor seconds of a clip with the cache and without, and their ratio, by model and levels."""
    seconds: dict[tuple[str, int, bool], list[float]] = {key: [] for key in turns}
    furthest = 0.0
    for index in range(count + 1):
        label, tokens = torch.tensor([index % len(CLIP_CLASSES)]), {}
        for key in list(turns)[:: 1 if index % 2 else -1]:
            began = time.process_time()
            tokens[key] = draw(turns[key], key[1], guidance, label, index).tokens
            seconds[key].append(time.process_time() - began)
        for name, levels, cached in turns:
            apart = tokens[name, levels, cached] - tokens[name, levels, True]
            furthest = max(furthest, float(apart.abs().max()))
    rows = []
    for name, levels in dict.fromkeys(key[:2] for key in turns):
        held, again = (seconds[name, levels, cached][1:] for cached in (True, False))
        row = {"model": name, "setting": f"levels={levels}", "processor_seconds": rounded(mean_figure(held))}
        row |= {"without_cache": rounded(mean_figure(again)), "speed": rounded(ratio_figure(again, held))}
        rows.append(row | {"furthest_apart": furthest})
        print(json_text(rows[-1]), flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", type=Path, nargs="+", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--samples", type=int, default=96)
    parser.add_argument("--alone", type=int, default=8, help="clips timed at batch 1")
    parser.add_argument("--guidance-scale", type=float, default=2.0, help="of these models")
    args = parser.parse_args()
    torch.set_num_threads(1)
    kinds: dict[bool, Any] = {True: ACDiTTransformer, False: Recomputing}
    models, turns = {}, {}
    for folder in args.models:
        for cached, kind in kinds.items():
            model: Any = kind.from_pretrained(folder)
            name = f"blocks of {model.block_size}"
            models.setdefault(name, model)
            turns |= {(name, levels, cached): model for levels in LEVELS}
    machine = environment(torch.device("cpu"), torch.float32)
    rows = quality(models, args.guidance_scale, args.samples)
    seconds = timings(turns, args.guidance_scale, args.alone)
    document = {"samples": args.samples, "alone": args.alone, "guidance_scale": args.guidance_scale}
    document |= {"environment": machine, "rows": rows, "seconds": seconds}
    write_json(args.out, document, indent=1)


if __name__ == "__main__":
    main()
