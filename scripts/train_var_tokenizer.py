"""Train the embedded multi-scale tokenizer on procedural shapes: `python scripts/train_var_tokenizer.py --out FOLDER`.

Afterwards `--out` holds the weights and `training.json`. An interrupted run resumes.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from visual_spec.models.next_scale.var_vq import MultiscaleVQModel
from visual_spec.models.next_token.llamagen_vq import VQModel
from visual_spec.training.var_tokenizer import VarTokenizerTraining, start_from, train_var_tokenizer


def main() -> None:
    defaults = VarTokenizerTraining()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--out", type=Path, required=True, help="folder for weights and training.json; resumes if interrupted"
    )
    parser.add_argument("--start-from", type=Path, metavar="DIR", help="a trained VQModel of the same widths")
    parser.add_argument("--steps", type=int, default=defaults.steps)
    parser.add_argument("--batch-size", type=int, default=defaults.batch_size)
    parser.add_argument("--continuous-steps", type=int, default=defaults.continuous_steps)
    parser.add_argument("--learning-rate", type=float, default=defaults.learning_rate)
    parser.add_argument("--scenes", type=int, default=defaults.scenes)
    parser.add_argument("--scales", type=int, nargs="+", default=[1, 2, 3, 4, 6, 8, 12, 16])
    parser.add_argument("--codebook-size", type=int, default=1024)
    parser.add_argument("--code-dim", type=int, default=8)
    parser.add_argument("--base-channels", type=int, default=8)
    parser.add_argument("--bfloat16", action="store_true", help="compute the networks in bfloat16")
    parser.add_argument("--device", default="cpu", help="cpu, cuda, cuda:1 ...")
    parser.add_argument("--seed", type=int, default=defaults.seed)
    arguments = vars(parser.parse_args())
    out, device, known = arguments.pop("out"), arguments.pop("device"), arguments.pop("start_from")
    torch.manual_seed(arguments["seed"])
    model = MultiscaleVQModel(
        base_channels=arguments.pop("base_channels"),
        channel_multipliers=(1, 2, 4, 8),
        blocks_per_level=1,
        codebook_size=arguments.pop("codebook_size"),
        code_dim=arguments.pop("code_dim"),
        scales=tuple(arguments.pop("scales")),
        norm_groups=None,
    ).to(device)
    if known is not None:
        start_from(model, VQModel.from_pretrained(known, torch_dtype=torch.float32).eval().to(device))
    record = train_var_tokenizer(model, VarTokenizerTraining(**arguments), out)
    print({name: value for name, value in record.items() if name not in ("settings", "loss")})


if __name__ == "__main__":
    main()
