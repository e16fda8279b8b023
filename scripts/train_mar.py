"""Train an embedded model of continuous tokens: `python scripts/train_mar.py --tokenizer FOLDER --out FOLDER`.

`--kind mar` hides tokens and predicts them in any order, `--kind causal` predicts one after the other. `--size small`
is the drafter of `--size large`. Afterwards `--out` holds the weights and `training.json`, with the loss curve, the
held-out loss and the class accuracy of pictures drawn with them. An interrupted run resumes.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL

from visual_spec.data.shapes_classes import CLASSES
from visual_spec.models.continuous.causal import CausalLatentTransformer
from visual_spec.models.continuous.mar import HEADS, MARTransformer
from visual_spec.training.loop import write_json
from visual_spec.training.mar import LatentTraining, initialise, judge, round_matrices, train_latents

SIZES: dict[str, dict[str, int]] = {
    "large": {"dim": 128, "num_layers": 4, "num_heads": 4, "head_width": 192, "head_depth": 3},
    "small": {"dim": 64, "num_layers": 2, "num_heads": 2, "head_width": 96, "head_depth": 2},
}


def new_model(kind: str, size: str, tokenizer: AutoencoderKL, head_kind: str) -> Any:
    """A fresh model for a tokenizer's latents. A causal one has as many layers as MAR's two networks together."""
    side = tokenizer.config["sample_size"] // 2 ** (len(tokenizer.config["block_out_channels"]) - 1)
    shared: dict[str, Any] = dict(
        SIZES[size],
        grid_size=side,
        token_dim=tokenizer.config["latent_channels"],
        num_classes=len(CLASSES),
        head_kind=head_kind,
    )
    if kind == "mar":
        model: Any = MARTransformer(buffer_size=4, **shared)
    else:
        shared["num_layers"] *= 2
        model = CausalLatentTransformer(prefix_length=1, **shared)
    initialise(model)
    return model


def main() -> None:
    defaults = LatentTraining()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--tokenizer", type=Path, required=True, help="folder that train_kl_tokenizer.py wrote"
    )
    parser.add_argument(
        "--out", type=Path, required=True, help="folder for weights and training.json; resumes if interrupted"
    )
    parser.add_argument("--kind", choices=("mar", "causal"), default="mar")
    parser.add_argument("--size", choices=SIZES, default="large")
    parser.add_argument("--head-kind", choices=HEADS, default="velocity")
    parser.add_argument(
        "--start-from", type=Path, help="folder of a trained model of this kind to go on with"
    )
    parser.add_argument("--steps", type=int, default=defaults.steps)
    parser.add_argument("--batch-size", type=int, default=defaults.batch_size)
    parser.add_argument("--scenes", type=int, default=defaults.scenes)
    parser.add_argument("--learning-rate", type=float, default=defaults.learning_rate)
    parser.add_argument("--head-repeats", type=int, default=defaults.head_repeats)
    parser.add_argument("--bfloat16", action="store_true", help="matrix products in bfloat16")
    parser.add_argument("--device", default="cpu", help="cpu, cuda, cuda:1 ...")
    parser.add_argument("--seed", type=int, default=defaults.seed)
    parser.add_argument("--judged-pictures", type=int, default=240, help="drawn for the accuracy; 0: none")
    parser.add_argument("--guidance-scale", type=float, default=2.0, help="of these pictures")
    parser.add_argument("--judged-steps", type=int, help="calls of MAR for a picture; default: one a token")
    parser.add_argument("--judged-head-steps", type=int, default=100, help="levels of a token's chain")
    parser.add_argument(
        "--eight-bits", action="store_true", help="store matrices in 8 bits, and judge the model so"
    )
    arguments = parser.parse_args()
    torch.manual_seed(arguments.seed)
    tokenizer: Any = AutoencoderKL.from_pretrained(arguments.tokenizer, torch_dtype=torch.float32)
    tokenizer = tokenizer.eval().to(arguments.device)
    if arguments.start_from is None:
        model = new_model(arguments.kind, arguments.size, tokenizer, arguments.head_kind)
    else:
        trained: Any = MARTransformer if arguments.kind == "mar" else CausalLatentTransformer
        model = trained.from_pretrained(arguments.start_from, torch_dtype=torch.float32)
    names = ("steps", "batch_size", "scenes", "learning_rate", "head_repeats", "bfloat16", "seed")
    settings = LatentTraining(**{name: getattr(arguments, name) for name in names})
    model = model.to(arguments.device)
    record = train_latents(model, tokenizer, settings, arguments.out, cache=arguments.tokenizer)
    if arguments.eight_bits:
        round_matrices(model, arguments.out)
    if arguments.judged_pictures:
        record["drawn"] = judge(
            model,
            tokenizer,
            arguments.judged_pictures,
            guidance=arguments.guidance_scale,
            steps=arguments.judged_steps,
            head_steps=arguments.judged_head_steps,
        )
        write_json(arguments.out / "training.json", record)
    print({name: value for name, value in record.items() if name not in ("settings", "loss")})


if __name__ == "__main__":
    main()
