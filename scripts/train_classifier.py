"""Train the network whose features measure distances between sets of `shapes` pictures; about five minutes on a core.

`python scripts/train_classifier.py --out visual_spec/models/weights/shapes_features`
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from visual_spec.models.shapes_features import ShapesFeatures
from visual_spec.training.classifier import HEADS, ClassifierTraining, train_classifier


def main() -> None:
    defaults = ClassifierTraining()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out", type=Path, required=True, help="folder for weights and training.json; resumes if interrupted"
    )
    parser.add_argument("--steps", type=int, default=defaults.steps)
    parser.add_argument("--batch-size", type=int, default=defaults.batch_size)
    parser.add_argument("--scenes", type=int, default=defaults.scenes)
    parser.add_argument("--seed", type=int, default=defaults.seed)
    arguments = parser.parse_args()
    torch.manual_seed(arguments.seed)
    settings = ClassifierTraining(
        steps=arguments.steps, batch_size=arguments.batch_size, scenes=arguments.scenes, seed=arguments.seed
    )
    record = train_classifier(ShapesFeatures(heads=HEADS), settings, arguments.out)
    print(f"{record['parameters']} parameters, {record['seconds']} s, held out: {record['held_out']}")


if __name__ == "__main__":
    main()
