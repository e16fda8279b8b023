"""The whole path of a paper's table on the embedded `shapes`: samples of two samplers, and their scores.

    python benchmarks/published_figures.py --folder runs/published --num 2000

Every step goes on where it was stopped. Weights of Inception and CLIP drawn at random stand in for the released ones
(`--weights FILE` and `--clip FOLDER` take those). Figures of such networks compare within one table only.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

import torch
from PIL import Image
from random_networks import random_clip, random_inception

from visual_spec.data.shapes import caption, sample_dataset
from visual_spec.eval.machine import environment
from visual_spec.eval.quality.beside import summary
from visual_spec.eval.tables import markdown
from visual_spec.files.documents import json_text

SAMPLERS = {"plain": "autoregressive", "default": "speculative-jacobi:window=32"}
METRICS = ["fid", "kid", "prc", "is", "clip", "shapes"]


def write_truth(folder: Path, num: int) -> None:
    """The held-out captions that no trainer sees, and the scenes that they describe."""
    scenes, pictures = sample_dataset(num, 0, held_out=True)
    (folder / "true").mkdir(parents=True, exist_ok=True)
    (folder / "prompts.txt").write_text("".join(caption(scene) + "\n" for scene in scenes))
    for index, picture in enumerate(pictures):
        if not (path := folder / "true" / f"{index:06d}.png").exists():
            Image.fromarray(picture).save(path)


def call(*arguments: object) -> dict:
    """Run `visual-spec` and return its document."""
    command = [sys.executable, "-m", "visual_spec", *map(str, arguments), "--json", "--threads", "1"]
    return json.loads(
        subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()[-1]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--num", type=int, default=2000)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--weights", type=Path, help="of Inception, the file of torch-fidelity")
    parser.add_argument("--clip", type=Path, help="a CLIP model, a folder of transformers")
    parser.add_argument("--only", choices=SAMPLERS, help="draw this set only; two processes may draw at once")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    folder, num = args.folder, args.num
    write_truth(folder, num)
    drawn, scored = {}, {}
    for name, sampler in SAMPLERS.items():
        if args.only in (None, name):
            asked = ["--prompts", folder / "prompts.txt", "--num", num, "--batch-size", args.batch_size]
            drawn[name] = call("sample", "--sampler", sampler, *asked, "--out", folder / name)
    if args.only:
        return
    weights = args.weights or folder / "inception.pth"
    if not weights.exists():
        random_inception(weights)
    clip = args.clip or folder / "clip"
    if not clip.exists():
        random_clip(clip, (folder / "prompts.txt").read_text().splitlines())
    for name in SAMPLERS:
        asked = ["--reference", folder / "true", "--feature-weights", weights, "--clip", clip]
        asked += ["--metrics", *METRICS]
        beside = ["--compare-to", folder / "plain"] if name != "plain" else []
        scored[name] = call("score", folder / name, *asked, *beside, "--features", folder / "features")
    rows = []
    for figure in scored["default"]["figures"]:
        cells = [scored[name]["figures"].get(figure) for name in SAMPLERS]
        rows.append([figure.replace("_", " "), *("-" if cell is None else _text(cell) for cell in cells)])
    for title, key in (("calls a sample", "calls_mean"), ("seconds a sample", "seconds_per_sample")):
        rows.append([title, *(f"{drawn[name][key]:.3f}" for name in SAMPLERS)])
    print(markdown([f"{num} against {num}", *SAMPLERS], rows))
    print(summary(scored["default"]["comparison"]))
    if args.json:
        record = {
            "environment": environment(torch.device("cpu"), torch.float32),
            "drawn": drawn,
            "scores": scored,
        }
        text = json_text(record, indent=1) + "\n"
        args.json.write_text(text.replace(f"{folder.absolute()}/", "").replace(f"{folder}/", ""))


def _text(cell: dict) -> str:
    return f"{cell['value']:.4g} ({cell['low']:.4g} to {cell['high']:.4g})"


if __name__ == "__main__":
    main()
