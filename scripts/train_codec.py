"""Train the embedded codec on procedural tunes: `python scripts/train_codec.py --out FOLDER`.

Afterwards `--out` holds the weights of an `EncodecModel` and `training.json`. An interrupted run resumes.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from transformers import EncodecModel

from visual_spec.training.codec import CodecTraining, codec_config, initialise, train_codec


def main() -> None:
    defaults = CodecTraining()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--out", type=Path, required=True, help="folder for weights and training.json; resumes if interrupted"
    )
    parser.add_argument("--steps", type=int, default=defaults.steps)
    parser.add_argument("--batch-size", type=int, default=defaults.batch_size)
    parser.add_argument(
        "--crop", type=int, default=defaults.crop, help="frames of 20 ms that a step sees of a clip"
    )
    parser.add_argument("--continuous-steps", type=int, default=defaults.continuous_steps)
    parser.add_argument("--learning-rate", type=float, default=defaults.learning_rate)
    parser.add_argument("--quantiser-dropout", type=float, default=defaults.quantiser_dropout)
    parser.add_argument("--clips", type=int, default=defaults.clips)
    parser.add_argument("--num-filters", type=int, default=16)
    parser.add_argument("--hidden-size", type=int, default=64)
    parser.add_argument("--codebook-size", type=int, default=512)
    parser.add_argument("--num-codebooks", type=int, default=4)
    parser.add_argument("--bfloat16", action="store_true", help="compute the networks in bfloat16")
    parser.add_argument("--device", default="cpu", help="cpu, cuda, cuda:1 ...")
    parser.add_argument("--seed", type=int, default=defaults.seed)
    arguments = vars(parser.parse_args())
    out, device = arguments.pop("out"), arguments.pop("device")
    sizes = ("num_filters", "hidden_size", "codebook_size", "num_codebooks")
    config = codec_config(**{name: arguments.pop(name) for name in sizes})
    torch.manual_seed(arguments["seed"])
    model = EncodecModel(config)
    initialise(model)
    record = train_codec(model.to(device), CodecTraining(**arguments), out)
    print({name: value for name, value in record.items() if name not in ("settings", "loss")})


if __name__ == "__main__":
    main()
