"""The figures of `visual-spec score` and of torch-fidelity's own command, for the same folders of pictures.

    python benchmarks/score_against_fidelity.py DRAWN TRUE --json benchmarks/results/score-against-fidelity.json

Without `--weights` a network of the released architecture with seeded random weights stands in for the Inception
network, in one file that both programs read.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from random_networks import random_inception

# Ours, theirs.
FIGURES = {"fid": "frechet_inception_distance", "kid": "kernel_inception_distance_mean"}
FIGURES |= {"inception_score": "inception_score_mean", "precision": "precision", "recall": "recall"}


def run(module: str, options: str) -> str:
    """What a command prints. Paths must have no spaces."""
    command = [sys.executable, "-m", module, *options.split()]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def compare(
    drawn: Path, true: Path, weights: Path | None, features: Path | None
) -> dict[str, dict[str, float]]:
    """{figure: {ours, theirs, apart}} of two folders; `apart` is relative."""
    with tempfile.TemporaryDirectory() as folder:
        file = weights or random_inception(Path(folder) / "inception.pth")
        asked = f"score {drawn} --reference {true} --metrics fid kid is prc --feature-weights {file} --json"
        said = run("visual_spec", f"{asked} --out {folder}/scores --features {features or folder}")
        ours = json.loads(said.splitlines()[-1])["figures"]
        size = min(1000, *(sum(path.suffix == ".png" for path in one.iterdir()) for one in (drawn, true)))
        asked = f"--input1 {drawn} --input2 {true} --fid --kid --isc --prc --kid-subset-size {size} --cpu --silent"
        asked += f" --feature-extractor inception-v3-compat --feature-extractor-weights-path {file}"
        asked += " --feature-layer-prc 2048 --batch-size 50 --no-cache --json"
        theirs = json.loads(run("torch_fidelity.fidelity", asked))
    pairs = {name: (ours[name]["value"], theirs[key]) for name, key in FIGURES.items()}
    return {
        name: {"ours": a, "theirs": b, "apart": abs(a / b - 1) if b else abs(a)}
        for name, (a, b) in pairs.items()
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    for name in ("drawn", "true", "--weights", "--features", "--json"):
        parser.add_argument(name, type=Path)
    args = parser.parse_args()
    rows = compare(args.drawn, args.true, args.weights, args.features)
    print("| figure | ours | torch-fidelity | relative difference |\n|:--|--:|--:|--:|")
    for name, row in rows.items():
        print(f"| {name.replace('_', ' ')} | {row['ours']:.9g} | {row['theirs']:.9g} | {row['apart']:.1e} |")
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1, allow_nan=False) + "\n")
