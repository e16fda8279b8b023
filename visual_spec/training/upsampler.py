"""Train the up-sampler of multi-scale drafting: cross entropy of every large token given the small picture's tokens."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from visual_spec.models.drafters.mulo import MultiscaleDrafter, TokenUpsampler
from visual_spec.models.next_token.llamagen import LlamaGenTransformer
from visual_spec.models.next_token.llamagen_vq import VQModel
from visual_spec.models.text.caption_encoder import CaptionEncoder
from visual_spec.training.ar import tokenize_dataset
from visual_spec.training.loop import Checkpoint, Descent, write_json


@dataclass(frozen=True)
class UpsamplerTraining:
    """Settings of a run."""

    steps: int = 2500
    batch_size: int = 32
    scenes: int = 12000
    learning_rate: float = 2e-3
    seed: int = 0


def train_upsampler(
    model: TokenUpsampler,
    encoder: CaptionEncoder,
    vq_model: VQModel,
    settings: UpsamplerTraining,
    out: Path,
    *,
    every: int = 250,
) -> dict:
    """Train in place and return the record. `encoder` only reads the words of scenes, which are not used.

    An interrupted run resumes from `out/resume.pt`; the finished run removes it.
    """
    torch.manual_seed(settings.seed)
    low_side = model.config["low_side"]
    sides = (low_side, low_side * model.config["factor"])
    small, large = (
        tokenize_dataset(vq_model, encoder, settings.scenes, settings.seed + 1, side=side, cache=out)[
            1
        ].long()
        for side in sides
    )
    optimiser = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate, betas=(0.9, 0.95))
    descend = Descent([optimiser], settings.steps, settings.learning_rate)
    checkpoint = Checkpoint(
        out / "resume.pt", every, asdict(settings), reads=[vq_model], model=model, descend=descend
    )
    model.train()
    for step in range(checkpoint.resume(), settings.steps):
        rng = np.random.default_rng((settings.seed, step))
        chosen = torch.from_numpy(rng.integers(len(small), size=settings.batch_size))
        loss = F.cross_entropy(model(small[chosen]).mT, large[chosen])
        descend(loss, step)
        checkpoint.after(step, settings.steps, loss)
    model.eval()
    small, large = (
        tokenize_dataset(vq_model, encoder, 400, 777, held_out=True, side=side)[1].long() for side in sides
    )
    with torch.no_grad():
        losses = [
            F.cross_entropy(model(a).mT, b).item()
            for a, b in zip(small.split(50), large.split(50), strict=True)
        ]
    checkpoint.remove()
    return {
        "settings": asdict(settings),
        "parameters": sum(p.numel() for p in model.parameters()),
        "seconds": round(checkpoint.seconds),
        "held_out_loss": round(float(np.mean(losses)), 4),
        "loss": checkpoint.curve,
    }


# -- the command line --------------------------------------------------------------------------------------------------

HELP = """Train the up-sampler of multi-scale decoding.

The other half of the drafter is a low-resolution LlamaGen: `python -m visual_spec.training.ar --grid-size 8`.

`python -m visual_spec.training.upsampler --tokenizer FOLDER --low-resolution FOLDER --out FOLDER`
"""


def main() -> None:
    defaults = UpsamplerTraining()
    parser = argparse.ArgumentParser(description=HELP)
    parser.add_argument(
        "--tokenizer",
        type=Path,
        required=True,
        help="folder that python -m visual_spec.training.tokenizer wrote",
    )
    parser.add_argument(
        "--low-resolution",
        type=Path,
        required=True,
        help="folder that python -m visual_spec.training.ar wrote",
    )
    parser.add_argument(
        "--out", type=Path, required=True, help="folder for the drafter; resumes if interrupted"
    )
    parser.add_argument("--steps", type=int, default=defaults.steps)
    parser.add_argument("--batch-size", type=int, default=defaults.batch_size)
    parser.add_argument("--scenes", type=int, default=defaults.scenes)
    parser.add_argument("--seed", type=int, default=defaults.seed)
    arguments = parser.parse_args()
    torch.manual_seed(arguments.seed)
    vq_model = VQModel.from_pretrained(arguments.tokenizer).eval()
    encoder = CaptionEncoder.from_pretrained(arguments.low_resolution / "text_encoder")
    transformer = LlamaGenTransformer.from_pretrained(arguments.low_resolution / "transformer")
    low_side = transformer.grid.width
    drafter = MultiscaleDrafter(
        {name: value for name, value in transformer.config.items() if not name.startswith("_")},
        {
            "vocab_size": transformer.vocab_size,
            "low_side": low_side,
            "factor": vq_model.tokens_per_side // low_side,
        },
    )
    drafter.transformer.load_state_dict(transformer.state_dict())
    settings = UpsamplerTraining(
        steps=arguments.steps, batch_size=arguments.batch_size, scenes=arguments.scenes, seed=arguments.seed
    )
    record = train_upsampler(drafter.upsampler, encoder, vq_model, settings, arguments.out)
    drafter.half().save_pretrained(arguments.out)
    low = json.loads((arguments.low_resolution / "training.json").read_text())
    write_json(arguments.out / "training.json", {"upsampler": record, "transformer": low})
    print(f"held-out loss {record['held_out_loss']}, {record['seconds']} s")


if __name__ == "__main__":
    main()
