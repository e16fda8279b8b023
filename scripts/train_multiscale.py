"""Train the drafter of multi-scale decoding: a low-resolution LlamaGen, trained by `scripts/train_ar.py --grid-size 8`,
and the up-sampler, trained here.

`python scripts/train_multiscale.py --tokenizer FOLDER --low-resolution FOLDER --out FOLDER`
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

from visual_spec.models.drafters.mulo import MultiscaleDrafter
from visual_spec.models.next_token.llamagen import LlamaGenTransformer
from visual_spec.models.next_token.llamagen_vq import VQModel
from visual_spec.models.text.caption_encoder import CaptionEncoder
from visual_spec.training.loop import write_json
from visual_spec.training.upsampler import UpsamplerTraining, train_upsampler


def main() -> None:
    defaults = UpsamplerTraining()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--tokenizer", type=Path, required=True, help="folder that scripts/train_tokenizer.py wrote"
    )
    parser.add_argument(
        "--low-resolution", type=Path, required=True, help="folder that scripts/train_ar.py wrote"
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
