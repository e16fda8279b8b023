"""Time Jacobi decoding of `motion` against plain decoding, by the source of drafts and by the camera of the clip.

python benchmarks/clips.py --prompts 16 --out benchmarks/results/motion-clips.json
python benchmarks/clips.py --prompts 100 --calls --out benchmarks/results/motion-calls.json
python benchmarks/clips.py --prompts 50 --rows "window 128, previous_frame" "window 128, panned_frame" \\
    --out benchmarks/results/motion-panned.json
python benchmarks/clips.py --prompts 24 --rows plain default "window 128, panned_frame" \\
    --out benchmarks/results/motion-plain.json

Held-out prompts, batch 1, all samplers of a prompt in turn; times are of the processor. What was measured is written
after each prompt. `--calls` counts calls only: prompts are then drawn together, and no times are given.
"""

import argparse
import time
from pathlib import Path
from typing import Any

import torch

from visual_spec.data.motion import held_out_prompts
from visual_spec.eval.draws import seeded
from visual_spec.eval.intervals import ratio_figure
from visual_spec.files.documents import json_text, write_json
from visual_spec.pipelines.video import VideoPipeline
from visual_spec.samplers.raster.autoregressive import AutoregressiveSampler
from visual_spec.samplers.raster.jacobi import SpeculativeJacobiSampler

SOURCES: dict[str, Any] = {
    "previous_frame": {"initial_draft": "previous_frame"},
    "previous_frame, carried": {"initial_draft": "previous_frame", "drafts": "carried"},
    "moved_frame": {"initial_draft": "moved_frame"},
    "panned_frame": {"initial_draft": "panned_frame"},
    "left": {"initial_draft": "left"},
}
SAMPLERS: dict[str, Any] = {
    "plain": AutoregressiveSampler(),
    "default": SpeculativeJacobiSampler(initial_draft="panned_frame"),
} | {
    f"window {window}, {name}": SpeculativeJacobiSampler(window, **settings)
    for window in (64, 128)
    for name, settings in SOURCES.items()
}
CAMERAS = ("still", "pans")


def ratio(above: list[float], below: list[float]) -> dict[str, float]:
    """Sum over sum with a 95 % interval over clips."""
    return {key: round(value, 3) for key, value in ratio_figure(above, below).items()} if above else {}


def summary(rows: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Of every sampler, by camera: tokens per call, calls and seconds of the first row over its own; equal clips."""
    record, first = {}, next(iter(rows.values()))
    for name, clips in rows.items():
        record[name] = {}
        for camera in ("", *CAMERAS):
            some = [place for place, clip in enumerate(clips) if camera in clip["camera"]]
            tokens, calls = ([clips[place][key] for place in some] for key in ("tokens", "calls"))
            facts = {"tokens per call": ratio(tokens, calls)}
            for key in ("calls", "seconds")[: 1 + ("seconds" in clips[0])]:
                above, below = ([row[place][key] for place in some] for row in (first, clips))
                facts[f"{key} of the first row over its own"] = ratio(above, below)
            record[name][f"{len(some)} clips, camera {camera}" if camera else "all clips"] = facts
        single = [round(clip["tokens"] / clip["calls"], 2) for clip in clips]
        record[name] |= {"worst clip": min(single), "best clip": max(single)}
        record[name]["equal clips"] = sum(clip["equal"] for clip in clips)
        if "seconds" in clips[0]:
            record[name]["seconds a clip"] = round(sum(clip["seconds"] for clip in clips) / len(clips), 3)
    return record


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument(
        "--calls", action="store_true", help="count calls of ten clips at a time, without times"
    )
    parser.add_argument("--rows", nargs="+", choices=list(SAMPLERS), default=list(SAMPLERS))
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    pipe = VideoPipeline.from_pretrained("motion")
    pipe.set_progress_bar_config(disable=True)
    prompts, batch = held_out_prompts(given.prompts), 10 if given.calls else 1
    rows: dict[str, list[dict[str, Any]]] = {name: [] for name in given.rows}
    for start in range(0, len(prompts), batch):
        some, wanted = prompts[start : start + batch], None
        for name in given.rows:
            pipe.sampler = SAMPLERS[name]
            seeds = seeded(start, len(some))
            began = time.process_time()
            drawn = pipe(some, generator=seeds, output_type="latent")
            seconds = time.process_time() - began
            wanted = drawn.tokens if wanted is None else wanted
            for index, prompt in enumerate(some):
                rows[name].append(
                    {
                        "camera": prompt.split("camera ")[1],
                        "tokens": drawn.tokens[index].numel(),
                        "calls": int(drawn.trace.target_calls[index]),
                        "equal": torch.equal(drawn.tokens[index], wanted[index]),
                    }
                    | ({} if given.calls else {"seconds": seconds})
                )
        record = {"threads": torch.get_num_threads(), "prompts": start + len(some), "rows": summary(rows)}
        write_json(given.out, record, indent=1)
    print(json_text(record, indent=1))


if __name__ == "__main__":
    main()
