"""Train the up-sampler of multi-scale drafting: cross entropy of every large token given the small picture's tokens."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from visual_spec.files.documents import write_json
from visual_spec.models.next_token.llamagen import LlamaGenTransformer
from visual_spec.models.next_token.llamagen_vq import VQModel
from visual_spec.models.text.caption_encoder import CaptionEncoder
from visual_spec.prototype.local_speculation.drafter import MultiscaleDrafter, TokenUpsampler
from visual_spec.training.loop import Descent, RunOptions, Trainer, option, read_options
from visual_spec.training.tokens import tokenize_dataset


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

    def batch(step: int) -> tuple[Tensor, Tensor]:
        rng = np.random.default_rng((settings.seed, step))
        chosen = torch.from_numpy(rng.integers(len(small), size=settings.batch_size))
        return small[chosen], large[chosen]

    @torch.no_grad()
    def judged() -> dict[str, float]:
        held = [tokenize_dataset(vq_model, encoder, 400, 777, held_out=True, side=side)[1] for side in sides]
        pairs = zip(*(part.long().split(50) for part in held), strict=True)
        losses = [F.cross_entropy(model(a).mT, b).item() for a, b in pairs]
        return {"held_out_loss": round(float(np.mean(losses)), 4)}

    run = Trainer(model, settings, out, descend, every=every, reads=[vq_model])
    return run.run(lambda a, b: F.cross_entropy(model(a).mT, b), batch, judged)


# -- the command line --------------------------------------------------------------------------------------------------

HELP = """Train the up-sampler of multi-scale decoding.

The other half of the drafter is a low-resolution LlamaGen: `python scripts/train ar --grid-size 8`.

`python scripts/train upsampler --tokenizer FOLDER --low-resolution FOLDER --out FOLDER`
"""


@dataclass(kw_only=True)
class Options(RunOptions):
    tokenizer: Path = option("folder that python scripts/train tokenizer wrote")
    low_resolution: Path = option("folder that python scripts/train ar wrote")


def main() -> None:
    options, settings = read_options(HELP, Options, UpsamplerTraining)
    torch.manual_seed(settings.seed)
    vq_model = VQModel.from_pretrained(options.tokenizer).eval()
    encoder = CaptionEncoder.from_pretrained(options.low_resolution / "text_encoder")
    transformer = LlamaGenTransformer.from_pretrained(options.low_resolution / "transformer")
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
    record = train_upsampler(drafter.upsampler, encoder, vq_model, settings, options.out)
    drafter.half().save_pretrained(options.out)
    low = json.loads((options.low_resolution / "training.json").read_text())
    write_json(options.out / "training.json", {"upsampler": record, "transformer": low})
    print(f"held-out loss {record['held_out_loss']}, {record['seconds']} s")
