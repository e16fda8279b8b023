"""What bounded caches do to clips twenty times as long as those that `motion_causal` was trained on.

python benchmarks/long_clips.py --clips 16 --out benchmarks/results/motion-causal-long.json --plot docs/long-clips.png

Held-out prompts of shapes that move and turn back at the border, so that a clip never comes to rest. Every policy draws
the same prompts with the same seeds, and the parser reads each frame (`benchmarks.motion_long`). The JSON holds
shares of frames, a value for every training length. Beside them stand true clips, made as small as the model's frames
and large again: what the parser reads at best.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.motion_long import NAMES, consistency
from scripts.train.motion_small import sample_plain_clips, small_frames
from visual_spec.data.motion import Clip, caption
from visual_spec.eval.draws import seeded
from visual_spec.eval.intervals import mean_figure, rounded
from visual_spec.files.documents import write_json
from visual_spec.pipelines.chunk_video import ChunkVideoPipeline
from visual_spec.pipelines.video_files import pixels_of

POLICIES = {
    "full": "full",
    "sliding window": "sliding:window=8",
    "sink + window": "sink-window:sink=2,window=8",
    "moved sink + window": "sink-window:sink=2,window=8,sink_gap=0",
    "Deep Forcing": "deep-forcing:sink=3,recent=3,budget=7,window=8,sink_gap=0",
    "Lookahead Anchoring, 1 ahead": "future-anchor:anchors=2,ahead=1,window=8",
    "Lookahead Anchoring, 4 ahead": "future-anchor:anchors=2,ahead=4,window=8",
    "Lookahead Anchoring, 12 ahead": "future-anchor:anchors=2,ahead=12,window=8",
}
LENGTHS = 20  # times the training length
TRUE = "(true clips)"
# Of a caption all but shape and size: one object in its colour, on its ground, that moves as it should.
OBJECT = ("kept", "colour", "background", "continuous", "moving")


def bouncing_clips(count: int) -> list[Clip]:
    """Held-out clips of shapes that never come to rest."""
    rng, chosen = np.random.default_rng(20), []
    while len(chosen) < count:
        clip = sample_plain_clips(1, rng, held_out=True)[0]
        if clip.objects[0].ending == "bounces":
            chosen.append(clip)
    return chosen


def read(pipe: ChunkVideoPipeline, prompts: list[str], frames: list[Any]) -> dict[str, Any]:
    """What the parser reads in the clips of a policy.

    Returns:
        held: shares of frames in which each part of a caption holds, by training length, {name: [LENGTHS]}; later: of
        the frames after the first training length, with intervals over clips; clips: the share of these frames of
        each clip in which the object is kept.
    """
    answers = [consistency(prompt, clip) for prompt, clip in zip(prompts, frames, strict=True)]
    for one in answers:
        one["object"] = np.all([one[name] for name in OBJECT], 0)
    held, later = {}, {}
    for name in (*NAMES, "object", "all"):
        shares = np.mean([one[name].reshape(-1, pipe.training_frames).mean(1) for one in answers], 0)
        held[name] = [round(float(share), 4) for share in shares]
        by_clip = [float(one[name][pipe.training_frames :].mean()) for one in answers]
        later[name] = rounded(mean_figure(by_clip))
    clips = [round(float(one["object"][pipe.training_frames :].mean()), 4) for one in answers]
    return {"held": held, "later": later, "clips": clips}


def measure(pipe: ChunkVideoPipeline, clips: list[Clip], batch_size: int) -> dict[str, Any]:
    """Draw and read the clips of every policy."""
    drawn: Any = None
    prompts, num_frames = [caption(clip) for clip in clips], LENGTHS * pipe.training_frames
    small = torch.stack([small_frames(clip, 0, num_frames) for clip in clips])
    true = [pixels_of(clip) for clip in pipe.decode_latents(small)]
    rows: dict[str, Any] = {TRUE: read(pipe, prompts, true)}
    for name, policy in POLICIES.items():
        frames: list[Any] = []
        for start in range(0, len(prompts), batch_size):
            some = prompts[start : start + batch_size]
            seeds = seeded(start, len(some))
            drawn = pipe(some, num_frames=num_frames, policy=policy, generator=seeds)
            frames += [pixels_of(clip) for clip in drawn.frames]
        cache = drawn.trace.cache_bytes[-1] // len(drawn.frames)
        rows[name] = {"policy": policy, "cache_bytes_a_clip": cache, **read(pipe, prompts, frames)}
        print(name, rows[name]["later"]["object"], flush=True)
    return rows


def plot(document: dict[str, Any], path: Path) -> None:
    """Draw the share of frames in which the object is kept, and the share in which its shape is the caption's."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, 2, figsize=(9, 3.4), sharey=True)
    titles = {"object": "one object, its colour, it moves on", "shape": "its shape is the caption's"}
    for panel, (name, title) in zip(panels, titles.items(), strict=True):
        for label, row in document["rows"].items():
            if label.startswith("Lookahead"):
                continue  # three more lines among the others, which hide them
            style = {"color": "0.6", "linestyle": ":"} if label == TRUE else {}
            panel.plot(range(1, LENGTHS + 1), row["held"][name], label=label, **style)
        panel.set(title=title, xlabel="frame / training length", ylim=(-0.02, 1.02))
        panel.axvline(1, color="0.8", zorder=0)
    panels[0].set_ylabel("share of frames")
    panels[1].legend(fontsize=7, loc="lower left")
    figure.tight_layout()
    figure.savefig(path, dpi=72)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="motion_causal", help="embedded name or folder")
    parser.add_argument("--clips", type=int, default=16)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--plot", type=Path)
    given = parser.parse_args()
    pipe = ChunkVideoPipeline.from_pretrained(given.model)
    pipe.set_progress_bar_config(disable=True)
    document = {
        "clips": given.clips,
        "training_frames": pipe.training_frames,
        "rows": measure(pipe, bouncing_clips(given.clips), given.batch_size),
    }
    write_json(given.out, document, indent=1)
    if given.plot is not None:
        plot(document, given.plot)


if __name__ == "__main__":
    main()
