"""Train the embedded KL tokenizer on class pictures: `python scripts/train_kl_tokenizer.py --out FOLDER`.

Afterwards `--out` holds the weights and `training.json`. An interrupted run resumes.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from visual_spec.training.kl_tokenizer import KLTokenizerTraining, new_tokenizer, train_kl_tokenizer


def main() -> None:
    defaults = KLTokenizerTraining()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--out", type=Path, required=True, help="folder for weights and training.json; resumes if interrupted"
    )
    parser.add_argument("--steps", type=int, default=defaults.steps)
    parser.add_argument("--batch-size", type=int, default=defaults.batch_size)
    parser.add_argument("--learning-rate", type=float, default=defaults.learning_rate)
    parser.add_argument("--kl-weight", type=float, default=defaults.kl_weight)
    parser.add_argument("--scenes", type=int, default=defaults.scenes)
    parser.add_argument("--crop", type=int, default=defaults.crop, help="side of windows of the first steps")
    parser.add_argument("--image-size", type=int, default=128, help="side of the pictures in pixels")
    parser.add_argument("--channels", type=int, nargs="+", default=[16, 16, 32, 64, 64])
    parser.add_argument("--latent-channels", type=int, default=8, help="numbers of a token")
    parser.add_argument("--bfloat16", action="store_true", help="compute the networks in bfloat16")
    parser.add_argument("--device", default="cpu", help="cpu, cuda, cuda:1 ...")
    parser.add_argument("--seed", type=int, default=defaults.seed)
    arguments = vars(parser.parse_args())
    out, device = arguments.pop("out"), arguments.pop("device")
    torch.manual_seed(arguments["seed"])
    model = new_tokenizer(
        channels=tuple(arguments.pop("channels")),
        latent_channels=arguments.pop("latent_channels"),
        image_size=arguments.pop("image_size"),
    )
    record = train_kl_tokenizer(model.to(device), KLTokenizerTraining(**arguments), out)
    print({name: value for name, value in record.items() if name not in ("settings", "loss")})


if __name__ == "__main__":
    main()
