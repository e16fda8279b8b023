"""Time Jacobi decoding of `motion` against plain decoding, by the source of drafts and by the camera of the clip.

python benchmarks/clips.py --prompts 16 --out benchmarks/results/motion-clips.json
python benchmarks/clips.py --prompts 100 --calls --out benchmarks/results/motion-calls.json

Held-out prompts, batch 1, all samplers of a prompt in turn. What was measured is written after each prompt. `--calls`
counts calls only: prompts are then drawn together, and no times are given.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch

from visual_spec.data.motion import held_out_prompts
from visual_spec.eval.draws import seeded
from visual_spec.files.whole import write_atomically
from visual_spec.pipelines.video import VideoPipeline
from visual_spec.samplers.raster.autoregressive import AutoregressiveSampler
from visual_spec.samplers.raster.jacobi import SpeculativeJacobiSampler

SOURCES = {
    "previous_frame": {"initial_draft": "previous_frame"},
    "previous_frame, carried": {"initial_draft": "previous_frame", "drafts": "carried"},
    "moved_frame": {"initial_draft": "moved_frame"},
    "left": {"initial_draft": "left"},
}
SAMPLERS: dict[str, Any] = {"plain": AutoregressiveSampler()} | {
    f"window {window}, {name}": SpeculativeJacobiSampler(window, **settings)
    for window in (64, 128)
    for name, settings in SOURCES.items()
}
CAMERAS = ("still", "pans")


def tokens_per_call(clips: list[dict[str, Any]]) -> float:
    return round(sum(clip["tokens"] for clip in clips) / max(sum(clip["calls"] for clip in clips), 1), 2)


def summary(rows: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Tokens per call by camera, equal clips, and total seconds beside plain decoding, of every sampler."""
    found = {}
    for name, clips in rows.items():
        found[name] = {"tokens per call": tokens_per_call(clips)}
        for camera in CAMERAS:
            some = [clip for clip in clips if camera in clip["camera"]]
            found[name][f"{len(some)} clips, camera {camera}"] = tokens_per_call(some)
        single = [tokens_per_call([clip]) for clip in clips]
        found[name] |= {"worst clip": min(single), "best clip": max(single)}
        found[name]["equal clips"] = sum(clip["equal"] for clip in clips)
        if "seconds" in clips[0]:
            seconds, plain = (sum(clip["seconds"] for clip in rows[key]) for key in (name, "plain"))
            found[name] |= {
                "seconds a clip": round(seconds / len(clips), 3),
                "speed-up": round(plain / seconds, 3),
            }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument(
        "--calls", action="store_true", help="count calls of ten clips at a time, without times"
    )
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    pipe = VideoPipeline.from_pretrained("motion")
    pipe.set_progress_bar_config(disable=True)
    prompts, batch = held_out_prompts(given.prompts), 10 if given.calls else 1
    rows: dict[str, list[dict[str, Any]]] = {name: [] for name in SAMPLERS}
    for start in range(0, len(prompts), batch):
        some, plain = prompts[start : start + batch], None
        for name, pipe.sampler in SAMPLERS.items():
            seeds = seeded(start, len(some))
            began = time.perf_counter()
            drawn = pipe(some, generator=seeds, output_type="latent")
            seconds = time.perf_counter() - began
            plain = drawn.tokens if plain is None else plain
            for index, prompt in enumerate(some):
                rows[name].append(
                    {
                        "camera": prompt.split("camera ")[1],
                        "tokens": drawn.tokens[index].numel(),
                        "calls": int(drawn.trace.target_calls[index]),
                        "equal": torch.equal(drawn.tokens[index], plain[index]),
                    }
                    | ({} if given.calls else {"seconds": seconds})
                )
        found = {"threads": torch.get_num_threads(), "prompts": start + len(some), "rows": summary(rows)}
        write_atomically(given.out, json.dumps(found, indent=1) + "\n", overwrite=True)
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
